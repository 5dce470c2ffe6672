"""Retention: messages go when everybody has received them, in batches, oldest first; nothing else does."""

from datetime import timedelta

import pytest

from romancy import Retention
from romancy.storage import ChannelMessage, InstanceWait, SQLStorage, TimerSubscription, Turn, WorkflowStatus
from romancy.worker import sweeper as sweeping
from romancy.worker.sweeper import Batch, Sweeper
from tests.conformance.arrange import (
    BROADCAST,
    COMPETING,
    DIRECT,
    data_pending,
    deliver,
    publish,
    receive,
    receive_all,
    status_of,
    subscriber,
    waiter,
)
from tests.conformance.neighbours import neighbour_publishes, row
from tests.harness import Harness

HOUR = timedelta(hours=1)


async def left(storage: SQLStorage, channel: str = "orders") -> list[str | None]:
    return [message.data for message in await storage.get_pending_channel_messages(channel)]


async def test_without_subscribers_all_that_is_old_goes(harness: Harness, storage: SQLStorage) -> None:
    await publish(storage, "1")
    await publish(storage, b"2")
    harness.advance(seconds=3601)
    await publish(storage, "3")

    assert await storage.cleanup_old_channel_messages(HOUR) == 2
    assert await storage.cleanup_old_channel_messages(HOUR) == 0

    assert await left(storage) == ["3"]


async def test_a_broadcast_message_stays_until_the_last_subscriber_has_it(
    harness: Harness, storage: SQLStorage
) -> None:
    quick, slow = await waiter(harness, storage), await waiter(harness, storage)
    for data in "123":
        await publish(storage, data)
    await deliver(storage, quick)
    await receive_all(storage, quick)
    harness.advance(seconds=3601)

    assert await storage.cleanup_old_channel_messages(HOUR) == 0
    await deliver(storage, slow)
    assert await storage.cleanup_old_channel_messages(HOUR) == 1

    assert await left(storage) == ["2", "3"]
    assert await receive_all(storage, slow) == [1, 2, 3]


@pytest.mark.parametrize("mode", [COMPETING, DIRECT])
async def test_a_message_that_nobody_has_taken_stays(harness: Harness, storage: SQLStorage, mode: str) -> None:
    lock = await subscriber(harness, storage, mode=COMPETING if mode == COMPETING else DIRECT)
    channel = "orders" if mode == COMPETING else f"orders:{lock.instance_id}"
    await publish(storage, "1", channel)
    harness.advance(seconds=86400)

    assert await storage.cleanup_old_channel_messages(HOUR) == 0

    assert await left(storage, channel) == ["1"]


async def test_a_claimed_message_stays(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage, mode=COMPETING)
    await storage.claim_channel_message(await publish(storage), lock.instance_id)
    harness.advance(seconds=86400)

    assert await storage.cleanup_old_channel_messages(HOUR) == 0


@pytest.mark.parametrize("end", ["unsubscribed", "finished", "cancelled"])
async def test_who_is_no_subscriber_any_more_keeps_nothing(harness: Harness, storage: SQLStorage, end: str) -> None:
    lock = await subscriber(harness, storage)
    await publish(storage)
    harness.advance(seconds=3601)
    if end == "unsubscribed":
        await storage.unsubscribe_from_channel(lock.instance_id, "orders")
    elif end == "finished":
        await storage.update_instance_output(lock.instance_id, None)
    else:
        await storage.cancel_instance(lock.instance_id, "no more")

    assert await storage.cleanup_old_channel_messages(HOUR) == 1


@pytest.mark.parametrize("deleted_by", ["us", "another framework"])
async def test_nothing_is_remembered_of_foreign_messages_that_are_gone(
    harness: Harness, storage: SQLStorage, deleted_by: str
) -> None:
    receivers = [await waiter(harness, storage) for _ in range(2)]
    for _ in range(3):
        await neighbour_publishes(storage, data="1")
    for receiver in receivers:
        await deliver(storage, receiver)
        await receive_all(storage, receiver)
    assert await row(storage, "SELECT COUNT(*) FROM romancy_receipts") == (6,)

    if deleted_by == "us":
        harness.advance(seconds=3601)
    else:
        await storage.conn().execute("DELETE FROM channel_messages")
    for _ in range(4):  # two receipts are looked at each time, of one message
        await storage.cleanup_old_channel_messages(HOUR, limit=2)

    assert await row(storage, "SELECT COUNT(*) FROM romancy_receipts") == (0,)


