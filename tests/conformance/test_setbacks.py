"""Setbacks: how often workers vanished with an instance, and which code could not run it."""

import pytest

from romancy.storage import Lock, LockLostError, SQLStorage
from tests.harness import Harness, step


async def taken_over(harness: Harness, storage: SQLStorage, instance_id: str) -> Lock:
    """The lock of a worker that vanished, taken by another."""
    harness.advance(seconds=31)
    lock = await storage.try_acquire_lock(instance_id, "worker-2", 30)
    assert lock is not None
    return lock


async def test_takeovers_without_a_new_step_are_counted(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    for expected in (1, 2, 3):
        lock = await taken_over(harness, storage, lock.instance_id)
        assert await storage.count_takeover(lock.instance_id, lock=lock) == expected


async def test_a_new_step_starts_the_count_anew(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    for _ in range(2):
        lock = await taken_over(harness, storage, lock.instance_id)
        await storage.count_takeover(lock.instance_id, lock=lock)
    await storage.append_history(step(lock.instance_id), lock=lock)
    lock = await taken_over(harness, storage, lock.instance_id)
    assert await storage.count_takeover(lock.instance_id, lock=lock) == 1


async def test_a_new_round_starts_the_count_anew(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.append_history(step(lock.instance_id), lock=lock)
    await storage.recur_instance(lock.instance_id, "{}", lock=lock)
    for expected in (1, 2):
        lock = await taken_over(harness, storage, lock.instance_id)
        assert await storage.count_takeover(lock.instance_id, lock=lock) == expected
    await storage.append_history(step(lock.instance_id), lock=lock)
    await storage.recur_instance(lock.instance_id, "{}", lock=lock)
    lock = await taken_over(harness, storage, lock.instance_id)
    assert await storage.count_takeover(lock.instance_id, lock=lock) == 1


async def test_unparking_forgets_the_takeovers(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.count_takeover(lock.instance_id, lock=lock)
    await storage.park(lock.instance_id, "enough", lock=lock)
    await storage.unpark(lock.instance_id)
    again = await storage.try_acquire_lock(lock.instance_id, "worker-1", 30)
    assert again is not None
    assert await storage.count_takeover(lock.instance_id, lock=again) == 1


async def refused(harness: Harness, storage: SQLStorage, code: str, **fields: str) -> str:
    lock = await harness.locked(storage, **fields)
    await storage.note_refusal(lock.instance_id, code, lock=lock)
    await storage.park(lock.instance_id, "does not fit", lock=lock)
    return lock.instance_id


async def test_what_other_code_refused_is_unparked_and_nothing_else(harness: Harness, storage: SQLStorage) -> None:
    by_others = await refused(harness, storage, "old")
    await refused(harness, storage, "new")
    await refused(harness, storage, "old", workflow_name="invoice")
    await refused(harness, storage, "old", owner_service="south")
    await refused(harness, storage, "old", framework="python")
    for_another_reason = await harness.instance(storage)
    await storage.park(for_another_reason, "poison")

    assert await storage.unpark_refused("order", "new", owner_service="") == [by_others]
    assert [one.instance_id for one in await storage.find_resumable_workflows()] == [by_others]
    assert await storage.unpark_refused("order", "new", owner_service="") == []


async def test_the_newest_refusal_counts(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await refused(harness, storage, "old")
    await storage.unpark(instance_id)
    lock = await storage.try_acquire_lock(instance_id, "worker-1", 30)
    assert lock is not None
    for code in ("older", "new"):
        await storage.note_refusal(instance_id, code, lock=lock)
    await storage.park(instance_id, "still does not fit", lock=lock)
    assert await storage.unpark_refused("order", "new") == []
    assert await storage.unpark_refused("order", "old") == [instance_id]


async def test_refused_instances_are_unparked_a_batch_at_a_time(harness: Harness, storage: SQLStorage) -> None:
    ids = sorted([await refused(harness, storage, "old") for _ in range(3)])
    assert await storage.unpark_refused("order", "new", 2) == ids[:2]
    assert await storage.unpark_refused("order", "new", 2) == ids[2:]


async def test_setbacks_go_with_their_instance(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.count_takeover(lock.instance_id, lock=lock)
    await storage.conn().execute("DELETE FROM workflow_instances")
    assert await storage.conn().fetch_value("SELECT COUNT(*) FROM romancy_setbacks") == 0
    with pytest.raises(LockLostError):
        await storage.count_takeover(lock.instance_id, lock=lock)
