"""The sweeper: what is over and was kept long enough is deleted, oldest first, a little at a time."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

from ..storage import SQLStorage, Turn
from .services import Service
from .settings import Retention

log = logging.getLogger("romancy")

LOCK = "romancy_sweeper"
"""The system lock of the one worker that sweeps."""

_LONGEST_BATCH_SEC = 0.01
"""What a batch should take, beyond what every commit takes: whoever writes to SQLite's one file waits no longer than
that, some more on a bad day."""
_FIRST_BATCH = 10
_SMALLEST_BATCH = 5
"""So that a database that is slow because it is full still becomes emptier."""
_LARGEST_BATCH = 1000


class Batch:
    """How many rows go at once: as many as take `_LONGEST_BATCH_SEC`."""

    def __init__(self) -> None:
        self.size = _FIRST_BATCH
        self.longest_work_sec = 0.0
        self.longest_commit_sec = 0.0
        self._fast_commit_sec = math.inf

    def took(self, work_sec: float, commit_sec: float) -> None:
        """Learn from the last one: shrink at once, grow slowly."""
        self.longest_work_sec = max(self.longest_work_sec, work_sec)
        self.longest_commit_sec = max(self.longest_commit_sec, commit_sec)
        # A smaller batch would not make a slow disk's commits faster, only more of them.
        self._fast_commit_sec = min(commit_sec, 1.1 * self._fast_commit_sec)
        seconds = work_sec + commit_sec - self._fast_commit_sec
        factor = min(max(_LONGEST_BATCH_SEC / max(seconds, 1e-6), 0.25), 1.5)
        self.size = min(max(int(self.size * factor + 0.5), _SMALLEST_BATCH), _LARGEST_BATCH)


Delete = Callable[[int, Turn], Awaitable[int]]
"""Delete at most so many in a turn; how many that were."""


class Chore:
    """One kind of thing to delete."""

    def __init__(self, name: str, delete: Delete) -> None:
        self.name = name
        self.delete = delete
        self.batch = Batch()
        self.deleted = 0
        """Since the start."""


class Sweeper(Service):
    """Deletes what was kept long enough; one worker at a time, resumed by the next."""

    def __init__(self, storage: SQLStorage, worker_id: str, retention: Retention) -> None:
        every_sec = retention.every.total_seconds()
        super().__init__(every_sec)
        self._every_sec = every_sec
        self._storage = storage
        self._worker_id = worker_id
        self._lease_sec = max(30.0, 2 * every_sec)
        self._renew_at = 0.0
        self.chores = list(_chores(storage, retention))

    async def run(self) -> None:
        # Not at once: a process that has just started has better things to do, and so have many that start together.
        await self._rest(self._every_sec * random.uniform(0.5, 1.0))
        await super().run()

    @property
    def progress(self) -> dict[str, int]:
        """How much of each has been deleted since the start."""
        return {chore.name: chore.deleted for chore in self.chores}

    async def look(self) -> bool:
        for chore in self.chores:
            if not await self._still_ours():
                return False
            await self._do(chore)
        return False

    async def _do(self, chore: Chore) -> None:
        """Batch after batch until nothing is left; between two, others get as long as one took."""
        before = chore.deleted
        while await self._still_ours():
            size = chore.batch.size
            turn = Turn(_LONGEST_BATCH_SEC)
            deleted = await chore.delete(size, turn)
            done = time.monotonic()
            chore.batch.took(turn.ended - turn.began, done - turn.ended)
            chore.deleted += deleted
            if deleted < size and not turn.cut_short:
                break
            await asyncio.sleep(done - turn.began)
        if chore.deleted > before:
            log.info("swept %d %s", chore.deleted - before, chore.name)

    async def _still_ours(self) -> bool:
        """Whether it is us who sweep; a worker that has begun goes on with it until it dies."""
        now = time.monotonic()
        if now < self._renew_at:
            return True
        ours = await self._storage.try_acquire_system_lock(LOCK, self._worker_id, self._lease_sec)
        self._renew_at = now + self._lease_sec / 3 if ours else 0.0
        return ours


def _chores(storage: SQLStorage, retention: Retention) -> list[Chore]:
    kept: list[tuple[str, timedelta | None, Callable[..., Awaitable[int]]]] = [
        ("instances", retention.instances, storage.delete_finished_instances),
        ("messages", retention.messages, storage.cleanup_old_channel_messages),
        ("events", retention.events, storage.cleanup_old_outbox_events),
        ("seen_events", retention.seen_events, storage.cleanup_seen_events),
    ]
    chores = [Chore(name, _older_than(age, delete)) for name, age, delete in kept if age is not None]

    async def system_locks(_: int, __: Turn) -> int:
        return await storage.cleanup_expired_system_locks()

    return [*chores, Chore("system_locks", system_locks)]


def _older_than(age: timedelta, delete: Callable[..., Awaitable[int]]) -> Delete:
    return lambda limit, turn: delete(age, limit=limit, turn=turn)
