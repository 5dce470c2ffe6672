"""Dying at a chosen durable write, in one process: everything after that point finds the database out of reach.

- ``before``: the write never happened, and its worker is dead.
- ``after``: the write is committed, and its worker is dead before it hears of it.
- ``error``: the write is committed, its worker lives and is told that the outcome is unknown.
- ``stolen``: another worker has taken the lock over right before the write.
"""

import asyncio
from typing import Any, TypeVar

from romancy import App
from romancy.storage import OutcomeUnknownError, SQLStorage
from romancy.storage.sql.operation import Call

T = TypeVar("T")

NOT_OF_A_WORKFLOW = ("refresh_locks", "_ask", "unpark_refused")
HOW = ("before", "after", "error", "stolen")


class Death(BaseException):
    """The process is gone."""


class Saboteur:
    """Stands between a storage and its runner, counts the writes, and strikes at one of them."""

    def __init__(self, storage: SQLStorage, accomplice: SQLStorage, strike_at: int, how: str) -> None:
        self._run = storage.runner.run
        self._accomplice = accomplice
        self._strike_at = strike_at
        self._how = how
        self.writes = 0
        self.dead = asyncio.Event()
        self.struck = ""
        storage.runner.run = self.run  # type: ignore[method-assign]

    async def run(self, call: Call[T]) -> T:
        if self.dead.is_set():
            raise Death
        if call.traits.reads or call.name in NOT_OF_A_WORKFLOW:
            return await self._run(call)
        self.writes += 1
        if self.writes != self._strike_at:
            return await self._run(call)
        self.struck = call.name
        return await self._strike(call)

    async def _strike(self, call: Call[Any]) -> Any:
        if self._how == "stolen":
            await expire_locks(self._accomplice, steal=True)
            return await self._run(call)
        if self._how in ("after", "error"):
            await self._run(call)
        if self._how == "error":
            raise OutcomeUnknownError("the connection broke while the answer was on its way")
        self.dead.set()
        raise Death


async def expire_locks(storage: SQLStorage, *, steal: bool = False) -> None:
    """Let all locks run out, as those of a dead worker do; stolen ones had another owner in between."""
    token = "lock_token + 1" if steal else "lock_token"
    await storage.conn().execute(
        f"UPDATE workflow_instances SET lock_token = {token}, lock_expires_at = '2000-01-01 00:00:00.000000'"
        " WHERE locked_by IS NOT NULL"
    )


async def bury(app: App) -> None:
    """End what is left of a dead app, as the end of its process would: without a word to the database."""
    worker = app.worker
    assert worker is not None
    tasks = [*worker._tasks, *worker.executor.tasks]
    tasks += [task for task in (app._listening, app._relaying) if task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await app.storage.close()