async def test_receipts_stay_as_long_as_their_messages(harness: Harness, storage: SQLStorage) -> None:
    receiver = await waiter(harness, storage)
    for _ in range(3):
        await neighbour_publishes(storage, data="1")
    await deliver(storage, receiver)
    await receive_all(storage, receiver)

    for _ in range(4):
        await storage.cleanup_old_channel_messages(HOUR, limit=2)

    assert await data_pending(storage, receiver) == []
    assert await row(storage, "SELECT COUNT(*) FROM romancy_receipts") == (3,)


async def test_messages_are_deleted_in_batches_oldest_first(harness: Harness, storage: SQLStorage) -> None:
    for n in range(5):
        await publish(storage, str(n), "a" if n % 2 else "b")
        harness.advance(seconds=1)

    assert await storage.cleanup_old_channel_messages(timedelta(0), limit=3) == 3

    assert (await left(storage, "a"), await left(storage, "b")) == (["3"], ["4"])


async def test_what_must_stay_does_not_hide_what_may_go(harness: Harness, storage: SQLStorage) -> None:
    await subscriber(harness, storage, "kept", COMPETING)
    await storage.publish_many([ChannelMessage(channel="kept", data="1")] * 5)
    harness.advance(seconds=1)
    await publish(storage)
    harness.advance(seconds=3601)

    assert await storage.cleanup_old_channel_messages(HOUR, limit=2) == 1


