"""For each operation that writes: a state in which it has much to do, and a call of it.

A scenario's `act` needs nothing but a storage, so that it can also be made by another process.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from romancy.storage import (
    ChannelMessage,
    ChannelMode,
    ChannelSubscription,
    ChannelWait,
    CompensationEntry,
    HistoryEvent,
    InstanceWait,
    Lock,
    OutboxEvent,
    SQLStorage,
    TimerSubscription,
    WorkflowInstance,
    WorkflowStatus,
)
from tests.comparison import FOREVER
from tests.harness import Harness, step

Arrange = Callable[[Harness, SQLStorage], Awaitable[None]]
Act = Callable[[SQLStorage], Awaitable[Any]]
Wait = TimerSubscription | ChannelWait | InstanceWait

HOUR = 3600.0
UNIT = timedelta(hours=1)
"""The clock moves by hours, so that the real milliseconds of two runs make no difference."""

# Tokens grow by one per acquisition, so the lock that an arrangement leaves is known before.
LOCK = Lock("order", 1, "worker", FOREVER)
LAST_STEP = step("order", "last:1")


def recorded(activity_id: str, instance_id: str = "order") -> HistoryEvent:
    return HistoryEvent(instance_id, activity_id, "ActivityCompleted", event_data='{"result": 1}')


# States. "order" is the instance that things happen to.


async def nothing(harness: Harness, storage: SQLStorage) -> None:
    """An empty database."""


async def untied(harness: Harness, storage: SQLStorage) -> None:
    """The order is run by a worker, and no other table knows it."""
    born = WorkflowInstance("order", "order", locked_by=LOCK.worker_id)
    assert await storage.create_instance(born, lock_timeout_sec=100 * HOUR)


async def running(harness: Harness, storage: SQLStorage) -> None:
    """The order is run by a worker, has done this and that, is subscribed, a member, and awaited by another."""
    born = WorkflowInstance("order", "order", locked_by=LOCK.worker_id)
    assert await storage.create_instance(born, lock_timeout_sec=100 * HOUR)
    await storage.append_history_many([recorded("a:1"), recorded("a:2")], lock=LOCK)
    await storage.add_compensation(CompensationEntry("order", "a:1", "undo"), lock=LOCK)
    await storage.register_timer_subscription(timer(in_hours=5, now=await storage.current_time()))
    await storage.subscribe_to_channel("order", "news", ChannelMode.BROADCAST)
    await storage.subscribe_to_channel("order", "jobs", ChannelMode.COMPETING)
    await storage.join_group("order", "customers")
    await storage.claim_channel_message(int(str(await storage.publish_to_channel("jobs", "1"))), "order")
    await storage.publish_to_channel("news", "1")
    await storage.update_delivery_cursor("order", "news", 10**9)
    other = await storage.create_instance(WorkflowInstance("invoice", "order", locked_by="w"), lock_timeout_sec=HOUR)
    assert other is not None
    assert await storage.suspend("invoice", [InstanceWait("order", "child:1")], lock=other) == []


async def waiting(harness: Harness, storage: SQLStorage) -> None:
    """The order waits for a timer and two channels; the timer and the waits are due, and there are messages."""
    await running(harness, storage)
    now = await storage.current_time()
    await storage.delete_channel_message(1)
    waits: list[Wait] = [
        ChannelWait("news", "receive_news:1", now + 2 * UNIT),
        ChannelWait("jobs", "receive_jobs:1"),
        timer(in_hours=2, now=now),
    ]
    await storage.cleanup_instance_subscriptions("order")
    await storage.subscribe_to_channel("order", "news", ChannelMode.BROADCAST)
    await storage.subscribe_to_channel("order", "jobs", ChannelMode.COMPETING)
    for message in await storage.get_pending_channel_messages("jobs"):
        await storage.delete_channel_message(message.id or 0)
    assert await storage.suspend("order", waits, lock=LOCK) == []
    await storage.publish_many([ChannelMessage("news", data="2"), ChannelMessage("jobs", data="3")])
    harness.advance(3 * HOUR)


async def only_receiving(harness: Harness, storage: SQLStorage) -> None:
    """The order waits for one channel, and for nothing else."""
    born = WorkflowInstance("order", "order", locked_by=LOCK.worker_id)
    assert await storage.create_instance(born, lock_timeout_sec=100 * HOUR)
    await storage.subscribe_to_channel("order", "news", ChannelMode.BROADCAST)
    await storage.suspend("order", [ChannelWait("news", "receive_news:1")], lock=LOCK)


async def only_sleeping(harness: Harness, storage: SQLStorage) -> None:
    """The order waits for one timer, and for nothing else."""
    born = WorkflowInstance("order", "order", locked_by=LOCK.worker_id)
    assert await storage.create_instance(born, lock_timeout_sec=100 * HOUR)
    await storage.suspend("order", [timer(in_hours=5, now=await storage.current_time())], lock=LOCK)


async def receivable(harness: Harness, storage: SQLStorage) -> None:
    """The order runs, and there are messages for it."""
    await running(harness, storage)
    await storage.publish_many([ChannelMessage("news", data="2"), ChannelMessage("jobs", data="3")])


async def settling(harness: Harness, storage: SQLStorage) -> None:
    """One channel has news for a waiter, another has none for anybody."""
    await waiting(harness, storage)
    await storage.publish_to_channel("forgotten", "1")


async def foreign_news(harness: Harness, storage: SQLStorage) -> None:
    """Long ago another framework has published something that nobody waits for, under an id far from the others."""
    await storage.publish_to_channel("news", "1")
    await storage.find_deliverable_subscriptions()
    await storage.conn().execute(
        "INSERT INTO channel_messages (id, channel, message_id, data_type, data, published_at)"
        " SELECT id + 1000, 'abroad', 'm-1', 'json', '1', published_at FROM channel_messages"
    )
    harness.advance(3 * HOUR)


async def finished(harness: Harness, storage: SQLStorage) -> None:
    """Two instances have finished long ago; another continues one of them."""
    await running(harness, storage)
    await storage.create_instance(WorkflowInstance("sequel", "order", continued_from="order"))
    await storage.update_instance_output("order", "1", lock=LOCK)
    await storage.cancel_instance("invoice", "enough")
    harness.advance(3 * HOUR)


async def stale(harness: Harness, storage: SQLStorage) -> None:
    """The locks of two instances have expired."""
    for name in ("order", "invoice"):
        await storage.create_instance(WorkflowInstance(name, "order", locked_by="worker"), lock_timeout_sec=HOUR)
    harness.advance(3 * HOUR)


async def parked(harness: Harness, storage: SQLStorage) -> None:
    await storage.create_instance(WorkflowInstance("order", "order"))
    await storage.park("order", "why")


async def refused(harness: Harness, storage: SQLStorage) -> None:
    """Two instances were parked because some code did not fit their histories."""
    for name in ("order", "invoice"):
        lock = await storage.create_instance(WorkflowInstance(name, "order", locked_by="worker"), lock_timeout_sec=HOUR)
        assert lock is not None
        await storage.note_refusal(name, "old code", lock=lock)
        await storage.park(name, "why", lock=lock)


async def outgoing(harness: Harness, storage: SQLStorage) -> None:
    """Two events wait to go out."""
    for name in ("e-1", "e-2"):
        await storage.add_outbox_event(OutboxEvent(name, "paid", "/shop", event_data="1", retry_count=9))


async def gone_out(harness: Harness, storage: SQLStorage) -> None:
    """Two events went out long ago."""
    await outgoing(harness, storage)
    for name in ("e-1", "e-2"):
        await storage.mark_outbox_event_sent(name)
    harness.advance(3 * HOUR)


async def old_messages(harness: Harness, storage: SQLStorage) -> None:
    """Messages that everybody has received, in a channel that nobody uses any more, and a channel without any."""
    await storage.publish_to_channel("news", "1")
    await storage.publish_to_channel("news", "2")
    await storage.publish_to_channel("empty", "3")
    await storage.find_deliverable_subscriptions()
    for message in await storage.get_pending_channel_messages("empty"):
        await storage.delete_channel_message(message.id or 0)
    harness.advance(3 * HOUR)


async def seen_events(harness: Harness, storage: SQLStorage) -> None:
    """Two events came in long ago."""
    for name in ("event-1", "event-2"):
        await storage.publish_once(name, "news", "1")
    harness.advance(3 * HOUR)


async def showing(harness: Harness, storage: SQLStorage) -> None:
    """The order runs, and shows something of itself."""
    await running(harness, storage)
    await storage.set_instance_state("order", '"paid"', lock=LOCK)


async def led(harness: Harness, storage: SQLStorage) -> None:
    """Somebody's lead has expired."""
    await storage.try_acquire_system_lock("leader", "w", HOUR)
    harness.advance(3 * HOUR)


