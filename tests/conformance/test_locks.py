"""Locks: free, held, expired, stolen."""

from romancy.storage import SQLStorage
from tests.harness import Harness


async def test_an_expired_lock_can_be_taken_by_another_worker(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage, "worker-1")
    assert await storage.try_acquire_lock(lock.instance_id, "worker-2", 30) is None

    harness.advance(seconds=31)
    stolen = await storage.try_acquire_lock(lock.instance_id, "worker-2", 30)

    assert stolen is not None
    assert (stolen.worker_id, stolen.token) == ("worker-2", lock.token + 1)
