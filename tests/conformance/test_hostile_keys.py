"""Keys are compared byte for byte, never cut, never part of a statement; what no database can hold is refused."""

import inspect
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from romancy.storage import (
    ANY,
    ChannelMessage,
    ChannelMode,
    ChannelSubscription,
    ChannelWait,
    CompensationEntry,
    InstanceWait,
    InvalidKeyError,
    ListInstancesOptions,
    Lock,
    LockLostError,
    OutboxEvent,
    SQLStorage,
    Storage,
    TimerSubscription,
    WorkflowInstance,
    WorkflowStatus,
)
from tests.harness import Harness, contents, history_of, step

PAST = datetime(2020, 1, 1, tzinfo=UTC)
BROADCAST = ChannelMode.BROADCAST

KEYS = [
    *("a", "A", "a ", "a  ", " a", "ä", "á", "a\u0301", "Ａ", "ａ"),  # case, trailing spaces, accents, widths
    *("ß", "ss", "SS", "i", "I", "ı", "İ", "æ", "ae", "\u03a9", "\u2126"),  # letters that collations call equal
    *("%", "_", "a%", "a_", "\\", "\\\\", "a\\", "'", "''", '"', "`", "--", "/*", "?", ":key", "$1", "%s", "{now}"),
    *("'; DROP TABLE workflow_instances; --", "a||b", "a:b", "{}", "[]", "null", "NULL", "0", "00", "1e0", "1"),
    *("😀", "😁", "👨‍👩‍👧", "\U0010ffff", "\uffff", "\u200b", "a\u200b", "\t", "\n", "\r\n", "\x01", "\x7f", "\u0085"),
    *("x" * 255, "X" * 255, "x" * 254 + " ", "é" * 255, "😀" * 255),
]
assert len(set(KEYS)) == len(KEYS)

Use = Callable[[SQLStorage, Any], Awaitable[object]]

MESSAGE = ChannelMessage(channel="news", data="{}")


def instance(**fields: Any) -> WorkflowInstance:
    return WorkflowInstance(**{"instance_id": "new", "workflow_name": "order", **fields})


def timer(**fields: Any) -> TimerSubscription:
    return TimerSubscription(**{"instance_id": "given", "timer_id": "nap", "expires_at": PAST, **fields})


def event(**fields: Any) -> OutboxEvent:
    return OutboxEvent(**{"event_id": "new", "event_type": "made", "event_source": "test", **fields})


def compensation(**fields: Any) -> CompensationEntry:
    return CompensationEntry(**{"instance_id": "given", "activity_id": "a:1", "activity_name": "undo", **fields})


def subscription(**fields: Any) -> ChannelSubscription:
    return ChannelSubscription(**{"instance_id": "given", "channel": "news", "mode": BROADCAST, **fields})


async def suspend(storage: SQLStorage, *waits: Any, instance_id: str = "given") -> object:
    lock = await storage.try_acquire_lock("given", "worker-1", 30)
    assert lock is not None
    try:
        return await storage.suspend(instance_id, waits, lock=lock)
    finally:
        await storage.release_lock("given", "worker-1", lock=lock)


async def recur(storage: SQLStorage, instance_id: str) -> object:
    lock = await storage.try_acquire_lock("given", "worker-1", 30)
    assert lock is not None
    try:
        return await storage.recur_instance(instance_id, "{}", lock=lock)
    finally:
        await storage.release_lock("given", "worker-1", lock=lock)


SOMEBODYS = Lock("given", 1, "worker-1", datetime(2026, 1, 1, tzinfo=UTC), WorkflowStatus.RUNNING)

