"""Events: out through the outbox, in through channels named by their type."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import uuid4

import msgspec

from .channels import receive, subscribe
from .engine.ambient import CURRENT_ACTIVITY, current_run
from .engine.calls import call
from .serialization import encode
from .storage import OutboxEvent


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
    """Wait for the next event of a type; those that arrive after the first wait for it are not missed."""
    run = current_run("wait_event")
    if event_type not in run.event_types:
        run.event_types.add(event_type)
        await subscribe(event_type)
    message = await receive(event_type, timeout=timeout)
    about = message.metadata
    return Event(
        type=str(about.get("ce_type", event_type)),
        data=message.data,
        source=str(about.get("ce_source", "")),
        id=str(about.get("ce_id", message.id)),
        attributes=about,
    )
