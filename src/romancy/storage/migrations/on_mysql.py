"""MySQL and MariaDB: no statement that changes a schema can be undone, so each one may have been done already.

A migration that died half-way is simply run again: what exists is left alone. Our named lock belongs to the session,
like Edda's. Behind a proxy that shares sessions between clients and does not know GET_LOCK (ProxySQL does) it would
keep nobody out; two processes would then run into each other's "exists already", which does no harm.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..errors import SchemaError
from ..sql.runners.mysql import MySQLRunner, error_code
from .connection import BUSY, EDDA_BUSY, ServerMigrationConnection

EDDA_LOCK = "edda_migration"

_TABLE_LOCK_SEC = 1  # everybody who comes later waits behind us while we wait for a table
_DONE_ALREADY = {
    1050,  # the table exists
    1060,  # the column exists
    1061,  # the index exists
    1091,  # the column or index to drop does not exist
}

_CLAUSE = re.compile(r",?\s*\n\s*(?=ADD|DROP)")  # of an ALTER TABLE, one on each line

# The shared tables in which another framework may have written times of a type that knows the session's zone.
_ZONED_TABLES = """
    SELECT DISTINCT TABLE_NAME FROM information_schema.COLUMNS
    WHERE TABLE_SCHEMA = DATABASE() AND DATA_TYPE = 'timestamp' AND TABLE_NAME IN (
        'workflow_definitions', 'workflow_instances', 'workflow_history', 'workflow_history_archive',
        'workflow_compensations', 'workflow_timer_subscriptions', 'workflow_group_memberships', 'outbox_events',
        'channel_messages', 'channel_subscriptions', 'channel_delivery_cursors', 'channel_message_claims',
        'system_locks')"""


class MySQLMigrationConnection(ServerMigrationConnection):
    """One connection that keeps the lock and works."""

    runner: MySQLRunner
    server_zone = "@@GLOBAL.time_zone"
    """Where sessions get their zone from that set none; tests look at another one."""
    _raw: Any

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        self._raw = await self.runner.connect_raw()
        try:
            await self._query(f"SET SESSION lock_wait_timeout = {_TABLE_LOCK_SEC}")
            # A lock's name is known to all databases of the server, and has 64 characters at most.
            database = hashlib.sha256(self.runner.url.database.encode()).hexdigest()
            async with self._named_lock(f"romancy_migration_{database[:32]}", what=BUSY):
                yield
            await self._raw.ensure_closed()
        finally:
            self._raw.close()

    @asynccontextmanager
    async def step(self, *, in_transaction: bool = True, shared: bool = False) -> AsyncIterator[None]:
        if not shared:
            yield
            return
        async with self._named_lock(EDDA_LOCK, what=EDDA_BUSY):
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
        # Not through a cursor: that one turns the server's notes ("exists already") into Python's warnings.
        await self._raw.query(text)
        return self._raw._result.rows or ()

    async def execute(self, statement: str) -> None:
        self.probe()
        try:
            await self._query(statement)
        except Exception as error:
            if error_code(error) not in _DONE_ALREADY:
                raise
            table, *clauses = _CLAUSE.split(statement)
            if len(clauses) > 1:  # it did all or nothing; perhaps only a part of it was there
                for clause in clauses:
                    await self.execute(f"{table} {clause}")

    async def check_adoptable(self) -> None:
        """SchemaError when times were written in the zone of a server that is not at UTC: their meaning is lost."""
        zone = (await self._query(f"SELECT {self.server_zone}"))[0][0]
        if await self._is_utc(zone):
            return
        for (table,) in await self._query(_ZONED_TABLES):
            if await self._query(f"SELECT 1 FROM {table} LIMIT 1"):
                raise SchemaError(
                    f"the server's time zone is {zone}, and {table} holds times that another framework wrote:"
                    " some of them in that zone, some in UTC. Only a database whose server was at UTC all the time"
                    " (default_time_zone = '+00:00') can be shared"
                )

    async def _is_utc(self, zone: str) -> bool:
        """Whether a clock in this zone shows UTC, in winter and in summer."""
        await self._query(f"SET time_zone = '{zone}'")
        january_and_july = await self._query("SELECT FROM_UNIXTIME(1736942400) + 0, FROM_UNIXTIME(1752580800) + 0")
        await self._query("SET time_zone = '+00:00'")
        return [int(shown) for shown in january_and_july[0]] == [20250115120000, 20250715120000]