USES: dict[str, Use] = {
    "create_instance instance_id": lambda s, k: s.create_instance(instance(instance_id=k)),
    "create_instance workflow_name": lambda s, k: s.create_instance(instance(workflow_name=k)),
    "create_instance continued_from": lambda s, k: s.create_instance(instance(continued_from=k)),
    "create_instance current_activity_id": lambda s, k: s.create_instance(instance(current_activity_id=k)),
    "get_instance": lambda s, k: s.get_instance(k),
    "update_instance_status": lambda s, k: s.update_instance_status(k, WorkflowStatus.FAILED),
    "update_instance_activity instance_id": lambda s, k: s.update_instance_activity(k, "a:1"),
    "update_instance_activity activity_id": lambda s, k: s.update_instance_activity("given", k),
    "update_instance_output": lambda s, k: s.update_instance_output(k, "{}"),
    "cancel_instance": lambda s, k: s.cancel_instance(k, "why not"),
    "list_instances framework": lambda s, k: s.list_instances(framework=k or "\0"),
    "suspend instance_id": lambda s, k: suspend(s, timer(), instance_id=k),
    "suspend timer_id": lambda s, k: suspend(s, timer(timer_id=k)),
    "suspend timer activity_id": lambda s, k: suspend(s, timer(activity_id=k)),
    "suspend channel": lambda s, k: suspend(s, ChannelWait(k, "a:1")),
    "suspend channel activity_id": lambda s, k: suspend(s, ChannelWait("news", k)),
    "suspend awaited instance": lambda s, k: suspend(s, InstanceWait(k, "a:1")),
    "suspend awaited activity_id": lambda s, k: suspend(s, InstanceWait("given", k)),
    "park": lambda s, k: s.park(k, "why not"),
    "unpark": lambda s, k: s.unpark(k),
    "recur_instance": recur,
    "try_acquire_lock instance_id": lambda s, k: s.try_acquire_lock(k, "worker-1", 30),
    "try_acquire_lock worker_id": lambda s, k: s.try_acquire_lock("given", k, 30),
    "claim_resumable_workflows": lambda s, k: s.claim_resumable_workflows(k, 30),
    "release_lock instance_id": lambda s, k: s.release_lock(k, "worker-1"),
    "release_lock worker_id": lambda s, k: s.release_lock("given", k),
    "refresh_lock instance_id": lambda s, k: s.refresh_lock(k, "worker-1", 30),
    "refresh_lock worker_id": lambda s, k: s.refresh_lock("given", k, 30),
    "append_history instance_id": lambda s, k: s.append_history(step(k)),
    "append_history activity_id": lambda s, k: s.append_history(step("given", k)),
    "append_history event_type": lambda s, k: s.append_history(step("given", event_type=k)),
    "append_history_many": lambda s, k: s.append_history_many([step("given", "b:1"), step("given", k)]),
    "get_history_paginated": lambda s, k: s.get_history_paginated(k),
    "get_history_to_replay": lambda s, k: s.get_history_to_replay(k),
    "get_history_event instance_id": lambda s, k: s.get_history_event(k, "a:1"),
    "get_history_event activity_id": lambda s, k: s.get_history_event("given", k),
    "get_history_count": lambda s, k: s.get_history_count(k),
    "register_timer_subscription instance_id": lambda s, k: s.register_timer_subscription(timer(instance_id=k)),
    "register_timer_subscription timer_id": lambda s, k: s.register_timer_subscription(timer(timer_id=k)),
    "register_timer_subscription activity_id": lambda s, k: s.register_timer_subscription(timer(activity_id=k)),
    "register_timer_subscription_and_release_lock": lambda s, k: s.register_timer_subscription_and_release_lock(
        timer(), "given", k
    ),
    "fire_timer timer_id": lambda s, k: s.fire_timer(timer(timer_id=k), worker_id="worker-1"),
    "fire_timer worker_id": lambda s, k: s.fire_timer(timer(), worker_id=k),
    "fire_and_claim timer_id": lambda s, k: s.fire_and_claim(timer(timer_id=k), "worker-1", 30),
    "fire_and_claim worker_id": lambda s, k: s.fire_and_claim(timer(), k, 30),
    "remove_timer_subscription instance_id": lambda s, k: s.remove_timer_subscription(k, "nap"),
    "remove_timer_subscription timer_id": lambda s, k: s.remove_timer_subscription("given", k),
    "add_outbox_event event_id": lambda s, k: s.add_outbox_event(event(event_id=k)),
    "add_outbox_event event_type": lambda s, k: s.add_outbox_event(event(event_type=k)),
    "add_outbox_event event_source": lambda s, k: s.add_outbox_event(event(event_source=k)),
    "add_outbox_event content_type": lambda s, k: s.add_outbox_event(event(content_type=k)),
    "add_outbox_event record": lambda s, k: s.add_outbox_event(event(), record=step("given", k)),
    "get_pending_outbox_events owner": lambda s, k: s.get_pending_outbox_events(owner=k),
    "mark_outbox_event_sent": lambda s, k: s.mark_outbox_event_sent(k),
    "mark_outbox_event_failed": lambda s, k: s.mark_outbox_event_failed(k),
    "increment_outbox_attempts": lambda s, k: s.increment_outbox_attempts(k),
    "add_compensation instance_id": lambda s, k: s.add_compensation(compensation(instance_id=k)),
    "add_compensation activity_id": lambda s, k: s.add_compensation(compensation(activity_id=k)),
    "add_compensation activity_name": lambda s, k: s.add_compensation(compensation(activity_name=k)),
    "get_compensations": lambda s, k: s.get_compensations(k),
    "publish_to_channel": lambda s, k: s.publish_to_channel(k, "{}"),
    "publish_many": lambda s, k: s.publish_many([MESSAGE, ChannelMessage(channel=k, data="{}")]),
    "publish_once event_key": lambda s, k: s.publish_once(k, "news", "{}"),
    "publish_once channel": lambda s, k: s.publish_once("new", k, "{}"),
    "subscribe_to_channel instance_id": lambda s, k: s.subscribe_to_channel(k, "other", BROADCAST),
    "subscribe_to_channel channel": lambda s, k: s.subscribe_to_channel("given", k, BROADCAST),
    "subscribe_to_channel direct": lambda s, k: s.subscribe_to_channel("given", k, ChannelMode.DIRECT),
    "unsubscribe_from_channel instance_id": lambda s, k: s.unsubscribe_from_channel(k, "news"),
    "unsubscribe_from_channel channel": lambda s, k: s.unsubscribe_from_channel("given", k),
    "get_channel_subscription instance_id": lambda s, k: s.get_channel_subscription(k, "news"),
    "get_channel_subscription channel": lambda s, k: s.get_channel_subscription("given", k),
    "get_channel_mode": lambda s, k: s.get_channel_mode(k),
    "register_channel_receive_and_release_lock channel": lambda s, k: s.register_channel_receive_and_release_lock(
        "given", k, "worker-1", "a:1"
    ),
    "register_channel_receive_and_release_lock worker_id": lambda s, k: s.register_channel_receive_and_release_lock(
        "given", "news", k, "a:1"
    ),
    "register_channel_receive_and_release_lock activity_id": lambda s, k: s.register_channel_receive_and_release_lock(
        "given", "news", "worker-1", k
    ),
    "get_pending_channel_messages": lambda s, k: s.get_pending_channel_messages(k),
    "get_pending_channel_messages_for_instance instance_id": lambda s, k: s.get_pending_channel_messages_for_instance(
        k, "news"
    ),
    "get_pending_channel_messages_for_instance channel": lambda s, k: s.get_pending_channel_messages_for_instance(
        "given", k
    ),
    "claim_channel_message": lambda s, k: s.claim_channel_message(1, k),
    "update_delivery_cursor instance_id": lambda s, k: s.update_delivery_cursor(k, "news", 1),
    "update_delivery_cursor channel": lambda s, k: s.update_delivery_cursor("given", k, 1),
    "get_delivery_cursor instance_id": lambda s, k: s.get_delivery_cursor(k, "news"),
    "get_delivery_cursor channel": lambda s, k: s.get_delivery_cursor("given", k),
    "get_channel_subscribers_waiting": lambda s, k: s.get_channel_subscribers_waiting(k),
    "clear_channel_waiting_state instance_id": lambda s, k: s.clear_channel_waiting_state(k, "news"),
    "clear_channel_waiting_state channel": lambda s, k: s.clear_channel_waiting_state("given", k),
    "deliver_channel_message instance_id": lambda s, k: s.deliver_channel_message(k, MESSAGE),
    "deliver_channel_message_with_lock instance_id": lambda s, k: s.deliver_channel_message_with_lock(
        k, "news", MESSAGE, "worker-1", 30
    ),
    "deliver_channel_message_with_lock channel": lambda s, k: s.deliver_channel_message_with_lock(
        "given", k, MESSAGE, "worker-1", 30
    ),
    "deliver_channel_message_with_lock worker_id": lambda s, k: s.deliver_channel_message_with_lock(
        "given", "news", MESSAGE, k, 30
    ),
    "deliver_and_claim instance_id": lambda s, k: s.deliver_and_claim(subscription(instance_id=k), "worker-1", 30),
    "deliver_and_claim channel": lambda s, k: s.deliver_and_claim(subscription(channel=k), "worker-1", 30),
    "deliver_and_claim worker_id": lambda s, k: s.deliver_and_claim(subscription(), k, 30),
    "expire_channel_receive channel": lambda s, k: s.expire_channel_receive(subscription(channel=k)),
    "expire_channel_receive subscription activity_id": lambda s, k: s.expire_channel_receive(
        subscription(activity_id=k)
    ),
    "join_group instance_id": lambda s, k: s.join_group(k, "riders"),
    "join_group group_name": lambda s, k: s.join_group("given", k),
    "leave_group instance_id": lambda s, k: s.leave_group(k, "riders"),
    "leave_group group_name": lambda s, k: s.leave_group("given", k),
    "get_group_members": lambda s, k: s.get_group_members(k),
    "leave_all_groups": lambda s, k: s.leave_all_groups(k),
    "set_instance_state": lambda s, k: s.set_instance_state(k, "{}"),
    "get_instance_state": lambda s, k: s.get_instance_state(k),
    "count_takeover": lambda s, k: s.count_takeover(k, lock=SOMEBODYS),
    "note_refusal instance_id": lambda s, k: s.note_refusal(k, "code", lock=SOMEBODYS),
    "note_refusal code": lambda s, k: s.note_refusal("given", k, lock=SOMEBODYS),
    "unpark_refused workflow_name": lambda s, k: s.unpark_refused(k, "code"),
    "unpark_refused code": lambda s, k: s.unpark_refused("order", k),
    "try_acquire_system_lock lock_name": lambda s, k: s.try_acquire_system_lock(k, "worker-1", 30),
    "try_acquire_system_lock worker_id": lambda s, k: s.try_acquire_system_lock("leader", k, 30),
    "release_system_lock lock_name": lambda s, k: s.release_system_lock(k, "worker-1"),
    "release_system_lock worker_id": lambda s, k: s.release_system_lock("leader", k),
    "archive_history": lambda s, k: s.archive_history(k),
    "get_archived_history": lambda s, k: s.get_archived_history(k),
    "get_awaited_steps": lambda s, k: s.get_awaited_steps(k),
    "get_waits": lambda s, k: s.get_waits(k),
    "cleanup_instance_subscriptions": lambda s, k: s.cleanup_instance_subscriptions(k),
}
"""Every text argument that names something."""


