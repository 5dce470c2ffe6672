"""No wake-up is lost between "nothing there yet" and "I wait now", however the two sides interleave."""

import asyncio
from collections.abc import Awaitable

import pytest

from romancy.storage import (
    ChannelMessage,
    ChannelMode,
    ChannelWait,
    InstanceWait,
    Lock,
    SQLStorage,
    TimerSubscription,
    WorkflowStatus,
)
from tests.harness import Harness, history_of

MODES = [ChannelMode.BROADCAST, ChannelMode.COMPETING]
ROUNDS = 60
AT_ONCE = 10


async def receiver(harness: Harness, storage: SQLStorage, channel: str, mode: ChannelMode) -> Lock:
    """A running instance that subscribes to a channel."""
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, channel, mode, lock=lock)
    return lock


async def receive(storage: SQLStorage, channel: str, lock: Lock) -> bool:
    """Whether a message was there; else the instance waits."""
    result = await storage.register_channel_receive_and_release_lock(
        lock.instance_id, channel, lock.worker_id, "receive:1", lock=lock
    )
    return result is not None


async def courier(storage: SQLStorage) -> set[str]:
    """Deliver what the poll finds; to whom."""
    found = await storage.find_deliverable_subscriptions(1000)
    for subscription in found:
        message = ChannelMessage(subscription.channel)
        await storage.deliver_channel_message_with_lock(
            subscription.instance_id, subscription.channel, message, "courier", 30
        )
    return {subscription.instance_id for subscription in found}


