"""What rivals do: each function is run by every rival at once, in tasks of one process or in several processes."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from romancy.storage import (
    ChannelMessage,
    ChannelMode,
    HistoryEvent,
    SQLStorage,
    StorageError,
    TimerSubscription,
    WorkflowInstance,
    WorkflowStatus,
)
from romancy.storage.models import StaleWorkflowInfo

Action = Callable[..., Awaitable[Any]]


async def acquire(storage: SQLStorage, me: str, prizes: list[str]) -> dict[str, int]:
    """Try each lock once; the tokens of those won."""
    won = {}
    for instance_id in prizes:
        lock = await storage.try_acquire_lock(instance_id, me, 60)
        if lock is not None:
            won[instance_id] = lock.token
    return won


async def take_turns(storage: SQLStorage, me: str, instance_id: str, turns: int) -> list[int]:
    """Acquire and release one lock many times; the tokens, in order."""
    tokens: list[int] = []
    while len(tokens) < turns:
        lock = await storage.try_acquire_lock(instance_id, me, 60)
        if lock is None:
            await asyncio.sleep(random.uniform(0.0, 0.005))
        else:
            tokens.append(lock.token)
            await storage.release_lock(instance_id, me, lock=lock)
    return tokens


async def fire(storage: SQLStorage, me: str, prizes: list[str]) -> list[str]:
    """Fire the timer of each instance; those that answered True."""
    timers = {timer.instance_id: timer for timer in await storage.find_expired_timers(100)}
    fired = []
    for instance_id in prizes:
        timer = timers.get(instance_id)
        if timer is not None and await storage.fire_timer(timer, worker_id=me):
            fired.append(instance_id)
    return fired


async def deliver(storage: SQLStorage, me: str, channel: str, waiting: list[str]) -> list[str]:
    """Deliver whatever is there to everybody who waits, in an order of one's own; who got something."""
    served = []
    for instance_id in random.sample(waiting, len(waiting)):
        result = await storage.deliver_channel_message_with_lock(instance_id, channel, ChannelMessage(channel), me, 30)
        if result is not None:
            served.append(instance_id)
    return served


async def receive(storage: SQLStorage, me: str, channel: str) -> bool:
    """Subscribe an instance of one's own and receive; whether something was there."""
    lock = await storage.create_instance(WorkflowInstance(me, "order", locked_by=me), lock_timeout_sec=60)
    await storage.subscribe_to_channel(me, channel, ChannelMode.COMPETING, lock=lock)
    result = await storage.register_channel_receive_and_release_lock(me, channel, me, "receive:1", lock=lock)
    return result is not None


async def claim(storage: SQLStorage, me: str, messages: list[int]) -> list[int]:
    """Claim each message for an instance of one's own; those won."""
    await storage.create_instance(WorkflowInstance(me, "order"))
    return [message_id for message_id in messages if await storage.claim_channel_message(message_id, me)]


async def lease(storage: SQLStorage, me: str, limit: int) -> list[str]:
    """Lease outbox events until there are none."""
    leased: list[str] = []
    while events := await storage.get_pending_outbox_events(limit, owner=me):
        leased += [event.event_id for event in events]
    return leased


async def lead(storage: SQLStorage, me: str, prizes: list[str]) -> list[str]:
    """Take each system lock; those won."""
    return [name for name in prizes if await storage.try_acquire_system_lock(name, me, 60)]


async def create(storage: SQLStorage, me: str, prizes: list[str]) -> dict[str, str]:
    """Create each instance, of a workflow of one's own; "made", or the error."""
    outcomes = {}
    for instance_id in prizes:
        try:
            await storage.create_instance(WorkflowInstance(instance_id, me))
            outcomes[instance_id] = "made"
        except StorageError as error:
            outcomes[instance_id] = type(error).__name__
    return outcomes


async def record(storage: SQLStorage, me: str, prizes: list[str]) -> dict[str, str]:
    """Record the same step of each instance with a result of one's own; "recorded", or the error."""
    outcomes = {}
    for instance_id in prizes:
        step = HistoryEvent(instance_id, "charge:1", "ActivityCompleted", event_data=f'"{me}"')
        try:
            await storage.append_history(step)
            outcomes[instance_id] = "recorded"
        except StorageError as error:
            outcomes[instance_id] = type(error).__name__
    return outcomes


async def subscribe(storage: SQLStorage, me: str, channels: list[str]) -> dict[str, str]:
    """Subscribe to each channel, half of the rivals in one mode and half in the other; the mode, or the error."""
    await storage.create_instance(WorkflowInstance(me, "order"))
    mode = ChannelMode.BROADCAST if int(me.rpartition("-")[2]) % 2 else ChannelMode.COMPETING
    outcomes = {}
    for channel in channels:
        try:
            await storage.subscribe_to_channel(me, channel, mode)
            outcomes[channel] = str(mode)
        except StorageError as error:
            outcomes[channel] = type(error).__name__
    return outcomes


async def publish(storage: SQLStorage, me: str, channel: str, messages: int) -> list[int]:
    """Publish many messages; their ids, in order."""
    ids = []
    for number in range(messages):
        message_id = await storage.publish_to_channel(channel, f'"{me} {number}"')
        assert isinstance(message_id, int)
        ids.append(message_id)
    return ids


async def clean_up(storage: SQLStorage, me: str, limit: int) -> list[str]:
    """Free stale locks until there are none; the instances reported."""
    reported: list[str] = []
    while stale := await storage.cleanup_stale_locks(60, limit=limit):
        assert all(isinstance(info, StaleWorkflowInfo) for info in stale)
        reported += [info.instance_id for info in stale]
    return reported


async def end(storage: SQLStorage, me: str, prizes: list[str]) -> dict[str, str]:
    """Each rival has its own way to wake or end an instance that waits for a timer and a message; what came of it."""
    ways: list[Callable[[str], Awaitable[object]]] = [
        lambda prize: storage.cancel_instance(prize, f"{me} says so"),
        lambda prize: storage.update_instance_output(prize, f'"{me}"'),
        lambda prize: storage.update_instance_status(prize, WorkflowStatus.FAILED, f"{me} failed"),
        lambda prize: storage.fire_timer(_timer(prize), worker_id=me),
        lambda prize: storage.deliver_channel_message_with_lock(prize, prize, ChannelMessage(prize), me, 30),
        lambda prize: storage.cleanup_instance_subscriptions(prize),
    ]
    way = ways[int(me.rpartition("-")[2]) % len(ways)]
    outcomes = {}
    for instance_id in prizes:
        try:
            outcome = await way(instance_id)
            outcomes[instance_id] = "ended" if outcome is None else "woken" if outcome is not False else "nothing"
        except StorageError as error:
            outcomes[instance_id] = type(error).__name__
    return outcomes


def _timer(instance_id: str) -> TimerSubscription:
    return TimerSubscription(instance_id, "nap", datetime(2020, 1, 1, tzinfo=UTC))


ACTIONS: dict[str, Action] = {
    action.__name__: action
    for action in (
        acquire,
        take_turns,
        fire,
        deliver,
        receive,
        claim,
        lease,
        lead,
        create,
        record,
        subscribe,
        publish,
        clean_up,
        end,
    )
}
