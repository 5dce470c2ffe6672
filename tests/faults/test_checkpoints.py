"""SQLite's write-ahead log is written back while the load goes on, and stays short, whoever writes or reads."""

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from romancy.storage import SQLStorage
from romancy.storage.sql.runners.sqlite import SQLiteRunner
from tests.harness import Harness

pytestmark = pytest.mark.databases("sqlite")

MEGABYTE = 1 << 20
Write = Callable[[SQLStorage, str], Awaitable[object]]


async def publish(storage: SQLStorage, text: str) -> None:
    await storage.publish_to_channel("orders", f'"{text}"')


async def transact(storage: SQLStorage, text: str) -> None:
    async with storage.transaction() as conn:
        await conn.execute("UPDATE workflow_instances SET input_data = :text", text=f'"{text}"')


async def write(storage: SQLStorage, how: Write, megabytes: int) -> None:
    for number in range(megabytes * 10):
        await how(storage, chr(ord("a") + number % 26) * (MEGABYTE // 10))


def path_of(storage: SQLStorage) -> Path:
    assert isinstance(storage.runner, SQLiteRunner)
    return Path(storage.runner.path)


def log_size(storage: SQLStorage) -> int:
    return Path(f"{path_of(storage)}-wal").stat().st_size


@pytest.mark.parametrize("how", [publish, transact])
async def test_the_log_stays_short(harness: Harness, storage: SQLStorage, how: Write) -> None:
    await harness.instance(storage)
    await write(storage, how, megabytes=60)
    assert log_size(storage) < 24 * MEGABYTE


async def test_the_log_stays_short_when_few_transactions_write_much(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage)
    for _ in range(40):
        async with storage.transaction():
            for number in range(20):
                await storage.publish_to_channel(f"orders-{number}", f'"{"x" * (MEGABYTE // 10)}"')
        assert log_size(storage) < 24 * MEGABYTE


async def test_a_log_that_a_reader_made_long_is_used_again(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage)
    with closing(sqlite3.connect(path_of(storage), isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM workflow_instances").fetchall()
        await write(storage, transact, megabytes=20)
        reader.execute("COMMIT")
    long = log_size(storage)

    await write(storage, transact, megabytes=60)

    assert log_size(storage) < long + 24 * MEGABYTE
