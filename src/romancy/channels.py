"""Messages between workflows, and from outside: each once to its receiver, in order."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, cast

from .engine.ambient import current_run
from .engine.calls import Record, call
from .engine.steps import Kind, Message
from .serialization import encode
from .storage import ChannelMessage, ChannelMode, ChannelWait
from .storage.sql.channels import direct_channel
from .storage.sql.checks import check_key

DIRECT = "__direct__"


def payload(data: Any) -> str | bytes:
    """What is published: bytes as they are, everything else as JSON."""
    return data if isinstance(data, bytes) else encode(data, "a message")


def metadata_text(metadata: dict[str, Any] | None) -> str | None:
    """What is told with a message, as JSON; TypeError if it is no dict, which no receiver could read."""
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise TypeError(f"a message's metadata must be a dict, not {type(metadata).__name__}")
    return encode(metadata, "a message's metadata")


def direct(channel: str, instance_id: str) -> str:
    """The channel on which an instance has its own messages; InvalidKeyError if the id is none."""
    return direct_channel(channel, check_key("instance_id", instance_id))


async def subscribe(channel: str, mode: ChannelMode | str = ChannelMode.BROADCAST) -> None:
    """Receive the channel's messages from now on: all of them, or competing with other subscribers for each."""
    run = current_run("subscribe")
    chosen = ChannelMode(mode)
    await call(
        "subscribe",
        {"channel": channel, "mode": str(chosen)},
        lambda record: run.storage.subscribe_to_channel(
            run.instance_id, channel, chosen, lock=run.lock, record=record("null")
        ),
    )


async def unsubscribe(channel: str) -> None:
    """Receive no more of the channel's messages."""
    run = current_run("unsubscribe")
    await call(
        "unsubscribe",
        {"channel": channel},
        lambda record: run.storage.unsubscribe_from_channel(
            run.instance_id, channel, lock=run.lock, record=record("null")
        ),
    )


async def receive(channel: str, *, timeout: timedelta | float | None = None) -> Message:
    """Wait for the channel's next message; ReceiveTimeoutError when none comes in time."""
    return await receiving(channel, timeout)


def receiving(channel: str, timeout: timedelta | float | None) -> asyncio.Future[Message]:
    """The channel's next message; cancelled, it leaves the message to the next receive."""
    run = current_run("receive")
    check_key("channel", channel)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    timeout_at = None if seconds is None else run.now() + timedelta(seconds=seconds)
    step_id = run.next_step_id(f"receive_{channel}"[:100].replace("#", "_").replace("/", "_"))
    wait = ChannelWait(channel=channel, activity_id=step_id, timeout_at=timeout_at)
    return run.ask(Kind.RECEIVE, "receive", step_id, wait=wait).future


async def receive_direct(channel: str = DIRECT, *, timeout: timedelta | float | None = None) -> Message:
    """Wait for the next message that was sent to this instance with `send_to`."""
    run = current_run("receive_direct")
    return await receive(f"{channel}:{run.instance_id}", timeout=timeout)


async def publish(channel: str, data: Any, *, metadata: dict[str, Any] | None = None) -> None:
    """Send a message to the channel's subscribers."""
    run = current_run("publish")
    content, about = payload(data), metadata_text(metadata)
    await call(
        "publish",
        {"channel": channel, "data": data},
        lambda record: run.storage.publish_to_channel(channel, content, about, lock=run.lock, record=record("null")),
    )


async def send_to(
    instance_id: str, data: Any, *, channel: str = DIRECT, metadata: dict[str, Any] | None = None
) -> None:
    """Send a message to one instance."""
    run = current_run("send_to")
    content, about = payload(data), metadata_text(metadata)
    receiver = direct(channel, instance_id)
    await call(
        "send_to",
        {"instance_id": instance_id, "channel": channel, "data": data},
        lambda record: run.storage.publish_to_channel(receiver, content, about, lock=run.lock, record=record("null")),
    )


async def join_group(group: str) -> None:
    """Become a member of a group of instances."""
    run = current_run("join_group")
    await call(
        "join_group",
        {"group": group},
        lambda record: run.storage.join_group(run.instance_id, group, lock=run.lock, record=record("null")),
    )


async def leave_group(group: str) -> None:
    """Leave a group of instances."""
    run = current_run("leave_group")
    await call(
        "leave_group",
        {"group": group},
        lambda record: run.storage.leave_group(run.instance_id, group, lock=run.lock, record=record("null")),
    )


async def group_members(group: str) -> list[str]:
    """The ids of a group's members, recorded."""
    run = current_run("group_members")

    async def look(record: Record) -> None:
        members = encode(await run.storage.get_group_members(group), "the members")
        await run.storage.append_history(record(members), lock=run.lock)

    return cast(list[str], await call("group_members", {"group": group}, look))


async def publish_to_group(group: str, data: Any, *, channel: str = DIRECT) -> int:
    """Send a message to every member of a group; to how many."""
    run = current_run("publish_to_group")
    content = payload(data)

    async def send(record: Record) -> None:
        members = await run.storage.get_group_members(group)
        messages = [message_to(f"{channel}:{member}", content) for member in members]
        async with run.storage.transaction():
            await run.storage.publish_many(messages, lock=run.lock)
            await run.storage.append_history(record(str(len(members))), lock=run.lock)

    return int(await call("publish_to_group", {"group": group, "channel": channel, "data": data}, send))


def message_to(channel: str, content: str | bytes) -> ChannelMessage:
    """A message to be published."""
    if isinstance(content, bytes):
        return ChannelMessage(channel=channel, data_binary=content)
    return ChannelMessage(channel=channel, data=content)
