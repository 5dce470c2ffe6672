"""A fresh, migrated database for each measurement, and what its commits wait for."""

from __future__ import annotations

import shutil
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from romancy.storage import SQLStorage, open_storage
from tests.servers import KINDS, Server, Servers
from tests.servers.server import database_of

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

    async def count(self, table: str, where: str = "1 = 1") -> int:
        """How many rows there are: a benchmark that lost some has measured nothing."""
        async with self.open() as storage:
            return int(await storage.conn().fetch_value(f"SELECT COUNT(*) FROM {table} WHERE {where}"))


class Place:
    """Where databases of one kind can be made."""

    def __init__(self, name: str, title: str, directory: Path, server: Server | None) -> None:
        self.name = name
        self.title = title
        self._directory = directory
        self._server = server
        self._made = 0
        self._template: str | None = None

    @asynccontextmanager
    async def database(self, *, migrated: bool = True) -> AsyncIterator[Database]:
        """A new database, dropped afterwards, so that no measurement reads what another one wrote."""
        if self._server is None:
            self._made += 1
            path = self._directory / f"{self._made}.db"
            if migrated:
                await self._copy_template(path)
            yield Database(self.name, self.title, f"sqlite:///{path}")
            for left in self._directory.glob(f"{self._made}.db*"):
                left.unlink()
            return
        url = await self._new_on(self._server, migrated)
        try:
            yield Database(self.name, self.title, url)
        finally:
            await self._server.drop_database(url)

    async def _new_on(self, server: Server, migrated: bool) -> str:
        if not migrated or self.name != "postgres":
            url = await server.create_database()
            if migrated:
                await _migrate(url)
            return url
        if self._template is None:
            self._template = await server.create_database()
            await _migrate(self._template)
        return await server.create_database(template=database_of(self._template))

    async def clear(self) -> None:
        """Drop what is left: a given server stays."""
        if self._server is not None and self._template is not None:
            await self._server.drop_database(self._template)

    async def _copy_template(self, path: Path) -> None:
        template = self._directory / "template.db"
        if not template.exists():
            await _migrate(f"sqlite:///{template}")
        shutil.copy(template, path)

    async def described(self) -> str:
        """Its version, and whether its commits wait for the disk."""
        if self._server is None:
            return f"SQLite {sqlite3.sqlite_version}: WAL, synchronous=FULL"
        async with self.database() as database, database.open() as storage:
            durable = await storage.conn().fetch_value(_DURABILITY[storage.runner.driver.driver_name()])
        waits = "commits wait for the disk" if durable else "COMMITS DO NOT WAIT FOR THE DISK: give it other settings"
        return f"{self.title} {self._server.version}{'' if self._server.ours else ', given'}: {waits}"


async def _migrate(url: str) -> None:
    async with open_storage(url) as storage:
        await storage.initialize()


@asynccontextmanager
async def places(names: Sequence[str], *, durable: bool = True) -> AsyncIterator[list[Place]]:
    """Where databases of these names can be made; what cannot be had is said and left out.

    Durable servers are always our own: those that tests may be given need not wait for the disk.
    """
    with tempfile.TemporaryDirectory(prefix="romancy-benchmarks-") as directory:
        async with Servers([name for name in names if name in KINDS], durable=durable, private=durable) as servers:
            for name, reason in servers.missing.items():
                print(f"NOT MEASURED ON {KINDS[name].title}: {reason}", file=sys.stderr)
            found = [
                Place(name, KINDS[name].title if name in KINDS else "SQLite", Path(directory), servers.get(name))
                for name in names
                if name not in servers.missing
            ]
            try:
                yield found
            finally:
                for place in found:
                    await place.clear()
