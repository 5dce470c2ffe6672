"""Other frameworks in the same tables: we exchange messages with them, and neither disturbs the other."""

import asyncio
import contextlib
import json
import sqlite3
from datetime import timedelta

import pytest

from romancy.storage import (
    ChannelDeliveryResult,
    ForeignInstanceError,
    InstanceWait,
    SQLStorage,
    TimerSubscription,
    WorkflowStatus,
)
from tests.conformance.arrange import (
    BROADCAST,
    COMPETING,
    another,
    data_pending,
    deliver,
    found,
    is_blocked,
    operations_run,
    publish,
    receive,
    receive_all,
    received,
    status_of,
    subscriber,
    waiter,
)
from tests.conformance.neighbours import (
    EDDA,
    ROMANCY,
    leave_a_gap,
    neighbour,
    neighbour_publishes,
    neighbour_subscribes,
    neighbour_waits,
    row,
)
from tests.harness import Harness, contents, history_of

FRAMEWORKS = pytest.mark.parametrize("framework", [EDDA, ROMANCY])
SUBSCRIPTION = "SELECT activity_id, timeout_at, cursor_message_id FROM channel_subscriptions WHERE instance_id = :id"


# Where they look.


async def test_our_waiters_wait_where_no_neighbour_looks(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage, timeout_at=await storage.current_time())

    waiting = await row(storage, SUBSCRIPTION, id=instance_id)

    assert waiting is not None
    assert waiting[:2] == (None, None)


@FRAMEWORKS
async def test_our_polls_leave_neighbours_alone(harness: Harness, storage: SQLStorage, framework: str) -> None:
    instance_id = await neighbour_waits(storage, "e1", framework=framework)
    conn = storage.conn()
    past = await storage.current_time() - timedelta(hours=1)
    await conn.execute("UPDATE channel_subscriptions SET timeout_at = :past_at", past_at=past)
    await storage.register_timer_subscription(
        TimerSubscription(instance_id=instance_id, timer_id="sleep:1", expires_at=past)
    )
    await publish(storage)
    before = await contents(storage)

    assert await found(storage) == []
    assert await storage.find_expired_channel_subscriptions() == []
    assert await storage.find_expired_timers() == []
    subscription = await storage.get_channel_subscription(instance_id, "orders")
    assert subscription is not None
    assert not await storage.expire_channel_receive(subscription)

    after = await contents(storage)
    assert {table for table in after if after[table] != before[table]} <= {"romancy_channels"}


# Their waiters.


async def test_a_waiting_neighbour_is_listed_with_ours(harness: Harness, storage: SQLStorage) -> None:
    ours = await waiter(harness, storage)
    await neighbour_waits(storage, "e1")
    await neighbour_waits(storage, "g1", framework=ROMANCY)
    await neighbour_waits(storage, "e2", "invoices")

    waiting = await storage.get_channel_subscribers_waiting("orders")

    assert {(each.instance_id, each.activity_id) for each in waiting} == {
        (ours, "receive:1"),
        ("e1", "receive_orders:1"),
        ("g1", "receive_orders:1"),
    }


async def test_edda_receives_a_message_in_its_own_words(storage: SQLStorage) -> None:
    await neighbour_waits(storage, "e1")
    number = await storage.publish_to_channel("orders", '{"n": 9007199254740993}', '{"b": 1, "a": 2}')
    [message] = await storage.get_pending_channel_messages("orders")

    delivered = await deliver(storage, "e1")

    assert delivered == ChannelDeliveryResult("e1", "neighbourly", "receive_orders:1")
    [event] = await history_of(storage, "e1")
    assert (event.event_type, event.activity_id, event.data_type) == (
        "ChannelMessageReceived",
        "receive_orders:1",
        "json",
    )
    assert message.published_at is not None
    published_at = message.published_at.isoformat(timespec="microseconds")
    assert event.event_data == (
        f'{{"id": "{message.message_id}", "channel": "orders", "data": {{"n": 9007199254740993}},'
        f' "metadata": {{"b": 1, "a": 2}}, "published_at": "{published_at}"}}'
    )
    assert await row(storage, SUBSCRIPTION, id="e1") == (None, None, number)


async def test_romancy_receives_a_message_in_its_own_words(storage: SQLStorage) -> None:
    await neighbour_waits(storage, "g1", framework=ROMANCY)
    number = await storage.publish_to_channel("orders", '{"n": 1}', '{"a": 2}')
    [message] = await storage.get_pending_channel_messages("orders")

    await deliver(storage, "g1")

    [event] = await history_of(storage, "g1")
    assert message.published_at is not None
    assert json.loads(event.event_data or "") == {
        "id": number,
        "channel_name": "orders",
        "data": {"n": 1},
        "metadata": {"a": 2},
        "created_at": message.published_at.isoformat(timespec="microseconds"),
    }
    assert await row(storage, "SELECT last_delivered_id FROM channel_delivery_cursors") == (number,)


