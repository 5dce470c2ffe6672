"""SQLite: everything in the one write transaction that SQLite allows at a time, on the storage's own writer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..errors import StorageError, TransientStorageError
from ..sql.operation import Call, Traits
from ..sql.runners.sqlite import SQLiteRunner
from ..sql.statement import NativeQuery, Want
from .connection import BUSY, MigrationConnection

_LONGEST_SEC = 3600.0


class SQLiteMigrationConnection(MigrationConnection):
    """A transaction of the runner, each step a savepoint in it."""

    runner: SQLiteRunner

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        await self.poll(self._begin, what=BUSY)
        async with self._ending():
            yield

    async def _begin(self) -> bool:
        try:
            await self.runner.transactions.begin(_LONGEST_SEC)
        except TransientStorageError:
            return False
        return True

    @asynccontextmanager
    async def step(self, *, in_transaction: bool = True, shared: bool = False) -> AsyncIterator[None]:
        await self.runner.transactions.begin()
        async with self._ending():
            yield

    @asynccontextmanager
    async def _ending(self) -> AsyncIterator[None]:
        """Commit or roll back the innermost `begin`."""
        try:
            yield
        except BaseException:
            await self.runner.transactions.rollback()
            raise
        await self.runner.transactions.commit()

    async def execute(self, statement: str) -> None:
        async def migrate(_: None) -> int:
            return await NativeQuery[int](statement, (), Want.COUNT)

        # A "read" only says that it needs no savepoint of its own.
        await self.runner.run(Call(migrate, None, (), {}, Traits(reads=True)))

    def translate(self, error: Exception) -> StorageError:
        return self.runner.translate(error)
