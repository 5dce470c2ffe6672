"""A worker that has nothing to do, while many instances wait: what it costs.

`python -m benchmarks.idling URL SECONDS` is that worker, in a process that does nothing else.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence

from romancy import App

from .databases import Database, Place
from .filling import sleeping
from .iteration import resident_mb
from .measuring import Report, Result, Series, Size, Target
from .waking import sleeper

MEMORY = Target(most=200)
CPU = Target(most=2)
STATEMENTS = Target(most=1)

_SETTLING_SEC = 2.0


async def measure(places: Sequence[Place], size: Size, report: Report) -> None:
    """Memory, processor time and statements of an idle worker."""
    report.section(f"An idle worker, while {size.waiting:,} instances wait")
    for place in places:
        async with place.database() as database:
            async with database.open() as storage:
                await sleeping(storage, sleeper, size.waiting, due_in_sec=86400)
            found = await _in_another_process(database, size.idle_sec)
            assert await database.count("workflow_instances", "status = 'waiting_for_timer'") == size.waiting
        report.add(Result("memory", place.title, Series([found["memory_mb"]]), unit=" MB", target=MEMORY))
        report.add(Result("processor", place.title, Series([found["cpu_percent"]]), unit=" %", target=CPU))
        report.add(Result("statements", place.title, Series([found["statements"]]), unit="/s", target=STATEMENTS))


async def _in_another_process(database: Database, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.idling", database.url, str(seconds)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the idle process ended with {process.returncode}")
    found: dict[str, float] = json.loads(output)
    return found


async def idle(url: str, seconds: float) -> dict[str, float]:
    """Do nothing for a while; what that took."""
    async with App(url, workflows=[sleeper]) as app:
        await asyncio.sleep(min(_SETTLING_SEC, seconds))
        statements = 0

        def count(point: str, operation: str) -> None:
            nonlocal statements
            statements += point == "before statement"

        app.storage.runner.probe = count
        before = time.process_time()
        await asyncio.sleep(seconds)
        cpu = time.process_time() - before
        return {
            "memory_mb": resident_mb(),
            "cpu_percent": 100 * cpu / seconds,
            "statements": statements / seconds,
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(idle(sys.argv[1], float(sys.argv[2])))))