@FRAMEWORKS
async def test_a_woken_neighbour_is_free_and_runs(storage: SQLStorage, framework: str) -> None:
    await neighbour_waits(storage, "e1", framework=framework)
    await storage.conn().execute("UPDATE workflow_instances SET locked_by = ''")
    await publish(storage, "{}")

    assert await deliver(storage, "e1") is not None

    lock = "SELECT status, locked_by, locked_at, lock_expires_at FROM workflow_instances"
    assert await row(storage, lock) == ("running", None, None, None)
    assert await deliver(storage, "e1") is None


async def test_a_neighbour_that_holds_its_lock_is_not_disturbed(storage: SQLStorage) -> None:
    await neighbour_waits(storage, "e1")
    expires_at = await storage.current_time() + timedelta(minutes=5)
    await storage.conn().execute(
        "UPDATE workflow_instances SET locked_by = 'worker', lock_expires_at = :expires_at", expires_at=expires_at
    )
    await publish(storage, "{}")
    before = await contents(storage)

    assert await deliver(storage, "e1") is None

    assert await contents(storage) == before


@pytest.mark.parametrize("status", ["completed", "running", "cancelled"])
async def test_a_neighbour_that_does_not_wait_is_not_woken(storage: SQLStorage, status: str) -> None:
    await neighbour_waits(storage, "e1")
    await storage.conn().execute("UPDATE workflow_instances SET status = :status", status=status)
    await publish(storage, "{}")

    assert await deliver(storage, "e1") is None

    assert await status_of(storage, "e1") == status


async def test_a_neighbour_is_given_what_lies_behind_its_cursor(storage: SQLStorage) -> None:
    for data in ('{"n": 1}', '{"n": 2}'):
        await neighbour_publishes(storage, data=data)
    newest = (await storage.get_pending_channel_messages("orders"))[-1]
    await neighbour_waits(storage, "e1", cursor=newest.id)
    assert await deliver(storage, "e1") is None

    await neighbour_publishes(storage, data='{"n": 3}')
    await publish(storage, '{"n": 4}')

    assert await data_pending(storage, "e1") == [{"n": 3}, {"n": 4}]
    await deliver(storage, "e1")
    assert await received(storage, "e1") == [{"n": 3}]


async def test_the_cursor_that_romancy_keeps_counts_too(storage: SQLStorage) -> None:
    first, second = await publish(storage, '{"n": 1}'), await publish(storage, '{"n": 2}')
    await neighbour_waits(storage, "g1", framework=ROMANCY, cursor=None)
    await storage.conn().execute(
        "INSERT INTO channel_delivery_cursors (channel, instance_id, last_delivered_id) VALUES ('orders', 'g1', :n)",
        n=first,
    )

    await deliver(storage, "g1")

    [event] = await history_of(storage, "g1")
    assert json.loads(event.event_data or "")["data"] == {"n": 2}
    assert await storage.get_delivery_cursor("g1", "orders") == second


async def test_a_competing_neighbour_takes_the_message_away(harness: Harness, storage: SQLStorage) -> None:
    ours = await waiter(harness, storage, mode=COMPETING)
    await neighbour_waits(storage, "e1", mode="competing", cursor=None)
    await publish(storage, "{}")

    assert await deliver(storage, "e1") is not None
    assert await deliver(storage, ours) is None

    assert await storage.get_pending_channel_messages("orders") == []


@FRAMEWORKS
@pytest.mark.parametrize("mode", [BROADCAST, COMPETING])
async def test_bytes_reach_neighbours_as_json_since_they_can_read_nothing_else(
    storage: SQLStorage, framework: str, mode: str
) -> None:
    await neighbour_waits(storage, "e1", mode=mode, framework=framework)
    await storage.publish_to_channel("orders", b"\0\xff", '{"a": 1}')

    assert await deliver(storage, "e1") is not None

    [event] = await history_of(storage, "e1")
    envelope = json.loads(event.event_data or "")
    assert (envelope["data"], envelope["metadata"]) == ({"data_base64": "AP8="}, {"a": 1})
    assert event.event_data_binary is None
    assert await data_pending(storage, "e1") == []


