"""Iterating a long history must not hold it in memory: measured in a process that does nothing else.

`python -m benchmarks.iteration URL INSTANCE_ID` is that process.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from romancy.storage import HistoryIterator, SQLStorage, open_storage
from tests.numbers import joined, numbers

from .appends import locked_instance
from .bare import EVENT_DATA, EVENT_TYPE
from .databases import Database, Place
from .measuring import Report, Result, Series, Size, Target

RATE = {"sqlite": Target(least=150_000), "postgres": Target(least=100_000)}
GROWTH = Target(most=100)

_INSTANCE = "long-history"
_FILL = """
    INSERT INTO workflow_history (instance_id, activity_id, event_type, data_type, event_data)
    SELECT '{instance_id}', {activity_id}, '{event_type}', 'json', '{event_data}'
      FROM {numbers} ORDER BY n"""


async def measure(places: Sequence[Place], size: Size, report: Report) -> None:
    """How fast a process reads a long history, and how much it grows meanwhile."""
    report.section(f"Reading a history of {size.history:,} events through HistoryIterator")
    for place in places:
        async with place.database() as database:
            async with database.open() as storage:
                await _fill(storage, size.history)
            found = [await _in_another_process(database) for _ in range(min(3, size.rounds))]
        assert all(each["events"] == size.history for each in found)
        rates = Series([each["events"] / each["seconds"] for each in found])
        report.add(Result("events per second", place.title, rates, unit="/s", target=RATE.get(place.name)))
        growth = Series([max(each["growth_mb"] for each in found)])
        report.add(Result("growth of the process", place.title, growth, unit=" MB", target=GROWTH))


async def _fill(storage: SQLStorage, events: int) -> None:
    await locked_instance(storage, _INSTANCE)
    statement = _FILL.format(
        instance_id=_INSTANCE,
        activity_id=joined(storage.runner.driver, "'step:'", "n"),
        event_type=EVENT_TYPE,
        event_data=EVENT_DATA,
        numbers=numbers(events),
    )
    async with storage.transaction(deadline_sec=600):
        await storage.conn().execute(statement)


async def _in_another_process(database: Database) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.iteration", database.url, _INSTANCE]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the iterating process ended with {process.returncode}")
    found: dict[str, float] = json.loads(output)
    return found


async def iterate(url: str, instance_id: str) -> dict[str, float]:
    """Read the whole history; how many events, how long it took, how much memory it took at most."""
    async with open_storage(url) as storage:
        await storage.get_instance(instance_id)  # connected, and what a first statement needs is loaded
        before = resident_mb()
        events = 0
        started = time.perf_counter()
        async for _ in HistoryIterator(storage, instance_id):
            events += 1
        seconds = time.perf_counter() - started
        # The largest ever: nothing that was given back meanwhile goes unseen.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"events": events, "seconds": seconds, "growth_mb": peak - before}


def resident_mb() -> float:
    """How much memory this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2


if __name__ == "__main__":
    print(json.dumps(asyncio.run(iterate(*sys.argv[1:]))))