async def test_cursors_outlive_the_messages(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    await publish(storage, "1")
    await deliver(storage, instance_id)
    harness.advance(seconds=3601)
    assert await storage.cleanup_old_channel_messages(HOUR) == 1

    await publish(storage, "2")

    assert await receive_all(storage, instance_id) == [1, 2]


async def test_forgotten_channels_leave_nothing_behind(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage, "mail", DIRECT)
    await storage.find_deliverable_subscriptions()
    await storage.update_instance_output(lock.instance_id, None)

    await storage.cleanup_old_channel_messages(HOUR)

    assert await row(storage, "SELECT COUNT(*) FROM romancy_channels") == (0,)


async def test_a_channel_that_was_forgotten_can_be_used_again(harness: Harness, storage: SQLStorage) -> None:
    await publish(storage)
    harness.advance(seconds=3601)
    for _ in range(3):
        await storage.find_deliverable_subscriptions()
        await storage.cleanup_old_channel_messages(HOUR)

    instance_id = await waiter(harness, storage)
    await publish(storage, "2")

    assert [each.instance_id for each in await storage.find_deliverable_subscriptions()] == [instance_id]


async def test_a_limit_makes_sense_or_is_refused(storage: SQLStorage) -> None:
    for cleanup in (storage.cleanup_old_channel_messages, storage.cleanup_old_outbox_events):
        with pytest.raises(ValueError, match="limit"):
            await cleanup(HOUR, limit=-1)


async def test_an_instance_can_be_freed_of_all_it_is_bound_to(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    child = await harness.instance(storage)
    await publish(storage)
    await receive(storage, lock, keep_lock=True)
    await storage.join_group(lock.instance_id, "riders")
    moment = await storage.current_time() + HOUR
    timer = TimerSubscription(instance_id=lock.instance_id, timer_id="t", expires_at=moment)
    await storage.suspend(lock.instance_id, [timer, InstanceWait(child, "child:1")], lock=lock)

    for _ in range(2):
        await storage.cleanup_instance_subscriptions(lock.instance_id)
    await storage.cleanup_instance_subscriptions("nobody")

    for table in (
        "workflow_timer_subscriptions",
        "channel_subscriptions",
        "channel_delivery_cursors",
        "workflow_group_memberships",
        "romancy_channel_waits",
        "romancy_instance_waits",
    ):
        assert await row(storage, f"SELECT COUNT(*) FROM {table}") == (0,)
    assert await status_of(storage, lock.instance_id) == WorkflowStatus.RUNNING  # nothing could wake it any more
    assert await storage.get_channel_mode("orders") is None
    await subscriber(harness, storage, mode=BROADCAST)


# What another framework has finished.


async def test_what_another_framework_finished_goes_by_its_last_change(harness: Harness, storage: SQLStorage) -> None:
    names = ("old", "unfinished", "just finished", "of another")
    for name in names:
        await harness.instance(storage, instance_id=name, framework="go" if name == "of another" else "python")
    conn = storage.conn()
    finish = "UPDATE workflow_instances SET status = 'completed', updated_at = {} WHERE instance_id = :name"
    for name in ("old", "of another"):
        await conn.execute(finish.format(storage.runner.driver.now()), name=name)
    harness.advance(seconds=3601)
    await conn.execute(finish.format(storage.runner.driver.now()), name="just finished")
    theirs = await harness.open(framework="python")

    assert await theirs.delete_finished_instances(HOUR) == 1

    assert [name for name in names if await storage.get_instance(name) is None] == ["old"]


# The sweeper.


async def finished(harness: Harness, storage: SQLStorage, count: int = 1) -> None:
    async with storage.transaction():
        for _ in range(count):
            await storage.update_instance_output(await harness.instance(storage), None)


async def instances(storage: SQLStorage) -> int:
    count: int = await storage.conn().fetch_value("SELECT COUNT(*) FROM workflow_instances")
    return count


async def test_a_sweep_deletes_all_that_was_kept_long_enough(harness: Harness, storage: SQLStorage) -> None:
    await finished(harness, storage, 25)
    await publish(storage)
    harness.advance(seconds=3601)
    await finished(harness, storage)
    await publish(storage)
    sweeper = Sweeper(storage, "worker-1", Retention(instances=HOUR, messages=HOUR))

    await sweeper.look()

    assert await instances(storage) == 1
    assert len(await left(storage)) == 1
    assert sweeper.progress == {"instances": 25, "messages": 1, "events": 0, "seen_events": 0, "system_locks": 0}


async def test_finished_instances_stay_unless_told_otherwise(harness: Harness, storage: SQLStorage) -> None:
    await finished(harness, storage)
    harness.advance(seconds=86400 * 1000)

    await Sweeper(storage, "worker-1", Retention()).look()

    assert await instances(storage) == 1


async def test_one_worker_sweeps_and_another_goes_on_when_it_is_dead(harness: Harness, storage: SQLStorage) -> None:
    first, second = (Sweeper(storage, worker, Retention(instances=HOUR)) for worker in ("worker-1", "worker-2"))
    await first.look()
    await finished(harness, storage)
    harness.advance(seconds=100)

    await second.look()
    assert second.progress["instances"] == 0
    harness.advance(seconds=3601)
    await second.look()

    assert second.progress["instances"] == 1


async def test_a_turn_that_is_over_leaves_the_rest_for_the_next(harness: Harness, storage: SQLStorage) -> None:
    await finished(harness, storage, 25)
    harness.advance(seconds=3601)
    turn = Turn(0.0)

    deleted = await storage.delete_finished_instances(HOUR, 100, turn=turn)

    assert (0 < deleted < 25, turn.cut_short) == (True, True)
    assert await instances(storage) == 25 - deleted
    assert await storage.delete_finished_instances(HOUR, 100, turn=(long := Turn(60.0))) == 25 - deleted
    assert not long.cut_short


async def test_a_turn_lasts_while_the_database_is_at_it(harness: Harness, storage: SQLStorage) -> None:
    deletes = [
        storage.delete_finished_instances,
        storage.cleanup_old_channel_messages,
        storage.cleanup_old_outbox_events,
        storage.cleanup_seen_events,
    ]
    for delete in deletes:
        turn = Turn()
        made = turn.began
        await delete(HOUR, limit=1, turn=turn)
        assert made < turn.began < turn.ended, delete


async def test_a_sweep_goes_on_until_all_is_gone_however_short_its_turns(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await finished(harness, storage, 50)
    harness.advance(seconds=3601)
    monkeypatch.setattr(sweeping, "_LONGEST_BATCH_SEC", 0.0)
    sweeper = Sweeper(storage, "worker-1", Retention(instances=HOUR))
    sweeper.chores[0].batch.size = 40

    await sweeper.look()

    assert await instances(storage) == 0


async def test_a_sweep_opens_no_transaction_that_a_busy_event_loop_would_keep_open(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await finished(harness, storage)
    harness.advance(seconds=3601)
    opened = []
    monkeypatch.setattr(storage.runner.transactions, "_open_session", opened.append)

    await Sweeper(storage, "worker-1", Retention(instances=HOUR)).look()

    assert (await instances(storage), opened) == (0, [])


def test_a_batch_that_took_long_is_followed_by_a_smaller_one() -> None:
    batch = Batch()
    for _ in range(20):
        batch.took(0.001, 0.001)
    most = batch.size
    batch.took(0.1, 0.001)
    assert 10 < most <= 1000
    assert batch.size <= most / 4
    for _ in range(20):
        batch.took(1.0, 0.001)
    assert batch.size == 5
    batch.took(0.001, 0.001)
    assert batch.size > 5


def test_a_batch_whose_commit_took_longer_than_others_is_followed_by_a_smaller_one() -> None:
    batch = Batch()
    for _ in range(20):
        batch.took(0.001, 0.001)
    most = batch.size
    batch.took(0.001, 0.1)
    assert batch.size <= most / 4


def test_a_disk_whose_every_commit_is_slow_does_not_make_batches_small() -> None:
    batch = Batch()
    for _ in range(20):
        batch.took(0.001, 0.1)
    assert batch.size > 100
