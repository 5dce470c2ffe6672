"""Replaying a long history: measured in a process that does nothing else.

`python -m benchmarks.replay URL INSTANCE_ID STEPS` is that process. The instance has all its steps recorded and is left
behind by a worker that died; another one claims it, replays it, and completes it.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Sequence

from romancy import App, activity, workflow
from romancy.engine.steps import recorded_input, step_id
from romancy.storage import SQLStorage, WorkflowInstance
from tests.numbers import joined, numbers

from .databases import Database, Place
from .iteration import resident_mb
from .measuring import Report, Result, Series, Size, Target

RATE = Target(least=100_000)

_INSTANCE = "long-replay"


@activity
async def same(number: int) -> int:
    raise AssertionError("it is recorded: nobody calls it again")


@workflow
async def many_steps(steps: int) -> int:
    total = 0
    for _ in range(steps):
        total += await same(1)
    return total


_FILL = """
    INSERT INTO workflow_history (instance_id, activity_id, event_type, data_type, event_data, lock_token)
    SELECT '{instance_id}', {activity_id}, 'ActivityCompleted', 'json', '{event_data}', 0
      FROM {numbers} ORDER BY n"""


async def measure(places: Sequence[Place], size: Size, report: Report) -> None:
    """How many recorded steps a worker replays per second, and how much memory that takes."""
    report.section(f"Replaying a workflow of {size.replayed:,} recorded steps")
    for place in places:
        found = []
        for _ in range(min(3, size.rounds)):
            async with place.database() as database:
                async with database.open() as storage:
                    await _fill(storage, size.replayed)
                found.append(await _in_another_process(database, size.replayed))
        rates = Series([size.replayed / each["seconds"] for each in found])
        report.add(Result("steps per second", place.title, rates, unit="/s", target=RATE))
        growth = Series([max(each["growth_mb"] for each in found)])
        report.add(Result("growth of the process", place.title, growth, unit=" MB"))


async def _fill(storage: SQLStorage, steps: int) -> None:
    arguments = many_steps.signature.encode_arguments((steps,), {})
    await storage.create_instance(
        WorkflowInstance(
            _INSTANCE,
            many_steps.name,
            source_hash=many_steps.source_hash,
            input_data=arguments,
            locked_by="died",
        ),
        lock_timeout_sec=3600,
    )
    called_with = same.signature.encode_arguments((1,), {})
    data = f'{{"activity_name": "same", "result": 1, "input": {recorded_input(called_with)}, "at": 1.0}}'
    first = step_id((), "same", 1)
    assert first.endswith("1")
    statement = _FILL.format(
        instance_id=_INSTANCE,
        activity_id=joined(storage.runner.driver, f"'{first[:-1]}'", "n"),
        event_data=data,
        numbers=numbers(steps),
    )
    async with storage.transaction(deadline_sec=600):
        await storage.conn().execute(statement)


async def _in_another_process(database: Database, steps: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.replay", database.url, _INSTANCE, str(steps)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the replaying process ended with {process.returncode}")
    found: dict[str, float] = json.loads(output)
    return found


async def replay(url: str, instance_id: str, steps: int) -> dict[str, float]:
    """Let the lock go and wait for the result; how long it took, how much memory it took at most."""
    async with App(url, workflows=[many_steps]) as app:
        before = resident_mb()
        started = time.perf_counter()
        await app.storage.release_lock(instance_id, "died")
        assert app.worker is not None
        app.worker._resumer.wake()
        assert await app.handle(instance_id, many_steps).result() == steps
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"seconds": seconds, "growth_mb": peak - before}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(replay(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
