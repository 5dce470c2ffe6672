"""Fencing: a write bound to a lock happens only while that acquisition is live, and else leaves no trace."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import msgspec
import pytest

from romancy.storage import (
    ChannelMessage,
    ChannelMode,
    CompensationEntry,
    Lock,
    LockLostError,
    OutboxEvent,
    SQLStorage,
    Storage,
    TimerSubscription,
    WorkflowStatus,
)
from tests.harness import Harness, contents, step

LATER = datetime(2042, 1, 1, tzinfo=UTC)

Write = Callable[[SQLStorage, Lock], Awaitable[object]]


def timer(lock: Lock) -> TimerSubscription:
    return TimerSubscription(lock.instance_id, "nap", LATER)


def message() -> ChannelMessage:
    return ChannelMessage(channel="news", data="{}")


WRITES: dict[str, Write] = {
    "append_history": lambda s, lock: s.append_history(step(lock.instance_id), lock=lock),
    "append_history_many": lambda s, lock: s.append_history_many([step(lock.instance_id)], lock=lock),
    "update_instance_status": lambda s, lock: s.update_instance_status(
        lock.instance_id, WorkflowStatus.FAILED, "too late", lock=lock
    ),
    "update_instance_activity": lambda s, lock: s.update_instance_activity(lock.instance_id, "late:1", lock=lock),
    "update_instance_output": lambda s, lock: s.update_instance_output(lock.instance_id, '{"late": 1}', lock=lock),
    "suspend": lambda s, lock: s.suspend(lock.instance_id, [timer(lock)], lock=lock),
    "park": lambda s, lock: s.park(lock.instance_id, "late", lock=lock),
    "recur_instance": lambda s, lock: s.recur_instance(lock.instance_id, "{}", lock=lock),
    "refresh_lock": lambda s, lock: s.refresh_lock(lock.instance_id, lock.worker_id, 30, lock=lock),
    "register_timer_subscription": lambda s, lock: s.register_timer_subscription(timer(lock), lock=lock),
    "register_timer_subscription_and_release_lock": lambda s, lock: s.register_timer_subscription_and_release_lock(
        timer(lock), lock.instance_id, lock.worker_id, lock=lock
    ),
    "register_channel_receive_and_release_lock": lambda s, lock: s.register_channel_receive_and_release_lock(
        lock.instance_id, "news", lock.worker_id, "receive:1", lock=lock
    ),
    "deliver_channel_message": lambda s, lock: s.deliver_channel_message(lock.instance_id, message(), lock=lock),
    "publish_to_channel": lambda s, lock: s.publish_to_channel("news", "{}", lock=lock),
    "publish_many": lambda s, lock: s.publish_many([message()], lock=lock),
    "subscribe_to_channel": lambda s, lock: s.subscribe_to_channel(
        lock.instance_id, "other", ChannelMode.BROADCAST, lock=lock
    ),
    "unsubscribe_from_channel": lambda s, lock: s.unsubscribe_from_channel(lock.instance_id, "news", lock=lock),
    "join_group": lambda s, lock: s.join_group(lock.instance_id, "walkers", lock=lock),
    "leave_group": lambda s, lock: s.leave_group(lock.instance_id, "riders", lock=lock),
    "add_outbox_event": lambda s, lock: s.add_outbox_event(OutboxEvent("event-1", "made", "test"), lock=lock),
    "add_compensation": lambda s, lock: s.add_compensation(
        CompensationEntry(lock.instance_id, "charge:1", "refund"), lock=lock
    ),
    "set_instance_state": lambda s, lock: s.set_instance_state(lock.instance_id, '"late"', lock=lock),
    "count_takeover": lambda s, lock: s.count_takeover(lock.instance_id, lock=lock),
    "note_refusal": lambda s, lock: s.note_refusal(lock.instance_id, "code", lock=lock),
    "archive_history": lambda s, lock: s.archive_history(lock.instance_id, lock=lock),
}
"""Everything that takes ``lock=``, but for `release_lock`, which is a no-op for whoever does not hold it."""

every_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())


async def owned(harness: Harness, storage: SQLStorage) -> Lock:
    """A locked instance with something that each of the writes could change."""
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, "news", ChannelMode.BROADCAST)
    await storage.join_group(lock.instance_id, "riders")
    await storage.append_history(step(lock.instance_id, "before:1"))
    return lock


def test_no_write_is_missing_here() -> None:
    takes_lock = {
        name
        for name, method in inspect.getmembers(Storage, inspect.isfunction)
        if "lock" in inspect.signature(method).parameters
    }
    assert set(WRITES) == takes_lock - {"release_lock"}


async def test_the_holder_can_write(harness: Harness, storage: SQLStorage) -> None:
    for write in WRITES.values():
        lock = await owned(harness, storage)
        await write(storage, lock)


@every_write
async def test_whoever_lost_the_lock_writes_nothing(harness: Harness, storage: SQLStorage, write: Write) -> None:
    lock = await owned(harness, storage)

    async def refused() -> None:
        before = await contents(storage)
        with pytest.raises(LockLostError) as lost:
            await write(storage, lock)
        assert (lost.value.instance_id, lost.value.worker_id) == (lock.instance_id, lock.worker_id)
        assert await contents(storage) == before

    harness.advance(seconds=31)
    await refused()  # expired, though nobody has taken it yet
    await storage.try_acquire_lock(lock.instance_id, "worker-2", 30)
    await refused()  # stolen
    await storage.release_lock(lock.instance_id, "worker-2")
    await refused()  # free again
    await storage.try_acquire_lock(lock.instance_id, lock.worker_id, 30)
    await refused()  # taken again under the same name: only the token tells the zombie from its successor


@every_write
async def test_a_zombie_loses_against_a_theft_that_commits_while_it_writes(
    harness: Harness, storage: SQLStorage, write: Write
) -> None:
    """The fence locks the row: comparing alone would read what was before the theft, and let the write through."""
    lock = await owned(harness, storage)
    thief = await harness.open()
    async with thief.transaction() as conn:
        await conn.execute(
            "UPDATE workflow_instances SET locked_by = 'worker-2', lock_token = lock_token + 1"
            f" WHERE instance_id = '{lock.instance_id}'"
        )
        writing = asyncio.ensure_future(write(storage, lock))
        await asyncio.wait({writing}, timeout=0.1)
        before = await contents(thief)

    if writing.done() and not writing.exception():
        assert writing.result() is None, "a busy row: neither refreshed nor lost"
    else:
        with pytest.raises(LockLostError):
            await writing
    assert await contents(thief) == before


async def test_the_lock_of_one_instance_proves_nothing_for_another(harness: Harness, storage: SQLStorage) -> None:
    mine, other = await owned(harness, storage), await harness.locked(storage)
    assert (mine.worker_id, mine.token) == (other.worker_id, other.token)
    before = await contents(storage)

    class ShowingTheOther:
        """Passes calls on, with the wrong lock."""

        def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
            def call(*args: object, **kwargs: object) -> Awaitable[object]:
                return getattr(storage, name)(*args, **{**kwargs, "lock": other})  # type: ignore[no-any-return]

            return call

    for name in WRITES.keys() - {"publish_to_channel", "publish_many", "add_outbox_event"}:  # which name no instance
        with pytest.raises(LockLostError):
            await WRITES[name](ShowingTheOther(), mine)  # type: ignore[arg-type]
    with pytest.raises(LockLostError):
        await storage.publish_to_channel("news", "{}", lock=other, record=step(mine.instance_id))

    assert await contents(storage) == before


async def test_a_zombie_cannot_overwrite_the_winners_output(harness: Harness, storage: SQLStorage) -> None:
    zombie = await harness.locked(storage, "worker-1")
    harness.advance(seconds=31)
    winner = await storage.try_acquire_lock(zombie.instance_id, "worker-2", 30)
    await storage.update_instance_output(zombie.instance_id, '"winner"', lock=winner)

    with pytest.raises(LockLostError):
        await storage.update_instance_output(zombie.instance_id, '"zombie"', lock=zombie)
    instance = await storage.get_instance(zombie.instance_id)
    assert instance is not None
    assert instance.output_data == '"winner"'


async def test_a_forged_token_is_refused(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    for forged in (0, lock.token + 1, -1, 2**63 - 1):
        with pytest.raises(LockLostError):
            await storage.append_history(step(lock.instance_id), lock=msgspec.structs.replace(lock, token=forged))
    with pytest.raises(LockLostError):
        await storage.append_history(step(lock.instance_id), lock=msgspec.structs.replace(lock, worker_id="Worker-1"))


async def test_inside_a_transaction_a_lost_lock_leaves_the_block_usable(harness: Harness, storage: SQLStorage) -> None:
    stale = await owned(harness, storage)
    await storage.release_lock(stale.instance_id, stale.worker_id, lock=stale)
    fresh = await harness.locked(storage)
    async with storage.transaction():
        for write in WRITES.values():
            with pytest.raises(LockLostError):
                await write(storage, stale)
        await storage.append_history(step(fresh.instance_id), lock=fresh)
    assert await storage.get_history_count(fresh.instance_id) == 1
