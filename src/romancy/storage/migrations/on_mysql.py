"""MySQL and MariaDB: no statement that changes a schema can be undone, so each may have been done already.

A migration that died half-way is simply run again: what exists is left alone. Our named lock belongs to the session, like
Edda's; a proxy that shares sessions between clients (ProxySQL recognises GET_LOCK and does not) would make both worthless,
and then two processes at once would run into each other's "exists already", which does no harm.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..errors import SchemaError, StorageError, StorageUnavailableError, TransientStorageError
from ..sql.runners.mysql import MySQLRunner, error_code
from ..sql.runners.server import Trouble
from .connection import BUSY, EDDA_BUSY, EDDA_LOCK_NAME, MigrationConnection

_DONE_ALREADY = {
    1050,  # the table exists
    1060,  # the column exists
    1061,  # the index exists
    1091,  # the column or index to drop does not
}
_TABLE_LOCK_SEC = 3


class MySQLMigrationConnection(MigrationConnection):
    """One connection that keeps the lock and works."""

    kind = "mysql"
    runner: MySQLRunner
    _raw: Any

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        self._raw = await self.runner.connect_raw()
        try:
            self._raw._read_timeout = None  # an index may take hours
            await self._query(f"SET SESSION lock_wait_timeout = {_TABLE_LOCK_SEC}")
            # Names are shared by all databases of a server, and 64 characters long at most.
            database = hashlib.sha256(self.runner.url.database.encode()).hexdigest()
            async with self._named_lock(f"romancy_migration_{database[:32]}", what=BUSY):
                yield
        finally:
            self._raw.close()

    @asynccontextmanager
    async def step(self, *, in_transaction: bool, shared: bool = False) -> AsyncIterator[None]:
        if not shared:
            yield
            return
        async with self._named_lock(EDDA_LOCK_NAME, what=EDDA_BUSY):
            yield

    @asynccontextmanager
    async def _named_lock(self, name: str, *, what: str) -> AsyncIterator[None]:
        async def locked() -> bool:
            return bool((await self._query(f"SELECT GET_LOCK('{name}', 1)"))[0][0])

        await self.poll(locked, what=what)
        try:
            yield
        finally:
            if self._raw.connected:
                await self._query(f"SELECT RELEASE_LOCK('{name}')")

    async def _query(self, text: str) -> Sequence[Sequence[Any]]:
        cursor = self._raw.cursor()
        await cursor.execute(text)
        rows: Sequence[Sequence[Any]] = await cursor.fetchall()
        return rows

    async def rows(self, query: str) -> Sequence[Sequence[Any]]:
        return await self._query(query)

    async def execute(self, statement: str) -> None:
        self.probe()
        try:
            await self._query(statement)
        except Exception as error:
            if error_code(error) not in _DONE_ALREADY:
                raise

    async def collation(self) -> str:
        found = await self._query(
            "SELECT COLLATION_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE()"
            " AND (TABLE_NAME, COLUMN_NAME) IN (('workflow_instances', 'instance_id'), ('workflow_definitions', 'workflow_name'))"
            " ORDER BY TABLE_NAME DESC LIMIT 1"
        )
        if found:
            return str(found[0][0])
        return "utf8mb4_nopad_bin" if self.runner.driver.is_mariadb else "utf8mb4_0900_bin"

    def worth_retrying(self, error: Exception) -> bool:
        return self.runner.trouble(error) is Trouble.CONFLICT

    def translate(self, error: Exception) -> StorageError:
        match self.runner.trouble(error):
            case Trouble.CONFLICT:
                return TransientStorageError(f"MySQL kept refusing a migration: {error}")
            case Trouble.REFUSED:
                return self.runner.translate(error)
        return StorageUnavailableError(f"the connection to {self.runner.url.shown} was lost: {error}")
