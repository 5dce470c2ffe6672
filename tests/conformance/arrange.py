"""What tests of channels, waits and timers begin with, and how they look at what came of it."""

import asyncio
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from romancy.storage import (
    ChannelDeliveryResult,
    ChannelMessage,
    ChannelMode,
    Lock,
    SQLStorage,
    StorageUnavailableError,
    WorkflowStatus,
)
from tests.harness import Harness, history_of

BROADCAST, COMPETING, DIRECT = ChannelMode.BROADCAST, ChannelMode.COMPETING, ChannelMode.DIRECT


async def another(harness: Harness) -> SQLStorage:
    """A second storage on the same database that is connected already, so that rivals really meet."""
    storage = await harness.open()
    await storage.current_time()
    return storage


async def publish(storage: SQLStorage, data: str | bytes = "1", channel: str = "orders") -> int:
    """A new message of ours; its number."""
    number = await storage.publish_to_channel(channel, data)
    assert isinstance(number, int)
    return number


async def subscriber(
    harness: Harness, storage: SQLStorage, channel: str = "orders", mode: ChannelMode = BROADCAST, **fields: Any
) -> Lock:
    """A new instance that is subscribed to the channel and held by worker-1."""
    lock = await harness.locked(storage, **fields)
    await storage.subscribe_to_channel(lock.instance_id, channel, mode)
    return lock


async def waiter(
    harness: Harness,
    storage: SQLStorage,
    channel: str = "orders",
    mode: ChannelMode = BROADCAST,
    *,
    activity_id: str = "receive:1",
    timeout_at: datetime | None = None,
    **fields: Any,
) -> str:
    """A new instance that waits for a message of the channel; its id."""
    lock = await subscriber(harness, storage, channel, mode, **fields)
    assert await receive(storage, lock, channel, activity_id, timeout_at) is None
    return lock.instance_id


async def receive(
    storage: SQLStorage,
    lock: Lock,
    channel: str = "orders",
    activity_id: str = "receive:1",
    timeout_at: datetime | None = None,
    *,
    keep_lock: bool = False,
) -> ChannelDeliveryResult | None:
    """Ask for the next message, on behalf of the lock's holder."""
    return await storage.register_channel_receive_and_release_lock(
        lock.instance_id, channel, lock.worker_id, activity_id, timeout_at, lock=lock, keep_lock=keep_lock
    )


async def deliver(storage: SQLStorage, instance_id: str, channel: str = "orders") -> ChannelDeliveryResult | None:
    """Bring the next message to a waiting instance, as a courier does."""
    return await storage.deliver_channel_message_with_lock(
        instance_id, channel, ChannelMessage(channel=channel, id=1), "courier", 30
    )


async def receive_all(storage: SQLStorage, instance_id: str, channel: str = "orders") -> list[Any]:
    """Receive until nothing is left, ending in a wait; the data of everything the instance has ever received."""
    while True:
        lock = await storage.try_acquire_lock(instance_id, "worker-1", 30)
        assert lock is not None, "the instance can be run"
        count = len(await history_of(storage, instance_id))
        if await receive(storage, lock, channel, f"receive:{count + 1}") is None:
            return await received(storage, instance_id)


async def data_pending(storage: SQLStorage, instance_id: str, channel: str = "orders") -> list[Any]:
    """The data of the messages that the instance has yet to receive."""
    messages = await storage.get_pending_channel_messages_for_instance(instance_id, channel)
    return [json.loads(message.data or "null") for message in messages]


async def received(storage: SQLStorage, instance_id: str) -> list[Any]:
    """The data of the messages the instance has received, in the order it received them."""
    return [
        json.loads(event.event_data or "")["data"]
        for event in await history_of(storage, instance_id)
        if event.event_type == "ChannelMessageReceived"
    ]


async def found(storage: SQLStorage, **options: Any) -> list[str]:
    """Whose messages the poll finds deliverable."""
    return [subscription.instance_id for subscription in await storage.find_deliverable_subscriptions(**options)]


async def status_of(storage: SQLStorage, instance_id: str) -> WorkflowStatus:
    instance = await storage.get_instance(instance_id)
    assert instance is not None
    return instance.status


async def lock_of(storage: SQLStorage, instance_id: str) -> tuple[Any, ...]:
    instance = await storage.get_instance(instance_id)
    assert instance is not None
    return instance.locked_by, instance.locked_at, instance.lock_expires_at


async def is_blocked(task: "asyncio.Task[Any]") -> bool:
    """Whether the task waits for somebody else's transaction."""
    done, _ = await asyncio.wait({task}, timeout=0.15)
    return not done


class Crash(StorageUnavailableError):
    """What a probe raises where a process would die."""


def crash_before_statement(number: int, operation: str) -> Callable[[str, str], None]:
    """A probe that lets `number` statements of the operation pass, and fails the next one."""
    passed = 0

    def probe(point: str, name: str) -> None:
        nonlocal passed
        if point == "before statement" and name == operation:
            passed += 1
            if passed > number:
                raise Crash(f"before statement {passed} of {operation}")

    return probe


def operations_run(storage: SQLStorage) -> list[str]:
    """A list that grows by the operation's name with each statement from now on."""
    names: list[str] = []
    storage.runner.probe = lambda point, name: names.append(name) if point == "before statement" else None
    return names
