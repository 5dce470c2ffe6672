"""Heartbeats are served promptly, whatever users' transactions and other operations are doing."""

import asyncio
import time

import pytest

from romancy.storage import SQLStorage
from romancy.storage.sql.runners.sqlite import SQLiteRunner
from tests.faults.leaks import assert_nothing_is_held
from tests.harness import Harness, step

POOL_SIZE = 5


class Hold:
    """A task with an open transaction that has written to an instance and to a channel."""

    def __init__(self, storage: SQLStorage, instance_id: str) -> None:
        self._opened = asyncio.Event()
        self._enough = asyncio.Event()
        self._task = asyncio.create_task(self._hold(storage, instance_id))

    async def _hold(self, storage: SQLStorage, instance_id: str) -> None:
        async with storage.transaction():
            await storage.update_instance_activity(instance_id, "held")
            self._opened.set()
            await self._enough.wait()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def opened(self) -> bool:
        async with asyncio.timeout(10):
            return await self._opened.wait()

    async def end(self) -> None:
        self._enough.set()
        await self._task


@pytest.mark.databases("postgres", "mariadb", "mysql")
@pytest.mark.parametrize("transactions", [POOL_SIZE - 2, POOL_SIZE, 3 * POOL_SIZE])
async def test_open_transactions_leave_a_connection_for_heartbeats(harness: Harness, transactions: int) -> None:
    storage = await harness.open(pool_size=POOL_SIZE)
    lock = await harness.locked(storage)
    ids = [await harness.instance(storage) for _ in range(transactions)]
    holds = [Hold(storage, instance_id) for instance_id in ids]
    async with asyncio.timeout(10):
        while sum(hold.is_open for hold in holds) < POOL_SIZE - 2:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    opened = sum(hold.is_open for hold in holds)

    begun = time.monotonic()
    refreshed = await storage.refresh_lock(lock.instance_id, lock.worker_id, 60, lock=lock)

    assert time.monotonic() - begun < 1
    assert refreshed is not None
    assert opened == POOL_SIZE - 2
    await asyncio.gather(*(hold.end() for hold in holds))
    await assert_nothing_is_held(storage)


@pytest.mark.databases("postgres", "mariadb", "mysql")
async def test_operations_that_wait_for_a_row_leave_a_connection_for_heartbeats(harness: Harness) -> None:
    storage = await harness.open(pool_size=POOL_SIZE)
    lock = await harness.locked(storage)
    held = await harness.instance(storage)
    hold = Hold(await harness.open(), held)
    assert await hold.opened()

    waiting = [asyncio.create_task(storage.update_instance_activity(held, "next")) for _ in range(3 * POOL_SIZE)]
    await asyncio.sleep(0.1)
    begun = time.monotonic()
    refreshed = await storage.refresh_lock(lock.instance_id, lock.worker_id, 60, lock=lock)

    assert time.monotonic() - begun < 1
    assert refreshed is not None
    await hold.end()
    await asyncio.gather(*waiting)
    await assert_nothing_is_held(storage)


async def test_a_heartbeat_passes_by_a_row_that_an_open_transaction_holds(
    harness: Harness, storage: SQLStorage
) -> None:
    """On a server it is told so at once; SQLite's one writer is free again when the transaction ends."""
    lock = await harness.locked(storage)
    hold = Hold(await harness.open(), lock.instance_id)
    assert await hold.opened()

    refreshing = asyncio.create_task(storage.refresh_lock(lock.instance_id, lock.worker_id, 60, lock=lock))
    await asyncio.wait({refreshing}, timeout=1)
    if harness.name != "sqlite":
        assert refreshing.done()
        assert await refreshing is None
    await hold.end()

    refreshed = await refreshing or await storage.refresh_lock(lock.instance_id, lock.worker_id, 60, lock=lock)
    assert refreshed is not None
    assert refreshed.expires_at > lock.expires_at


@pytest.mark.databases("sqlite")
async def test_a_heartbeat_goes_before_what_is_queued(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    ids = [await harness.instance(storage) for _ in range(20)]
    order: list[str] = []
    hold = Hold(storage, ids[0])
    assert await hold.opened()

    storage.runner.probe = lambda point, name: order.append(name)
    writing = [asyncio.create_task(storage.append_history(step(instance_id))) for instance_id in ids]
    await asyncio.sleep(0.05)
    refreshing = asyncio.create_task(storage.refresh_lock(lock.instance_id, lock.worker_id, 60, lock=lock))
    await asyncio.sleep(0.05)
    await hold.end()
    await asyncio.gather(refreshing, *writing)
    storage.runner.probe = None

    assert order[0] == "refresh_lock"


@pytest.mark.databases("sqlite")
async def test_a_heartbeat_goes_between_two_transactions(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    ids = [await harness.instance(storage) for _ in range(3)]
    holds = [Hold(storage, instance_id) for instance_id in ids]
    assert await holds[0].opened()

    refreshing = asyncio.create_task(storage.refresh_lock(lock.instance_id, lock.worker_id, 60, lock=lock))
    await asyncio.sleep(0.05)
    await holds[0].end()
    await asyncio.wait({refreshing}, timeout=1)

    assert refreshing.done()
    for hold in holds[1:]:
        await hold.end()


@pytest.mark.databases("sqlite")
async def test_a_stream_of_operations_does_not_keep_a_transaction_from_the_writer(
    harness: Harness, storage: SQLStorage
) -> None:
    assert isinstance(storage.runner, SQLiteRunner)
    ids = [await harness.instance(storage) for _ in range(3)]
    streaming = True

    async def stream(instance_id: str, worker: int) -> None:
        number = 0
        while streaming:
            number += 1
            await storage.append_history(step(instance_id, f"step:{worker}:{number}"))

    streams = [asyncio.create_task(stream(ids[worker % 3], worker)) for worker in range(30)]
    await asyncio.sleep(0.05)
    begun = time.monotonic()
    async with storage.transaction():
        waited = time.monotonic() - begun
    streaming = False
    await asyncio.gather(*streams)

    assert waited < 2