def timer(*, in_hours: float, now: Any) -> TimerSubscription:
    return TimerSubscription("order", "sleep", now + in_hours * UNIT, activity_id="sleep:1")


async def latest_message(storage: SQLStorage, channel: str) -> int:
    return (await storage.get_pending_channel_messages(channel))[-1].id or 0


@dataclass(frozen=True)
class Scenario:
    """A state, and an operation that changes it."""

    arrange: Arrange
    act: Act
    hard: bool = False
    """Among the few that are also cut by killing the connection or the process."""


async def claim_the_latest(storage: SQLStorage) -> bool:
    return await storage.claim_channel_message(await latest_message(storage, "news"), "order")


async def delete_the_latest(storage: SQLStorage) -> None:
    await storage.delete_channel_message(await latest_message(storage, "news"))


async def suspend_in_time(storage: SQLStorage) -> Any:
    now = await storage.current_time()
    waits: list[Wait] = [timer(in_hours=5, now=now), ChannelWait("news", "r:1", now + 5 * UNIT)]
    waits.append(InstanceWait("invoice", "i:1"))
    return await storage.suspend("order", waits, lock=LOCK, withdrawn=["sleep:1"])


async def suspend_too_late(storage: SQLStorage) -> Any:
    now = await storage.current_time()
    waits: list[Wait] = [timer(in_hours=-5, now=now), ChannelWait("jobs", "r:1", now), ChannelWait("news", "r:2", now)]
    return await storage.suspend("order", waits, lock=LOCK, withdrawn=["sleep:1"])


