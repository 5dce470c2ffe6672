"""Delivery: how messages reach those who wait for them, once each, in order, and never to the dead."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest

from romancy.storage import (
    ChannelDeliveryResult,
    ChannelMessage,
    ChannelMode,
    InstanceNotFoundError,
    InvalidStatusTransitionError,
    LockLostError,
    NotSubscribedError,
    SQLStorage,
    TimerSubscription,
    WorkflowStatus,
)
from tests.conformance.arrange import (
    BROADCAST,
    COMPETING,
    DIRECT,
    Crash,
    another,
    crash_before_statement,
    data_pending,
    deliver,
    found,
    is_blocked,
    lock_of,
    operations_run,
    publish,
    receive,
    receive_all,
    received,
    status_of,
    subscriber,
    waiter,
)
from tests.conformance.neighbours import row
from tests.harness import Harness, contents, history_of

FREE = (None, None, None)
MODES = pytest.mark.parametrize("mode", [BROADCAST, COMPETING])


# Asking for a message.


@MODES
async def test_a_pending_message_is_received_at_once(harness: Harness, storage: SQLStorage, mode: ChannelMode) -> None:
    lock = await subscriber(harness, storage, mode=mode)
    await publish(storage, '{"n": 1}')

    delivered = await receive(storage, lock)

    assert delivered == ChannelDeliveryResult(lock.instance_id, "order", "receive:1")
    assert await received(storage, lock.instance_id) == [{"n": 1}]
    assert await status_of(storage, lock.instance_id) == WorkflowStatus.RUNNING
    assert await lock_of(storage, lock.instance_id) == FREE


async def test_without_a_message_the_instance_waits_and_its_lock_is_free(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    timeout_at = lock.expires_at + timedelta(days=1)

    assert await receive(storage, lock, timeout_at=timeout_at) is None

    assert await status_of(storage, lock.instance_id) == WorkflowStatus.WAITING_FOR_MESSAGE
    assert await lock_of(storage, lock.instance_id) == FREE
    subscription = await storage.get_channel_subscription(lock.instance_id, "orders")
    assert subscription is not None
    assert (subscription.activity_id, subscription.timeout_at) == ("receive:1", timeout_at)


async def test_the_lock_is_kept_only_if_a_message_was_received(harness: Harness, storage: SQLStorage) -> None:
    lucky, unlucky = await subscriber(harness, storage), await subscriber(harness, storage, "invoices")
    await publish(storage)

    assert await receive(storage, lucky, keep_lock=True) is not None
    assert await receive(storage, unlucky, "invoices", keep_lock=True) is None

    assert (await lock_of(storage, lucky.instance_id))[0] == "worker-1"
    await storage.update_instance_activity(lucky.instance_id, "next:1", lock=lucky)
    assert await lock_of(storage, unlucky.instance_id) == FREE


async def test_a_worker_may_ask_by_its_name_alone(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)

    delivered = await storage.register_channel_receive_and_release_lock(
        lock.instance_id, "orders", "worker-1", "receive:1"
    )

    assert delivered is None
    assert await status_of(storage, lock.instance_id) == WorkflowStatus.WAITING_FOR_MESSAGE


async def test_only_the_owner_of_the_lock_may_ask(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    harness.advance(seconds=31)
    await storage.try_acquire_lock(lock.instance_id, "worker-2", 30)
    before = await contents(storage)

    with pytest.raises(LockLostError):
        await receive(storage, lock)
    for worker_id in ("worker-1", "worker-3"):
        with pytest.raises(LockLostError):
            await storage.register_channel_receive_and_release_lock(lock.instance_id, "orders", worker_id, "receive:1")

    assert await contents(storage) == before


async def test_only_a_subscriber_may_ask(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    before = await contents(storage)

    with pytest.raises(NotSubscribedError):
        await receive(storage, lock)

    assert await contents(storage) == before


async def test_a_step_that_has_its_message_is_not_given_another(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    await publish(storage, "1")
    await publish(storage, "2")
    await receive(storage, lock, keep_lock=True)

    again = await receive(storage, lock, keep_lock=True)

    assert again == ChannelDeliveryResult(lock.instance_id, "order", "receive:1")
    assert await received(storage, lock.instance_id) == [1]
    assert await data_pending(storage, lock.instance_id) == [2]


async def test_an_instance_that_waits_already_cannot_ask(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    lock = await storage.try_acquire_lock(instance_id, "worker-1", 30)
    assert lock is not None

    with pytest.raises(InvalidStatusTransitionError):
        await receive(storage, lock, activity_id="receive:2")


# No wake-up is lost, whoever commits first.


@MODES
async def test_a_message_that_is_being_published_is_waited_for_and_received(
    harness: Harness, storage: SQLStorage, mode: ChannelMode
) -> None:
    lock = await subscriber(harness, storage, mode=mode)
    publisher = await another(harness)
    async with publisher.transaction():
        await publish(publisher, "1")
        asking = asyncio.create_task(receive(storage, lock))
        assert await is_blocked(asking)

    assert await asking is not None
    assert await received(storage, lock.instance_id) == [1]


@MODES
async def test_a_receiver_that_is_just_registering_is_found_by_the_poll(
    harness: Harness, storage: SQLStorage, mode: ChannelMode
) -> None:
    lock = await subscriber(harness, storage, mode=mode)
    publisher = await another(harness)
    async with storage.transaction():
        assert await receive(storage, lock) is None
        publishing = asyncio.create_task(publish(publisher, "1"))
        assert await is_blocked(publishing)
    await publishing

    assert await found(publisher) == [lock.instance_id]
    await deliver(publisher, lock.instance_id)
    assert await received(storage, lock.instance_id) == [1]


async def test_a_poll_during_a_publish_does_not_settle_the_channel(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    await publish(storage, "1")
    await deliver(storage, instance_id)
    assert await receive_all(storage, instance_id) == [1]  # nothing is left to settle but the channel itself
    poller = await another(harness)
    async with storage.transaction():
        await publish(storage, "2")
        polling = asyncio.create_task(found(poller))
        await is_blocked(polling)  # on SQLite it waits for the writer
    await polling

    assert await found(poller) == [instance_id]


async def test_a_poll_while_a_receiver_registers_does_not_settle_the_channel(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await subscriber(harness, storage)
    poller, publisher = await another(harness), await another(harness)
    await publish(storage, "1", "elsewhere")
    async with storage.transaction():
        assert await receive(storage, lock) is None
        publishing = asyncio.create_task(publish(publisher, "1"))
        polling = asyncio.create_task(found(poller))
        assert await is_blocked(publishing)
    await publishing
    await polling

    assert await found(poller) == [lock.instance_id]


async def test_publishing_in_a_transaction_wakes_the_waiter(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    async with storage.transaction():
        await publish(storage)
        await publish(storage, "1", "elsewhere")

    assert await found(storage) == [instance_id]


async def test_an_instance_that_asks_in_a_rolled_back_transaction_still_runs(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await subscriber(harness, storage)
    await publish(storage)
    with pytest.raises(KeyError):
        async with storage.transaction():
            assert await receive(storage, lock) is not None
            raise KeyError

    assert await received(storage, lock.instance_id) == []
    assert await receive(storage, lock) is not None
    assert await received(storage, lock.instance_id) == [1]


# Bringing a message to a waiting instance.


@MODES
async def test_a_waiting_instance_is_woken_with_its_message(
    harness: Harness, storage: SQLStorage, mode: ChannelMode
) -> None:
    instance_id = await waiter(harness, storage, mode=mode)
    number = await publish(storage, '{"n": 1}')

    delivered = await deliver(storage, instance_id)

    assert delivered == ChannelDeliveryResult(instance_id, "order", "receive:1")
    assert await received(storage, instance_id) == [{"n": 1}]
    assert await status_of(storage, instance_id) == WorkflowStatus.RUNNING
    assert await lock_of(storage, instance_id) == FREE
    subscription = await storage.get_channel_subscription(instance_id, "orders")
    assert subscription is not None
    assert (subscription.activity_id, subscription.timeout_at) == (None, None)
    assert await storage.get_delivery_cursor(instance_id, "orders") == (number if mode is BROADCAST else 0)
    assert [resumable.instance_id for resumable in await storage.find_resumable_workflows()] == [instance_id]


async def test_a_delivery_draws_no_lock_token(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    await publish(storage)

    await deliver(storage, instance_id)

    lock = await storage.try_acquire_lock(instance_id, "worker-1", 30)
    assert lock is not None
    assert lock.token == 2


async def test_the_oldest_message_is_delivered_whatever_the_hint_says(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    for data in "123":
        await publish(storage, data)
    newest = (await storage.get_pending_channel_messages("orders"))[-1]

    await storage.deliver_channel_message_with_lock(instance_id, "orders", newest, "courier", 30)

    assert await received(storage, instance_id) == [1]
    assert await receive_all(storage, instance_id) == [1, 2, 3]


@MODES
async def test_a_message_is_not_delivered_twice(harness: Harness, storage: SQLStorage, mode: ChannelMode) -> None:
    instance_id = await waiter(harness, storage, mode=mode)
    couriers = [storage, await another(harness), await another(harness)]
    await publish(storage)

    outcomes = await asyncio.gather(*(deliver(couriers[n % 3], instance_id) for n in range(6)))
    repaired = await deliver(storage, instance_id)

    assert sum(outcome is not None for outcome in [*outcomes, repaired]) == 1
    assert await received(storage, instance_id) == [1]


async def test_every_broadcast_subscriber_receives_every_message_once_in_order(
    harness: Harness, storage: SQLStorage
) -> None:
    instances = [await waiter(harness, storage) for _ in range(3)]
    for data in "1234":
        await publish(storage, data)

    for instance_id in instances:
        await deliver(storage, instance_id)

    for instance_id in instances:
        assert await receive_all(storage, instance_id) == [1, 2, 3, 4]


async def test_competing_subscribers_share_the_messages(harness: Harness, storage: SQLStorage) -> None:
    instances = [await waiter(harness, storage, mode=COMPETING) for _ in range(4)]
    couriers = [storage, await another(harness)]
    for data in "123":
        await publish(storage, data)

    await asyncio.gather(*(deliver(couriers[n % 2], instance_id) for n, instance_id in enumerate(instances)))
    for instance_id in instances:
        await deliver(storage, instance_id)

    shared = [await received(storage, instance_id) for instance_id in instances]
    assert sorted(data for each in shared for data in each) == [1, 2, 3]
    assert max(len(each) for each in shared) == 1
    assert await storage.get_pending_channel_messages("orders") == []


async def test_a_claimed_message_is_delivered_to_its_owner_only(harness: Harness, storage: SQLStorage) -> None:
    owner = await waiter(harness, storage, mode=COMPETING)
    other = await waiter(harness, storage, mode=COMPETING)
    number = await publish(storage)
    await storage.claim_channel_message(number, owner)

    assert await deliver(storage, other) is None
    assert await deliver(storage, owner) is not None

    assert await received(storage, owner) == [1]
    assert await row(storage, "SELECT COUNT(*) FROM channel_message_claims") == (0,)


async def test_a_direct_message_reaches_its_instance(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, "mail", DIRECT)
    own = f"mail:{lock.instance_id}"
    await receive(storage, lock, own)
    await publish(storage, "1", own)

    assert await found(storage) == [lock.instance_id]
    await deliver(storage, lock.instance_id, own)

    assert await received(storage, lock.instance_id) == [1]


async def test_nothing_is_delivered_to_an_instance_that_does_not_wait_for_it(
    harness: Harness, storage: SQLStorage
) -> None:
    running = await subscriber(harness, storage)
    elsewhere = await waiter(harness, storage, "invoices")
    await storage.subscribe_to_channel(elsewhere, "orders", BROADCAST)
    unsubscribed = await waiter(harness, storage, "receipts")
    empty = await waiter(harness, storage, "empty")
    await publish(storage)
    before = await contents(storage)

    for instance_id in (running.instance_id, elsewhere, unsubscribed, "nobody"):
        assert await deliver(storage, instance_id) is None
    assert await deliver(storage, empty, "empty") is None

    assert await contents(storage) == before


async def test_nothing_is_delivered_while_somebody_else_holds_the_instance(
    harness: Harness, storage: SQLStorage
) -> None:
    instance_id = await waiter(harness, storage)
    await publish(storage)
    await storage.try_acquire_lock(instance_id, "worker-2", 30)
    assert await deliver(storage, instance_id) is None

    harness.advance(seconds=31)

    assert await found(storage) == [instance_id]
    assert await deliver(storage, instance_id) is not None


@pytest.mark.databases("postgres", "mariadb", "mysql")
async def test_a_courier_passes_over_an_instance_that_is_being_written(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    await publish(storage)
    courier = await another(harness)
    async with storage.transaction():
        await storage.update_instance_activity(instance_id, "busy")
        async with asyncio.timeout(5):
            assert await deliver(courier, instance_id) is None

    assert await found(courier) == [instance_id]


@pytest.mark.parametrize("status", [WorkflowStatus.COMPLETED, WorkflowStatus.FAILED, WorkflowStatus.CANCELLED])
async def test_no_message_and_no_timeout_brings_a_finished_instance_back(
    harness: Harness, storage: SQLStorage, status: WorkflowStatus
) -> None:
    instance_id = await waiter(harness, storage, timeout_at=await storage.current_time())
    [expired] = await storage.find_expired_channel_subscriptions()
    await publish(storage)
    await storage.update_instance_status(instance_id, status)
    before = await contents(storage)

    assert await deliver(storage, instance_id) is None
    assert await storage.deliver_channel_message(instance_id, ChannelMessage(channel="orders")) is None
    assert await storage.deliver_and_claim(expired, "worker-1", 30) is None
    assert not await storage.expire_channel_receive(expired)
    await storage.clear_channel_waiting_state(instance_id, "orders")

    assert await contents(storage) == before


async def test_a_compensating_instance_goes_on_compensating(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    await storage.update_instance_status(lock.instance_id, WorkflowStatus.COMPENSATING, lock=lock)
    await receive(storage, lock)
    assert await status_of(storage, lock.instance_id) == WorkflowStatus.WAITING_FOR_MESSAGE
    await publish(storage)

    await deliver(storage, lock.instance_id)

    assert await status_of(storage, lock.instance_id) == WorkflowStatus.COMPENSATING


async def test_who_holds_the_lock_can_deliver_and_keeps_it(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    await publish(storage)
    lock = await storage.try_acquire_lock(instance_id, "worker-2", 30)
    assert lock is not None

    delivered = await storage.deliver_channel_message(instance_id, ChannelMessage(channel="orders"), lock=lock)

    assert delivered == ChannelDeliveryResult(instance_id, "order", "receive:1")
    assert await received(storage, instance_id) == [1]
    assert await status_of(storage, instance_id) == WorkflowStatus.RUNNING
    await storage.update_instance_activity(instance_id, "next:1", lock=lock)
    assert await storage.deliver_channel_message(instance_id, ChannelMessage(channel="orders"), lock=lock) is None


async def test_who_has_lost_the_lock_delivers_nothing(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    await publish(storage)
    lock = await storage.try_acquire_lock(instance_id, "worker-2", 30)
    harness.advance(seconds=31)

    with pytest.raises(LockLostError):
        await storage.deliver_channel_message(instance_id, ChannelMessage(channel="orders"), lock=lock)
    with pytest.raises(InstanceNotFoundError):
        await storage.deliver_channel_message("nobody", ChannelMessage(channel="orders"))

    assert await received(storage, instance_id) == []


@MODES
async def test_a_crash_anywhere_in_a_delivery_leaves_nothing_of_it(
    harness: Harness, storage: SQLStorage, mode: ChannelMode
) -> None:
    instance_id = await waiter(harness, storage, mode=mode)
    await publish(storage)
    before = await contents(storage)

    for statement in range(100):
        storage.runner.probe = crash_before_statement(statement, "deliver_channel_message_with_lock")
        try:
            delivered = await deliver(storage, instance_id)
            break
        except Crash:
            storage.runner.probe = None
            assert await contents(storage) == before
    else:
        raise AssertionError("it never came through")

    assert delivered is not None
    assert statement > 5
    assert await received(storage, instance_id) == [1]


@MODES
async def test_a_crash_anywhere_in_a_receive_leaves_nothing_of_it(
    harness: Harness, storage: SQLStorage, mode: ChannelMode
) -> None:
    lock = await subscriber(harness, storage, mode=mode)
    await publish(storage)
    before = await contents(storage)

    for statement in range(100):
        storage.runner.probe = crash_before_statement(statement, "register_channel_receive_and_release_lock")
        try:
            delivered = await receive(storage, lock)
            break
        except Crash:
            storage.runner.probe = None
            assert await contents(storage) == before
    else:
        raise AssertionError("it never came through")

    assert delivered is not None
    assert statement > 5
    assert await received(storage, lock.instance_id) == [1]


# What is written into history.


AWKWARD = [
    "9007199254740993",
    '{"b": 1,"a":2, "b": 3}',
    '"Grüße, 世界 🎉 \\u00e9 \\\\ %s :name {x}"',
    " [1.0, 1e400 ] ",
]


@pytest.mark.parametrize("data", AWKWARD)
async def test_a_received_message_stands_in_history_byte_for_byte(
    harness: Harness, storage: SQLStorage, data: str
) -> None:
    lock = await subscriber(harness, storage)
    await storage.publish_to_channel("orders", data, data)
    [message] = await storage.get_pending_channel_messages("orders")
    await receive(storage, lock)

    [event] = await history_of(storage, lock.instance_id)

    assert (event.event_type, event.activity_id, event.data_type) == ("ChannelMessageReceived", "receive:1", "json")
    assert event.event_data is not None
    assert event.event_data.count(data) == 2
    envelope = json.loads(event.event_data)
    assert list(envelope) == ["id", "channel", "data", "metadata", "published_at"]
    assert (envelope["id"], envelope["channel"]) == (message.message_id, "orders")
    assert message.published_at is not None
    assert envelope["published_at"] == message.published_at.isoformat(timespec="microseconds")


async def test_a_received_message_without_metadata_has_an_empty_object(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage, 'a "quoted" \\ chännel')
    await publish(storage, "1", 'a "quoted" \\ chännel')
    await receive(storage, lock, 'a "quoted" \\ chännel')

    [event] = await history_of(storage, lock.instance_id)

    envelope = json.loads(event.event_data or "")
    assert (envelope["channel"], envelope["metadata"]) == ('a "quoted" \\ chännel', {})


@MODES
async def test_a_received_binary_message_keeps_payload_and_metadata(
    harness: Harness, storage: SQLStorage, mode: ChannelMode
) -> None:
    lock = await subscriber(harness, storage, mode=mode)
    await storage.publish_to_channel("orders", b"\0\xff", '{"kind": "image"}')
    await receive(storage, lock)

    [event] = await history_of(storage, lock.instance_id)

    assert (event.event_data_binary, event.data_type) == (b"\0\xff", "binary")
    envelope = json.loads(event.event_data or "")
    assert (envelope["metadata"], envelope["data"], envelope["channel"]) == ({"kind": "image"}, None, "orders")


@pytest.mark.parametrize("payload", ['"' + "x" * 998 + '"', b"x" * 1000])
async def test_a_message_of_the_largest_size_can_be_received(harness: Harness, payload: str | bytes) -> None:
    storage = await harness.open(max_payload_bytes=1000)
    lock = await subscriber(harness, storage)
    await storage.publish_to_channel("orders", payload, payload if isinstance(payload, str) else None)

    assert await receive(storage, lock) is not None
    [event] = await history_of(storage, lock.instance_id)

    assert event.event_data_binary == payload or json.loads(event.event_data or "")["data"] == "x" * 998


# The poll that repairs any lost hint.


async def test_the_poll_finds_who_waits_for_a_message_that_is_there(harness: Harness, storage: SQLStorage) -> None:
    first, second = await waiter(harness, storage), await waiter(harness, storage)
    await waiter(harness, storage, "quiet")
    await subscriber(harness, storage)
    await publish(storage)

    subscriptions = await storage.find_deliverable_subscriptions()

    assert [subscription.instance_id for subscription in subscriptions] == [first, second]
    assert {subscription.activity_id for subscription in subscriptions} == {"receive:1"}
    assert {(subscription.channel, subscription.mode) for subscription in subscriptions} == {("orders", BROADCAST)}


@MODES
async def test_the_poll_finds_everybody_until_everything_is_delivered(
    harness: Harness, storage: SQLStorage, mode: ChannelMode
) -> None:
    instances = [await waiter(harness, storage, mode=mode) for _ in range(3)]
    for _ in instances:
        await publish(storage)

    for expected in (3, 2, 1):
        waiting = await found(storage)
        assert len(waiting) == expected
        await deliver(storage, waiting[0])

    assert await found(storage) == []
    assert [await received(storage, instance_id) for instance_id in instances] == [[1]] * 3


async def test_the_poll_returns_the_longest_waiting_first_up_to_its_limit(
    harness: Harness, storage: SQLStorage
) -> None:
    instances = [await waiter(harness, storage, f"c{n % 2}") for n in range(4)]
    await publish(storage, "1", "c1")
    await publish(storage, "1", "c0")

    assert await found(storage, limit=3) == instances[:3]
    assert await found(storage, limit=0) == instances


async def test_the_poll_sees_the_workflows_and_services_it_is_asked_for(harness: Harness, storage: SQLStorage) -> None:
    mine = await waiter(harness, storage, workflow_name="mine", owner_service="here")
    theirs = await waiter(harness, storage, workflow_name="theirs", owner_service="there")
    foreign = await waiter(harness, await harness.open(framework="elsewhere"))
    await publish(storage)

    assert await found(storage, workflow_names=["mine"]) == [mine]
    assert await found(storage, owner_service="there") == [theirs]
    assert await found(storage, workflow_names=[]) == []
    assert await found(storage, workflow_names=["mine"], owner_service="there") == []
    assert await found(storage) == [mine, theirs]
    assert await found(await harness.open(framework="elsewhere")) == [foreign]


async def test_others_do_not_starve_the_poll(harness: Harness, storage: SQLStorage) -> None:
    for _ in range(5):
        await waiter(harness, storage, workflow_name="theirs")
    mine = await waiter(harness, storage, workflow_name="mine")
    await publish(storage)

    assert await found(storage, limit=2, workflow_names=["mine"]) == [mine]


async def test_a_waiter_the_poll_was_not_asked_for_is_not_forgotten(harness: Harness, storage: SQLStorage) -> None:
    theirs = await waiter(harness, storage, workflow_name="theirs")
    await publish(storage)

    for _ in range(3):
        assert await found(storage, workflow_names=["mine"]) == []

    assert await found(storage, workflow_names=["theirs"]) == [theirs]


async def test_a_parked_waiter_is_not_woken_but_not_forgotten(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    await storage.park(instance_id, "later")
    await publish(storage)

    for _ in range(3):
        assert await found(storage) == []
    await storage.unpark(instance_id)

    assert await found(storage) == [instance_id]


async def test_a_poll_without_news_looks_at_no_waiter(harness: Harness, storage: SQLStorage) -> None:
    for n in range(5):
        await waiter(harness, storage, f"c{n}")
    await subscriber(harness, storage)
    await publish(storage)  # nobody waits for this one
    await found(storage)

    run = operations_run(storage)
    assert await found(storage) == []

    assert set(run) <= {"_anything_new_to_deliver"}


async def test_a_channel_is_news_again_with_every_message(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    for data in (1, 2, 3):
        await publish(storage, str(data))
        assert await found(storage) == [instance_id]
        await deliver(storage, instance_id)
        await found(storage)
        assert (await receive_all(storage, instance_id))[-1] == data


async def test_a_message_whose_claim_is_given_up_wakes_those_who_wait_for_it(
    harness: Harness, storage: SQLStorage
) -> None:
    owner = await subscriber(harness, storage, mode=COMPETING)
    waiting = await waiter(harness, storage, mode=COMPETING)
    await storage.claim_channel_message(await publish(storage), owner.instance_id)
    assert await found(storage) == []

    await storage.update_instance_output(owner.instance_id, None, lock=owner)

    assert await found(storage) == [waiting]


async def test_a_wait_left_over_from_an_earlier_suspension_is_still_served(
    harness: Harness, storage: SQLStorage
) -> None:
    instance_id = await waiter(harness, storage)
    moment = await storage.current_time()
    timer = TimerSubscription(instance_id=instance_id, timer_id="t1", expires_at=moment)
    await storage.register_timer_subscription(timer)
    assert await storage.fire_timer(timer, worker_id="worker-1")
    await publish(storage)
    assert await found(storage) == []  # it runs

    lock = await storage.try_acquire_lock(instance_id, "worker-1", 30)
    assert lock is not None
    later = TimerSubscription(instance_id=instance_id, timer_id="t2", expires_at=moment + timedelta(days=1))
    await storage.suspend(instance_id, [later], lock=lock)

    assert await found(storage) == [instance_id]


# Who waits.


async def test_those_who_wait_for_a_channel_are_listed_longest_first(harness: Harness, storage: SQLStorage) -> None:
    first = await waiter(harness, storage, mode=COMPETING)
    await subscriber(harness, storage, mode=COMPETING)
    await waiter(harness, storage, "invoices")
    second = await waiter(harness, storage, mode=COMPETING)

    waiting = await storage.get_channel_subscribers_waiting("orders")

    assert [(subscription.instance_id, subscription.activity_id) for subscription in waiting] == [
        (first, "receive:1"),
        (second, "receive:1"),
    ]
    assert {subscription.mode for subscription in waiting} == {COMPETING}
    limited = await storage.get_channel_subscribers_waiting("orders", limit=1)
    assert [subscription.instance_id for subscription in limited] == [first]


# Timeouts.


async def test_a_receive_times_out_and_the_timeout_is_its_result(harness: Harness, storage: SQLStorage) -> None:
    timeout_at = await storage.current_time() + timedelta(seconds=10)
    instance_id = await waiter(harness, storage, timeout_at=timeout_at)
    assert await storage.find_expired_channel_subscriptions() == []

    harness.advance(seconds=11)
    [expired] = await storage.find_expired_channel_subscriptions()
    assert (expired.instance_id, expired.channel, expired.activity_id) == (instance_id, "orders", "receive:1")
    assert await storage.expire_channel_receive(expired)

    [event] = await history_of(storage, instance_id)
    assert (event.event_type, event.activity_id) == ("MessageTimeout", "receive:1")
    told = json.loads(event.event_data or "")
    assert (told["_error"], told["error_type"], told["channel"]) == (True, "TimeoutError", "orders")
    assert told["timeout_at"] == timeout_at.isoformat(timespec="microseconds")
    assert await status_of(storage, instance_id) == WorkflowStatus.RUNNING
    assert await storage.find_expired_channel_subscriptions() == []


async def test_timeouts_are_found_oldest_first_up_to_the_limit(harness: Harness, storage: SQLStorage) -> None:
    now = await storage.current_time()
    instances = [await waiter(harness, storage, timeout_at=now - timedelta(seconds=n)) for n in (1, 3, 2)]

    expired = await storage.find_expired_channel_subscriptions(limit=2)

    assert [subscription.instance_id for subscription in expired] == [instances[1], instances[2]]


async def test_timeouts_are_found_for_the_workflows_and_services_asked_for(
    harness: Harness, storage: SQLStorage
) -> None:
    now = await storage.current_time()
    mine = await waiter(harness, storage, timeout_at=now, workflow_name="mine", owner_service="here")
    parked = await waiter(harness, storage, timeout_at=now, workflow_name="mine")
    await storage.park(parked, "later")
    await waiter(harness, storage, timeout_at=now, workflow_name="theirs")
    await waiter(harness, await harness.open(framework="elsewhere"), timeout_at=now, workflow_name="mine")

    async def expired(**options: Any) -> list[str]:
        return [each.instance_id for each in await storage.find_expired_channel_subscriptions(**options)]

    assert await expired(workflow_names=["mine"]) == [mine]
    assert await expired(owner_service="here", limit=1) == [mine]
    assert len(await expired()) == 2


async def test_a_receive_has_a_message_or_a_timeout_never_both(harness: Harness, storage: SQLStorage) -> None:
    now = await storage.current_time()
    delivered, timed_out = [await waiter(harness, storage, timeout_at=now) for _ in range(2)]
    both = await storage.find_expired_channel_subscriptions()
    await publish(storage)

    assert await deliver(storage, delivered) is not None
    assert [await storage.expire_channel_receive(each) for each in both] == [False, True]
    assert await deliver(storage, timed_out) is None

    assert [event.event_type for event in await history_of(storage, delivered)] == ["ChannelMessageReceived"]
    assert [event.event_type for event in await history_of(storage, timed_out)] == ["MessageTimeout"]
    assert await receive_all(storage, timed_out) == [1]


async def test_rivals_for_a_timeout_are_decided_by_the_database(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage, timeout_at=await storage.current_time())
    rival = await another(harness)
    await publish(storage)
    [expired] = await storage.find_expired_channel_subscriptions()

    outcomes = await asyncio.gather(
        storage.expire_channel_receive(expired), rival.expire_channel_receive(expired), deliver(rival, instance_id)
    )

    assert sum(bool(outcome) for outcome in outcomes) == 1
    assert len(await history_of(storage, instance_id)) == 1


async def test_a_timeout_that_is_not_due_does_not_expire(harness: Harness, storage: SQLStorage) -> None:
    timeout_at = await storage.current_time() + timedelta(seconds=10)
    instance_id = await waiter(harness, storage, timeout_at=timeout_at)
    patient = await waiter(harness, storage)

    for each in (instance_id, patient):
        subscription = await storage.get_channel_subscription(each, "orders")
        assert subscription is not None
        assert not await storage.expire_channel_receive(subscription)

    assert await status_of(storage, instance_id) == WorkflowStatus.WAITING_FOR_MESSAGE


async def test_a_timeout_restores_the_status_it_was_suspended_from(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    await storage.update_instance_status(lock.instance_id, WorkflowStatus.COMPENSATING, lock=lock)
    await receive(storage, lock, timeout_at=await storage.current_time())

    [expired] = await storage.find_expired_channel_subscriptions()
    await storage.expire_channel_receive(expired)

    assert await status_of(storage, lock.instance_id) == WorkflowStatus.COMPENSATING


# No longer waiting.


async def test_an_instance_that_stops_waiting_runs_again(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)

    for _ in range(2):
        await storage.clear_channel_waiting_state(instance_id, "orders")

    assert await status_of(storage, instance_id) == WorkflowStatus.RUNNING
    subscription = await storage.get_channel_subscription(instance_id, "orders")
    assert subscription is not None
    assert subscription.activity_id is None
    assert [resumable.instance_id for resumable in await storage.find_resumable_workflows()] == [instance_id]


@pytest.mark.parametrize("end", ["clear", "unsubscribe", "cleanup"])
async def test_whoever_stops_the_waiting_of_an_instance_it_holds_keeps_its_lock(
    harness: Harness, storage: SQLStorage, end: str
) -> None:
    instance_id = await waiter(harness, storage)
    lock = await storage.try_acquire_lock(instance_id, "worker-1", 30)

    if end == "clear":
        await storage.clear_channel_waiting_state(instance_id, "orders")
    elif end == "unsubscribe":
        await storage.unsubscribe_from_channel(instance_id, "orders", lock=lock)
    else:
        await storage.cleanup_instance_subscriptions(instance_id)

    assert await status_of(storage, instance_id) == WorkflowStatus.RUNNING
    await storage.update_instance_activity(instance_id, "next:1", lock=lock)


@pytest.mark.parametrize("end", ["clear", "unsubscribe"])
async def test_an_instance_with_another_wait_goes_on_waiting(harness: Harness, storage: SQLStorage, end: str) -> None:
    instance_id = await waiter(harness, storage)
    moment = await storage.current_time() + timedelta(days=1)
    await storage.register_timer_subscription(
        TimerSubscription(instance_id=instance_id, timer_id="t", expires_at=moment)
    )

    if end == "clear":
        await storage.clear_channel_waiting_state(instance_id, "orders")
    else:
        await storage.unsubscribe_from_channel(instance_id, "orders")
    await publish(storage)

    assert await status_of(storage, instance_id) == WorkflowStatus.WAITING_FOR_MESSAGE
    assert await found(storage) == []


async def test_who_does_not_wait_for_the_channel_is_left_alone(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage, "invoices")
    await storage.subscribe_to_channel(instance_id, "orders", BROADCAST)
    before = await contents(storage)

    await storage.clear_channel_waiting_state(instance_id, "orders")
    await storage.clear_channel_waiting_state("nobody", "orders")

    assert await contents(storage) == before


async def test_unsubscribing_ends_the_wait(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)

    await storage.unsubscribe_from_channel(instance_id, "orders")
    await publish(storage)

    assert await status_of(storage, instance_id) == WorkflowStatus.RUNNING
    assert await found(storage) == []