NAMELESS = {
    *("initialize", "close", "begin_transaction", "commit_transaction", "rollback_transaction", "current_time"),
    *("find_resumable_workflows", "find_expired_timers", "find_deliverable_subscriptions"),
    *("find_expired_channel_subscriptions", "cleanup_stale_locks", "refresh_locks", "delete_finished_instances"),
    *("cleanup_old_outbox_events", "cleanup_old_channel_messages", "cleanup_expired_system_locks"),
    *("delete_channel_message", "cleanup_seen_events", "look_for_work"),
}
"""Operations whose arguments name nothing, or only narrow a search."""


def test_no_operation_is_missing_here() -> None:
    operations = {name for name, method in inspect.getmembers(Storage, inspect.iscoroutinefunction)}
    assert {use.split()[0] for use in USES} == operations - NAMELESS


@pytest.mark.parametrize(
    "key",
    ["", "x" * 256, "😀" * 256, "a\0b", "\0", "\ud800", "a\udfff", b"bytes", None, 17],
    ids=["empty", "256", "256 emoji", "NUL inside", "NUL", "surrogate", "surrogate inside", "bytes", "None", "number"],
)
async def test_what_is_no_key_is_refused_by_every_operation(harness: Harness, storage: SQLStorage, key: Any) -> None:
    await storage.create_instance(instance(instance_id="given"))
    before = await contents(storage)

    async def outcome(use: Use) -> str:
        try:
            return f"returned {await use(storage, key)!r}"
        except Exception as error:
            return f"raised {error!r}"

    outcomes = {name: await outcome(use) for name, use in USES.items() if not (key is None and optional(name))}
    assert {name: what for name, what in outcomes.items() if not what.startswith("raised InvalidKeyError")} == {}
    without_tokens = {**await contents(storage), "workflow_instances": before["workflow_instances"]}
    assert without_tokens == before


