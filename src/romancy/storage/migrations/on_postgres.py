"""PostgreSQL: advisory locks of transactions, so that a transaction pooler may stand in between.

Our lock belongs to a transaction that does nothing else, on a connection of its own. It holds no snapshot, so CREATE
INDEX CONCURRENTLY on the other connection does not wait for it; nor for those who want the lock too, because they ask
again and again instead of waiting inside a statement. Edda's lock (the same kind of key, held by a session there) is
only taken around the shared tables: Edda waits one second for it and then goes on as if they were there.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from ..sql.runners.postgres import PostgresRunner
from .connection import BUSY, EDDA_BUSY, ServerMigrationConnection

EDDA_LOCK = 20251217000000
_OUR_LOCK = int.from_bytes(b"romancy")

_LONGEST_SEC = 86400.0  # building an index may take hours
# Waiting for a table may not: everybody who comes later waits behind us. And in a deadlock it is us who give way, since
# PostgreSQL looks for somebody to blame only after a second.
_TABLE_LOCK_TIMEOUT = "500ms"
_CLOSE_SEC = 2.0

_INDEX = re.compile(r"CREATE (?:UNIQUE )?INDEX CONCURRENTLY (?:IF NOT EXISTS )?(?P<name>\w+)", re.IGNORECASE)


class PostgresMigrationConnection(ServerMigrationConnection):
    """One connection that keeps the lock and one that works."""

    runner: PostgresRunner
    _work: asyncpg.Connection[Any]

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._connected() as guard:

            async def locked() -> bool:
                await guard.execute("BEGIN")
                taken: bool = await guard.fetchval(f"SELECT pg_try_advisory_xact_lock({_OUR_LOCK})")
                # Either statement also ends asyncpg's portal of the SELECT, and with it the snapshot that it holds.
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
            await connection.close(timeout=_CLOSE_SEC)
        finally:
            connection.terminate()  # does nothing to a closed one; the server rolls back what is open

    @asynccontextmanager
    async def step(self, *, in_transaction: bool = True, shared: bool = False) -> AsyncIterator[None]:
        if not in_transaction:
            yield
            return
        await self._work.execute(
            "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = 0;"
            f" SET LOCAL lock_timeout = '{_TABLE_LOCK_TIMEOUT}'"
        )
        try:
            if shared:
                await self.poll(self._lock_out_edda, what=EDDA_BUSY)
            yield
        except Exception:
            if not self._work.is_closed():
                await self._work.execute("ROLLBACK")
            raise
        await self._work.execute("COMMIT")

    async def _lock_out_edda(self) -> bool:
        return bool(await self._work.fetchval(f"SELECT pg_try_advisory_xact_lock({EDDA_LOCK})"))

    async def execute(self, statement: str) -> None:
        self.probe()
        index = _INDEX.match(statement)
        if index is not None:
            await self._drop_half_built(index["name"])
        await self._work.execute(statement, timeout=_LONGEST_SEC)

    async def _drop_half_built(self, name: str) -> None:
        """An index whose building was cut short stays there INVALID, and IF NOT EXISTS would be content with it."""
        invalid = await self._work.fetchval(
            "SELECT true FROM pg_index WHERE NOT indisvalid AND indexrelid = to_regclass($1)", name
        )
        if invalid:
            await self._work.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}", timeout=_LONGEST_SEC)
