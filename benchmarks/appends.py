"""Fenced appends: by one caller beside the bare driver, and by many beside the bare driver's batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from romancy.storage import HistoryEvent, Lock, SQLStorage, WorkflowInstance

from .bare import BARE, EVENT_DATA, EVENT_TYPE
from .databases import Database, Place
from .measuring import Contender, Report, Result, Series, Size, Target, per_second, take_turns

ONE = Target(least=0.7)
MANY = {"sqlite": Target(least=0.45), "postgres": Target(least=0.6), "mariadb": Target(least=0.6)}
_LONGER = 3
"""So many times as many appends of one caller: among sixty, one commit that waits for the disk would decide."""


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
    bare_batches: Series
    many: Series


async def measure(places: Sequence[Place], size: Size, report: Report) -> None:
    """What an append costs beside the bare driver, and how near many callers come to its batches."""
    report.section("A fenced append through the public API, beside the same statement in the bare driver")
    for place in places:
        async with place.database() as database:
            found = await _measure(database, size)
        report.add(
            Result(
                "one caller",
                place.title,
                found.bare.divided_by(found.one),
                beside=f"{per_second(found.bare)} bare",
                ours=per_second(found.one),
                target=ONE,
            )
        )
        report.add(
            Result(
                f"{size.callers} callers",
                place.title,
                found.bare_batches.divided_by(found.many),
                beside=f"{per_second(found.bare_batches)} in batches",
                ours=per_second(found.many),
                target=MANY.get(place.name),
            )
        )
        report.add(
            Result(
                f"{size.callers} callers, one commit each",
                place.title,
                found.bare.divided_by(found.many),
                beside=f"{per_second(found.bare)} bare",
                ours=per_second(found.many),
            )
        )


async def _measure(database: Database, size: Size) -> Measured:
    async with database.open() as storage:
        locks = [await locked_instance(storage, f"appends-{number}") for number in range(size.callers)]
        callers = [Ours(storage, lock) for lock in locks]

        async def all_at_once(appends: int) -> None:
            async with asyncio.TaskGroup() as group:
                for caller in callers:
                    group.create_task(caller.append(appends // len(callers)))

        bare = BARE[database.name](database.url)
        bare.for_appends(storage, locks)
        await bare.connect()
        single, many = _LONGER * size.single, size.callers * size.each
        try:
            measured = await take_turns(
                size.rounds,
                [
                    Contender(bare.append, single),
                    Contender(callers[0].append, single),
                    Contender(bare.append_batches, many),
                    Contender(all_at_once, many),
                ],
            )
        finally:
            await bare.close()
    for prefix in ("bare", "ours"):
        expected = (size.rounds + 1) * (single + many)
        assert await database.count("workflow_history", f"activity_id LIKE '{prefix}:%'") == expected
    return Measured(*measured)


async def locked_instance(storage: SQLStorage, instance_id: str) -> Lock:
    """A new instance that is ours for an hour."""
    instance = WorkflowInstance(instance_id, "benchmark", locked_by="worker")
    lock = await storage.create_instance(instance, lock_timeout_sec=3600)
    assert lock is not None
    return lock
