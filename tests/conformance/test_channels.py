"""Channels: publishing, subscribing, reading, claiming, cursors."""

import asyncio
import json
from datetime import timedelta

import pytest

from romancy.storage import (
    ChannelMessage,
    ChannelMode,
    ChannelModeConflictError,
    InstanceNotFoundError,
    InvalidJSONError,
    InvalidKeyError,
    InvalidStatusTransitionError,
    PayloadTooLargeError,
    SQLStorage,
    WorkflowStatus,
)
from tests.conformance.arrange import (
    BROADCAST,
    COMPETING,
    DIRECT,
    another,
    data_pending,
    deliver,
    is_blocked,
    publish,
    receive_all,
    status_of,
    subscriber,
    waiter,
)
from tests.conformance.neighbours import row
from tests.harness import Harness, contents

AWKWARD_JSON = [
    "9007199254740993",
    '{"b": 1,"a":2, "b": 3}',
    '"Grüße, 世界 🎉 \\u00e9 \\" \\\\ %s :name {brace}"',
    " [1.0, 1e400, -0, null , true] ",
    '"' + "long " * 20_000 + '"',
]


# Publishing.


@pytest.mark.parametrize("data", AWKWARD_JSON)
async def test_json_is_kept_byte_for_byte(storage: SQLStorage, data: str) -> None:
    await storage.publish_to_channel("orders", data, data)

    [message] = await storage.get_pending_channel_messages("orders")

    assert (message.data, message.metadata, message.data_binary, message.data_type) == (data, data, None, "json")


@pytest.mark.parametrize("payload", [b"", bytes(range(256)), b"\xff\xfe not text %s"])
async def test_bytes_are_kept_with_their_metadata(storage: SQLStorage, payload: bytes) -> None:
    await storage.publish_to_channel("orders", payload, '{"kind": "image"}')

    [message] = await storage.get_pending_channel_messages("orders")

    assert (message.data, message.data_binary, message.data_type) == (None, payload, "binary")
    assert message.metadata == '{"kind": "image"}'


async def test_a_message_knows_its_channel_its_number_its_name_and_its_time(storage: SQLStorage) -> None:
    number = await storage.publish_to_channel("orders", "{}")

    [message] = await storage.get_pending_channel_messages("orders")

    assert (message.channel, message.id, message.metadata) == ("orders", number, None)
    assert message.message_id
    assert message.published_at is not None
    assert abs(message.published_at - await storage.current_time()) < timedelta(minutes=1)


async def test_messages_are_read_in_the_order_they_were_published(storage: SQLStorage) -> None:
    numbers = [await publish(storage, str(n)) for n in range(5)]

    assert [message.data for message in await storage.get_pending_channel_messages("orders")] == list("01234")
    assert numbers == sorted(numbers)
    after = await storage.get_pending_channel_messages("orders", numbers[1], 2)
    assert [message.data for message in after] == ["2", "3"]


async def test_a_page_of_messages_has_a_hundred_unless_told(storage: SQLStorage) -> None:
    await storage.publish_many([ChannelMessage(channel="orders", data="1")] * 101)

    assert len(await storage.get_pending_channel_messages("orders")) == 100
    assert len(await storage.get_pending_channel_messages("orders", 0, 0)) == 100
    with pytest.raises(ValueError, match="limit"):
        await storage.get_pending_channel_messages("orders", 0, -1)


@pytest.mark.parametrize("data", ["", "{", "{'a': 1}", "NaN", "\ud800"])
async def test_what_is_not_json_is_not_published(storage: SQLStorage, data: str) -> None:
    with pytest.raises(InvalidJSONError):
        await storage.publish_to_channel("orders", data)
    with pytest.raises(InvalidJSONError):
        await storage.publish_to_channel("orders", "{}", data)

    assert await storage.get_pending_channel_messages("orders") == []


@pytest.mark.parametrize("payload", ['"' + "x" * 100 + '"', b"x" * 101])
async def test_too_large_a_message_is_refused(harness: Harness, payload: str | bytes) -> None:
    storage = await harness.open(max_payload_bytes=100)

    with pytest.raises(PayloadTooLargeError):
        await storage.publish_to_channel("orders", payload)

    assert await storage.get_pending_channel_messages("orders") == []


