"""Events: out through the outbox, in through channels named by their type."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import uuid4

import msgspec

from .channels import receiving
from .engine.ambient import CURRENT_ACTIVITY, current_run
from .engine.calls import Record, call
from .engine.run import Run
from .engine.steps import Message
from .serialization import encode
from .storage import ChannelMode, OutboxEvent
from .storage.sql.checks import LONGEST_KEY


class Event(msgspec.Struct, frozen=True):
    """A received event (CloudEvents)."""

    type: str
    data: Any
    source: str = ""
    id: str = ""
    attributes: Mapping[str, Any] = {}


async def emit(event_type: str, data: Any, *, source: str = "romancy", event_id: str | None = None) -> None:
    """Send an event to the outside, once, if and only if what caused it is recorded.

    In a transactional activity it is part of the transaction, in a plain one it is written with the result, in a
    workflow's body it is a step.
    """
    activity = CURRENT_ACTIVITY.get()
    if activity is None:
        run = current_run("emit")
        await call(
            "emit",
            {"type": event_type, "data": data, "source": source},
            lambda record: run.storage.add_outbox_event(
                _event(event_type, data, source, event_id), lock=run.lock, record=record("null")
            ),
        )
    elif activity.transactional:
        await activity.storage.add_outbox_event(_event(event_type, data, source, event_id))
    else:
        activity.emitted.append(_event(event_type, data, source, event_id))


def _event(event_type: str, data: Any, source: str, event_id: str | None) -> OutboxEvent:
    binary = data if isinstance(data, bytes) else None
    return OutboxEvent(
        event_id=event_id or str(uuid4()),
        event_type=event_type,
        event_source=source,
        event_data=None if binary is not None else encode(data, "an event"),
        event_data_binary=binary,
        content_type="application/json" if binary is None else "application/octet-stream",
    )


async def wait_event(event_type: str, *, timeout: timedelta | float | None = None) -> Event:
    """Wait for the next event of a type; ReceiveTimeoutError when none comes in time.

    Events for everybody count from the first wait for their type on, events for this instance alone from ever.
    """
    run = current_run("wait_event")
    direct = f"{event_type}:{run.instance_id}"
    channels = [event_type, direct] if len(direct) <= LONGEST_KEY else [event_type]
    if event_type not in run.event_types:
        run.event_types.add(event_type)
        await _subscribe(run, event_type, direct=direct in channels)
    message = await _first_of(channels, timeout)
    about = message.metadata
    return Event(
        type=str(about.get("ce_type", event_type)),
        data=message.data,
        source=str(about.get("ce_source", "")),
        id=str(about.get("ce_id", message.id)),
        attributes=about,
    )


async def _subscribe(run: Run, event_type: str, *, direct: bool) -> None:
    """Hear of events of a type: those for everybody, and those for this instance alone."""

    async def both(record: Record) -> None:
        async with run.storage.transaction():
            await run.storage.subscribe_to_channel(
                run.instance_id, event_type, ChannelMode.BROADCAST, lock=run.lock, record=record("null")
            )
            if direct:
                await run.storage.subscribe_to_channel(run.instance_id, event_type, ChannelMode.DIRECT, lock=run.lock)

    await call("wait_event", {"type": event_type}, both)


async def _first_of(channels: list[str], timeout: timedelta | float | None) -> Message:
    waiting = [receiving(channel, timeout) for channel in channels]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return next(future for future in waiting if future.done()).result()
    finally:
        for future in waiting:
            future.cancel()
