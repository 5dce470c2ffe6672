"""What the oracle remembers: dictionaries instead of tables, and rows that are never changed, only replaced."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from romancy.storage import (
    ArchivedHistoryEvent,
    ChannelMessage,
    ChannelSubscription,
    ChannelWait,
    CompensationEntry,
    HistoryEvent,
    InstanceNotFoundError,
    InstanceWait,
    InvalidStatusTransitionError,
    Lock,
    LockLostError,
    OutboxEvent,
    TimerSubscription,
    WorkflowInstance,
    WorkflowStatus,
)

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
OURS, NEIGHBOUR = "romancy-py", "neighbour"
FINISHED = ("completed", "failed", "cancelled")
WAITING = ("waiting_for_event", "waiting_for_timer", "waiting_for_message")
RUNNABLE = ("running", "compensating")
OPEN_OUTBOX = ("pending", "processing")

Wait = TimerSubscription | ChannelWait | InstanceWait
Key = tuple[str, str]


class Instance(WorkflowInstance, frozen=True):
    """An instance with what the storage keeps but does not show."""

    suspended_from: str | None = None
    runnable_since: datetime | None = None
    finished_at: datetime | None = None

    @property
    def shown(self) -> WorkflowInstance:
        return WorkflowInstance(**{name: getattr(self, name) for name in WorkflowInstance.__struct_fields__})


class Event(OutboxEvent, frozen=True):
    """An outbox event with its lease."""

    lease_owner: str | None = None
    lease_until: datetime | None = None
    next_attempt_at: datetime | None = None

    @property
    def shown(self) -> OutboxEvent:
        return OutboxEvent(**{name: getattr(self, name) for name in OutboxEvent.__struct_fields__})


class Message(ChannelMessage, frozen=True):
    """A message with the framework that published it; None for one that knows nothing of us."""

    origin: str | None = None

    @property
    def shown(self) -> ChannelMessage:
        return ChannelMessage(**{name: getattr(self, name) for name in ChannelMessage.__struct_fields__})


class SystemLock(msgspec.Struct, frozen=True):
    """Who holds a system lock, until when."""

    locked_by: str
    locked_at: datetime
    lock_expires_at: datetime


class Setback(msgspec.Struct, frozen=True):
    """How often workers vanished with an instance, where it stood the last time, and which code refused it."""

    takeovers: int = 0
    progress: tuple[int, int] | None = None
    refused_by: str | None = None


class Memory:
    """All that is remembered, and what operations do with it in common."""

    def __init__(self) -> None:
        self.now = EPOCH
        self.framework = OURS
        self.in_transaction = False
        self.last_id = 0
        self.definitions: dict[Key, None] = {}
        self.instances: dict[str, Instance] = {}
        self.history: dict[Key, HistoryEvent] = {}
        self.recorded_under: dict[int | None, int] = {}
        self.archive: list[ArchivedHistoryEvent] = []
        self.compensations: list[CompensationEntry] = []
        self.timers: dict[Key, TimerSubscription] = {}
        self.channel_waits: dict[Key, ChannelWait] = {}
        self.instance_waits: dict[Key, InstanceWait] = {}
        self.messages: dict[int, Message] = {}
        self.claims: dict[int, str] = {}
        self.subscriptions: dict[Key, ChannelSubscription] = {}
        self.cursors: dict[Key, int] = {}
        self.received: set[tuple[str, int]] = set()
        self.groups: dict[Key, None] = {}
        self.outbox: dict[str, Event] = {}
        self.system_locks: dict[str, SystemLock] = {}
        self.states: dict[str, str] = {}
        self.setbacks: dict[str, Setback] = {}
        self.seen_events: dict[str, datetime] = {}

    def snapshot(self) -> dict[str, Any]:
        """All that is remembered, to go back to with `restore`."""
        return {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(self).items()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        vars(self).update(snapshot)

    def _id(self) -> int:
        self.last_id += 1
        return self.last_id

    def is_past(self, moment: datetime | None) -> bool:
        return moment is not None and moment <= self.now

    def _in(self, seconds: float) -> datetime:
        return self.now + timedelta(seconds=seconds)

    def _change(self, instance_id: str, **changes: Any) -> None:
        self.instances[instance_id] = replace(self.instances[instance_id], **changes)

    def _unlock(self, instance_id: str) -> None:
        self._change(instance_id, locked_by=None, locked_at=None, lock_expires_at=None)

    def is_free(self, instance: Instance) -> bool:
        return not instance.locked_by or self.is_past(instance.lock_expires_at)

    def _is_parked(self, instance: Instance) -> bool:
        return instance.parked_until is not None and not self.is_past(instance.parked_until)

    def _owns(self, instance_id: str, worker_id: str, token: int | None) -> bool:
        instance = self.instances.get(instance_id)
        return (
            instance is not None
            and instance.locked_by == worker_id
            and token in (None, instance.lock_token)
            and not self.is_past(instance.lock_expires_at)
        )

    def _hold(self, instance_id: str, lock: Lock | None = None) -> Instance:
        if lock is not None:
            return self._hold_owned(instance_id, lock.worker_id, lock)
        if instance_id not in self.instances:
            raise InstanceNotFoundError(instance_id)
        return self.instances[instance_id]

    def _hold_owned(self, instance_id: str, worker_id: str, lock: Lock | None) -> Instance:
        worker_id = worker_id if lock is None else lock.worker_id
        if lock is not None and lock.instance_id != instance_id:
            raise LockLostError(instance_id, worker_id)  # the lock of one instance proves nothing for another
        if not self._owns(instance_id, worker_id, None if lock is None else lock.token):
            raise LockLostError(instance_id, worker_id)
        return self.instances[instance_id]

    def _hold_unfinished(self, instance_id: str, lock: Lock | None, purpose: str) -> Instance:
        instance = self._hold(instance_id, lock)
        if instance.status in FINISHED:
            raise InvalidStatusTransitionError(instance_id, instance.status, purpose)
        return instance

    def _must_run(self, instance: Instance) -> None:
        if instance.status not in RUNNABLE:
            raise InvalidStatusTransitionError(instance.instance_id, instance.status, "waiting")

    def _allow(self, instance_id: str, target: WorkflowStatus, lock: Lock | None) -> None:
        status = self._standing(self._hold(instance_id, lock))
        undoing = status == "compensating" and target not in ("compensating", "failed", "cancelled")
        if status in FINISHED or target == "recurred" or undoing:
            raise InvalidStatusTransitionError(instance_id, status, target)

    def _standing(self, instance: Instance) -> WorkflowStatus:
        """Its status, but compensating if it waits for something in the middle of that."""
        undoing = instance.status in WAITING and instance.suspended_from == "compensating"
        return WorkflowStatus.COMPENSATING if undoing else WorkflowStatus(instance.status)

    def _begin_step(
        self, lock: Lock | None, record: HistoryEvent | None, instance_id: str | None = None
    ) -> HistoryEvent | None:
        """Fence a step and record it; what was recorded for it before, if anything was."""
        if lock is not None:
            self._hold(instance_id or lock.instance_id, lock)
        if record is None:
            return None
        self._hold(record.instance_id, lock)
        recorded = self.history.get((record.instance_id, record.activity_id))
        if recorded is None:
            self._record_event(record)
        return recorded

    def _record(
        self, instance_id: str, activity_id: str, event_type: str, data: str, binary: bytes | None = None
    ) -> HistoryEvent:
        """Record a step unless it is recorded already; what stands there."""
        recorded = self.history.get((instance_id, activity_id))
        event = HistoryEvent(instance_id, activity_id, event_type, event_data=data, event_data_binary=binary)
        return recorded if recorded is not None else self._record_event(event)

    def _record_event(self, event: HistoryEvent) -> HistoryEvent:
        recorded = replace(event, id=self._id(), created_at=event.created_at or self.now)
        self.recorded_under.pop(recorded.id, None)
        self.history[event.instance_id, event.activity_id] = recorded
        return recorded

    def _record_timeout(self, instance_id: str, wait: ChannelWait) -> HistoryEvent:
        timeout_at = "null" if wait.timeout_at is None else f'"{iso(wait.timeout_at)}"'
        data = (
            '{"_error": true, "error_type": "TimeoutError",'
            f' "error_message": "no message on channel \'{wait.channel}\' in time",'
            f' "channel": "{wait.channel}", "timeout_at": {timeout_at}}}'
        )
        return self._record(instance_id, wait.activity_id, "MessageTimeout", data)

    def _record_finish(self, instance_id: str, wait: InstanceWait, status: WorkflowStatus) -> HistoryEvent:
        data = f'{{"instance_id":"{wait.instance_id}","status":"{status}"}}'
        return self._record(instance_id, wait.activity_id, "InstanceFinished", data)

    def _finish(self, instance_id: str, status: WorkflowStatus, output_data: str | None) -> None:
        instance = self.instances[instance_id]
        self._unlock(instance_id)
        self._change(
            instance_id,
            status=status,
            output_data=instance.output_data if output_data is None else output_data,
            suspended_from=None,
            parked_until=None,
            parked_reason=None,
            finished_at=self.now,
        )
        self._forget_waits(instance_id)
        self._forget_interests(instance_id)
        for (waiter, activity_id), wait in sorted(self.instance_waits.items(), key=lambda item: item[0][0]):
            if wait.instance_id == instance_id:
                del self.instance_waits[waiter, activity_id]
                if self.instances[waiter].status in WAITING:
                    self._record_finish(waiter, wait, status)
                    self._wake(waiter, keep_lock=True)

    def _forget_waits(self, instance_id: str) -> None:
        self.timers = {key: timer for key, timer in self.timers.items() if key[0] != instance_id}
        self.channel_waits = {key: wait for key, wait in self.channel_waits.items() if key[0] != instance_id}
        self.instance_waits = {key: wait for key, wait in self.instance_waits.items() if key[0] != instance_id}

    def _forget_subscriptions(self, instance_id: str) -> None:
        self.subscriptions = {key: s for key, s in self.subscriptions.items() if key[0] != instance_id}
        self.cursors = {key: cursor for key, cursor in self.cursors.items() if key[0] != instance_id}
        self.received = {key for key in self.received if key[0] != instance_id}
        self.groups = {key: None for key in self.groups if key[0] != instance_id}

    def _forget_interests(self, instance_id: str) -> None:
        self._forget_subscriptions(instance_id)
        self.claims = {message_id: owner for message_id, owner in self.claims.items() if owner != instance_id}

    def _can_wake(self, instance_id: str, worker_id: str) -> bool:
        """It waits, and nobody else works on it."""
        instance = self.instances.get(instance_id)
        return (
            instance is not None
            and instance.status in WAITING
            and (self.is_free(instance) or instance.locked_by == worker_id)
        )

    def _wake(self, instance_id: str, *, keep_lock: bool = False) -> None:
        instance = self.instances[instance_id]
        status = WorkflowStatus(instance.suspended_from or "running")
        self._change(instance_id, status=status, suspended_from=None, runnable_since=self.now)
        if not keep_lock:
            self._unlock(instance_id)

    def _wake_unless_waiting(self, instance_id: str) -> None:
        waiting = {key[0] for key in (*self.timers, *self.channel_waits, *self.instance_waits)}
        if instance_id not in waiting and self.instances[instance_id].status in WAITING:
            self._wake(instance_id, keep_lock=True)

    def _ours(
        self,
        instances: Iterable[Instance],
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> list[Instance]:
        return [
            instance
            for instance in instances
            if instance.framework == self.framework
            and (workflow_names is None or instance.workflow_name in workflow_names)
            and owner_service in (None, instance.owner_service)
        ]

    def _polled(self, instance_id: str, workflow_names: Sequence[str] | None, owner_service: str | None) -> bool:
        """Whether a poll for what wakes an instance looks at this one."""
        instance = self.instances[instance_id]
        ours = self._ours([instance], workflow_names, owner_service)
        return bool(ours) and instance.status in WAITING and not self._is_parked(instance)


def iso(moment: datetime | None) -> str:
    assert moment is not None
    return moment.isoformat(timespec="microseconds")
