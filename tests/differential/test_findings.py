"""What random sequences have found, each in its fewest steps."""

from datetime import timedelta
from uuid import uuid4

from romancy.storage import (
    ChannelMessage,
    ChannelMode,
    ChannelWait,
    InstanceWait,
    Lock,
    LockLostError,
    SQLStorage,
    TimerSubscription,
    WorkflowStatus,
)
from tests.harness import Harness, step

HOUR = timedelta(hours=1)


async def subscribed(harness: Harness, storage: SQLStorage, mode: ChannelMode = ChannelMode.BROADCAST) -> Lock:
    """A running instance that is subscribed to "news"."""
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, "news", mode)
    return lock


async def status_of(storage: SQLStorage, instance_id: str) -> WorkflowStatus | None:
    instance = await storage.get_instance(instance_id)
    return None if instance is None else instance.status


async def test_of_two_acquisitions_by_one_worker_only_the_newer_is_refreshed(
    harness: Harness, storage: SQLStorage
) -> None:
    older = await harness.locked(storage, "worker-1")
    harness.advance(seconds=31)
    newer = await storage.try_acquire_lock(older.instance_id, "worker-1", 30)
    assert newer is not None

    of_older, of_newer = await storage.refresh_locks([older, newer], 30)

    assert isinstance(of_older, LockLostError)
    assert isinstance(of_newer, Lock)


async def test_a_wait_for_an_instance_that_finished_while_the_waiter_ran_strands_nobody(
    harness: Harness, storage: SQLStorage
) -> None:
    lock, awaited = await subscribed(harness, storage), await harness.instance(storage)
    await storage.suspend(
        lock.instance_id, [ChannelWait("news", "receive:1"), InstanceWait(awaited, "child:1")], lock=lock
    )
    await storage.publish_to_channel("news", "1")
    await storage.deliver_channel_message_with_lock(lock.instance_id, "news", ChannelMessage("news"), "w", 30)
    await storage.update_instance_output(awaited, "1")
    again = await storage.try_acquire_lock(lock.instance_id, "worker-1", 30)
    assert again is not None
    await storage.suspend(lock.instance_id, [ChannelWait("news", "receive:2")], lock=again)

    await storage.clear_channel_waiting_state(lock.instance_id, "news")

    assert await status_of(storage, lock.instance_id) == "running"


async def test_a_message_can_be_delivered_when_the_instance_that_claimed_it_has_ended(
    harness: Harness, storage: SQLStorage
) -> None:
    owner = await subscribed(harness, storage, ChannelMode.COMPETING)
    waiter = await subscribed(harness, storage, ChannelMode.COMPETING)
    message_id = await storage.publish_to_channel("news", "1")
    assert isinstance(message_id, int)
    await storage.claim_channel_message(message_id, owner.instance_id)
    await storage.suspend(waiter.instance_id, [ChannelWait("news", "receive:1")], lock=waiter)
    assert await storage.find_deliverable_subscriptions() == []

    await storage.update_instance_output(owner.instance_id, "1", lock=owner)

    found = await storage.find_deliverable_subscriptions()
    assert [subscription.instance_id for subscription in found] == [waiter.instance_id]


async def test_a_poll_while_an_instance_runs_does_not_forget_a_wait_that_it_has_kept(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await subscribed(harness, storage)
    now = await storage.current_time()
    timer = TimerSubscription(lock.instance_id, "sleep:1", now + HOUR)
    await storage.suspend(lock.instance_id, [timer, ChannelWait("news", "receive:1")], lock=lock)
    harness.advance(seconds=3601)
    await storage.fire_timer(timer, worker_id="w")
    await storage.publish_to_channel("news", "1")
    assert await storage.find_deliverable_subscriptions() == []
    assert await storage.get_channel_subscribers_waiting("news") == []

    again = await storage.try_acquire_lock(lock.instance_id, "worker-1", 30)
    assert again is not None
    await storage.suspend(
        lock.instance_id, [TimerSubscription(lock.instance_id, "sleep:2", now + 9 * HOUR)], lock=again
    )

    found = await storage.find_deliverable_subscriptions()
    assert [subscription.activity_id for subscription in found] == ["receive:1"]


async def test_retention_keeps_a_foreign_message_that_came_late_and_has_not_been_received(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await subscribed(harness, storage)
    # Another framework draws an id, and commits after us.
    drawn = await storage.publish_to_channel("news", "1")
    assert isinstance(drawn, int)
    await storage.delete_channel_message(drawn)
    await storage.publish_to_channel("news", "2")
    await storage.update_delivery_cursor(lock.instance_id, "news", drawn + 1)
    await storage.conn().execute(
        "INSERT INTO channel_messages (id, channel, message_id, data_type, data)"
        f" VALUES ({drawn}, 'news', '{uuid4()}', 'json', '1')"
    )
    harness.advance(seconds=7200)

    await storage.cleanup_old_channel_messages(HOUR)

    left = await storage.get_pending_channel_messages_for_instance(lock.instance_id, "news")
    assert [message.id for message in left] == [drawn]


async def test_a_timer_does_not_fire_early_because_the_step_it_is_registered_anew_for_is_recorded(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await harness.locked(storage)
    later = await storage.current_time() + HOUR
    await storage.register_timer_subscription(TimerSubscription(lock.instance_id, "t", later, activity_id="sleep:1"))
    await storage.append_history(step(lock.instance_id, "charge:1"), lock=lock)

    again = TimerSubscription(lock.instance_id, "t", later, activity_id="charge:1")

    assert await storage.suspend(lock.instance_id, [again], lock=lock) == []
    assert await status_of(storage, lock.instance_id) == "waiting_for_timer"