async def register_timer(storage: SQLStorage) -> None:
    later = replace(timer(in_hours=5, now=await storage.current_time()), timer_id="other")
    await storage.register_timer_subscription(later, lock=LOCK)


async def wait_for_timer(storage: SQLStorage) -> Any:
    later = timer(in_hours=5, now=await storage.current_time())
    return await storage.register_timer_subscription_and_release_lock(later, "order", "worker", lock=LOCK)


async def fire_timer(storage: SQLStorage) -> bool:
    return await storage.fire_timer(timer(in_hours=-1, now=await storage.current_time()), worker_id="w")


async def fire_and_claim(storage: SQLStorage) -> Any:
    return await storage.fire_and_claim(timer(in_hours=-1, now=await storage.current_time()), "w", HOUR)


def deliver_and_claim(channel: str) -> Act:
    subscription = ChannelSubscription("order", channel, ChannelMode.BROADCAST)
    return lambda storage: storage.deliver_and_claim(subscription, "w", HOUR)


def deliver(channel: str) -> Act:
    message = ChannelMessage(channel)
    return lambda storage: storage.deliver_channel_message_with_lock("order", channel, message, "w", HOUR)


def receive(channel: str) -> Act:
    return lambda storage: storage.register_channel_receive_and_release_lock(
        "order", channel, "worker", "receive:1", lock=LOCK
    )


EXPIRED = ChannelSubscription("order", "news", ChannelMode.BROADCAST, activity_id="receive_news:1")
EVENT = OutboxEvent("e-9", "paid", "/shop", event_data="1")
STEP: dict[str, Any] = {"lock": LOCK, "record": recorded("s:1")}

