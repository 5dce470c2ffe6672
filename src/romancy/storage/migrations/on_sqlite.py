"""SQLite: all of it in the one write transaction that SQLite allows at a time, on the storage's own writer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..errors import StorageError, TransientStorageError
from ..sql.operation import Call, Traits
from ..sql.runners.sqlite import SQLiteRunner
from ..sql.statement import NativeQuery, Want
from .connection import BUSY, MigrationConnection

_LONGEST_SEC = 3600.0


class SQLiteMigrationConnection(MigrationConnection):
    """A transaction of the runner; the runner waits for its turn, and undoes everything if we fail."""

    kind = "sqlite"
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
    async def step(self, *, in_transaction: bool, shared: bool = False) -> AsyncIterator[None]:
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

    async def rows(self, query: str) -> Sequence[Sequence[Any]]:
        found: Sequence[Sequence[Any]] = await self._run(query, Want.ALL)
        return found

    async def execute(self, statement: str) -> None:
        await self._run(statement, Want.COUNT)

    async def _run(self, text: str, want: Want) -> Any:
        async def migrate(_: None) -> Any:
            return await NativeQuery[Any](text, (), want)

        return await self.runner.run(Call(migrate, None, (), {}, Traits(reads=True)))

    async def collation(self) -> str:
        return "BINARY"

    def translate(self, error: Exception) -> StorageError:
        return self.runner.translate(error)
