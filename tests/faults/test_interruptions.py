"""Statements that somebody interrupts: what is answered is true, or said to be unknown."""

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from asyncmy import errors as my

from romancy.storage import DatabaseError, HistoryEvent, OutcomeUnknownError, SQLStorage, StorageError, WorkflowInstance
from romancy.storage.sql.runners.mysql import MySQLConnection, MySQLRunner
from romancy.storage.sql.runners.pool import Connection
from romancy.storage.sql.runners.server import ServerRunner
from romancy.storage.sql.statement import NativeQuery, Want
from tests.harness import Harness

CALLERS = 8
SECONDS = 3.0
MOST_SECONDS = 30.0
"""A slow machine may take longer for enough of both."""


def interruption(connection: Connection) -> str:
    raw: Any = connection.raw  # type: ignore[attr-defined]
    if isinstance(connection, MySQLConnection):
        return f"KILL QUERY {raw.thread_id()}"
    return f"SELECT pg_cancel_backend({raw.get_server_pid()})"


@asynccontextmanager
async def interrupted(storage: SQLStorage, other: SQLStorage) -> AsyncIterator[Counter[str]]:
    """Interrupt whatever is under way, again and again."""
    runner = storage.runner
    assert isinstance(runner, ServerRunner)
    done: Counter[str] = Counter()

    async def interrupt(connection: Connection) -> None:
        try:
            await other.conn().execute(interruption(connection))
        except DatabaseError as error:
            if "Unknown thread id" not in str(error):  # given up meanwhile, after an earlier interruption
                raise
        else:
            done["interruptions"] += 1

    async def interrupt_at_random() -> None:
        while True:
            for connection in (*runner._flush_pool._taken, *runner.pool._taken):
                if random.random() < 0.5:
                    await interrupt(connection)
            await asyncio.sleep(random.uniform(0, 0.002))

    async with asyncio.TaskGroup() as group:
        interrupting = group.create_task(interrupt_at_random())
        yield done
        interrupting.cancel()


def new_instance(now: datetime) -> WorkflowInstance:
    return WorkflowInstance(
        secrets.token_hex(8),
        "interrupted",
        started_at=now,
        locked_by="worker",
        locked_at=now,
        lock_expires_at=now + timedelta(minutes=5),
    )


@pytest.mark.databases("postgres", "mariadb", "mysql")
async def test_nobody_is_told_the_opposite_of_what_has_happened(harness: Harness, storage: SQLStorage) -> None:
    other = await harness.open()
    assert isinstance(storage.runner, ServerRunner)
    storage.runner.statement_timeout_sec = 1.0  # MySQL, interrupted between two statements, says nothing any more
    now = await storage.current_time()
    await storage.create_instance(new_instance(now))  # its definition is known from now on
    told: dict[str, str | None] = {}
    """The status that each instance has, if what its caller was told is true; None if there is none."""

    async def live() -> None:
        instance = new_instance(now)
        try:
            lock = await storage.create_instance(instance)
            told[instance.instance_id] = "running"
            end = HistoryEvent(instance.instance_id, "last:1", "ActivityCompleted", event_data="{}")
            await storage.update_instance_output(instance.instance_id, '"done"', lock=lock, record=end)
            told[instance.instance_id] = "completed"
        except OutcomeUnknownError:
            told.pop(instance.instance_id, None)
        except StorageError:
            told.setdefault(instance.instance_id, None)

    async with interrupted(storage, other) as done:
        began, enough = time.monotonic(), False
        while time.monotonic() < began + (SECONDS if enough else MOST_SECONDS):
            await asyncio.gather(*(live() for _ in range(CALLERS)))
            enough = done["interruptions"] > 20 and list(told.values()).count("completed") > 20
    assert enough, (done, Counter(told.values()))
    for instance_id, status in told.items():
        found = await other.get_instance(instance_id)
        assert (None if found is None else found.status) == status
        assert await other.get_history_count(instance_id) == (1 if status == "completed" else 0)


# MariaDB takes several statements as one, and may speak of an interruption when they are done.


@asynccontextmanager
async def flushing(storage: SQLStorage) -> AsyncIterator[MySQLConnection]:
    runner = storage.runner
    assert isinstance(runner, MySQLRunner)
    async with runner._flush_pool.connection() as connection:
        assert isinstance(connection, MySQLConnection)
        yield connection


async def is_in_transaction(connection: MySQLConnection) -> bool:
    return bool(await connection.execute(NativeQuery("SELECT @@in_transaction", (), Want.VALUE)))


@pytest.mark.databases("mariadb")
async def test_an_interruption_after_the_commit_is_not_taken_for_a_failure(storage: SQLStorage) -> None:
    write = "INSERT INTO romancy_marks (name, value) VALUES ('interrupted', 1)"
    interruption = "SIGNAL SQLSTATE '70100' SET MYSQL_ERRNO = 1317"
    async with flushing(storage) as connection:
        with pytest.raises(my.InternalError, match="perhaps after its COMMIT"):
            await connection._commit_all([write, "COMMIT", interruption], 1)
        assert not await is_in_transaction(connection)
    assert await storage.conn().fetch_one("SELECT 1 FROM romancy_marks WHERE name = 'interrupted'")


@pytest.mark.databases("mariadb")
async def test_a_connection_that_cannot_roll_back_is_given_up(
    storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: MySQLConnection) -> None:
        raise my.OperationalError(1317, "Query execution was interrupted")

    monkeypatch.setattr(MySQLConnection, "rollback", refuse)
    nothing = "UPDATE romancy_marks SET value = value WHERE name = 'nobody'"
    async with flushing(storage) as connection:
        assert not await connection._commit_all([nothing], 1)
        assert connection.broken
