"""A migrated database for each test, emptied instead of made anew, and a clock that tests can move.

async def test_an_expired_lock_can_be_taken_by_another_worker(harness: Harness, storage: SQLStorage) -> None:
    …
    harness.advance(seconds=31)     # for every storage that this test opened
    rival = await harness.open()    # a second storage on the same database, as another process would have
"""

from collections.abc import Callable
from itertools import count
from typing import Any

from romancy.storage import HistoryEvent, Lock, SQLStorage, WorkflowInstance, open_storage
from romancy.storage.sql.ending import TIED
from romancy.storage.sql.runners.sqlite import SQLiteRunner

_KEPT = ("romancy_migrations", "schema_migrations", "schema_version")
_TABLES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'",
    "postgres": "SELECT tablename FROM pg_tables WHERE schemaname = 'public'",
    "mysql": "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()",
}


class Harness:
    """The storages of one test, all on the same database, all with the same clock."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        """sqlite, postgres, mariadb or mysql."""
        self.url = url
        self._storages: list[SQLStorage] = []
        self._offset = 0.0
        self._numbers = count(1)

    async def open(self, **options: Any) -> SQLStorage:
        """Another storage on this database, closed at the end of the test."""
        if self.name == "sqlite":  # as quick as the test servers, which do not wait for the disk either
            options = {"synchronous": "OFF", **options}
        storage = open_storage(self.url, **options)
        storage.runner.driver.clock_offset = self._offset
        self._storages.append(storage)
        return storage

    @property
    def clock(self) -> float:
        """By how many seconds the database's clock has been moved."""
        return self._offset

    def advance(self, seconds: float) -> None:
        """Move the database's clock forward, as all storages of this test see it."""
        self._offset += seconds
        for storage in self._storages:
            storage.runner.driver.clock_offset = self._offset

    async def close(self) -> None:
        for storage in self._storages:
            storage.runner.probe = None
            await storage.close()

    # Factories: what most tests begin with.

    def new_id(self, prefix: str = "instance") -> str:
        return f"{prefix}-{next(self._numbers)}"

    async def instance(self, storage: SQLStorage, **fields: Any) -> str:
        """A new running instance, unlocked; its id."""
        instance = WorkflowInstance(**{"instance_id": self.new_id(), "workflow_name": "order", **fields})
        await storage.create_instance(instance)
        return instance.instance_id

    async def locked(self, storage: SQLStorage, worker_id: str = "worker-1", **fields: Any) -> Lock:
        """A new running instance with its lock."""
        instance = WorkflowInstance(
            **{"instance_id": self.new_id(), "workflow_name": "order", "locked_by": worker_id, **fields}
        )
        lock = await storage.create_instance(instance, lock_timeout_sec=30)
        assert lock is not None
        return lock


def step(
    instance_id: str, activity_id: str = "charge:1", data: str | None = '{"result": 1}', **fields: Any
) -> HistoryEvent:
    """A history event of a completed activity."""
    return HistoryEvent(
        **{
            "instance_id": instance_id,
            "activity_id": activity_id,
            "event_type": "ActivityCompleted",
            "event_data": data,
            **fields,
        }
    )


def expect_company(storage: SQLStorage) -> None:
    """Let even the first write wait for others; on SQLite, one that seems to be without company is done at once."""
    if isinstance(storage.runner, SQLiteRunner):
        storage.runner._lonely = False


async def history_of(storage: SQLStorage, instance_id: str) -> list[HistoryEvent]:
    """All history of an instance."""
    return (await storage.get_history_paginated(instance_id, 0, 10_000)).events


async def tables_of(storage: SQLStorage) -> list[str]:
    """The names of all tables but those of the migrations."""
    rows = await storage.conn().fetch_all(_TABLES[storage.runner.driver.driver_name()])
    return sorted(row[0] for row in rows if row[0] not in _KEPT)


async def contents(storage: SQLStorage) -> dict[str, list[str]]:
    """All rows of all tables, for tests that nothing was written."""
    conn = storage.conn()
    return {
        table: sorted(repr(tuple(row)) for row in await conn.fetch_all(f"SELECT * FROM {table}"))
        for table in await tables_of(storage)
    }


async def assert_ties_are_known(storage: SQLStorage) -> None:
    """An instance that has a row in one of the tables that are cleared at its end is marked as such."""
    ties = [*((table, "instance_id") for table in TIED), ("romancy_instance_waits", "awaited_id")]
    for table, column in ties:
        unknown = await storage.conn().fetch_all(
            f"SELECT i.instance_id FROM {table} t JOIN workflow_instances i ON i.instance_id = t.{column}"
            " WHERE NOT i.has_ties"
        )
        assert unknown == [], f"{table} has rows of instances that are said to have no ties"


async def empty(storage: SQLStorage, *, deadline_sec: float | None = None) -> None:
    """Delete all rows but those of the migrations, so that the next test finds a fresh database."""
    conn = storage.conn()
    kind = storage.runner.driver.driver_name()
    # Not TRUNCATE, which takes several times as long for a few rows. Instances go before their definitions: PostgreSQL
    # cannot look away meanwhile, as the others can.
    tables = sorted(await tables_of(storage), key=lambda table: table == "workflow_definitions")
    delete: Callable[[str], str] = "DELETE FROM {}".format
    async with storage.transaction(deadline_sec=deadline_sec):
        if kind == "mysql":
            await conn.execute("SET FOREIGN_KEY_CHECKS = 0")
        elif kind == "sqlite":
            await conn.execute("PRAGMA defer_foreign_keys = ON")
        for table in tables:
            await conn.execute(delete(table))
        if kind == "mysql":
            await conn.execute("SET FOREIGN_KEY_CHECKS = 1")