async def blocked(work: Awaitable[object]) -> "asyncio.Future[object]":
    """Work that has been started and is waiting for somebody."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=0.1)
    assert not task.done(), "this should have waited"
    return task


@pytest.mark.parametrize("mode", MODES)
async def test_a_message_published_while_a_receiver_registers_reaches_it(
    harness: Harness, storage: SQLStorage, mode: ChannelMode
) -> None:
    publisher = await harness.open()
    for start in range(0, ROUNDS, AT_ONCE):
        channels = [f"channel-{start + number}" for number in range(AT_ONCE)]
        locks = [await receiver(harness, storage, channel, mode) for channel in channels]
        received = await asyncio.gather(
            *(receive(storage, channel, lock) for channel, lock in zip(channels, locks, strict=True)),
            *(publisher.publish_to_channel(channel, "1") for channel in channels),
        )
        woken = await courier(storage)

        for lock, at_once in zip(locks, received[:AT_ONCE], strict=True):
            assert bool(at_once) != (lock.instance_id in woken)
            assert len(await history_of(storage, lock.instance_id)) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_receiver_waits_for_a_publisher_that_is_about_to_commit(
    harness: Harness, storage: SQLStorage, mode: ChannelMode
) -> None:
    lock = await receiver(harness, storage, "news", mode)
    publisher = await harness.open()

    async with publisher.transaction():
        await publisher.publish_to_channel("news", "1")
        receiving = await blocked(receive(storage, "news", lock))

    assert await receiving is True


@pytest.mark.parametrize("mode", MODES)
async def test_a_publisher_waits_for_a_receiver_that_is_about_to_wait(
    harness: Harness, storage: SQLStorage, mode: ChannelMode
) -> None:
    lock = await receiver(harness, storage, "news", mode)
    publisher = await harness.open()

    async with storage.transaction():
        assert await receive(storage, "news", lock) is False
        publishing = await blocked(publisher.publish_to_channel("news", "1"))
    await publishing

    assert await courier(storage) == {lock.instance_id}
    assert len(await history_of(storage, lock.instance_id)) == 1


async def test_a_publisher_waits_for_one_with_a_smaller_id_to_commit(harness: Harness, storage: SQLStorage) -> None:
    await storage.publish_to_channel("news", "0")
    other = await harness.open()

    async with other.transaction():
        first = await other.publish_to_channel("news", "1")
        publishing = await blocked(storage.publish_to_channel("news", "2"))
        assert len(await storage.get_pending_channel_messages("news")) == 1
    second = await publishing

    assert isinstance(first, int)
    assert isinstance(second, int)
    assert first < second


async def test_the_first_publishers_of_a_channel_also_wait_for_each_other(
    harness: Harness, storage: SQLStorage
) -> None:
    other = await harness.open()

    async with other.transaction():
        first = await other.publish_to_channel("news", "1")
        publishing = await blocked(storage.publish_to_channel("news", "2"))
    second = await publishing

    assert [message.id for message in await storage.get_pending_channel_messages("news")] == [first, second]


async def test_a_publisher_that_rolls_back_lets_the_next_one_through(harness: Harness, storage: SQLStorage) -> None:
    other = await harness.open()

    await other.begin_transaction()
    await other.publish_to_channel("news", "1")
    publishing = await blocked(storage.publish_to_channel("news", "2"))
    await other.rollback_transaction()
    await publishing

    assert [message.data for message in await storage.get_pending_channel_messages("news")] == ["2"]


async def test_a_subscriber_that_joins_during_a_publish_gets_what_comes_after(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await harness.locked(storage)
    publisher = await harness.open()

    async with publisher.transaction():
        await publisher.publish_to_channel("news", "1")
        subscribing = await blocked(
            storage.subscribe_to_channel(lock.instance_id, "news", ChannelMode.BROADCAST, lock=lock)
        )
    await subscribing
    await publisher.publish_to_channel("news", "2")

    pending = await storage.get_pending_channel_messages_for_instance(lock.instance_id, "news")
    assert [message.data for message in pending] == ["2"]


async def test_a_poll_does_not_forget_a_channel_that_somebody_publishes_to(
    harness: Harness, storage: SQLStorage
) -> None:
    """A poll settles channels that nobody waits on; that must not swallow what is on its way."""
    publisher = await harness.open()
    for number in range(15):
        channels = [f"channel-{number}-{k}" for k in range(4)]
        locks = [await receiver(harness, storage, channel, ChannelMode.BROADCAST) for channel in channels]
        served = await asyncio.gather(
            *(receive(storage, channel, lock) for channel, lock in zip(channels, locks, strict=True)),
            *(publisher.publish_to_channel(channel, "1") for channel in channels),
            courier(storage),
            courier(publisher),
        )
        await courier(storage)
        assert len(served) == 10
        for lock in locks:
            assert len(await history_of(storage, lock.instance_id)) == 1


# Waiting for another instance.


async def test_a_child_that_finishes_while_its_parent_suspends_wakes_it(harness: Harness, storage: SQLStorage) -> None:
    worker = await harness.open()
    for _ in range(ROUNDS // AT_ONCE):
        families = [(await harness.locked(storage), await harness.locked(storage, "child")) for _ in range(AT_ONCE)]
        await asyncio.gather(
            *(
                storage.suspend(parent.instance_id, [InstanceWait(child.instance_id, "child:1")], lock=parent)
                for parent, child in families
            ),
            *(worker.update_instance_output(child.instance_id, "1", lock=child) for _, child in families),
        )

        for parent, _ in families:
            instance = await storage.get_instance(parent.instance_id)
            assert instance is not None
            assert instance.status == WorkflowStatus.RUNNING
            assert [event.event_type for event in await history_of(storage, parent.instance_id)] == ["InstanceFinished"]


async def test_a_parent_waits_for_a_child_that_is_about_to_finish(harness: Harness, storage: SQLStorage) -> None:
    parent, child = await harness.locked(storage), await harness.locked(storage, "child")
    worker = await harness.open()

    async with worker.transaction():
        await worker.update_instance_output(child.instance_id, "1", lock=child)
        suspending = await blocked(
            storage.suspend(parent.instance_id, [InstanceWait(child.instance_id, "child:1")], lock=parent)
        )
    events = await suspending

    assert isinstance(events, list)
    assert [event.activity_id for event in events] == ["child:1"]


async def test_a_child_waits_for_a_parent_that_is_about_to_suspend(harness: Harness, storage: SQLStorage) -> None:
    parent, child = await harness.locked(storage), await harness.locked(storage, "child")
    worker = await harness.open()

    async with storage.transaction():
        await storage.suspend(parent.instance_id, [InstanceWait(child.instance_id, "child:1")], lock=parent)
        finishing = await blocked(worker.update_instance_output(child.instance_id, "1", lock=child))
    await finishing

    assert [event.activity_id for event in await history_of(storage, parent.instance_id)] == ["child:1"]


async def test_instances_that_suspend_on_each_other_meet_no_deadlock(harness: Harness, storage: SQLStorage) -> None:
    other = await harness.open()
    for _ in range(4):
        ring = [await harness.locked(storage) for _ in range(3)]
        await asyncio.gather(
            *(
                (storage, other)[number % 2].suspend(
                    lock.instance_id, [InstanceWait(ring[number - 1].instance_id, "wait:1")], lock=lock
                )
                for number, lock in enumerate(ring)
            )
        )
        await other.cancel_instance(ring[0].instance_id, "enough")

        woken = await storage.get_instance(ring[1].instance_id)
        assert woken is not None
        assert woken.status == WorkflowStatus.RUNNING


async def test_a_wait_for_three_things_that_all_happen_at_once_records_each_once(
    harness: Harness, storage: SQLStorage
) -> None:
    worker = await harness.open()
    for number in range(15):
        channel = f"channel-{number}"
        parent, child = await harness.locked(storage), await harness.locked(storage, "child")
        await storage.subscribe_to_channel(parent.instance_id, channel, ChannelMode.BROADCAST, lock=parent)
        nap = TimerSubscription(parent.instance_id, "nap", await storage.current_time())
        waits = [nap, ChannelWait(channel, "receive:1"), InstanceWait(child.instance_id, "child:1")]
        await asyncio.gather(
            storage.suspend(parent.instance_id, waits, lock=parent),
            worker.publish_to_channel(channel, "1"),
            worker.update_instance_output(child.instance_id, "1", lock=child),
            worker.fire_timer(nap, worker_id="timekeeper"),
        )

        instance = await storage.get_instance(parent.instance_id)
        recorded = [event.activity_id for event in await history_of(storage, parent.instance_id)]
        assert instance is not None
        assert instance.status == WorkflowStatus.RUNNING
        assert recorded
        assert len(recorded) == len(set(recorded))
