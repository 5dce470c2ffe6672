"""Instances are created and removed for a while: nothing may grow for good, and nobody may wait long for the sweeper.

    python -m benchmarks.retention --databases sqlite --instances 500000

Finished instances with five steps each come in by the hundred, with some messages, events and keys, all of them kept
long enough, and somebody else makes small writes all the time. Half of the instances come while the sweeper rests, half
while it removes them: what a small write takes longer then is the sweeper's doing, whatever else the machine is busy
with. Sizes are those of the database (on SQLite also of its write-ahead log) after each tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from romancy import Retention
from romancy.storage import SQLStorage, WorkflowInstance
from romancy.storage.sql.runners.sqlite import SQLiteRunner
from romancy.worker.sweeper import Sweeper
from tests.numbers import joined, numbers
from tests.servers import ServerError

from .databases import DATABASES, Database, places

LONGEST_LOG_MB = 32.0
MOST_GROWTH = 1.3
"""From the first third on."""

LONGEST_WAIT_SEC = 0.05
"""Beyond what a small write takes without the sweeper."""

_AT_ONCE = 100
_HALF = 500
"""How many come while the sweeper rests, and again while it works."""
_STEPS = 5
_PER_MESSAGE = 10
"""For so many instances there is a message, an event and a seen key."""
_MOST_PER_MINUTE = {"postgres": 60_000}
"""Where the server itself makes room, once a minute (autovacuum), what is there rises and falls: 500,000 instances
are eight of its rounds then, and the first third is more than two."""
_LEFT = {
    "workflow_instances": 1,
    "workflow_history": 0,
    "channel_messages": 0,
    "outbox_events": 0,
    "romancy_seen_events": 0,
}
"""Afterwards: whoever writes is not finished."""
_SIZES = {
    "postgres": "SELECT pg_database_size(current_database())",
    "mysql": """
        SELECT SUM(file_size) FROM information_schema.innodb_{}tablespaces
         WHERE name LIKE CONCAT(DATABASE(), '/%')""",
}


class Load:
    """What goes on in one database."""

    def __init__(self, storage: SQLStorage, instances: int) -> None:
        self._storage = storage
        self._instances = instances
        most_per_minute = _MOST_PER_MINUTE.get(storage.runner.driver.driver_name())
        self._least_sec = 60 * instances / most_per_minute if most_per_minute else 0.0
        minute = timedelta(minutes=1)
        retention = Retention(instances=minute, messages=minute, events=minute, seen_events=minute)
        self._sweeper = Sweeper(storage, "sweeper", retention)
        self._swept = self._sweeper.chores[0]
        self._made = 0
        self.alone: list[float] = []
        """What small writes took while the sweeper rested."""
        self.beside: list[float] = []
        """And while it worked."""
        self._waits = self.alone
        self.sizes: list[float] = []
        self.longest_log = 0.0

    async def run(self) -> None:
        """Create and remove all instances, while somebody writes."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(self._write())
            print(
                f"  {'created':>9} {'removed':>9} {'size':>9} {'log':>9} {'longest batch':>14} {'longest commit':>16}"
            )
            for tenth in range(1, 11):
                while self._made < self._instances * tenth // 10:
                    await self._round()
                    await asyncio.sleep(began + self._least_sec * self._made / self._instances - time.monotonic())
                await self._report()
            writing.cancel()

    async def finish(self) -> None:
        """What the last sweep has left of the last round."""
        await self._sweeper.look()

    async def _round(self) -> None:
        self._waits = self.alone
        await self._make(_HALF)
        while len(self.alone) < len(self.beside) // 4:  # creating them is quicker than removing them
            await asyncio.sleep(0.01)
        self._waits = self.beside
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep(self._made + _HALF))
            await self._make(_HALF)

    async def _make(self, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for first in range(self._made, self._made + count, _AT_ONCE):
                group.create_task(self._insert(first))
        self._made += count

    async def _insert(self, first: int) -> None:
        driver = self._storage.runner.driver
        instance_id = joined(driver, "'i-'", f"({first} + n)")
        ago = driver.seconds_after(driver.now(), "-3600")
        source = numbers(_AT_ONCE)
        steps = " UNION ALL ".join(f"SELECT {k} AS k" for k in range(_STEPS))
        async with self._storage.transaction() as conn:
            await conn.execute(f"""
                INSERT INTO workflow_instances
                       (instance_id, workflow_name, source_hash, owner_service, framework, status, started_at,
                        finished_at, input_data)
                SELECT {instance_id}, 'load', '', '', 'romancy-py', 'completed', {ago}, {ago}, '{{}}' FROM {source}""")
            await conn.execute(f"""
                INSERT INTO workflow_history (instance_id, activity_id, event_type, event_data)
                SELECT {instance_id}, {joined(driver, "'step:'", "k")}, 'ActivityCompleted', '{{"result": 12345}}'
                  FROM {source} CROSS JOIN ({steps}) steps""")
            for table, columns, values in (
                ("channel_messages", "message_id, channel, data_type, data, published_at", "'news', 'json', '{}',"),
                (
                    "outbox_events",
                    "event_id, event_type, event_source, event_data, status, published_at",
                    "'paid', 'orders', '{}', 'published',",
                ),
                ("romancy_seen_events", "event_key, seen_at", ""),
            ):
                fewer = numbers(_AT_ONCE // _PER_MESSAGE)
                await conn.execute(f"INSERT INTO {table} ({columns}) SELECT {instance_id}, {values} {ago} FROM {fewer}")

    async def _sweep(self, until: int) -> None:
        """Until so many have been removed, since the start."""
        while self._swept.deleted < until:
            await self._sweeper.look()
            await asyncio.sleep(0.001)

    async def _write(self) -> None:
        """What somebody else's small write takes, in which the sweeper may be in the way."""
        while True:
            waits = self._waits
            started = time.perf_counter()
            await self._storage.update_instance_activity("somebody", "step:1")
            if waits is self._waits:  # else it met both
                waits.append(time.perf_counter() - started)
            await asyncio.sleep(0.005)

    async def _report(self) -> None:
        size, log = await self._size()
        self.sizes.append(size)
        self.longest_log = max(self.longest_log, log)
        batch = self._swept.batch
        work, commit = batch.longest_work_sec, batch.longest_commit_sec
        batch.longest_work_sec = batch.longest_commit_sec = 0.0
        print(
            f"  {self._made:>9,} {self._swept.deleted:>9,} {size:>6.1f} MB {log:>6.1f} MB {work * 1000:>11.1f} ms"
            f" {commit * 1000:>13.1f} ms",
            flush=True,
        )

    async def _size(self) -> tuple[float, float]:
        """Of the database and of SQLite's log, in megabytes."""
        runner = self._storage.runner
        if isinstance(runner, SQLiteRunner):
            paths = Path(runner.path), Path(f"{runner.path}-wal")
            size, log = (path.stat().st_size / 1e6 if path.exists() else 0.0 for path in paths)
            return size, log
        query = _SIZES[runner.driver.driver_name()]
        mariadb = getattr(runner.driver, "is_mariadb", False)
        return float(await self._storage.conn().fetch_value(query.format("sys_" if mariadb else "")) or 0) / 1e6, 0.0


async def measure(names: Sequence[str], instances: int) -> bool:
    """Print what happens on each database; whether nothing grew for good."""
    well = True
    async with places(names) as found:
        for place in found:
            async with place.database() as database:
                well &= await _measure(database, instances)
    return well


async def _measure(database: Database, instances: int) -> bool:
    print(f"\n{database.title}: {instances:,} instances, created and removed")
    async with database.open() as storage:
        await storage.create_instance(WorkflowInstance("somebody", "load"))
        load = Load(storage, instances)
        await load.run()
        await load.finish()
    for table, left in _LEFT.items():
        found = await database.count(table)
        if found != left:
            raise AssertionError(f"{found} rows are left in {table}, not {left}")
    growth = max(load.sizes[4:]) / max(load.sizes[:4])
    print(f"  growth after the first third: {growth:.2f}×, at most {MOST_GROWTH}×: {_verdict(growth <= MOST_GROWTH)}")
    short = load.longest_log <= LONGEST_LOG_MB
    print(f"  longest log: {load.longest_log:.1f} MB, at most {LONGEST_LOG_MB:g} MB: {_verdict(short)}")
    return _compare(load.alone, load.beside) and growth <= MOST_GROWTH and short


def _compare(alone: list[float], beside: list[float]) -> bool:
    """Print what small writes took without and with the sweeper; whether it kept nobody waiting for long."""
    print(f"  {'a small write':<28} {'how many':>9} {'median':>10} {'99 %':>10} {'99.9 %':>10} {'longest':>10}")
    for name, waits in (("while the sweeper rests", alone), ("while it works", beside)):
        found = [_quantile(waits, part) for part in (0.5, 0.99, 0.999, 1.0)]
        print(f"  {name:<28} {len(waits):>9,} " + " ".join(f"{wait * 1000:>7.1f} ms" for wait in found))
    # Not the longest of all: a disk that stands still for a second now and then meets either of them.
    beyond = _quantile(beside, 0.999) - _quantile(alone, 0.999)
    well = beyond <= LONGEST_WAIT_SEC
    print(
        f"  99.9 % wait at most {beyond * 1000:.1f} ms longer, at most {LONGEST_WAIT_SEC * 1000:g} ms: {_verdict(well)}"
    )
    return well


def _quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def _verdict(well: bool) -> str:
    return "ok" if well else "missed"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retention", description=__doc__.partition("\n")[0])
    known = ",".join(DATABASES)
    parser.add_argument("--databases", default=known, metavar="NAMES", help=f"some of {known} (default: all)")
    parser.add_argument("--instances", type=int, default=20_000, help="to create and remove (default: %(default)s)")
    arguments = parser.parse_args()
    names = arguments.databases.split(",")
    if unknown := set(names) - set(DATABASES):
        parser.error(f"there is no {', '.join(unknown)}, only {known}")
    logging.getLogger("romancy").setLevel(logging.WARNING)
    try:
        return 0 if asyncio.run(measure(names, arguments.instances)) else 1
    except ServerError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    sys.exit(main())