@pytest.mark.parametrize("channel", ["", "x" * 256, "a\0b", "\ud800"])
async def test_a_channel_needs_a_proper_name(harness: Harness, storage: SQLStorage, channel: str) -> None:
    instance_id = await harness.instance(storage)
    before = await contents(storage)

    for attempt in (
        storage.publish_to_channel(channel, "{}"),
        storage.publish_many([ChannelMessage(channel="fine", data="{}"), ChannelMessage(channel=channel, data="{}")]),
        storage.subscribe_to_channel(instance_id, channel, BROADCAST),
        storage.unsubscribe_from_channel(instance_id, channel),
        storage.get_pending_channel_messages(channel),
        storage.get_channel_mode(channel),
        storage.update_delivery_cursor(instance_id, channel, 1),
        storage.clear_channel_waiting_state(instance_id, channel),
    ):
        with pytest.raises(InvalidKeyError):
            await attempt

    assert await contents(storage) == before


async def test_a_direct_channel_that_would_be_too_long_is_refused(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage, instance_id="i" * 200)

    with pytest.raises(InvalidKeyError):
        await storage.subscribe_to_channel(instance_id, "c" * 100, DIRECT)


async def test_channel_names_are_compared_byte_for_byte(harness: Harness, storage: SQLStorage) -> None:
    names = ["chan", "Chan", "chan ", "chän", "cha\u0308n", "chan\t", "%", "_", "x" * 255]
    for name in names:
        await storage.publish_to_channel(name, json.dumps(name))
        await subscriber(harness, storage, name, COMPETING if name == "Chan" else BROADCAST)

    for name in names:
        assert [message.data for message in await storage.get_pending_channel_messages(name)] == [json.dumps(name)]
        assert await storage.get_channel_mode(name) == (COMPETING if name == "Chan" else BROADCAST)


async def test_more_messages_than_a_transaction_should_hold_are_refused(storage: SQLStorage) -> None:
    with pytest.raises(ValueError, match="100,000 messages at once, not 100,001"):
        await storage.publish_many([ChannelMessage(channel="orders", data="1")] * 100_001)
    assert await storage.get_pending_channel_messages("orders") == []


async def test_many_messages_are_published_together_and_numbered_as_given(storage: SQLStorage) -> None:
    messages = [ChannelMessage(channel=f"c{n % 3}", data=str(n), metadata=f'{{"n": {n}}}') for n in reversed(range(9))]
    messages.append(ChannelMessage(channel="c0", data_binary=b"\0last"))

    numbers = await storage.publish_many(messages)

    stored = {
        message.id: message
        for channel in ("c0", "c1", "c2")
        for message in await storage.get_pending_channel_messages(channel)
    }
    assert [(stored[n].data, stored[n].data_binary, stored[n].metadata) for n in numbers] == [
        (message.data, message.data_binary, message.metadata) for message in messages
    ]
    in_channel = [message.data for message in await storage.get_pending_channel_messages("c0")]
    assert in_channel == ["6", "3", "0", None]


async def test_many_messages_are_published_all_or_none(storage: SQLStorage) -> None:
    assert await storage.publish_many([]) == []
    with pytest.raises(InvalidJSONError):
        await storage.publish_many([ChannelMessage(channel="a", data="1"), ChannelMessage(channel="a", data="{")])

    assert await storage.get_pending_channel_messages("a") == []


@pytest.mark.databases("postgres", "mariadb", "mysql")
async def test_publishers_lock_channels_in_the_order_of_their_names_and_never_each_other(
    harness: Harness, storage: SQLStorage
) -> None:
    rival, third = await another(harness), await another(harness)
    async with storage.transaction():
        await publish(storage, "1", "a")
        many = asyncio.create_task(
            rival.publish_many([ChannelMessage(channel="b", data="2"), ChannelMessage(channel="a", data="3")])
        )
        assert await is_blocked(many)
        async with asyncio.timeout(5):
            await publish(third, "4", "b")  # waiting for a, the rival has not taken b
    await many


async def test_a_message_published_in_a_transaction_appears_with_its_commit(
    harness: Harness, storage: SQLStorage
) -> None:
    reader = await another(harness)
    async with storage.transaction():
        await publish(storage, "1")
        assert await reader.get_pending_channel_messages("orders") == []

    assert [message.data for message in await reader.get_pending_channel_messages("orders")] == ["1"]


async def test_a_rolled_back_message_was_never_there(storage: SQLStorage) -> None:
    with pytest.raises(KeyError):
        async with storage.transaction():
            await publish(storage, "1")
            raise KeyError
    await publish(storage, "2")

    assert [message.data for message in await storage.get_pending_channel_messages("orders")] == ["2"]


