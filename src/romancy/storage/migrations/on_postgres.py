"""PostgreSQL: advisory locks of transactions, so that a transaction pooler may stand in between.

Our lock belongs to a transaction that does nothing else, on a connection of its own: it holds no snapshot, so CREATE INDEX
CONCURRENTLY on the other connection does not wait for it. Nor for those who want the lock, because they ask again and again
instead of waiting inside a statement. Edda's lock (the same key, of a session there) is only taken around the shared
tables: Edda waits one second for it and then goes on as if they were there.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from ..errors import StorageError, StorageUnavailableError, TransientStorageError
from ..sql.runners.postgres import PostgresRunner
from ..sql.runners.server import Trouble
from .connection import BUSY, EDDA_BUSY, EDDA_LOCK_KEY, MigrationConnection

_LOCK_KEY = int.from_bytes(b"romancy")
# Building an index may take hours; asking for a table may not: whoever comes later would wait behind us.
_LONGEST_SEC = 86400.0
_TABLE_LOCK_TIMEOUT = "3s"

_INDEX = re.compile(r"CREATE (?:UNIQUE )?INDEX CONCURRENTLY (?:IF NOT EXISTS )?(?P<name>\w+) ", re.IGNORECASE)


class PostgresMigrationConnection(MigrationConnection):
    """One connection that keeps the lock and one that works."""

    kind = "postgres"
    runner: PostgresRunner
    _work: asyncpg.Connection[Any]

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._connected() as guard:

            async def locked() -> bool:
                await guard.execute("BEGIN")
                taken: bool = await guard.fetchval(f"SELECT pg_try_advisory_xact_lock({_LOCK_KEY})")
                # This also ends asyncpg's portal of the SELECT, and with it the snapshot it still holds.
                await guard.execute("SET LOCAL idle_in_transaction_session_timeout = 0" if taken else "ROLLBACK")
                return taken

            await self.poll(locked, what=BUSY)
            async with self._connected() as self._work:
                yield

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[asyncpg.Connection[Any]]:
        connection = await self.runner.connect_raw()
        try:
            yield connection
        finally:
            connection.terminate()  # the server rolls back; nothing is left to say

    @asynccontextmanager
    async def step(self, *, in_transaction: bool, shared: bool = False) -> AsyncIterator[None]:
        if not in_transaction:
            yield
            return
        await self._work.execute(
            f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = 0;"
            f" SET LOCAL lock_timeout = '{_TABLE_LOCK_TIMEOUT}'"
        )
        try:
            if shared:
                await self.poll(self._lock_out_edda, what=EDDA_BUSY)
            yield
        except BaseException:
            if not self._work.is_closed():
                await self._work.execute("ROLLBACK")
            raise
        await self._work.execute("COMMIT")

    async def _lock_out_edda(self) -> bool:
        return bool(await self._work.fetchval(f"SELECT pg_try_advisory_xact_lock({EDDA_LOCK_KEY})"))

    async def rows(self, query: str) -> Sequence[Sequence[Any]]:
        found: Sequence[Sequence[Any]] = await self._work.fetch(query)
        return found

    async def execute(self, statement: str) -> None:
        index = _INDEX.match(statement)
        if index is not None:
            await self._drop_half_built(index["name"])
        self.probe()
        await self._work.execute(statement, timeout=_LONGEST_SEC)

    async def _drop_half_built(self, name: str) -> None:
        """An index whose building was cut short stays there INVALID, and IF NOT EXISTS would be content with it."""
        invalid = await self._work.fetchval(
            "SELECT true FROM pg_index WHERE NOT indisvalid AND indexrelid = to_regclass($1)", name
        )
        if invalid:
            await self._work.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}", timeout=_LONGEST_SEC)

    async def collation(self) -> str:
        # Two columns of different collations cannot even be compared in a join.
        name = await self._work.fetchval(
            "SELECT collname FROM pg_attribute JOIN pg_collation ON pg_collation.oid = attcollation"
            " WHERE attrelid = to_regclass('workflow_instances') AND attname = 'instance_id'"
        )
        return f'"{name or "C"}"'

    def worth_retrying(self, error: Exception) -> bool:
        return self.runner.trouble(error) is Trouble.CONFLICT

    def translate(self, error: Exception) -> StorageError:
        match self.runner.trouble(error):
            case Trouble.CONFLICT:
                return TransientStorageError(f"PostgreSQL kept refusing a migration: {error}")
            case Trouble.REFUSED:
                return self.runner.translate(error)
        return StorageUnavailableError(f"the connection to {self.runner.url.shown} was lost: {error}")
