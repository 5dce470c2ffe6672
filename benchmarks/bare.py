"""The bare drivers: what an append and a workflow need at least, with nothing of ours around it.

Each is the fastest client that was found for its database, on one connection unless it says otherwise. The servers'
clients are asynchronous ones; where a batch is sent, there is one `await` for 64 rows, which weighs nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count, repeat
from typing import Any

import asyncmy
import asyncpg

from romancy.storage import HistoryEvent, Lock, SQLStorage
from romancy.storage.sql.history import History
from romancy.storage.urls import parse_url

EVENT_TYPE = "ActivityCompleted"
EVENT_DATA = '{"activity_name": "charge", "result": {"payment_id": "p-1042", "amount": 1999, "currency": "EUR"}}'
STEPS = 5

_CREATE = """
    INSERT INTO workflow_instances
           (instance_id, workflow_name, source_hash, owner_service, framework, status, input_data, locked_by)
    VALUES ({}, 'bare', '', '', 'bare', 'running', {}, 'worker')"""
_RECORD = "INSERT INTO workflow_history (instance_id, activity_id, event_type, event_data) VALUES ({}, {}, {}, {})"
_COMPLETE = (
    "UPDATE workflow_instances SET status = 'completed', output_data = {}, locked_by = NULL WHERE instance_id = {}"
)
_INPUT = '{"args": [1], "kwargs": {}}'
_OUTPUT = '{"result": 6}'


class Bare(ABC):
    """One connection, with a driver's own calls, as durable as ours."""

    def __init__(self, url: str, lengths: Iterator[int] | None = None) -> None:
        """LENGTHS are those of its workflows, one after the other."""
        self.url = parse_url(url)
        self._lengths = lengths or repeat(STEPS)
        self._numbers = count(1)
        self._name = secrets.token_hex(4)

    def for_appends(self, storage: SQLStorage, locks: Sequence[Lock]) -> None:
        """Take the very statement of our appends, to be sent for these locks in turn."""
        self.now = storage.runner.driver.now()
        rendered = storage.runner.driver.rendered(History._append_fenced)
        self.text = rendered.text
        self._locks = locks
        self._rows = [
            rendered.bind(
                {
                    **storage._checked_event(HistoryEvent(lock.instance_id, "step", EVENT_TYPE, event_data=EVENT_DATA)),
                    "token": lock.token,
                    "worker_id": lock.worker_id,
                }
            )
            for lock in locks
        ]
        self._changing = [at for at, (name, _) in enumerate(rendered.binders) if name == "activity_id"]

    def rows(self, appends: int) -> Iterator[list[Any]]:
        """The parameters of the next appends."""
        for number in range(appends):
            row = self._rows[number % len(self._rows)]
            step = f"bare:{next(self._numbers)}"
            for position in self._changing:
                row[position] = step
            yield row

    @abstractmethod
    async def connect(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def append(self, appends: int) -> None:
        """Append one event after the other, one commit each."""

    @abstractmethod
    async def append_batches(self, appends: int) -> None:
        """Append one event for each lock in one transaction, and again; so many events in all."""

    @abstractmethod
    async def workflow(self) -> None:
        """A commit for its creation, for each of its (five) steps and for its completion; not even fenced."""

    async def workflows(self, workflows: int) -> None:
        """Run one workflow after the other."""
        for _ in range(workflows):
            await self.workflow()

    def steps(self) -> tuple[str, list[str]]:
        """A new instance's id, and those of its steps."""
        steps = range(1, next(self._lengths) + 1)
        return f"bare-{self._name}-{next(self._numbers)}", [f"step:{number}" for number in steps]


class BareSQLite(Bare):
    """The standard library's sqlite3, in the event loop's own thread."""

    async def connect(self) -> None:
        self.connection = sqlite3.connect(self.url.database, isolation_level=None)
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("PRAGMA foreign_keys = ON")
        self._create, self._record, self._complete = (
            statement.format(*"????") for statement in (_CREATE, _RECORD, _COMPLETE)
        )

    async def close(self) -> None:
        self.connection.close()

    async def append(self, appends: int) -> None:
        execute = self.connection.execute
        for row in self.rows(appends):
            execute("BEGIN IMMEDIATE")
            assert execute(self.text, row).rowcount == 1
            execute("COMMIT")

    async def append_batches(self, appends: int) -> None:
        execute = self.connection.execute
        for _ in range(appends // len(self._locks)):
            execute("BEGIN IMMEDIATE")
            for row in self.rows(len(self._locks)):
                assert execute(self.text, row).rowcount == 1
            execute("COMMIT")

    async def workflow(self) -> None:
        execute = self.connection.execute
        instance_id, steps = self.steps()
        execute(self._create, (instance_id, _INPUT))
        for step in steps:
            execute(self._record, (instance_id, step, EVENT_TYPE, EVENT_DATA))
        execute(self._complete, (_OUTPUT, instance_id))


class BarePostgres(Bare):
    """asyncpg with prepared statements; a batch is one statement over arrays, the quickest form there is."""

    _BATCH = """
        INSERT INTO workflow_history
               (instance_id, activity_id, event_type, data_type, event_data, created_at, lock_token)
        SELECT i.instance_id, e.activity_id, e.event_type, 'json', e.event_data, {now}, i.lock_token
          FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[])
               AS e (instance_id, activity_id, event_type, event_data, token, worker_id)
          JOIN workflow_instances i ON i.instance_id = e.instance_id
         WHERE i.lock_token = e.token AND i.locked_by = e.worker_id AND i.lock_expires_at > {now}
           FOR SHARE OF i
        ON CONFLICT (instance_id, activity_id) DO NOTHING
        RETURNING id, instance_id"""

    async def connect(self) -> None:
        url = self.url
        self.connection: asyncpg.Connection[Any] = await asyncpg.connect(
            host=url.host, port=url.port, user=url.user, password=url.password, database=url.database
        )
        prepare = self.connection.prepare
        self._create = await prepare(_CREATE.format("$1", "$2"))
        self._record = await prepare(_RECORD.format("$1", "$2", "$3", "$4"))
        self._complete = await prepare(_COMPLETE.format("$1", "$2"))

    async def close(self) -> None:
        await self.connection.close()

    async def append(self, appends: int) -> None:
        statement = await self.connection.prepare(self.text)
        for row in self.rows(appends):
            assert await statement.fetchval(*row)

    async def append_batches(self, appends: int) -> None:
        statement = await self.connection.prepare(self._BATCH.format(now=self.now))
        size = len(self._locks)
        ids = [lock.instance_id for lock in self._locks]
        tokens = [lock.token for lock in self._locks]
        workers = [lock.worker_id for lock in self._locks]
        for _ in range(appends // size):
            steps = [f"bare:{next(self._numbers)}" for _ in range(size)]
            written = await statement.fetch(ids, steps, [EVENT_TYPE] * size, [EVENT_DATA] * size, tokens, workers)
            assert len(written) == size

    async def workflow(self) -> None:
        instance_id, steps = self.steps()
        await self._create.fetch(instance_id, _INPUT)
        for step in steps:
            await self._record.fetch(instance_id, step, EVENT_TYPE, EVENT_DATA)
        await self._complete.fetch(_OUTPUT, instance_id)


class BareMySQL(Bare):
    """asyncmy with one cursor; a batch is one statement over a list of rows."""

    _BATCH = """
        INSERT INTO workflow_history
               (instance_id, activity_id, event_type, data_type, event_data, created_at, lock_token)
        SELECT i.instance_id, e.activity_id, e.event_type, 'json', e.event_data, {now}, i.lock_token
          FROM ({rows}) e STRAIGHT_JOIN workflow_instances i ON i.instance_id = e.instance_id
         WHERE i.lock_token = e.token AND i.locked_by = e.worker_id AND i.lock_expires_at > {now}
          LOCK IN SHARE MODE"""
    _FIRST = (
        "SELECT %s AS instance_id, %s AS activity_id, %s AS event_type, %s AS event_data, %s AS token, %s AS worker_id"
    )
    _NEXT = " UNION ALL SELECT %s, %s, %s, %s, %s, %s"

    async def connect(self) -> None:
        url = self.url
        self.connection = await asyncmy.connect(
            host=url.host, port=url.port, user=url.user, password=url.password, database=url.database, autocommit=True
        )
        self.cursor = self.connection.cursor()
        await self.cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        # Texts are compared as the tables' own columns are; another collation could not use their indexes.
        await self.cursor.execute(
            "SELECT collation_name FROM information_schema.columns WHERE table_schema = DATABASE()"
            " AND table_name = 'workflow_instances' AND column_name = 'instance_id'"
        )
        (collation,) = await self.cursor.fetchone()
        await self.cursor.execute(f"SET NAMES utf8mb4 COLLATE {collation}")
        self._create, self._record, self._complete = (
            statement.format(*["%s"] * 4) for statement in (_CREATE, _RECORD, _COMPLETE)
        )

    async def close(self) -> None:
        await self.connection.ensure_closed()

    async def append(self, appends: int) -> None:
        for row in self.rows(appends):
            await self.cursor.execute(self.text, row)
            assert self.cursor.lastrowid

    async def append_batches(self, appends: int) -> None:
        size = len(self._locks)
        text = self._BATCH.format(now=self.now, rows=self._FIRST + self._NEXT * (size - 1))
        for _ in range(appends // size):
            values: list[Any] = []
            for lock in self._locks:
                step = f"bare:{next(self._numbers)}"
                values += (lock.instance_id, step, EVENT_TYPE, EVENT_DATA, lock.token, lock.worker_id)
            await self.cursor.execute(text, values)
            assert self.cursor.rowcount == size

    async def workflow(self) -> None:
        instance_id, steps = self.steps()
        execute = self.cursor.execute
        await execute(self._create, (instance_id, _INPUT))
        for step in steps:
            await execute(self._record, (instance_id, step, EVENT_TYPE, EVENT_DATA))
        await execute(self._complete, (_OUTPUT, instance_id))


BARE: dict[str, type[Bare]] = {
    "sqlite": BareSQLite,
    "postgres": BarePostgres,
    "mariadb": BareMySQL,
    "mysql": BareMySQL,
}


class HandWritten:
    """Workflows written by hand, as many at once as there are connections."""

    def __init__(self, name: str, url: str, connections: int, lengths: Iterator[int] | None = None) -> None:
        # SQLite has one writer: a second connection would only wait for the first.
        self._all = [BARE[name](url, lengths) for _ in range(1 if name == "sqlite" else connections)]

    async def connect(self) -> None:
        for bare in self._all:
            await bare.connect()

    async def close(self) -> None:
        for bare in self._all:
            await bare.close()

    async def run(self, workflows: int) -> None:
        """Run so many workflows."""
        async with asyncio.TaskGroup() as group:
            for at, bare in enumerate(self._all):
                group.create_task(bare.workflows(len(range(at, workflows, len(self._all)))))