def optional(use: str) -> bool:
    """Whether None is a fine value of this argument."""
    names = (
        "continued_from",
        "current_activity_id",
        "timer activity_id",
        "subscription activity_id",
        "owner",
        "framework",
    )
    return use.endswith(names)


@pytest.mark.parametrize("label", ["owner_service", "source_hash"])
async def test_a_label_may_be_empty_but_not_unstorable(harness: Harness, storage: SQLStorage, label: str) -> None:
    await harness.instance(storage, **{label: ""})
    for text in ("x" * 256, "a\0b", "\ud800"):
        with pytest.raises(InvalidKeyError):
            await harness.instance(storage, **{label: text})


async def test_a_framework_needs_a_proper_name(harness: Harness) -> None:
    for name in ("", "x" * 51, "a\0b", "\ud800"):
        with pytest.raises(InvalidKeyError):
            await harness.open(framework=name)


# Each key is another one.


async def test_instances_are_told_apart_by_every_byte_of_their_id(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        for number, key in enumerate(KEYS):
            await harness.instance(storage, instance_id=key, workflow_name=key, owner_service=key, lock_token=number)

    for number, key in enumerate(KEYS):
        found = await storage.get_instance(key)
        assert found is not None
        assert (found.instance_id, found.workflow_name, found.owner_service, found.lock_token) == (
            key,
            key,
            key,
            number,
        )
    page = await storage.list_instances(ListInstancesOptions(limit=1000), framework=ANY)
    assert sorted(found.instance_id for found in page.instances) == sorted(KEYS)


async def test_polls_tell_workflow_names_and_owners_apart(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        for key in KEYS:
            await harness.instance(storage, instance_id=key, workflow_name=key, owner_service=key)
    for key in KEYS:
        by_name = await storage.find_resumable_workflows(workflow_names=[key])
        assert [found.instance_id for found in by_name] == [key]
        by_owner = await storage.find_resumable_workflows(owner_service=key)
        assert [found.instance_id for found in by_owner] == [key]


async def test_steps_are_told_apart_by_every_byte_of_their_id(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.append_history_many([step(lock.instance_id, key) for key in KEYS], lock=lock)
    async with storage.transaction():
        for key in KEYS:
            await storage.add_compensation(CompensationEntry(lock.instance_id, key, key))

    assert [event.activity_id for event in await history_of(storage, lock.instance_id)] == KEYS
    assert [entry.activity_id for entry in await storage.get_compensations(lock.instance_id)] == KEYS[::-1]
    await storage.archive_history(lock.instance_id)
    assert [event.activity_id for event in await storage.get_archived_history(lock.instance_id)] == KEYS


async def test_timers_are_told_apart_by_every_byte_of_their_id(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    async with storage.transaction():
        for key in KEYS:
            await storage.register_timer_subscription(TimerSubscription(instance_id, key, PAST, activity_id=key))
        await storage.update_instance_status(instance_id, WorkflowStatus.WAITING_FOR_TIMER)
    found = await storage.find_expired_timers()
    assert [(timer.timer_id, timer.activity_id) for timer in found] == [(key, key) for key in KEYS]


async def test_channels_are_told_apart_by_every_byte_of_their_name(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    async with storage.transaction():
        for key in KEYS:
            await storage.subscribe_to_channel(instance_id, key, BROADCAST)
        await storage.publish_many([ChannelMessage(channel=key, data=str(n)) for n, key in enumerate(KEYS)])
    for number, key in enumerate(KEYS):
        (message,) = await storage.get_pending_channel_messages(key)
        assert (message.channel, message.data) == (key, str(number))
        (pending,) = await storage.get_pending_channel_messages_for_instance(instance_id, key)
        assert pending.id == message.id
        subscribed = await storage.get_channel_subscription(instance_id, key)
        assert subscribed is not None
        assert subscribed.channel == key


async def test_groups_are_told_apart_by_every_byte_of_their_name(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        for key in KEYS:
            await storage.join_group(await harness.instance(storage, instance_id=key), key)
    for key in KEYS:
        assert await storage.get_group_members(key) == [key]
        await storage.leave_group(key, key)
        assert await storage.get_group_members(key) == []


async def test_outbox_events_are_told_apart_by_every_byte_of_their_id(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        for key in KEYS:
            await storage.add_outbox_event(OutboxEvent(key, key, key))
    leased = await storage.get_pending_outbox_events()
    assert [(event.event_id, event.event_type, event.event_source) for event in leased] == [(k, k, k) for k in KEYS]
    for key in KEYS:
        assert await storage.mark_outbox_event_sent(key) is True


async def test_system_locks_are_told_apart_by_every_byte_of_their_name(harness: Harness, storage: SQLStorage) -> None:
    for number, key in enumerate(KEYS):
        assert await storage.try_acquire_system_lock(key, f"worker-{number}", 30) is True
        assert await storage.try_acquire_system_lock(key, "worker-x", 30) is False


async def test_workers_are_told_apart_by_every_byte_of_their_name(harness: Harness, storage: SQLStorage) -> None:
    for worker_id in KEYS:
        lock = await harness.locked(storage, worker_id)
        for other in ("a", "ss", "i"):
            if other != worker_id:
                await storage.release_lock(lock.instance_id, other)
                with pytest.raises(LockLostError):
                    await storage.refresh_lock(lock.instance_id, other, 30)
        refreshed = await storage.refresh_lock(lock.instance_id, worker_id, 30, lock=lock)
        assert refreshed is not None
        assert refreshed.worker_id == worker_id


# Text that is no key.

NOTES = [*KEYS, "", "a\0b", "\ud800", "x" * 5000]


async def test_any_text_will_do_as_a_reason_or_an_error(harness: Harness, storage: SQLStorage) -> None:
    """What cannot be stored is replaced, not refused: the failure it tells of must not be lost over it."""
    async with storage.transaction():
        for number, note in enumerate(NOTES):
            failed = await harness.instance(storage)
            await storage.update_instance_status(failed, WorkflowStatus.FAILED, note)
            await storage.cancel_instance(await harness.instance(storage), note)
            parked = await harness.instance(storage, instance_id=f"parked-{number}")
            await storage.park(parked, note)
            await storage.add_outbox_event(OutboxEvent(f"event-{number}", "made", "test"))
            await storage.increment_outbox_attempts(f"event-{number}", error=note)
            await storage.mark_outbox_event_failed(f"event-{number}", error=note)
    for number, note in enumerate(NOTES):
        found = await storage.get_instance(f"parked-{number}")
        assert found is not None
        assert found.parked_reason == note.replace("\0", "\ufffd").replace("\ud800", "?")
