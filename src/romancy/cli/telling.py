"""What there is to tell of an instance: facts with a name each, and notes below the lines of its history."""

from __future__ import annotations

from datetime import datetime

import msgspec

from ..channels import DIRECT
from ..compensation import took_effect
from ..errors import NonDeterminismError
from ..serialization import StoredError, clipped
from ..storage import (
    ChannelWait,
    CompensationEntry,
    HistoryEvent,
    HistoryEventType,
    InstanceWait,
    TimerSubscription,
    WorkflowInstance,
    WorkflowStatus,
)
from ..storage.models import Wait

Fact = tuple[str, str]

_LONGEST_NOTE = 77
"""So that it can stand below a line's type, within a hundred columns."""


def is_parked(instance: WorkflowInstance, now: datetime) -> bool:
    """Whether no worker will pick the instance up for the time being."""
    return instance.parked_until is not None and instance.parked_until > now


def described(instance: WorkflowInstance, now: datetime, *, payloads: bool) -> list[Fact]:
    """The facts worth a line."""
    facts = [
        ("id", instance.instance_id),
        ("workflow", instance.workflow_name),
        ("status", str(instance.status)),
        ("started", shown(instance.started_at)),
        ("updated", shown(instance.updated_at)),
    ]
    if instance.locked_by:
        facts.append(("worker", f"{instance.locked_by} until {shown(instance.lock_expires_at)}"))
    if is_parked(instance, now):
        for_good = instance.parked_until is not None and instance.parked_until.year == 9999
        until = "it is unparked" if for_good else shown(instance.parked_until)
        if for_good and (instance.parked_reason or "").startswith(NonDeterminismError.__name__):
            until = "a worker has other code for it"
        facts += _in_lines("parked", f"until {until}: {instance.parked_reason}")
    if payloads:
        facts += [*_in_lines("input", str(instance.input_data)), *_in_lines("output", str(instance.output_data))]
    return facts


def reason_of(instance: WorkflowInstance, cancelled: HistoryEvent | None) -> list[Fact]:
    """Why an instance has ended other than well, as far as it is told in our words."""
    try:
        if instance.status is WorkflowStatus.FAILED:
            error = msgspec.json.decode(instance.output_data or "", type=StoredError)
            return _in_lines("failed", f"{error.error_type}: {error.error_message}")
        if cancelled is not None:
            return _in_lines("cancelled", msgspec.json.decode(cancelled.event_data or "", type=_Cancelled).reason)
    except msgspec.MsgspecError:
        pass  # another framework's words
    return []


def _in_lines(name: str, text: str) -> list[Fact]:
    """A fact that may have several lines, as an error has: the name stands at the first of them."""
    first, *rest = text.split("\n")
    return [(name, first), *(("", line) for line in rest)]


class _Cancelled(msgspec.Struct):
    reason: str


def awaited(instance_id: str, wait: Wait) -> Fact:
    """What an instance waits for."""
    match wait:
        case TimerSubscription():
            step, pause, _ = wait.timer_id.partition("#")
            what = f"the next attempt at {step}" if pause else step
            return "waits for", f"{what}, due {shown(wait.expires_at)}"
        case ChannelWait():
            until = "" if wait.timeout_at is None else f", until {shown(wait.timeout_at)}"
            return "waits for", f"{_message_on(wait.channel, instance_id)}{until}"
        case InstanceWait():
            return "waits for", f"the end of {wait.instance_id}"


def _message_on(channel: str, instance_id: str) -> str:
    """A message, with its channel as the workflow's code names it."""
    named = channel.removesuffix(f":{instance_id}")
    if named == channel:
        return f"a message on {channel}"
    return "a message to it alone" if named == DIRECT else f"a message on {named} to it alone"


def note_on(event: HistoryEvent, compensations: dict[str, CompensationEntry]) -> str | None:
    """What a line of history leaves open: how something failed, or what was undone."""
    if event.event_type == HistoryEventType.ACTIVITY_FAILED:
        return _failure(event)
    if event.activity_id in compensations:
        entry = compensations[event.activity_id]
        return f"undid {entry.activity_id} with {entry.activity_name}"
    return None


def _failure(event: HistoryEvent) -> str | None:
    """With what an activity failed, in one line; None if that is told in another framework's words."""
    try:
        error = msgspec.json.decode(event.event_data or "", type=StoredError)
    except msgspec.MsgspecError:
        return None
    _, hash_sign, attempt = event.activity_id.partition("#")
    which = f"attempt {attempt}: " if hash_sign else ""
    said, *_ = error.error_message.splitlines() or [""]
    return clipped(f"{which}{error.error_type}: {said}" if said else f"{which}{error.error_type}", _LONGEST_NOTE)


def leaves_nothing_to_undo(event: HistoryEvent) -> bool:
    """Whether a line of history says that its compensation has run, or that its step had no effect."""
    if event.event_type == HistoryEventType.ACTIVITY_FAILED:
        return not took_effect(event)
    return event.event_type == HistoryEventType.COMPENSATION_EXECUTED


def shown(moment: datetime | None) -> str:
    """A moment, to the second, UTC."""
    return "-" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"
