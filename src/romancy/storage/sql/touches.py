"""What the operations touch that may share a flush: all of it on one page, since a name forgotten is a race.

Two operations that change the same thing, or one that changes what the other shares, follow each other. Left out is
only what a row lock or a unique key settles however the two interleave.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..models import (
    ChannelWait,
    HistoryEvent,
    InstanceWait,
    Lock,
    OutboxEvent,
    TimerSubscription,
    Wait,
    WorkflowInstance,
)
from .checks import findable
from .demands import Claim, Lease
from .operation import Touches

_FEW = 10
"""Who wants more goes by itself, so that no transaction becomes large."""


def _instance(instance_id: str) -> str:
    return f"instance {instance_id}"


def _channel(channel: str) -> str:
    return f"channel {channel}"


def of_change(instance_id: str, *_: object, **__: object) -> Touches:
    """An operation that changes the instance it names first."""
    return Touches(changes=(_instance(instance_id),))


def of_append(event: HistoryEvent, *_: object) -> Touches:
    """Steps of one instance are recorded side by side, each of them once."""
    return Touches(
        changes=(f"step {event.activity_id} of {event.instance_id}",), shares=(_instance(event.instance_id),)
    )


def of_creation(instance: WorkflowInstance, *_: object) -> Touches:
    """A new instance."""
    return Touches(changes=(_instance(instance.instance_id),))


def of_suspension(instance_id: str, waits: Sequence[Wait], **_: object) -> Touches:
    """Nobody publishes on a channel, and no awaited instance ends, while a wait for it is being decided."""
    channels = [_channel(wait.channel) for wait in waits if isinstance(wait, ChannelWait)]
    awaited = [_instance(wait.instance_id) for wait in waits if isinstance(wait, InstanceWait)]
    return Touches(changes=(_instance(instance_id), *awaited, *channels))


def of_firing(timer: TimerSubscription, *_: object, **__: object) -> Touches:
    """The instance that is woken."""
    return of_change(timer.instance_id)


def of_publication(
    channel_name: str, *_: object, lock: Lock | None = None, record: HistoryEvent | None = None, **__: object
) -> Touches:
    """Many publish on one channel side by side; a step of an instance keeps others from that instance."""
    return Touches(changes=_of_step(lock, record), shares=(_channel(channel_name),))


def of_outbox(event: OutboxEvent, *, lock: Lock | None = None, record: HistoryEvent | None = None) -> Touches:
    """A new event, perhaps a step of an instance."""
    return Touches(changes=(f"event {event.event_id}", *_of_step(lock, record)))


def of_mark(event_id: str, *_: object, **__: object) -> Touches:
    """An event of the outbox."""
    return Touches(changes=(f"event {event_id}",))


def of_claim(claim: Claim) -> Touches | None:
    """Whatever can run: found and locked by the database, which passes over what others have locked."""
    claim.check()
    names = None if claim.workflow_names is None else tuple(findable(claim.workflow_names))
    return _search("claims", claim.limit, names, claim.owner_service)


def of_lease(lease: Lease) -> Touches | None:
    """Whatever is due in the outbox."""
    lease.check()
    return _search("leases", lease.limit)


def _search(what: str, limit: int, *where: object) -> Touches | None:
    """One look at a time: MariaDB may lock more than it finds, and who looks meanwhile would find too little."""
    return Touches(changes=(what,), alike=(what, *where)) if 0 < limit <= _FEW else None


def _of_step(lock: Lock | None, record: HistoryEvent | None) -> tuple[str, ...]:
    names = {_instance(step.instance_id) for step in (lock, record) if step is not None}
    return tuple(names)