SCENARIOS: dict[str, Scenario] = {
    "create_instance": Scenario(
        nothing, lambda s: s.create_instance(WorkflowInstance("order", "order", locked_by="w")), hard=True
    ),
    "create_instance of a known workflow": Scenario(
        running,
        lambda s: s.create_instance(
            WorkflowInstance("new", "order", locked_by="w", locked_at=FOREVER, lock_expires_at=FOREVER)
        ),
        hard=True,
    ),
    "update_instance_status": Scenario(
        running, lambda s: s.update_instance_status("order", WorkflowStatus.COMPENSATING, "broken", lock=LOCK)
    ),
    "update_instance_status to failed": Scenario(
        running, lambda s: s.update_instance_status("order", WorkflowStatus.FAILED, "broken", lock=LOCK)
    ),
    "update_instance_activity": Scenario(running, lambda s: s.update_instance_activity("order", "a:2", lock=LOCK)),
    "update_instance_output": Scenario(
        running, lambda s: s.update_instance_output("order", '{"result": 1}'), hard=True
    ),
    "update_instance_output of one without ties": Scenario(
        untied, lambda s: s.update_instance_output("order", '{"result": 1}', lock=LOCK), hard=True
    ),
    "update_instance_output with its last step": Scenario(
        untied, lambda s: s.update_instance_output("order", '{"result": 1}', lock=LOCK, record=LAST_STEP), hard=True
    ),
    "update_instance_output with its last step and ties": Scenario(
        running, lambda s: s.update_instance_output("order", '{"result": 1}', record=LAST_STEP)
    ),
    "cancel_instance": Scenario(running, lambda s: s.cancel_instance("order", "enough"), hard=True),
    "cancel_instance and compensate": Scenario(waiting, lambda s: s.cancel_instance("order", "x", compensate=True)),
    "park": Scenario(running, lambda s: s.park("order", "why", lock=LOCK)),
    "unpark": Scenario(parked, lambda s: s.unpark("order")),
    "recur_instance": Scenario(running, lambda s: s.recur_instance("order", '{"round": 2}', lock=LOCK), hard=True),
    "delete_finished_instances": Scenario(finished, lambda s: s.delete_finished_instances(UNIT)),
    "suspend": Scenario(running, suspend_in_time, hard=True),
    "suspend when all is due": Scenario(receivable, suspend_too_late, hard=True),
    "try_acquire_lock": Scenario(stale, lambda s: s.try_acquire_lock("order", "w", HOUR)),
    "claim_resumable_workflows": Scenario(stale, lambda s: s.claim_resumable_workflows("w", HOUR)),
    "release_lock": Scenario(running, lambda s: s.release_lock("order", "worker", lock=LOCK)),
    "refresh_lock": Scenario(running, lambda s: s.refresh_lock("order", "worker", HOUR, lock=LOCK), hard=True),
    "refresh_locks": Scenario(running, lambda s: s.refresh_locks([LOCK], HOUR)),
    "cleanup_stale_locks": Scenario(stale, lambda s: s.cleanup_stale_locks(HOUR)),
    "append_history": Scenario(running, lambda s: s.append_history(recorded("a:3")), hard=True),
    "append_history with a lock": Scenario(running, lambda s: s.append_history(recorded("a:3"), lock=LOCK), hard=True),
    "append_history_many": Scenario(
        running, lambda s: s.append_history_many([recorded(f"a:{n}") for n in range(3, 6)], lock=LOCK)
    ),
    "register_timer_subscription": Scenario(running, register_timer),
    "register_timer_subscription_and_release_lock": Scenario(running, wait_for_timer),
    "fire_timer": Scenario(waiting, fire_timer, hard=True),
    "fire_and_claim": Scenario(waiting, fire_and_claim, hard=True),
    "remove_timer_subscription": Scenario(only_sleeping, lambda s: s.remove_timer_subscription("order", "sleep")),
    "add_outbox_event": Scenario(running, lambda s: s.add_outbox_event(EVENT, **STEP)),
    "get_pending_outbox_events": Scenario(
        outgoing, lambda s: s.get_pending_outbox_events(lease_sec=HOUR, owner="w"), hard=True
    ),
    "mark_outbox_event_sent": Scenario(outgoing, lambda s: s.mark_outbox_event_sent("e-1")),
    "mark_outbox_event_failed": Scenario(outgoing, lambda s: s.mark_outbox_event_failed("e-1", error="x")),
    "increment_outbox_attempts": Scenario(outgoing, lambda s: s.increment_outbox_attempts("e-1", error="x")),
    "cleanup_old_outbox_events": Scenario(gone_out, lambda s: s.cleanup_old_outbox_events(UNIT)),
    "add_compensation": Scenario(
        running, lambda s: s.add_compensation(CompensationEntry("order", "a:2", "undo"), **STEP)
    ),
    "publish_to_channel": Scenario(running, lambda s: s.publish_to_channel("news", "1", **STEP), hard=True),
    "publish_to_channel, a new one": Scenario(running, lambda s: s.publish_to_channel("new", b"1", "{}")),
    "publish_many": Scenario(
        running, lambda s: s.publish_many([ChannelMessage("b", data="1"), ChannelMessage("a", data="2")], lock=LOCK)
    ),
    "publish_once": Scenario(running, lambda s: s.publish_once("event-2", "news", "1")),
    "cleanup_seen_events": Scenario(seen_events, lambda s: s.cleanup_seen_events(UNIT)),
    "subscribe_to_channel": Scenario(
        running, lambda s: s.subscribe_to_channel("order", "alerts", ChannelMode.BROADCAST, **STEP)
    ),
    "unsubscribe_from_channel": Scenario(only_receiving, lambda s: s.unsubscribe_from_channel("order", "news")),
    "register_channel_receive_and_release_lock": Scenario(running, receive("news"), hard=True),
    "register_channel_receive_and_release_lock with a message": Scenario(receivable, receive("news")),
    "register_channel_receive_and_release_lock with a job": Scenario(receivable, receive("jobs")),
    "claim_channel_message": Scenario(running, claim_the_latest),
    "delete_channel_message": Scenario(running, delete_the_latest),
    "update_delivery_cursor": Scenario(receivable, lambda s: s.update_delivery_cursor("order", "news", 10**9)),
    "clear_channel_waiting_state": Scenario(only_receiving, lambda s: s.clear_channel_waiting_state("order", "news")),
    "deliver_channel_message": Scenario(waiting, lambda s: s.deliver_channel_message("order", ChannelMessage("news"))),
    "deliver_channel_message_with_lock": Scenario(waiting, deliver("news"), hard=True),
    "deliver_channel_message_with_lock, competing": Scenario(waiting, deliver("jobs"), hard=True),
    "deliver_and_claim": Scenario(waiting, deliver_and_claim("news"), hard=True),
    "deliver_and_claim, competing": Scenario(waiting, deliver_and_claim("jobs")),
    "find_deliverable_subscriptions": Scenario(settling, lambda s: s.find_deliverable_subscriptions()),
    "find_deliverable_subscriptions among foreign news": Scenario(
        foreign_news, lambda s: s.find_deliverable_subscriptions()
    ),
    "expire_channel_receive": Scenario(waiting, lambda s: s.expire_channel_receive(EXPIRED)),
    "cleanup_old_channel_messages": Scenario(old_messages, lambda s: s.cleanup_old_channel_messages(UNIT)),
    "join_group": Scenario(running, lambda s: s.join_group("order", "vip", **STEP)),
    "leave_group": Scenario(running, lambda s: s.leave_group("order", "customers", **STEP)),
    "leave_all_groups": Scenario(running, lambda s: s.leave_all_groups("order")),
    "set_instance_state": Scenario(running, lambda s: s.set_instance_state("order", '"packed"', **STEP)),
    "set_instance_state again": Scenario(showing, lambda s: s.set_instance_state("order", '"packed"', **STEP)),
    "count_takeover": Scenario(running, lambda s: s.count_takeover("order", lock=LOCK)),
    "note_refusal": Scenario(running, lambda s: s.note_refusal("order", "code", lock=LOCK)),
    "unpark_refused": Scenario(refused, lambda s: s.unpark_refused("order", "new code")),
    "try_acquire_system_lock": Scenario(nothing, lambda s: s.try_acquire_system_lock("leader", "w", HOUR)),
    "release_system_lock": Scenario(led, lambda s: s.release_system_lock("leader", "w")),
    "cleanup_expired_system_locks": Scenario(led, lambda s: s.cleanup_expired_system_locks()),
    "archive_history": Scenario(running, lambda s: s.archive_history("order", lock=LOCK)),
    "cleanup_instance_subscriptions": Scenario(waiting, lambda s: s.cleanup_instance_subscriptions("order")),
}

HARD = [name for name, scenario in SCENARIOS.items() if scenario.hard]