@FRAMEWORKS
async def test_bytes_reach_our_own_receivers_in_a_database_taken_over(harness: Harness, framework: str) -> None:
    storage = await harness.open(framework=framework)
    instance_id = await waiter(harness, storage)
    await publish(storage, b"\0")

    assert await found(storage) == [instance_id]
    assert await deliver(storage, instance_id) is not None

    [event] = await history_of(storage, instance_id)
    assert event.event_data_binary == b"\0"


# Their messages.


@pytest.mark.parametrize("mode", [BROADCAST, COMPETING])
async def test_a_neighbours_message_wakes_our_waiter(harness: Harness, storage: SQLStorage, mode: str) -> None:
    instance_id = await waiter(harness, storage, mode=BROADCAST if mode == BROADCAST else COMPETING)
    name = await neighbour_publishes(storage, data='{"n": 1}')

    assert await found(storage) == [instance_id]
    await deliver(storage, instance_id)

    [event] = await history_of(storage, instance_id)
    envelope = json.loads(event.event_data or "")
    assert (envelope["id"], envelope["data"], envelope["metadata"]) == (name, {"n": 1}, {"source_instance_id": "e1"})
    assert await found(storage) == []
    assert await receive_all(storage, instance_id) == [{"n": 1}]


async def test_a_neighbours_message_is_received_at_once(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    await neighbour_publishes(storage, data="1")

    assert await receive(storage, lock) is not None
    assert await receive_all(storage, lock.instance_id) == [1]


async def test_messages_of_all_are_received_in_the_order_of_their_numbers(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await subscriber(harness, storage)
    for n in range(1, 7):
        await (publish(storage, str(n)) if n % 2 else neighbour_publishes(storage, data=str(n)))

    await storage.release_lock(lock.instance_id, "worker-1", lock=lock)

    assert await receive_all(storage, lock.instance_id) == [1, 2, 3, 4, 5, 6]


async def test_what_neighbours_published_before_the_subscription_is_not_received(
    harness: Harness, storage: SQLStorage
) -> None:
    for _ in range(3):
        await neighbour_publishes(storage)
    lock = await subscriber(harness, storage)
    await neighbour_publishes(storage, data='{"n": 2}')

    assert await data_pending(storage, lock.instance_id) == [{"n": 2}]


async def test_a_neighbours_number_that_comes_late_is_received_once(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    gap = await leave_a_gap(storage)
    await publish(storage, "2")
    await receive(storage, lock, activity_id="receive:1")

    await neighbour_publishes(storage, data="1", message_id=gap)

    assert await data_pending(storage, lock.instance_id) == [1]
    assert await receive_all(storage, lock.instance_id) == [2, 1]
    assert await data_pending(storage, lock.instance_id) == []
    await publish(storage, "3")
    await deliver(storage, lock.instance_id)
    assert await receive_all(storage, lock.instance_id) == [2, 1, 3]


async def test_a_neighbours_number_that_comes_late_wakes_our_waiter_once(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    gap = await leave_a_gap(storage)
    await neighbour_publishes(storage, data="2")
    await receive(storage, lock, activity_id="receive:1")
    assert await receive_all(storage, lock.instance_id) == [2]
    assert await found(storage) == []

    await neighbour_publishes(storage, data="1", message_id=gap)

    assert await found(storage) == [lock.instance_id]
    await deliver(storage, lock.instance_id)
    assert await received(storage, lock.instance_id) == [2, 1]
    assert await receive_all(storage, lock.instance_id) == [2, 1]
    assert await found(storage) == []


async def test_a_neighbours_number_that_comes_after_the_subscription_is_received(
    harness: Harness, storage: SQLStorage
) -> None:
    gap = await leave_a_gap(storage)
    await neighbour_publishes(storage, data="2")
    lock = await subscriber(harness, storage)

    await neighbour_publishes(storage, data="1", message_id=gap)

    assert await data_pending(storage, lock.instance_id) == [1]


async def test_a_cursor_counts_only_what_was_visible_when_it_was_moved(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    gap = await leave_a_gap(storage)
    await neighbour_publishes(storage, data="2")
    await storage.update_delivery_cursor(lock.instance_id, "orders", 10**9)
    assert await data_pending(storage, lock.instance_id) == []

    await neighbour_publishes(storage, data="1", message_id=gap)

    assert await data_pending(storage, lock.instance_id) == [1]


async def test_our_own_numbers_never_come_late(harness: Harness, storage: SQLStorage) -> None:
    first = await publish(storage, "1")
    lock = await subscriber(harness, storage)
    await publish(storage, "2")
    await storage.release_lock(lock.instance_id, "worker-1", lock=lock)

    assert await receive_all(storage, lock.instance_id) == [2]
    assert (await storage.get_pending_channel_messages("orders"))[0].id == first


@pytest.mark.databases("postgres", "mariadb", "mysql")
async def test_a_neighbours_slow_commit_loses_no_message(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    slow = await another(harness)
    async with slow.transaction():
        await neighbour_publishes(slow, data="1")
        await publish(storage, "2")
        assert await found(storage) == [instance_id]
        await deliver(storage, instance_id)
        assert await receive_all(storage, instance_id) == [2]

    assert await found(storage) == [instance_id]
    await deliver(storage, instance_id)
    assert await receive_all(storage, instance_id) == [2, 1]


@pytest.mark.parametrize("parked", [False, True])
async def test_a_neighbours_message_is_found_however_long_ago_it_came(
    harness: Harness, storage: SQLStorage, parked: bool
) -> None:
    instance_id = await waiter(harness, storage, workflow_name="mine")
    if parked:
        await storage.park(instance_id, "later")
    await neighbour_publishes(storage, data="0")
    for _ in range(3):
        harness.advance(seconds=3600)
        assert await found(storage, workflow_names=["theirs"]) == []
        await neighbour_publishes(storage, "elsewhere")
    await storage.unpark(instance_id)

    assert await found(storage, workflow_names=["mine"]) == [instance_id]


async def test_neighbours_messages_are_looked_at_no_more_when_they_are_old(
    harness: Harness, storage: SQLStorage
) -> None:
    instance_id = await waiter(harness, storage)
    for _ in range(3):
        await neighbour_publishes(storage, data="1")
    await deliver(storage, instance_id)
    assert await receive_all(storage, instance_id) == [1, 1, 1]
    assert await found(storage) == []

    harness.advance(seconds=3600)
    await found(storage)
    run = operations_run(storage)

    assert await found(storage) == []
    assert set(run) <= {"_anything_new_to_deliver"}


async def test_one_waiter_with_many_messages_of_neighbours_does_not_hide_the_next(
    harness: Harness, storage: SQLStorage
) -> None:
    first, second = await waiter(harness, storage, "a"), await waiter(harness, storage, "b")
    for _ in range(5):
        await neighbour_publishes(storage, "a")
    await neighbour_publishes(storage, "b")

    assert await found(storage, limit=2) == [first, second]


async def test_the_longest_waiting_comes_first_whoever_published(harness: Harness, storage: SQLStorage) -> None:
    first, second = await waiter(harness, storage, "a"), await waiter(harness, storage, "b")
    await neighbour_publishes(storage, "a")
    await publish(storage, "1", "b")

    assert await found(storage, limit=1) == [first]
    assert await found(storage) == [first, second]


@pytest.mark.databases("postgres", "mariadb", "mysql")
@pytest.mark.parametrize("commits", [True, False])
async def test_a_message_that_a_neighbour_is_taking_is_not_given_to_ours(
    harness: Harness, storage: SQLStorage, commits: bool
) -> None:
    instance_id = await waiter(harness, storage, mode=COMPETING)
    await neighbour(storage, "e1")
    name = await neighbour_publishes(storage, data="1")
    await publish(storage, "2")
    other = await another(harness)
    await other.begin_transaction()
    await other.conn().execute(
        "INSERT INTO channel_message_claims (message_id, instance_id) VALUES (:name, 'e1')", name=name
    )
    delivering = asyncio.create_task(deliver(storage, instance_id))
    assert await is_blocked(delivering)
    await other.conn().execute("DELETE FROM channel_message_claims WHERE message_id = :name", name=name)
    await other.conn().execute("DELETE FROM channel_messages WHERE message_id = :name", name=name)
    await (other.commit_transaction() if commits else other.rollback_transaction())

    assert await delivering is not None
    assert await received(storage, instance_id) == [2 if commits else 1]


async def test_what_a_neighbour_has_claimed_is_left_to_it_while_it_lives(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage, mode=COMPETING)
    await neighbour(storage, "e1", status="running")
    name = await neighbour_publishes(storage, data="1")
    await storage.conn().execute(
        "INSERT INTO channel_message_claims (message_id, instance_id) VALUES (:name, 'e1')", name=name
    )
    assert await found(storage) == []
    assert await deliver(storage, instance_id) is None

    await storage.conn().execute("UPDATE workflow_instances SET status = 'completed' WHERE instance_id = 'e1'")

    assert await found(storage) == [instance_id]
    assert await deliver(storage, instance_id) is not None


# What they leave behind.


async def test_a_finished_neighbours_subscription_keeps_neither_mode_nor_messages(
    harness: Harness, storage: SQLStorage
) -> None:
    await neighbour(storage, "e1", status="completed")
    await neighbour_subscribes(storage, "e1", "orders", "competing", cursor=None)

    lock = await subscriber(harness, storage, mode=BROADCAST)
    await publish(storage)
    await receive(storage, lock)
    harness.advance(seconds=60)

    assert await storage.get_channel_mode("orders") == BROADCAST
    assert await storage.cleanup_old_channel_messages(timedelta(0)) == 1


async def test_a_living_neighbour_keeps_the_messages_it_has_not_received(harness: Harness, storage: SQLStorage) -> None:
    first, second = await publish(storage, "1"), await publish(storage, "2")
    await neighbour(storage, "e1", status="running")
    await neighbour_subscribes(storage, "e1", "orders", cursor=first)
    harness.advance(seconds=60)

    assert await storage.cleanup_old_channel_messages(timedelta(0)) == 1

    assert [message.id for message in await storage.get_pending_channel_messages("orders")] == [second]


async def test_a_neighbours_late_message_is_kept_until_it_is_received(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    gap = await leave_a_gap(storage)
    await publish(storage, "2")
    await receive(storage, lock, activity_id="receive:1")
    await neighbour_publishes(storage, data="1", message_id=gap)
    harness.advance(seconds=60)

    assert await storage.cleanup_old_channel_messages(timedelta(0)) == 1
    assert await receive_all(storage, lock.instance_id) == [2, 1]
    assert await storage.cleanup_old_channel_messages(timedelta(0)) == 1


@pytest.mark.databases("sqlite")
async def test_times_without_a_fraction_are_read(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    await neighbour_publishes(storage)
    await storage.conn().execute("UPDATE channel_messages SET published_at = datetime('now')")

    assert await deliver(storage, instance_id) is not None
    [message] = await storage.get_pending_channel_messages("orders")
    assert message.published_at is not None
    assert message.published_at.microsecond == 0


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("claimed_as", ["its name", "its number"])
async def test_a_neighbour_that_checks_no_foreign_keys_cannot_claim_what_we_have_delivered(
    harness: Harness, storage: SQLStorage, claimed_as: str
) -> None:
    receiver = await waiter(harness, storage, "jobs", COMPETING)
    rival = await neighbour_waits(storage, "rival", "jobs", "competing")
    number = await publish(storage, "1", "jobs")
    name = await row(storage, "SELECT message_id FROM channel_messages")
    assert name is not None
    claim = "INSERT INTO channel_message_claims (message_id, instance_id) VALUES (?, ?)"
    values = (name[0] if claimed_as == "its name" else str(number), rival)

    with contextlib.closing(sqlite3.connect(harness.url.removeprefix("sqlite:///"))) as theirs:
        theirs.execute(claim, values)  # while it is there, they may
        theirs.rollback()
        assert await deliver(storage, receiver, "jobs") is not None
        with pytest.raises(sqlite3.IntegrityError, match="the message is gone"):
            theirs.execute(claim, values)


@FRAMEWORKS
async def test_a_neighbour_that_would_not_tell_us_of_its_end_cannot_be_waited_for(
    harness: Harness, storage: SQLStorage, framework: str
) -> None:
    await neighbour(storage, "theirs", framework, status="running")
    lock = await harness.locked(storage)
    before = await contents(storage)

    with pytest.raises(ForeignInstanceError, match="cannot be waited for; let it publish a message"):
        await storage.suspend(lock.instance_id, [InstanceWait("theirs", "child:1")], lock=lock)

    assert await contents(storage) == before


@FRAMEWORKS
async def test_a_neighbour_that_has_finished_counts_as_finished(
    harness: Harness, storage: SQLStorage, framework: str
) -> None:
    await neighbour(storage, "theirs", framework, status="completed")
    lock = await harness.locked(storage)

    [event] = await storage.suspend(lock.instance_id, [InstanceWait("theirs", "child:1")], lock=lock)

    assert json.loads(event.event_data or "") == {"instance_id": "theirs", "status": "completed"}


@FRAMEWORKS
async def test_instances_of_a_framework_that_we_stand_in_for_can_be_waited_for(
    harness: Harness, framework: str
) -> None:
    storage = await harness.open(framework=framework)
    await neighbour(storage, "theirs", framework, status="running")
    lock = await harness.locked(storage)
    await storage.suspend(lock.instance_id, [InstanceWait("theirs", "child:1")], lock=lock)

    await storage.update_instance_output("theirs", "1")

    assert await status_of(storage, lock.instance_id) == WorkflowStatus.RUNNING
