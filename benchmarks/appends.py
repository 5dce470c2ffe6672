"""Fenced appends: by one caller beside the bare driver, and by many beside one commit per call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from romancy.storage import HistoryEvent, Lock, SQLStorage, WorkflowInstance

from .bare import BARE
from .databases import Database
from .measuring import Contender, Series, Size, Table, microseconds, per_second, take_turns, verdict

MOST_FOR_ONE = 1.5
"""How many times the bare driver's time a single append may take."""
LEAST_FOR_MANY = 4.0
"""How many times the rate of one commit per call many callers must reach on SQLite."""

EVENT_TYPE = "ActivityCompleted"
EVENT_DATA = '{"activity_name": "charge", "result": {"payment_id": "p-1042", "amount": 1999, "currency": "EUR"}}'


class Ours:
    """Appends through the public API."""

    def __init__(self, storage: SQLStorage, lock: Lock) -> None:
        self._storage = storage
        self._lock = lock
        self._numbers = count(1)

    async def append(self, count: int) -> None:
        """Append `count` events, one after the other."""
        for _ in range(count):
            event = HistoryEvent(
                self._lock.instance_id, f"ours:{next(self._numbers)}", EVENT_TYPE, event_data=EVENT_DATA
            )
            await self._storage.append_history(event, lock=self._lock)


@dataclass(frozen=True)
class Measured:
    """Seconds per append, in each round."""

    bare: Series
    one: Series
    many: Series


async def measure(databases: Sequence[Database], size: Size) -> None:
    """Print what an append costs beside the bare driver, and what many callers gain by sharing commits."""
    measured = {database.name: await _measure(database, size) for database in databases}

    table = Table("A fenced append by one caller: time", database=10, bare_driver=12, ours=12, ratio=20, target=0)
    for database in databases:
        found = measured[database.name]
        ratio = found.one.divided_by(found.bare)
        target = f"at most {MOST_FOR_ONE}×: {verdict(ratio.median <= MOST_FOR_ONE)}"
        table.row(database.title, microseconds(found.bare), microseconds(found.one), str(ratio), target)

    title = f"Fenced appends by {size.callers} callers at once, each waiting for its own commit: rate"
    table = Table(title, database=10, one_by_one=12, ours=12, ratio=20, target=0)
    for database in databases:
        found = measured[database.name]
        ratio = found.bare.divided_by(found.many)
        target = f"at least {LEAST_FOR_MANY}×: {verdict(ratio.median >= LEAST_FOR_MANY)}"
        row = [database.title, per_second(found.bare), per_second(found.many), str(ratio)]
        table.row(*row, target if database.name == "sqlite" else "(for information)")


async def _measure(database: Database, size: Size) -> Measured:
    async with database.open() as storage:
        locks = [await locked_instance(storage, f"appends-{number}") for number in range(size.callers + 1)]
        rival = locks.pop()
        event = HistoryEvent(rival.instance_id, "bare:0", EVENT_TYPE, event_data=EVENT_DATA)
        bare = BARE[database.name](storage, database.url, rival, event)
        callers = [Ours(storage, lock) for lock in locks]

        async def all_at_once(appends: int) -> None:
            async with asyncio.TaskGroup() as group:
                for caller in callers:
                    group.create_task(caller.append(appends // len(callers)))

        await bare.connect()
        try:
            contenders = [
                Contender(bare.append, size.single),
                Contender(callers[0].append, size.single),
                Contender(all_at_once, size.callers * size.each),
            ]
            return Measured(*await take_turns(size.rounds, contenders))
        finally:
            await bare.close()


async def locked_instance(storage: SQLStorage, instance_id: str) -> Lock:
    """A new instance that is ours for an hour."""
    instance = WorkflowInstance(instance_id, "benchmark", locked_by="worker")
    lock = await storage.create_instance(instance, lock_timeout_sec=3600)
    assert lock is not None
    return lock