@pytest.mark.parametrize("first_commits", [True, False])
async def test_a_number_never_becomes_visible_after_a_larger_one(
    harness: Harness, storage: SQLStorage, first_commits: bool
) -> None:
    rival, reader = await another(harness), await another(harness)
    await storage.begin_transaction()
    await storage.publish_to_channel("orders", '"first"')
    second = asyncio.create_task(rival.publish_to_channel("orders", '"second"'))

    assert await is_blocked(second)
    assert await reader.get_pending_channel_messages("orders") == []
    await (storage.commit_transaction() if first_commits else storage.rollback_transaction())
    await second

    visible = [message.data for message in await reader.get_pending_channel_messages("orders")]
    assert visible == ['"first"', '"second"'] if first_commits else ['"second"']


@pytest.mark.databases("postgres", "mariadb", "mysql")
async def test_publishers_of_different_channels_do_not_wait_for_each_other(
    harness: Harness, storage: SQLStorage
) -> None:
    rival = await another(harness)
    async with storage.transaction():
        await publish(storage, "1")
        async with asyncio.timeout(5):
            await rival.publish_to_channel("invoices", "2")

    assert len(await storage.get_pending_channel_messages("invoices")) == 1


# Subscribing.


async def test_subscribing_twice_changes_nothing(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    first = await storage.get_channel_subscription(lock.instance_id, "orders")
    await publish(storage, "1")

    await storage.subscribe_to_channel(lock.instance_id, "orders", BROADCAST)

    assert await storage.get_channel_subscription(lock.instance_id, "orders") == first
    assert await data_pending(storage, lock.instance_id) == [1]


async def test_a_subscription_tells_what_it_is(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage, mode=COMPETING)

    subscription = await storage.get_channel_subscription(lock.instance_id, "orders")

    assert subscription is not None
    assert (subscription.instance_id, subscription.channel) == (lock.instance_id, "orders")
    assert (subscription.mode, subscription.activity_id, subscription.timeout_at) == (COMPETING, None, None)
    assert await storage.get_channel_subscription(lock.instance_id, "invoices") is None


@pytest.mark.parametrize(("mode", "pending"), [(BROADCAST, [2]), (COMPETING, [1, 2])])
async def test_broadcast_starts_after_what_is_visible_and_competing_with_what_is_left(
    harness: Harness, storage: SQLStorage, mode: ChannelMode, pending: list[int]
) -> None:
    await publish(storage, "1")
    lock = await subscriber(harness, storage, mode=mode)
    await publish(storage, "2")

    assert await data_pending(storage, lock.instance_id) == pending


async def test_a_direct_subscription_receives_from_the_first_message_on(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.publish_to_channel(f"mail:{instance_id}", "1")

    await storage.subscribe_to_channel(instance_id, "mail", DIRECT)

    own = f"mail:{instance_id}"
    assert await data_pending(storage, instance_id, own) == [1]
    assert await storage.get_channel_mode(own) == BROADCAST
    assert await storage.get_channel_subscription(instance_id, "mail") is None


async def test_a_channel_has_no_mode_without_subscribers(harness: Harness, storage: SQLStorage) -> None:
    assert await storage.get_channel_mode("orders") is None
    lock = await subscriber(harness, storage)
    assert await storage.get_channel_mode("orders") == BROADCAST

    await storage.unsubscribe_from_channel(lock.instance_id, "orders")

    assert await storage.get_channel_mode("orders") is None


@pytest.mark.parametrize(("present", "asked"), [(BROADCAST, COMPETING), (COMPETING, BROADCAST)])
async def test_a_channel_has_one_mode_while_it_has_subscribers(
    harness: Harness, storage: SQLStorage, present: ChannelMode, asked: ChannelMode
) -> None:
    holder = await subscriber(harness, storage, mode=present)
    other = await harness.instance(storage)

    with pytest.raises(ChannelModeConflictError) as caught:
        await storage.subscribe_to_channel(other, "orders", asked)
    with pytest.raises(ChannelModeConflictError):
        await storage.subscribe_to_channel(holder.instance_id, "orders", asked)

    assert (caught.value.channel, caught.value.mode, caught.value.requested) == ("orders", present, asked)
    assert await storage.get_channel_subscription(other, "orders") is None


async def test_a_direct_channel_is_a_broadcast_channel_to_others(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage, "mail", DIRECT)
    other = await harness.instance(storage)

    with pytest.raises(ChannelModeConflictError):
        await storage.subscribe_to_channel(other, f"mail:{lock.instance_id}", COMPETING)


async def test_the_mode_is_free_again_when_the_last_subscriber_has_finished(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await subscriber(harness, storage, mode=BROADCAST)
    await storage.update_instance_output(lock.instance_id, "1", lock=lock)

    await subscriber(harness, storage, mode=COMPETING)

    assert await storage.get_channel_mode("orders") == COMPETING


@pytest.mark.parametrize("first_commits", [True, False])
async def test_rivals_for_the_mode_of_a_channel_are_decided_by_the_commit(
    harness: Harness, storage: SQLStorage, first_commits: bool
) -> None:
    first, second = await harness.instance(storage), await harness.instance(storage)
    rival = await another(harness)
    await storage.begin_transaction()
    await storage.subscribe_to_channel(first, "orders", BROADCAST)
    late = asyncio.create_task(rival.subscribe_to_channel(second, "orders", COMPETING))

    assert await is_blocked(late)
    await (storage.commit_transaction() if first_commits else storage.rollback_transaction())
    [outcome] = await asyncio.gather(late, return_exceptions=True)

    assert isinstance(outcome, ChannelModeConflictError) == first_commits
    assert await storage.get_channel_mode("orders") == (BROADCAST if first_commits else COMPETING)


async def test_only_an_unfinished_instance_can_subscribe(harness: Harness, storage: SQLStorage) -> None:
    finished = await harness.instance(storage, status=WorkflowStatus.COMPLETED)

    with pytest.raises(InvalidStatusTransitionError):
        await storage.subscribe_to_channel(finished, "orders", BROADCAST)
    with pytest.raises(InstanceNotFoundError):
        await storage.subscribe_to_channel("nobody", "orders", BROADCAST)


async def test_unsubscribing_is_idempotent_and_forgets_the_cursor(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    await publish(storage)
    await deliver(storage, instance_id)
    assert await receive_all(storage, instance_id) == [1]

    for _ in range(2):
        await storage.unsubscribe_from_channel(instance_id, "orders")

    assert await storage.get_channel_subscription(instance_id, "orders") is None
    assert await storage.get_delivery_cursor(instance_id, "orders") == 0
    assert await status_of(storage, instance_id) == WorkflowStatus.RUNNING
    await storage.unsubscribe_from_channel("nobody", "orders")


async def test_subscribing_again_starts_anew(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    await publish(storage, "1")
    await storage.unsubscribe_from_channel(lock.instance_id, "orders")
    await publish(storage, "2")

    await storage.subscribe_to_channel(lock.instance_id, "orders", BROADCAST)
    await publish(storage, "3")

    assert await data_pending(storage, lock.instance_id) == [3]


async def test_who_is_not_subscribed_has_nothing_pending(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await publish(storage, "1")

    assert await data_pending(storage, instance_id) == []


# Cursors.


async def test_a_cursor_counts_everything_up_to_it_as_received(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    numbers = await storage.publish_many([ChannelMessage(channel="orders", data=str(n)) for n in range(3)])

    await storage.update_delivery_cursor(lock.instance_id, "orders", numbers[1])

    assert await storage.get_delivery_cursor(lock.instance_id, "orders") == numbers[1]
    assert await data_pending(storage, lock.instance_id) == [2]


async def test_a_cursor_never_moves_back_nor_past_the_newest_message(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    numbers = await storage.publish_many([ChannelMessage(channel="orders", data=str(n)) for n in range(3)])
    await publish(storage, "1", "invoices")

    await storage.update_delivery_cursor(lock.instance_id, "orders", 10**12)
    assert await storage.get_delivery_cursor(lock.instance_id, "orders") == numbers[2]
    await storage.update_delivery_cursor(lock.instance_id, "orders", numbers[0])
    assert await storage.get_delivery_cursor(lock.instance_id, "orders") == numbers[2]

    await storage.publish_to_channel("orders", '"next"')
    assert await data_pending(storage, lock.instance_id) == ["next"]


async def test_a_cursor_is_kept_for_every_reader_of_the_shared_tables(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    number = await publish(storage)

    await storage.update_delivery_cursor(lock.instance_id, "orders", number)

    for query in (
        "SELECT cursor_message_id FROM channel_subscriptions WHERE instance_id = :id",
        "SELECT last_delivered_id FROM channel_delivery_cursors WHERE instance_id = :id",
    ):
        assert await row(storage, query, id=lock.instance_id) == (number,)


@pytest.mark.parametrize(
    "update",
    [
        "UPDATE channel_subscriptions SET cursor_message_id = :n WHERE instance_id = :id",
        "INSERT INTO channel_delivery_cursors (channel, instance_id, last_delivered_id) VALUES ('orders', :id, :n)",
    ],
    ids=["Edda's", "Romancy's"],
)
async def test_the_larger_of_the_two_cursors_counts(harness: Harness, storage: SQLStorage, update: str) -> None:
    lock = await subscriber(harness, storage)
    numbers = await storage.publish_many([ChannelMessage(channel="orders", data=str(n)) for n in range(3)])

    await storage.conn().execute(update, id=lock.instance_id, n=numbers[1])

    assert await storage.get_delivery_cursor(lock.instance_id, "orders") == numbers[1]
    subscription = await storage.get_channel_subscription(lock.instance_id, "orders")
    assert subscription is not None
    assert subscription.cursor_message_id == numbers[1]
    assert await data_pending(storage, lock.instance_id) == [2]


async def test_a_cursor_of_nobody_is_zero_and_cannot_be_moved(storage: SQLStorage) -> None:
    assert await storage.get_delivery_cursor("nobody", "orders") == 0
    with pytest.raises(InstanceNotFoundError):
        await storage.update_delivery_cursor("nobody", "orders", 1)


# Claims.


async def test_a_message_is_claimed_by_one_instance(harness: Harness, storage: SQLStorage) -> None:
    first = await subscriber(harness, storage, mode=COMPETING)
    second = await subscriber(harness, storage, mode=COMPETING)
    number = await publish(storage)

    assert await storage.claim_channel_message(number, first.instance_id)
    assert not await storage.claim_channel_message(number, second.instance_id)

    assert await data_pending(storage, second.instance_id) == []
    assert await data_pending(storage, first.instance_id) == [1]


async def test_a_claim_names_the_message_by_its_uuid(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage, mode=COMPETING)
    number = await publish(storage)

    await storage.claim_channel_message(number, lock.instance_id)

    query = "SELECT m.id FROM channel_message_claims k JOIN channel_messages m ON m.message_id = k.message_id"
    assert await row(storage, query) == (number,)


async def test_rivals_for_a_claim_are_decided_by_the_database(harness: Harness, storage: SQLStorage) -> None:
    instances = [await subscriber(harness, storage, mode=COMPETING) for _ in range(6)]
    storages = [storage, await another(harness)]
    number = await publish(storage)

    won = await asyncio.gather(
        *(storages[n % 2].claim_channel_message(number, lock.instance_id) for n, lock in enumerate(instances))
    )

    assert sorted(won) == [False] * 5 + [True]


@pytest.mark.parametrize("end", ["finished", "deleted"])
async def test_the_claim_of_an_instance_that_is_gone_is_released(
    harness: Harness, storage: SQLStorage, end: str
) -> None:
    first = await subscriber(harness, storage, mode=COMPETING)
    second = await subscriber(harness, storage, mode=COMPETING)
    number = await publish(storage)
    await storage.claim_channel_message(number, first.instance_id)

    await storage.update_instance_output(first.instance_id, None)
    if end == "deleted":
        harness.advance(seconds=1)
        assert await storage.delete_finished_instances(timedelta(0)) == 1

    assert await data_pending(storage, second.instance_id) == [1]
    assert await storage.claim_channel_message(number, second.instance_id)


async def test_what_is_gone_cannot_be_claimed(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage, mode=COMPETING)
    number = await publish(storage)
    await storage.delete_channel_message(number)

    assert not await storage.claim_channel_message(number, lock.instance_id)
    with pytest.raises(InstanceNotFoundError):
        await storage.claim_channel_message(number, "nobody")


@pytest.mark.parametrize("commits", [True, False])
async def test_a_message_that_is_just_being_deleted_is_claimed_only_if_it_stays(
    harness: Harness, storage: SQLStorage, commits: bool
) -> None:
    lock = await subscriber(harness, storage, mode=COMPETING)
    number = await publish(storage)
    other = await another(harness)
    await other.begin_transaction()
    await other.delete_channel_message(number)
    claiming = asyncio.create_task(storage.claim_channel_message(number, lock.instance_id))
    assert await is_blocked(claiming)
    await (other.commit_transaction() if commits else other.rollback_transaction())

    assert await claiming != commits


async def test_deleting_a_message_takes_its_claim_along_and_can_be_repeated(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await subscriber(harness, storage, mode=COMPETING)
    number = await publish(storage)
    await storage.claim_channel_message(number, lock.instance_id)

    for _ in range(2):
        await storage.delete_channel_message(number)

    assert await storage.get_pending_channel_messages("orders") == []
    assert await row(storage, "SELECT COUNT(*) FROM channel_message_claims") == (0,)
