"""Locks: free, held, expired, stolen; one worker runs an instance at a time."""

import asyncio
from datetime import timedelta

import pytest

from romancy.storage import ChannelMessage, ChannelMode, Lock, LockLostError, SQLStorage, TimerSubscription
from romancy.storage.models import FINISHED
from tests.harness import Harness, contents, step


async def acquired(storage: SQLStorage, instance_id: str, worker_id: str = "worker-1", timeout_sec: float = 30) -> Lock:
    lock = await storage.try_acquire_lock(instance_id, worker_id, timeout_sec)
    assert lock is not None
    return lock


async def holder(storage: SQLStorage, instance_id: str) -> str | None:
    instance = await storage.get_instance(instance_id)
    assert instance is not None
    return instance.locked_by


# Acquiring.


async def test_a_free_lock_can_be_taken(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    before = await storage.current_time()
    lock = await acquired(storage, instance_id, "worker-1", 0.5)

    assert (lock.instance_id, lock.worker_id, lock.token, lock.status) == (instance_id, "worker-1", 1, "running")
    assert timedelta(0) <= lock.expires_at - before - timedelta(seconds=0.5) < timedelta(seconds=5)
    instance = await storage.get_instance(instance_id)
    assert instance is not None
    assert (instance.locked_by, instance.lock_expires_at, instance.lock_token) == ("worker-1", lock.expires_at, 1)
    assert instance.locked_at is not None


async def test_a_held_lock_is_refused_to_others(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage, "worker-1")
    rival = await harness.open()
    assert await rival.try_acquire_lock(lock.instance_id, "worker-2", 30) is None


async def test_a_lock_is_not_reentrant(harness: Harness, storage: SQLStorage) -> None:
    """Or one process would run an instance twice at the same time."""
    lock = await harness.locked(storage, "worker-1")
    assert await storage.try_acquire_lock(lock.instance_id, "worker-1", 30) is None
    await storage.append_history(step(lock.instance_id), lock=lock)


async def test_an_expired_lock_can_be_taken_by_another_worker(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage, "worker-1")
    assert await storage.try_acquire_lock(lock.instance_id, "worker-2", 30) is None

    harness.advance(seconds=31)
    stolen = await storage.try_acquire_lock(lock.instance_id, "worker-2", 30)

    assert stolen is not None
    assert (stolen.worker_id, stolen.token) == ("worker-2", lock.token + 1)


async def test_a_lock_lasts_as_long_as_it_was_taken_for(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await acquired(storage, instance_id, timeout_sec=3600)
    harness.advance(seconds=3590)
    assert await storage.try_acquire_lock(instance_id, "worker-2", 30) is None


async def test_the_timeout_on_the_instance_beats_the_callers(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage, lock_timeout_seconds=300)
    lock = await acquired(storage, instance_id, timeout_sec=5)
    harness.advance(seconds=200)
    assert await storage.try_acquire_lock(instance_id, "worker-2", 5) is None
    refreshed = await storage.refresh_lock(instance_id, "worker-1", 5, lock=lock)
    assert refreshed is not None
    harness.advance(seconds=200)
    assert await storage.try_acquire_lock(instance_id, "worker-2", 5) is None


async def test_a_missing_or_finished_instance_cannot_be_locked(harness: Harness, storage: SQLStorage) -> None:
    assert await storage.try_acquire_lock("nobody", "worker-1", 30) is None
    for status in FINISHED:
        instance_id = await harness.instance(storage, status=status)
        assert await storage.try_acquire_lock(instance_id, "worker-1", 30) is None


@pytest.mark.parametrize("timeout_sec", [0, -1, float("nan"), float("inf"), 1e15])
async def test_a_lock_needs_a_sensible_timeout(harness: Harness, storage: SQLStorage, timeout_sec: float) -> None:
    lock = await harness.locked(storage)
    with pytest.raises(ValueError, match="timeout_sec"):
        await storage.try_acquire_lock(await harness.instance(storage), "worker-1", timeout_sec)
    with pytest.raises(ValueError, match="timeout_sec"):
        await storage.refresh_lock(lock.instance_id, "worker-1", timeout_sec, lock=lock)
    with pytest.raises(ValueError, match="timeout_sec"):
        await harness.locked(storage, lock_timeout_seconds=-1)


async def test_each_acquisition_draws_one_token_and_nothing_else_draws_any(
    harness: Harness, storage: SQLStorage
) -> None:
    instance_id = await harness.instance(storage)
    lock = await acquired(storage, instance_id)
    await storage.subscribe_to_channel(instance_id, "news", ChannelMode.BROADCAST, lock=lock)
    await storage.refresh_lock(instance_id, "worker-1", 30, lock=lock)
    await storage.register_channel_receive_and_release_lock(instance_id, "news", "worker-1", "receive:1", lock=lock)
    await storage.publish_to_channel("news", "{}")
    message = ChannelMessage(channel="news")
    assert await storage.deliver_channel_message_with_lock(instance_id, "news", message, "worker-2", 30) is not None
    lock = await acquired(storage, instance_id)
    assert lock.token == 2

    timer = TimerSubscription(instance_id, "nap", await storage.current_time() + timedelta(seconds=1))
    await storage.suspend(instance_id, [timer], lock=lock)
    harness.advance(seconds=2)
    assert await storage.fire_timer(timer, worker_id="worker-2") is True
    lock = await acquired(storage, instance_id)
    assert lock.token == 3

    harness.advance(seconds=31)
    assert len(await storage.cleanup_stale_locks(30)) == 1
    assert (await acquired(storage, instance_id, "worker-2")).token == 4


async def test_a_row_being_written_by_its_owner_cannot_be_stolen(harness: Harness, storage: SQLStorage) -> None:
    """The lock expires while the owner's fenced transaction is open: its commit stands, the rival comes after it."""
    lock = await harness.locked(storage)
    rival = await harness.open()
    async with storage.transaction():
        await storage.append_history(step(lock.instance_id), lock=lock)
        harness.advance(seconds=31)
        stealing = asyncio.ensure_future(rival.try_acquire_lock(lock.instance_id, "worker-2", 30))
        await asyncio.wait({stealing}, timeout=0.1)
        assert not stealing.done() or stealing.result() is None

    stolen = await stealing or await acquired(rival, lock.instance_id, "worker-2")
    assert stolen.token == lock.token + 1
    assert await storage.get_history_count(lock.instance_id) == 1


# Releasing.


async def test_a_released_lock_is_free(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.release_lock(lock.instance_id, "worker-1", lock=lock)

    instance = await storage.get_instance(lock.instance_id)
    assert instance is not None
    assert (instance.locked_by, instance.locked_at, instance.lock_expires_at) == (None, None, None)
    assert (await acquired(storage, lock.instance_id, "worker-2")).token == 2


async def test_a_worker_can_release_without_showing_its_lock(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.release_lock(lock.instance_id, "worker-1")
    assert await holder(storage, lock.instance_id) is None


async def test_nobody_releases_anothers_lock(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage, "worker-1")
    other = await harness.locked(storage, "worker-1")
    await storage.release_lock(lock.instance_id, "worker-2")
    await storage.release_lock(lock.instance_id, "worker-2", lock=lock)
    await storage.release_lock(lock.instance_id, "worker-1", lock=other)
    await storage.release_lock("nobody", "worker-1")
    assert await holder(storage, lock.instance_id) == "worker-1"


async def test_an_earlier_acquisition_does_not_release_the_live_one(harness: Harness, storage: SQLStorage) -> None:
    """A late release of the same worker: its name is right, its token is not."""
    old = await harness.locked(storage, "worker-1")
    await storage.release_lock(old.instance_id, "worker-1", lock=old)
    await acquired(storage, old.instance_id, "worker-1")

    await storage.release_lock(old.instance_id, "worker-1", lock=old)
    assert await holder(storage, old.instance_id) == "worker-1"


# Refreshing.


async def test_refreshing_extends_the_lock(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    for _ in range(3):
        harness.advance(seconds=20)
        refreshed = await storage.refresh_lock(lock.instance_id, "worker-1", 30, lock=lock)
        assert refreshed is not None
        assert refreshed.token == lock.token
        assert refreshed.expires_at > lock.expires_at
    assert await storage.try_acquire_lock(lock.instance_id, "worker-2", 30) is None
    await storage.append_history(step(lock.instance_id), lock=lock)


async def test_a_worker_can_refresh_without_showing_its_lock(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    refreshed = await storage.refresh_lock(lock.instance_id, "worker-1", 60)
    assert refreshed is not None
    assert refreshed.token == lock.token


@pytest.mark.parametrize(
    "loss", ["expired", "released", "stolen", "taken again", "finished", "somebody else's", "gone"]
)
async def test_a_lost_lock_cannot_be_refreshed(harness: Harness, storage: SQLStorage, loss: str) -> None:
    lock = await harness.locked(storage, "worker-1")
    instance_id, worker_id = lock.instance_id, "worker-1"
    match loss:
        case "expired":
            harness.advance(seconds=31)
        case "released":
            await storage.release_lock(instance_id, "worker-1", lock=lock)
        case "stolen":
            harness.advance(seconds=31)
            await acquired(storage, instance_id, "worker-2")
        case "taken again":
            await storage.release_lock(instance_id, "worker-1", lock=lock)
            await acquired(storage, instance_id, "worker-1")
        case "finished":
            await storage.update_instance_output(instance_id, "{}")
        case "somebody else's":
            worker_id = "worker-2"
        case "gone":
            await storage.conn().execute("DELETE FROM workflow_instances")
    before = await contents(storage)

    with pytest.raises(LockLostError):
        await storage.refresh_lock(instance_id, worker_id, 30, lock=lock)
    if worker_id == lock.worker_id:
        (outcome,) = await storage.refresh_locks([lock], 30)
        assert isinstance(outcome, LockLostError)

    assert await contents(storage) == before


async def test_a_hundred_thousand_locks_can_be_refreshed_together(harness: Harness, storage: SQLStorage) -> None:
    held = [await harness.locked(storage, lock_timeout_seconds=3600) for _ in range(3)]
    gone = [Lock(f"{n:0255}", 1, "worker-1", held[0].expires_at, held[0].status) for n in range(99_997)]
    locks = [held[0], *gone[:50_000], held[1], *gone[50_000:], held[2]]

    outcomes = await storage.refresh_locks(locks, 30)

    alive = [lock for lock, outcome in zip(locks, outcomes, strict=True) if not isinstance(outcome, LockLostError)]
    assert alive == held
    with pytest.raises(ValueError, match="100,000 locks at once, not 100,001"):
        await storage.refresh_locks([*locks, held[0]], 30)


async def test_many_locks_are_refreshed_in_one_go_and_answered_in_order(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage, f"worker-{number % 2}") for number in range(5)]
    await storage.release_lock(locks[1].instance_id, locks[1].worker_id, lock=locks[1])
    harness.advance(seconds=20)

    outcomes = await storage.refresh_locks([*locks, locks[0]], 30)

    assert [type(outcome).__name__ for outcome in outcomes] == ["Lock", "LockLostError", *["Lock"] * 4]
    refreshed = [outcome for outcome in outcomes if isinstance(outcome, Lock)]
    assert [lock.instance_id for lock in refreshed] == [locks[n].instance_id for n in (0, 2, 3, 4, 0)]
    assert await storage.refresh_locks([], 30) == []


async def test_a_heartbeat_past_an_open_transaction_neither_fails_nor_loses_the_lock(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await harness.locked(storage)
    heart = await harness.open()
    async with storage.transaction():
        await storage.append_history(step(lock.instance_id), lock=lock)
        beating = asyncio.ensure_future(heart.refresh_lock(lock.instance_id, "worker-1", 30, lock=lock))
        await asyncio.wait({beating}, timeout=0.2)
        if harness.name != "sqlite":  # where the one writer is taken, the heartbeat is first in line
            assert beating.done()
            assert beating.result() is None
            assert await heart.refresh_locks([lock], 30) == [None]
    refreshed = await beating or await heart.refresh_lock(lock.instance_id, "worker-1", 30, lock=lock)
    assert refreshed is not None


# Cleaning up.


async def test_expired_locks_are_freed_and_reported(harness: Harness, storage: SQLStorage) -> None:
    expired = await harness.locked(storage, workflow_name="fulfil")
    harness.advance(seconds=31)
    live = await harness.locked(storage)

    (stale,) = await storage.cleanup_stale_locks(30)
    assert (stale.instance_id, stale.workflow_name) == (expired.instance_id, "fulfil")
    assert await holder(storage, expired.instance_id) is None
    assert await holder(storage, live.instance_id) == "worker-1"
    assert await storage.cleanup_stale_locks(30) == []


async def test_every_freed_lock_is_reported_also_beyond_the_limit(harness: Harness, storage: SQLStorage) -> None:
    """Reporting a hundred and freeing all would leave the rest to nobody."""
    locks = [await harness.locked(storage) for _ in range(5)]
    harness.advance(seconds=31)

    first = {stale.instance_id for stale in await storage.cleanup_stale_locks(30, limit=2)}
    freed = {lock.instance_id for lock in locks if await holder(storage, lock.instance_id) is None}
    assert len(first) == 2
    assert freed == first

    rest = {stale.instance_id for stale in await storage.cleanup_stale_locks(30)}
    assert first | rest == {lock.instance_id for lock in locks}
    assert not first & rest


async def test_a_lock_without_expiry_counts_from_when_it_was_taken(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.conn().execute("UPDATE workflow_instances SET lock_expires_at = NULL")
    assert await storage.try_acquire_lock(lock.instance_id, "worker-2", 30) is None
    harness.advance(seconds=50)
    assert await storage.cleanup_stale_locks(60) == []
    assert await storage.try_acquire_lock(lock.instance_id, "worker-2", 30) is None
    harness.advance(seconds=11)
    assert len(await storage.cleanup_stale_locks(60)) == 1
    assert await storage.try_acquire_lock(lock.instance_id, "worker-2", 30) is not None


async def test_stale_locks_of_others_are_left_to_them(harness: Harness, storage: SQLStorage) -> None:
    await harness.locked(storage, framework="python")
    ours = await harness.locked(storage, workflow_name="order", owner_service="shop")
    await harness.locked(storage, workflow_name="refund", owner_service="shop")
    await harness.locked(storage, workflow_name="order", owner_service="billing")
    harness.advance(seconds=31)

    found = await storage.cleanup_stale_locks(30, limit=1, workflow_names=["order"], owner_service="shop")
    assert [stale.instance_id for stale in found] == [ours.instance_id]
    assert len(await storage.cleanup_stale_locks(30)) == 2


async def test_what_was_freed_can_be_resumed(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    harness.advance(seconds=31)
    await storage.cleanup_stale_locks(30)
    assert [found.instance_id for found in await storage.find_resumable_workflows()] == [lock.instance_id]


# Counting.


async def test_an_update_counts_the_rows_it_matched_not_those_it_changed(harness: Harness, storage: SQLStorage) -> None:
    """MySQL's clients count changed rows unless told otherwise: taking a lock again looked like losing it."""
    await harness.locked(storage)
    same = "UPDATE workflow_instances SET locked_by = 'worker-1', status = 'running'"
    assert await storage.conn().execute(same) == 1
    assert await storage.conn().execute(same) == 1
    assert await storage.conn().execute(f"{same} WHERE instance_id = 'nobody'") == 0
