"""The bare drivers: the statements that a fenced append needs, with nothing of ours around them."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from typing import Any

import asyncmy
import asyncpg

from romancy.storage import HistoryEvent, Lock, SQLStorage
from romancy.storage.sql.history import History
from romancy.storage.urls import parse_url


class BareAppends(ABC):
    """Appends history with a driver's own calls, one commit each, as durable and as fenced as ours."""

    def __init__(self, storage: SQLStorage, url: str, lock: Lock, event: HistoryEvent) -> None:
        self.url = url
        rendered = storage.runner.driver.rendered(History._append_fenced)
        self.text = rendered.text
        values = {**storage._checked_event(event), "token": lock.token, "worker_id": lock.worker_id}
        self._arguments = rendered.bind(values)
        self._changing = [at for at, (name, _) in enumerate(rendered.binders) if name == "activity_id"]
        self._appended = 0

    def arguments(self) -> list[Any]:
        """The parameters of the next append."""
        self._appended += 1
        for position in self._changing:
            self._arguments[position] = f"bare:{self._appended}"
        return self._arguments

    @abstractmethod
    async def connect(self) -> None: ...

    @abstractmethod
    async def append(self, count: int) -> None:
        """Append `count` events, one after the other."""

    @abstractmethod
    async def close(self) -> None: ...


class BareSQLite(BareAppends):
    """The standard library's sqlite3, in the event loop's own thread."""

    async def connect(self) -> None:
        self.connection = sqlite3.connect(parse_url(self.url).database, isolation_level=None)
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("PRAGMA foreign_keys = ON")

    async def append(self, count: int) -> None:
        execute = self.connection.execute
        for _ in range(count):
            execute("BEGIN IMMEDIATE")
            assert execute(self.text, self.arguments()).rowcount == 1
            execute("COMMIT")

    async def close(self) -> None:
        self.connection.close()


class BarePostgres(BareAppends):
    """asyncpg with a prepared statement."""

    async def connect(self) -> None:
        self.connection: asyncpg.Connection[Any] = await asyncpg.connect(self.url)
        self.statement = await self.connection.prepare(self.text)

    async def append(self, count: int) -> None:
        for _ in range(count):
            assert await self.statement.fetchval(*self.arguments())

    async def close(self) -> None:
        await self.connection.close()


class BareMySQL(BareAppends):
    """asyncmy with one cursor."""

    async def connect(self) -> None:
        url = parse_url(self.url)
        self.connection = await asyncmy.connect(
            host=url.host, port=url.port, user=url.user, password=url.password, database=url.database, autocommit=True
        )
        self.cursor = self.connection.cursor()
        await self.cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    async def append(self, count: int) -> None:
        for _ in range(count):
            await self.cursor.execute(self.text, self.arguments())
            assert self.cursor.lastrowid

    async def close(self) -> None:
        await self.connection.ensure_closed()


BARE: dict[str, type[BareAppends]] = {
    "sqlite": BareSQLite,
    "postgres": BarePostgres,
    "mariadb": BareMySQL,
    "mysql": BareMySQL,
}
