"""A fresh, migrated database of each kind, and what its commits wait for."""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from romancy.storage import SQLStorage, open_storage
from tests.servers import KINDS, Server, Servers

DATABASES = ("sqlite", *KINDS)

_DURABILITY = {
    "postgres": "SELECT current_setting('fsync') = 'on' AND current_setting('synchronous_commit') <> 'off'",
    "mysql": "SELECT @@innodb_flush_log_at_trx_commit = 1",
}


@dataclass(frozen=True)
class Database:
    """A database to measure on."""

    name: str
    title: str
    url: str

    def open(self) -> SQLStorage:
        return open_storage(self.url)


@asynccontextmanager
async def fresh_databases(names: Sequence[str]) -> AsyncIterator[list[Database]]:
    """Migrated databases of these names; what cannot be had is said and left out."""
    with tempfile.TemporaryDirectory(prefix="romancy-benchmarks-") as directory:
        async with Servers([name for name in names if name in KINDS], durable=True) as servers:
            for name, reason in servers.missing.items():
                print(f"NOT MEASURED ON {KINDS[name].title}: {reason}", file=sys.stderr)
            found = [
                await _on_sqlite(Path(directory)) if name == "sqlite" else await _on_server(servers[name])
                for name in names
                if name not in servers.missing
            ]
            try:
                yield found
            finally:
                for database in found:
                    if database.name != "sqlite":
                        await servers[database.name].drop_database(database.url)


async def _on_sqlite(directory: Path) -> Database:
    database = Database("sqlite", "SQLite", f"sqlite:///{directory}/benchmarks.db")
    await _migrate(database)
    print(f"SQLite {sqlite3.sqlite_version}: WAL, synchronous=FULL")
    return database


async def _on_server(server: Server) -> Database:
    database = Database(server.name, server.title, await server.create_database())
    await _migrate(database)
    async with database.open() as storage:
        durable = await storage.conn().fetch_value(_DURABILITY[storage.runner.driver.driver_name()])
    waits = "commits wait for the disk" if durable else "COMMITS DO NOT WAIT FOR THE DISK: give it other settings"
    print(f"{server.title} {server.version}{'' if server.ours else ', given'}: {waits}")
    return database


async def _migrate(database: Database) -> None:
    async with database.open() as storage:
        await storage.initialize()
