"""Steps: what a workflow's body waits for, and how a recorded event becomes its result."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import NonDeterminismError, ReceiveTimeoutError, SerializationError
from ..serialization import StoredError, fingerprint
from ..storage import HistoryEvent, HistoryEventType, TimerSubscription
from ..storage.models import Wait

if TYPE_CHECKING:
    from .run import Run

LONGEST_ID = 255
_LONGEST_PATH = 100


class Kind(StrEnum):
    """What kind of step, and so which events may settle it."""

    ACTIVITY = "activity"
    CALL = "call"
    TIMER = "timer"
    RECEIVE = "receive"
    CHILD = "child"


_SETTLED_BY = {
    Kind.ACTIVITY: (HistoryEventType.ACTIVITY_COMPLETED, HistoryEventType.ACTIVITY_FAILED),
    Kind.CALL: (HistoryEventType.ACTIVITY_COMPLETED, HistoryEventType.ACTIVITY_FAILED),
    Kind.TIMER: (HistoryEventType.TIMER_EXPIRED,),
    Kind.RECEIVE: (
        HistoryEventType.CHANNEL_MESSAGE_RECEIVED,
        HistoryEventType.MESSAGE_TIMEOUT,
        HistoryEventType.ACTIVITY_FAILED,
    ),
    Kind.CHILD: (HistoryEventType.INSTANCE_FINISHED, HistoryEventType.ACTIVITY_FAILED),
}


# Under names of their own: before Python 3.12 looking a member up costs more than the comparison it is needed for.
ACTIVITY, CALL = Kind.ACTIVITY, Kind.CALL
COMPLETED, FAILED = HistoryEventType.ACTIVITY_COMPLETED, HistoryEventType.ACTIVITY_FAILED


class Message(msgspec.Struct, frozen=True):
    """A received message."""

    data: Any
    """What was published: decoded JSON, or bytes."""
    channel: str
    id: str
    metadata: dict[str, Any] = {}
    published_at: datetime | None = None


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """An activity's recorded end."""

    activity_name: str
    input_hash: str = ""
    input: msgspec.Raw = msgspec.Raw(b"")
    result: msgspec.Raw = msgspec.Raw(b"null")
    at: float = 0.0

    def is_of(self, input_json: str) -> bool:
        """Whether the recorded call had these arguments; what says nothing of them may have been any."""
        recorded = bytes(self.input)
        if recorded == recorded_input(input_json).encode():
            return True
        if self.input_hash:  # of what is too large to be recorded
            return self.input_hash == fingerprint(input_json)
        return not recorded


def recorded_input(input_json: str) -> str:
    """The arguments of a call as they are part of its record."""
    return f'{{"args": [], "kwargs": {input_json}}}'


class _Stamp(msgspec.Struct, frozen=True):
    at: float = 0.0


_outcomes = msgspec.json.Decoder(Outcome)


def recorded_outcome(event: HistoryEvent, name: str, input_json: str) -> Outcome | None:
    """What is recorded of a step that succeeded; None if it did not, or if the record is of another call."""
    if event.event_type != COMPLETED:
        return None
    outcome = _outcomes.decode(event.event_data or "{}")
    return outcome if outcome.activity_name == name and outcome.is_of(input_json) else None


class Fresh(msgspec.Struct, frozen=True, gc=False):
    """A result that is just being recorded, as it will be read."""

    result: Any
    at: float


class Success(msgspec.Struct, frozen=True):
    """What an activity has brought about, to be recorded."""

    event: HistoryEvent
    fresh: Fresh
    refused: Callable[[Run, Step, Exception], Awaitable[None]]
    """What is done instead if it cannot be stored."""


Perform = Callable[["Run", "Step"], Awaitable[Success | None]]


class Step:
    """One durable thing that the body waits for."""

    __slots__ = (
        "decode",
        "fire",
        "future",
        "id",
        "input_json",
        "kind",
        "name",
        "on_done",
        "outcome",
        "perform",
        "wait",
    )

    def __init__(
        self,
        step_id: str,
        kind: Kind,
        name: str,
        future: asyncio.Future[Any],
        input_json: str,
        decode: Callable[[msgspec.Raw], Any],
        wait: Wait | None,
        fire: Callable[[], None] | None,
    ) -> None:
        self.id = step_id
        self.kind = kind
        self.name = name
        self.future = future
        self.input_json = input_json
        self.decode = decode
        self.perform: Perform | None = None
        """How to do it, live: activities and calls."""
        self.wait = wait
        """What to wait for: timers, receives, children."""
        self.fire = fire
        self.on_done: Callable[[asyncio.Future[Any]], None] | None = None
        """What is called when the body gives the step up."""
        self.outcome: Outcome | None = None
        """What the record says, once that is known."""

    @property
    def input_hash(self) -> str:
        return fingerprint(self.input_json)

    @property
    def wait_id(self) -> str:
        """Under which id the database knows what this step waits for."""
        return self.wait.timer_id if isinstance(self.wait, TimerSubscription) else self.id

    def check(self, event: HistoryEvent) -> None:
        """Read the record; NonDeterminismError when it is of another step than this one."""
        if event.event_type not in _SETTLED_BY[self.kind]:
            raise NonDeterminismError(
                f"step {self.id!r}: the code waits for a {self.kind}, history has recorded {event.event_type}"
            )
        if self.kind is ACTIVITY or self.kind is CALL:
            self.outcome = recorded = _outcomes.decode(event.event_data or "{}")
            if recorded.activity_name != self.name:
                raise NonDeterminismError(
                    f"step {self.id!r}: the code calls {self.name!r}, history has recorded {recorded.activity_name!r}"
                )
            if not recorded.is_of(self.input_json):
                raise NonDeterminismError(
                    f"step {self.id!r}: {self.name} is called with other arguments than were recorded",
                    f"; the code gives {self.input_json}, history has {_recorded_input(event)}",
                )

    def recorded_at(self, event: HistoryEvent) -> float:
        """When the event was recorded: what we wrote says so itself, the rest by its row."""
        if self.outcome is not None:
            return self.outcome.at
        if event.event_type == FAILED:
            return msgspec.json.decode(event.event_data or "{}", type=_Stamp).at
        return 0.0 if event.created_at is None else event.created_at.timestamp()

    def settle(self, event: HistoryEvent, fresh: Fresh | None = None) -> None:
        """Hand the recorded result to the body; who has just made the record need not read it."""
        if self.fire is not None:
            self.fire()
        if self.future.done():
            return
        if self.on_done is not None:
            self.future.remove_done_callback(self.on_done)  # a settled step is not given up any more
        self.on_done = self.perform = None  # both may know this step: it would be left to the garbage collector
        try:
            self.future.set_result(self._result(event) if fresh is None else fresh.result)
        except Exception as error:
            if isinstance(error, NonDeterminismError) and event.event_type == COMPLETED:
                raise
            self.future.set_exception(error)
            self.future.exception()  # seen: the task that waits for it raises it

    def _result(self, event: HistoryEvent) -> Any:
        if event.event_type == COMPLETED:
            outcome = self.outcome or _outcomes.decode(event.event_data or "{}")
            try:
                return self.decode(outcome.result)
            except SerializationError as error:  # when it was recorded, it did fit
                raise NonDeterminismError(
                    f"step {self.id!r}: its recorded result is not what the code expects by now", f": {error}"
                ) from error
        match event.event_type:
            case HistoryEventType.ACTIVITY_FAILED:
                raise msgspec.json.decode(event.event_data or "{}", type=StoredError).revive()
            case HistoryEventType.CHANNEL_MESSAGE_RECEIVED:
                return received(event)
            case HistoryEventType.MESSAGE_TIMEOUT:
                raise ReceiveTimeoutError(f"no message for step {self.id!r} in time")
        return None


class _Envelope(msgspec.Struct, frozen=True):
    id: str
    channel: str
    data: msgspec.Raw
    metadata: dict[str, Any] | None = None
    published_at: datetime | None = None


def received(event: HistoryEvent) -> Message:
    """The message that a history event records."""
    envelope = msgspec.json.decode(event.event_data or "{}", type=_Envelope)
    data = event.event_data_binary
    return Message(
        data=msgspec.json.decode(envelope.data) if data is None else data,
        channel=envelope.channel,
        id=envelope.id,
        metadata=envelope.metadata or {},
        published_at=envelope.published_at,
    )


def step_id(path: tuple[int, ...], name: str, number: int) -> str:
    """Where in the code a step stands: the task's path, then the call's name and number within the task."""
    if not path:
        return f"{name}:{number}"
    prefix = ".".join(map(str, path))
    if len(prefix) > _LONGEST_PATH:
        prefix = "h" + hashlib.blake2b(prefix.encode(), digest_size=16).hexdigest()
    return f"{prefix}/{name}:{number}"


def _recorded_input(event: HistoryEvent) -> str:
    stored = msgspec.json.decode(event.event_data or "{}")
    return msgspec.json.encode(stored.get("input", {}).get("kwargs", {})).decode()
