"""The storage contract as plain Python: dictionaries instead of tables, one caller at a time, a clock that is told.

Each method has the name, the arguments and the answer of the storage's. It may raise in the middle: whoever calls it
takes a `snapshot` before and goes back to it. Rows are never changed, only replaced, so a snapshot is a shallow copy.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace

from romancy.storage import (
    Appended,
    ArchivedHistoryEvent,
    ChannelDeliveryResult,
    ChannelMessage,
    ChannelMode,
    ChannelModeConflictError,
    ChannelSubscription,
    ChannelWait,
    CompensationEntry,
    HistoryConflictError,
    HistoryEvent,
    InstanceExistsError,
    InstanceNotFoundError,
    InstanceWait,
    InvalidStatusTransitionError,
    ListInstancesOptions,
    Lock,
    LockLostError,
    NotSubscribedError,
    OutboxEvent,
    OutboxEventExistsError,
    OutboxStatus,
    ResumableWorkflow,
    StaleWorkflowInfo,
    StorageError,
    TimerSubscription,
    WorkflowInstance,
    WorkflowNotCancellableError,
    WorkflowStatus,
)
from tests.comparison import FOREVER

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


class Oracle:
    """What a storage should answer."""

    def __init__(self) -> None:
        self.now = EPOCH
        self.framework = OURS
        self.in_transaction = False
        self.last_id = 0
        self.definitions: dict[Key, None] = {}
        self.instances: dict[str, Instance] = {}
        self.history: dict[Key, HistoryEvent] = {}
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

    # Instances.

    def create_instance(self, instance: WorkflowInstance, *, lock_timeout_sec: float | None = None) -> Lock | None:
        if instance.continued_from is not None and instance.continued_from not in self.instances:
            raise InstanceNotFoundError(instance.continued_from)
        if instance.instance_id in self.instances:
            raise InstanceExistsError(instance.instance_id)
        lock = None
        if instance.locked_by:
            expires_at = self._in(instance.lock_timeout_seconds or lock_timeout_sec or 60)
            token = instance.lock_token + 1
            lock = Lock(instance.instance_id, token, instance.locked_by, expires_at, instance.status)
        self.definitions.setdefault((instance.workflow_name, instance.source_hash))
        self.instances[instance.instance_id] = Instance(
            **{
                **msgspec.structs.asdict(instance),
                "framework": instance.framework or self.framework,
                "started_at": instance.started_at or self.now,
                "locked_at": self.now if lock else None,
                "lock_expires_at": lock.expires_at if lock else None,
                "lock_token": lock.token if lock else instance.lock_token,
                "runnable_since": self.now,
                "finished_at": self.now if instance.status in FINISHED else None,
            }
        )
        return lock

    def get_instance(self, instance_id: str) -> WorkflowInstance | None:
        return self.instances[instance_id].shown if instance_id in self.instances else None

    def update_instance_status(
        self,
        instance_id: str,
        status: WorkflowStatus,
        error_msg: str = "",
        *,
        output_data: str | None = None,
        lock: Lock | None = None,
    ) -> None:
        self._allow(instance_id, status, lock)
        if error_msg and status in ("failed", "compensating"):
            self._record(instance_id, "workflow_failed", "WorkflowFailed", f'{{"error_message":"{error_msg}"}}')
        if status in FINISHED:
            self._finish(instance_id, status, output_data)
            return
        output = output_data if output_data is not None else self.instances[instance_id].output_data
        self._change(instance_id, status=status, output_data=output, suspended_from=None, runnable_since=self.now)

    def update_instance_activity(self, instance_id: str, activity_id: str, *, lock: Lock | None = None) -> None:
        self._hold_unfinished(instance_id, lock, "updated")
        self._change(instance_id, current_activity_id=activity_id)

    def update_instance_output(self, instance_id: str, output_data: str | None, *, lock: Lock | None = None) -> None:
        self._allow(instance_id, WorkflowStatus.COMPLETED, lock)
        self._finish(instance_id, WorkflowStatus.COMPLETED, output_data)

    def cancel_instance(self, instance_id: str, reason: str, *, compensate: bool = False) -> None:
        instance = self.instances.get(instance_id)
        status = None if instance is None else instance.status
        if status is None or status in FINISHED or status == "compensating":
            raise WorkflowNotCancellableError(instance_id, status)
        details = f'{{"reason":"{reason}","previous_status":"{status}"}}'
        self._record(instance_id, "workflow_cancelled", "WorkflowCancelled", details)
        if not compensate:
            self._finish(instance_id, WorkflowStatus.CANCELLED, None)
            return
        self._forget_waits(instance_id)
        self._change(
            instance_id,
            status=WorkflowStatus.COMPENSATING,
            suspended_from=None,
            parked_until=None,
            parked_reason=None,
            runnable_since=self.now,
        )

    def list_instances(self, options: ListInstancesOptions, *, payloads: bool = False) -> list[WorkflowInstance]:
        """All pages together."""
        found = [
            instance
            for instance in self._ours(self.instances.values())
            if options.status_filter in (None, instance.status)
            and (options.workflow_name_filter or "").lower() in instance.workflow_name.lower()
            and (options.instance_id_filter or "").lower() in instance.instance_id.lower()
            and (options.started_after is None or _started(instance) > options.started_after)
            and (options.started_before is None or _started(instance) < options.started_before)
        ]
        found.sort(key=lambda instance: (_started(instance), instance.instance_id), reverse=True)
        hidden = {} if payloads else {"input_data": None, "output_data": None}
        return [replace(instance.shown, **hidden) for instance in found]

    def find_resumable_workflows(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ResumableWorkflow]:
        found = [
            instance
            for instance in self._ours(self.instances.values(), workflow_names, owner_service)
            if instance.status in RUNNABLE and self.is_free(instance) and not self._is_parked(instance)
        ]
        found.sort(key=lambda instance: (instance.runnable_since or EPOCH, instance.instance_id))
        return [ResumableWorkflow(instance.instance_id, instance.workflow_name) for instance in found[:limit]]

    def park(self, instance_id: str, reason: str, *, until: datetime | None = None, lock: Lock | None = None) -> None:
        self._hold_unfinished(instance_id, lock, "parked")
        self._unlock(instance_id)
        self._change(instance_id, parked_until=until or FOREVER, parked_reason=reason)

    def unpark(self, instance_id: str) -> bool:
        instance = self.instances.get(instance_id)
        if instance is None or instance.parked_until is None:
            return False
        self._change(instance_id, parked_until=None, parked_reason=None, runnable_since=self.now)
        return True

    def recur_instance(self, instance_id: str, input_data: str, *, lock: Lock) -> None:
        status = self._hold(instance_id, lock).status
        if status != "running":
            raise InvalidStatusTransitionError(instance_id, status, "starting over")
        self._archive(instance_id)
        self._forget_waits(instance_id)
        self.compensations = [entry for entry in self.compensations if entry.instance_id != instance_id]
        self._change(
            instance_id, input_data=input_data, output_data=None, current_activity_id=None, runnable_since=self.now
        )

    def delete_finished_instances(self, older_than: timedelta, limit: int = 100) -> int:
        old = [
            instance
            for instance in self._ours(self.instances.values())
            if instance.finished_at is not None and instance.finished_at < self.now - older_than
        ]
        old.sort(key=lambda instance: instance.finished_at or EPOCH)
        for instance in old[:limit]:
            gone = instance.instance_id
            del self.instances[gone]
            self.history = {key: event for key, event in self.history.items() if key[0] != gone}
            self.archive = [event for event in self.archive if event.instance_id != gone]
            self.compensations = [entry for entry in self.compensations if entry.instance_id != gone]
            self._forget_waits(gone)
            self._forget_interests(gone)
            for other in self.instances.values():
                if other.continued_from == gone:
                    self._change(other.instance_id, continued_from=None)
        return len(old[:limit])

    def current_time(self) -> datetime:
        return self.now

    # Locks.

    def try_acquire_lock(self, instance_id: str, worker_id: str, timeout_sec: float) -> Lock | None:
        instance = self.instances.get(instance_id)
        if instance is None or instance.status in FINISHED or not self.is_free(instance):
            return None
        expires_at = self._in(instance.lock_timeout_seconds or timeout_sec)
        lock = Lock(instance_id, instance.lock_token + 1, worker_id, expires_at, instance.status)
        self._change(
            instance_id, locked_by=worker_id, locked_at=self.now, lock_expires_at=expires_at, lock_token=lock.token
        )
        return lock

    def claim_resumable_workflows(
        self,
        worker_id: str,
        timeout_sec: float,
        limit: int = 100,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> list[tuple[WorkflowInstance, Lock]]:
        claimed: list[tuple[WorkflowInstance, Lock]] = []
        found = self.find_resumable_workflows(limit, workflow_names=workflow_names, owner_service=owner_service)
        for instance in [self.instances[resumable.instance_id] for resumable in found]:
            lock = self.try_acquire_lock(instance.instance_id, worker_id, timeout_sec)
            assert lock is not None
            claimed.append((instance.shown, lock))
        return claimed

    def release_lock(self, instance_id: str, worker_id: str, *, lock: Lock | None = None) -> None:
        if lock is not None and (lock.instance_id, lock.worker_id) != (instance_id, worker_id):
            return
        if self._owns(instance_id, worker_id, None if lock is None else lock.token):
            self._unlock(instance_id)
            self._change(instance_id, runnable_since=self.now)

    def refresh_lock(self, instance_id: str, worker_id: str, timeout_sec: float, *, lock: Lock | None = None) -> Lock:
        if lock is not None and lock.instance_id != instance_id:
            raise LockLostError(instance_id, lock.worker_id)
        if not self._owns(instance_id, worker_id, None if lock is None else lock.token):
            raise LockLostError(instance_id, worker_id)
        instance = self.instances[instance_id]
        expires_at = self._in(instance.lock_timeout_seconds or timeout_sec)
        self._change(instance_id, lock_expires_at=expires_at)
        return Lock(instance_id, instance.lock_token, worker_id, expires_at, instance.status)

    def refresh_locks(self, locks: Sequence[Lock], timeout_sec: float) -> list[Lock | LockLostError]:
        answers: list[Lock | LockLostError] = []
        for lock in locks:
            try:
                answers.append(self.refresh_lock(lock.instance_id, lock.worker_id, timeout_sec, lock=lock))
            except LockLostError as error:
                answers.append(error)
        return answers

    def cleanup_stale_locks(
        self,
        timeout_sec: float,
        *,
        limit: int = 100,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> list[StaleWorkflowInfo]:
        stale = [
            instance
            for instance in self._ours(self.instances.values(), workflow_names, owner_service)
            if instance.status not in FINISHED and instance.locked_by and self.is_free(instance)
        ]
        stale = sorted(stale, key=lambda instance: instance.instance_id)[:limit]
        for instance in stale:
            self._unlock(instance.instance_id)
        return [StaleWorkflowInfo(instance.instance_id, instance.workflow_name) for instance in stale]

    # History.

    def append_history(self, event: HistoryEvent, *, lock: Lock | None = None) -> Appended:
        if lock is not None and lock.instance_id != event.instance_id:
            raise LockLostError(event.instance_id, lock.worker_id)
        if event.instance_id not in self.instances:
            raise InstanceNotFoundError(event.instance_id)
        self._hold(event.instance_id, lock)
        recorded = self.history.get((event.instance_id, event.activity_id))
        if recorded is None:
            return Appended(self._record_event(event).id or 0, already_recorded=False)
        same = (event.event_type, event.event_data, event.event_data_binary) == (
            recorded.event_type,
            recorded.event_data,
            recorded.event_data_binary,
        )
        if lock is not None and same and not self.in_transaction:
            return Appended(recorded.id or 0, already_recorded=True)
        raise HistoryConflictError(recorded)

    def append_history_many(
        self, events: Sequence[HistoryEvent], *, lock: Lock | None = None
    ) -> list[Appended | StorageError]:
        if lock is not None:
            self._hold(lock.instance_id, lock)
        answers: list[Appended | StorageError] = []
        for event in events:
            try:
                answers.append(self.append_history(event, lock=lock))
            except (HistoryConflictError, InstanceNotFoundError) as error:
                answers.append(error)
        return answers

    def get_history(self, instance_id: str) -> list[HistoryEvent]:
        """All pages together."""
        return [event for key, event in self.history.items() if key[0] == instance_id]

    def get_history_event(self, instance_id: str, activity_id: str) -> HistoryEvent | None:
        return self.history.get((instance_id, activity_id))

    def get_history_count(self, instance_id: str) -> int:
        return sum(key[0] == instance_id for key in self.history)

    # Suspending.

    def suspend(
        self,
        instance_id: str,
        waits: Sequence[Wait],
        *,
        lock: Lock,
        keep_lock: bool = False,
        withdrawn: Sequence[str] = (),
    ) -> list[HistoryEvent]:
        for awaited in sorted({wait.instance_id for wait in waits if isinstance(wait, InstanceWait)}):
            if awaited not in self.instances:
                raise InstanceNotFoundError(awaited)
        self._must_run(self._hold(instance_id, lock))
        for activity_id in withdrawn:
            self._withdraw(instance_id, activity_id)
        # Channels are looked at in the order of their names.
        ordered = sorted(waits, key=lambda wait: wait.channel if isinstance(wait, ChannelWait) else "")
        due = {id(wait): event for wait in ordered if (event := self._due(instance_id, wait)) is not None}
        if not due and not keep_lock:
            for wait in waits:
                self._register(instance_id, wait)
            self._suspend(instance_id, waits)
        return [due[id(wait)] for wait in waits if id(wait) in due]

    def _withdraw(self, instance_id: str, activity_id: str) -> None:
        self.channel_waits.pop((instance_id, activity_id), None)
        self.instance_waits.pop((instance_id, activity_id), None)
        self.timers = {
            key: timer
            for key, timer in self.timers.items()
            if (key[0], timer.activity_id or timer.timer_id) != (instance_id, activity_id)
        }

    def _due(self, instance_id: str, wait: Wait) -> HistoryEvent | None:
        """Record what the wait would record, if it has happened already."""
        match wait:
            case TimerSubscription():
                return self._due_timer(wait)
            case ChannelWait():
                event = self._receive_now(instance_id, wait.channel, wait.activity_id)
                if event is None and self.is_past(wait.timeout_at):
                    self.channel_waits.pop((instance_id, wait.activity_id), None)
                    return self._record_timeout(instance_id, wait)
                return event
            case InstanceWait():
                status = self.instances[wait.instance_id].status
                if status not in FINISHED:
                    return None
                self.instance_waits.pop((instance_id, wait.activity_id), None)
                return self._record_finish(instance_id, wait, status)

    def _due_timer(self, timer: TimerSubscription) -> HistoryEvent | None:
        timer = self.timers.get((timer.instance_id, timer.timer_id), timer)
        recorded = (timer.instance_id, timer.activity_id or timer.timer_id) in self.history
        return self._expire_timer(timer) if recorded or self.is_past(timer.expires_at) else None

    def _register(self, instance_id: str, wait: Wait) -> None:
        match wait:
            case TimerSubscription():
                self._keep_timer(wait)
            case ChannelWait():
                self.channel_waits.setdefault((instance_id, wait.activity_id), wait)
            case InstanceWait():
                self.instance_waits.setdefault((instance_id, wait.activity_id), wait)

    def _suspend(self, instance_id: str, waits: Sequence[Wait]) -> None:
        status = WorkflowStatus.WAITING_FOR_EVENT
        if any(isinstance(wait, TimerSubscription) for wait in waits):
            status = WorkflowStatus.WAITING_FOR_TIMER
        if any(isinstance(wait, ChannelWait) for wait in waits):
            status = WorkflowStatus.WAITING_FOR_MESSAGE
        self._change(instance_id, suspended_from=self.instances[instance_id].status, status=status)
        self._unlock(instance_id)

    # Timers.

    def register_timer_subscription(self, subscription: TimerSubscription, *, lock: Lock | None = None) -> None:
        self._hold_unfinished(subscription.instance_id, lock, "waiting")
        self._keep_timer(subscription)

    def register_timer_subscription_and_release_lock(
        self, subscription: TimerSubscription, instance_id: str, worker_id: str, *, lock: Lock | None = None
    ) -> HistoryEvent | None:
        self._must_run(self._hold_owned(instance_id, worker_id, lock))
        event = self._due_timer(subscription)
        if event is None:
            self._keep_timer(subscription)
            self._suspend(instance_id, [subscription])
        else:
            self._unlock(instance_id)
            self._change(instance_id, runnable_since=self.now)
        return event

    def find_expired_timers(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[TimerSubscription]:
        due = [
            timer
            for timer in self.timers.values()
            if self.is_past(timer.expires_at) and self._polled(timer.instance_id, workflow_names, owner_service)
        ]
        return sorted(due, key=lambda timer: (timer.expires_at, timer.id))[:limit]

    def fire_timer(self, timer: TimerSubscription, *, worker_id: str) -> bool:
        registered = self.timers.get((timer.instance_id, timer.timer_id))
        if not self._can_wake(timer.instance_id, worker_id) or registered is None:
            return False
        if not self.is_past(registered.expires_at):
            return False
        self._expire_timer(registered)
        self._wake(timer.instance_id)
        return True

    def remove_timer_subscription(self, instance_id: str, timer_id: str) -> None:
        self.timers.pop((instance_id, timer_id), None)

    def _keep_timer(self, timer: TimerSubscription) -> None:
        key = (timer.instance_id, timer.timer_id)
        if key not in self.timers:
            self.timers[key] = replace(timer, id=self._id(), created_at=self.now)

    def _expire_timer(self, timer: TimerSubscription) -> HistoryEvent:
        self.timers.pop((timer.instance_id, timer.timer_id), None)
        data = f'{{"result":null,"timer_id":"{timer.timer_id}","expires_at":"{_iso(timer.expires_at)}"}}'
        return self._record(timer.instance_id, timer.activity_id or timer.timer_id, "TimerExpired", data)

    # Outbox.

    def add_outbox_event(
        self, event: OutboxEvent, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record)
        if recorded is not None:
            return recorded
        if event.event_id in self.outbox:
            raise OutboxEventExistsError(event.event_id)
        data = "null" if event.event_data is None and event.event_data_binary is None else event.event_data
        fields = {**msgspec.structs.asdict(event), "event_data": data, "created_at": event.created_at or self.now}
        self.outbox[event.event_id] = Event(**fields)
        return None

    def get_pending_outbox_events(
        self, limit: int = 100, *, lease_sec: float = 60.0, owner: str | None = None
    ) -> list[OutboxEvent]:
        due = [
            event
            for event in self.outbox.values()
            if (event.status == "pending" and (event.next_attempt_at is None or self.is_past(event.next_attempt_at)))
            or (event.status == "processing" and self.is_past(event.lease_until))
        ]
        due = sorted(due, key=lambda event: event.created_at or EPOCH)[:limit]
        for event in due:
            self.outbox[event.event_id] = replace(
                event, status=OutboxStatus.PROCESSING, lease_owner=owner, lease_until=self._in(lease_sec)
            )
        return [replace(event.shown, status=OutboxStatus.PROCESSING) for event in due]

    def mark_outbox_event_sent(self, event_id: str) -> bool:
        event = self.outbox.get(event_id)
        if event is None or event.status == "published":
            return False
        self._settle(event_id, status=OutboxStatus.PUBLISHED, published_at=self.now)
        return True

    def mark_outbox_event_failed(self, event_id: str, *, error: str = "", invalid: bool = False) -> bool:
        event = self.outbox.get(event_id)
        if event is None or event.status not in OPEN_OUTBOX:
            return False
        status = OutboxStatus.INVALID if invalid else OutboxStatus.FAILED
        self._settle(event_id, status=status, last_error=error or event.last_error)
        return True

    def increment_outbox_attempts(self, event_id: str, *, error: str = "") -> bool:
        event = self.outbox.get(event_id)
        if event is None or event.status not in OPEN_OUTBOX:
            return False
        self._settle(
            event_id,
            status=OutboxStatus.PENDING,
            retry_count=event.retry_count + 1,
            last_error=error or event.last_error,
            next_attempt_at=self._in(min(2.0**event.retry_count, 300)),
        )
        return True

    def cleanup_old_outbox_events(self, older_than: timedelta, *, limit: int = 1000) -> int:
        old = [
            event
            for event in self.outbox.values()
            if event.status == "published" and (event.published_at or EPOCH) < self.now - older_than
        ]
        old = sorted(old, key=lambda event: event.published_at or EPOCH)[:limit]
        for event in old:
            del self.outbox[event.event_id]
        return len(old)

    def _settle(self, event_id: str, **changes: Any) -> None:
        self.outbox[event_id] = replace(self.outbox[event_id], lease_owner=None, lease_until=None, **changes)

    # Compensations.

    def add_compensation(
        self, entry: CompensationEntry, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record, entry.instance_id)
        if recorded is not None:
            return recorded
        self._hold(entry.instance_id)
        if not any(
            (entry.instance_id, entry.activity_id) == (other.instance_id, other.activity_id)
            for other in self.compensations
        ):
            self.compensations.append(replace(entry, id=self._id(), created_at=self.now))
        return None

    def get_compensations(self, instance_id: str) -> list[CompensationEntry]:
        return [entry for entry in reversed(self.compensations) if entry.instance_id == instance_id]

    # Channels.

    def publish_to_channel(
        self,
        channel_name: str,
        data: str | bytes,
        metadata: str | None = None,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> int | HistoryEvent:
        recorded = self._begin_step(lock, record)
        return recorded if recorded is not None else self._publish(channel_name, data, metadata, self.framework)

    def publish_many(self, messages: Sequence[ChannelMessage], *, lock: Lock | None = None) -> list[int]:
        self._begin_step(lock, None)
        ids = {
            position: self._publish(
                messages[position].channel, _payload(messages[position]), messages[position].metadata, self.framework
            )
            for position in sorted(range(len(messages)), key=lambda position: (messages[position].channel, position))
        }
        return [ids[position] for position in range(len(messages))]

    def publish_foreign(self, channel_name: str, data: str, reserved_id: int | None = None) -> int:
        """A framework that knows nothing of us publishes; with an id that it drew earlier, it committed late."""
        return self._publish(channel_name, data, None, None, reserved_id)

    def reserve_foreign(self) -> int:
        """Another framework draws an id for a message that it will commit later."""
        return self._id()

    def _publish(
        self, channel: str, data: str | bytes, metadata: str | None, origin: str | None, given_id: int | None = None
    ) -> int:
        message_id = self._id() if given_id is None else given_id
        self.messages[message_id] = Message(
            channel,
            data=data if isinstance(data, str) else None,
            data_binary=data if isinstance(data, bytes) else None,
            metadata=metadata,
            id=message_id,
            message_id=str(UUID(int=message_id)),
            published_at=self.now,
            origin=origin,
        )
        self.messages = dict(sorted(self.messages.items()))
        return message_id

    def subscribe_to_channel(
        self,
        instance_id: str,
        channel_name: str,
        mode: ChannelMode,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record, instance_id)
        if recorded is not None:
            return recorded
        self._hold_unfinished(instance_id, None, "subscribed")
        direct = mode == "direct"
        channel = f"{channel_name}:{instance_id}" if direct else channel_name
        stored = ChannelMode.BROADCAST if direct else mode
        present = self.get_channel_mode(channel)
        if present is not None and present != stored:
            raise ChannelModeConflictError(channel, present, mode)
        if (instance_id, channel) in self.subscriptions:
            return None
        self.subscriptions[instance_id, channel] = ChannelSubscription(
            instance_id, channel, stored, id=self._id(), subscribed_at=self.now
        )
        self.cursors.pop((instance_id, channel), None)
        if stored == "broadcast" and not direct:
            self._advance(instance_id, channel, self._newest(channel))
        return None

    def unsubscribe_from_channel(
        self,
        instance_id: str,
        channel_name: str,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record, instance_id)
        if recorded is not None:
            return recorded
        self.clear_channel_waiting_state(instance_id, channel_name)
        self.subscriptions.pop((instance_id, channel_name), None)
        self.cursors.pop((instance_id, channel_name), None)
        return None

    def get_channel_subscription(self, instance_id: str, channel_name: str) -> ChannelSubscription | None:
        waiting = self._waits_on(instance_id, channel_name)
        return self._subscription(instance_id, channel_name, waiting[0] if waiting else None)

    def get_channel_mode(self, channel_name: str) -> ChannelMode | None:
        modes = [subscription.mode for key, subscription in self.subscriptions.items() if key[1] == channel_name]
        return modes[0] if modes else None

    def register_channel_receive_and_release_lock(
        self,
        instance_id: str,
        channel_name: str,
        worker_id: str,
        activity_id: str,
        timeout_at: datetime | None = None,
        *,
        lock: Lock | None = None,
        keep_lock: bool = False,
    ) -> ChannelDeliveryResult | None:
        self._must_run(self._hold_owned(instance_id, worker_id, lock))
        if self._receive_now(instance_id, channel_name, activity_id) is None:
            wait = ChannelWait(channel_name, activity_id, timeout_at)
            self._register(instance_id, wait)
            self._suspend(instance_id, [wait])
            return None
        if not keep_lock:
            self._unlock(instance_id)
            self._change(instance_id, runnable_since=self.now)
        return ChannelDeliveryResult(instance_id, self.instances[instance_id].workflow_name, activity_id)

    def get_pending_channel_messages(
        self, channel_name: str, after_id: int = 0, limit: int = 100
    ) -> list[ChannelMessage]:
        after = [m.shown for m in self.messages.values() if m.channel == channel_name and (m.id or 0) > after_id]
        return after[:limit]

    def get_pending_channel_messages_for_instance(
        self, instance_id: str, channel_name: str, *, limit: int = 100
    ) -> list[ChannelMessage]:
        return [message.shown for message in self.pending(instance_id, channel_name)[:limit]]

    def claim_channel_message(self, message_id: int, instance_id: str) -> bool:
        self._hold_unfinished(instance_id, None, "the owner of a claim")
        if message_id not in self.messages or message_id in self.claims:
            return False
        self.claims[message_id] = instance_id
        return True

    def delete_channel_message(self, message_id: int) -> None:
        self.messages.pop(message_id, None)
        self.claims.pop(message_id, None)

    def update_delivery_cursor(self, instance_id: str, channel_name: str, last_message_id: int) -> None:
        self._hold(instance_id)
        self._advance(instance_id, channel_name, min(last_message_id, self._newest(channel_name)))

    def get_delivery_cursor(self, instance_id: str, channel_name: str) -> int:
        return self.cursors.get((instance_id, channel_name), 0)

    def get_channel_subscribers_waiting(self, channel_name: str, *, limit: int = 100) -> list[ChannelSubscription]:
        found = [
            self._subscription(instance_id, channel_name, wait)
            for (instance_id, _), wait in self.channel_waits.items()
            if wait.channel == channel_name and self.instances[instance_id].status in WAITING
        ]
        return [subscription for subscription in found if subscription is not None][:limit]

    def clear_channel_waiting_state(self, instance_id: str, channel_name: str) -> None:
        withdrawn = [
            key for key, wait in self.channel_waits.items() if key[0] == instance_id and wait.channel == channel_name
        ]
        for key in withdrawn:
            del self.channel_waits[key]
        others = {key[0] for key in (*self.timers, *self.channel_waits, *self.instance_waits)}
        if withdrawn and instance_id not in others and self.instances[instance_id].status in WAITING:
            self._wake(instance_id)

    def deliver_channel_message(
        self, instance_id: str, message: ChannelMessage, *, lock: Lock | None = None
    ) -> ChannelDeliveryResult | None:
        if self._hold(instance_id, lock).status not in WAITING:
            return None
        return self._deliver_to_waiter(instance_id, message.channel, keep_lock=True)

    def deliver_channel_message_with_lock(
        self,
        instance_id: str,
        channel_name: str,
        message: ChannelMessage,
        worker_id: str,
        lock_timeout_sec: float,
    ) -> ChannelDeliveryResult | None:
        if not self._can_wake(instance_id, worker_id):
            return None
        return self._deliver_to_waiter(instance_id, channel_name, keep_lock=False)

    def find_deliverable_subscriptions(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ChannelSubscription]:
        found = [
            self._subscription(instance_id, wait.channel, wait)
            for (instance_id, _), wait in self.channel_waits.items()
            if self._polled(instance_id, workflow_names, owner_service) and self.pending(instance_id, wait.channel)
        ]
        return [subscription for subscription in found if subscription is not None][:limit]

    def find_expired_channel_subscriptions(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ChannelSubscription]:
        due = [
            (wait.timeout_at, self._subscription(instance_id, wait.channel, wait))
            for (instance_id, _), wait in self.channel_waits.items()
            if self.is_past(wait.timeout_at) and self._polled(instance_id, workflow_names, owner_service)
        ]
        due.sort(key=lambda found: found[0] or EPOCH)
        return [subscription for _, subscription in due if subscription is not None][:limit]

    def expire_channel_receive(self, subscription: ChannelSubscription) -> bool:
        key = (subscription.instance_id, subscription.activity_id or "")
        wait = self.channel_waits.get(key)
        if wait is None or wait.channel != subscription.channel or not self.is_past(wait.timeout_at):
            return False
        if not self._can_wake(subscription.instance_id, ""):
            return False
        del self.channel_waits[key]
        self._record_timeout(subscription.instance_id, replace(wait, timeout_at=subscription.timeout_at))
        self._wake(subscription.instance_id)
        return True

    def cleanup_old_channel_messages(self, older_than: timedelta, *, limit: int = 1000) -> int:
        old = [
            message
            for message in self.messages.values()
            if (message.published_at or EPOCH) < self.now - older_than
            and not any(
                key[1] == message.channel and (subscription.mode == "competing" or message in self.pending(*key))
                for key, subscription in self.subscriptions.items()
            )
        ]
        old = sorted(old, key=lambda message: (message.published_at, message.id))[:limit]
        for message in old:
            self.delete_channel_message(message.id or 0)
        return len(old)

    def _newest(self, channel: str) -> int:
        return max((key for key, message in self.messages.items() if message.channel == channel), default=0)

    def _advance(self, instance_id: str, channel: str, message_id: int) -> None:
        """Count everything visible up to a message as received."""
        if message_id <= self.cursors.get((instance_id, channel), 0):
            return
        self.cursors[instance_id, channel] = message_id
        visible = [key for key, m in self.messages.items() if m.channel == channel and key <= message_id]
        self.received |= {(instance_id, key) for key in visible}

    def _subscription(self, instance_id: str, channel: str, wait: ChannelWait | None) -> ChannelSubscription | None:
        subscription = self.subscriptions.get((instance_id, channel))
        if subscription is None:
            return None
        return replace(
            subscription,
            cursor_message_id=self.cursors.get((instance_id, channel), 0),
            activity_id=wait and wait.activity_id,
            timeout_at=wait and wait.timeout_at,
        )

    def _waits_on(self, instance_id: str, channel: str) -> list[ChannelWait]:
        return [wait for key, wait in self.channel_waits.items() if key[0] == instance_id and wait.channel == channel]

    def pending(self, instance_id: str, channel: str) -> list[Message]:
        """What the subscriber has yet to receive, or could take."""
        subscription = self.subscriptions.get((instance_id, channel))
        messages = [message for message in self.messages.values() if message.channel == channel]
        if subscription is None:
            return []
        if subscription.mode == "competing":
            return [message for message in messages if self.claims.get(message.id or 0, instance_id) == instance_id]
        cursor = self.cursors.get((instance_id, channel), 0)
        return [
            message
            for message in messages
            if (message.id or 0) > cursor or (message.origin is None and (instance_id, message.id) not in self.received)
        ]

    def _receive_now(self, instance_id: str, channel: str, activity_id: str) -> HistoryEvent | None:
        """Deliver a pending message to a step, unless that step is recorded already; None without a message."""
        if (instance_id, channel) not in self.subscriptions:
            raise NotSubscribedError(instance_id, channel)
        recorded = self.history.get((instance_id, activity_id))
        if recorded is None and not self.pending(instance_id, channel):
            return None
        return self._receive(instance_id, channel, activity_id)

    def _receive(self, instance_id: str, channel: str, activity_id: str) -> HistoryEvent:
        """End the wait of a step with the oldest message, or with what is recorded for the step already."""
        self.channel_waits.pop((instance_id, activity_id), None)
        recorded = self.history.get((instance_id, activity_id))
        if recorded is not None:
            return recorded
        message = self.pending(instance_id, channel)[0]
        assert message.id is not None
        if self.subscriptions[instance_id, channel].mode == "competing":
            self.delete_channel_message(message.id)
        else:
            # Only this one: a smaller id may still appear.
            self.received.add((instance_id, message.id))
            self.cursors[instance_id, channel] = max(message.id, self.cursors.get((instance_id, channel), 0))
        data = (
            f'{{"id": "{message.message_id}", "channel": "{channel}", "data": {message.data or "null"},'
            f' "metadata": {message.metadata or "{}"}, "published_at": "{_iso(message.published_at)}"}}'
        )
        return self._record(instance_id, activity_id, "ChannelMessageReceived", data, message.data_binary)

    def _deliver_to_waiter(self, instance_id: str, channel: str, *, keep_lock: bool) -> ChannelDeliveryResult | None:
        waits = self._waits_on(instance_id, channel)
        if not waits or not self.pending(instance_id, channel):
            return None
        self._receive(instance_id, channel, waits[0].activity_id)
        self._wake(instance_id, keep_lock=keep_lock)
        return ChannelDeliveryResult(instance_id, self.instances[instance_id].workflow_name, waits[0].activity_id)

    # Groups.

    def join_group(
        self, instance_id: str, group_name: str, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record, instance_id)
        if recorded is None:
            self._hold_unfinished(instance_id, None, "a group member")
            self.groups.setdefault((instance_id, group_name))
        return recorded

    def leave_group(
        self, instance_id: str, group_name: str, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record, instance_id)
        if recorded is None:
            self.groups.pop((instance_id, group_name), None)
        return recorded

    def get_group_members(self, group_name: str) -> list[str]:
        return [instance_id for instance_id, name in self.groups if name == group_name]

    def leave_all_groups(self, instance_id: str) -> None:
        self.groups = {key: None for key in self.groups if key[0] != instance_id}

    # System locks.

    def try_acquire_system_lock(self, lock_name: str, worker_id: str, timeout_sec: float) -> bool:
        held = self.system_locks.get(lock_name)
        if held is not None and held.locked_by != worker_id and not self.is_past(held.lock_expires_at):
            return False
        self.system_locks[lock_name] = SystemLock(worker_id, self.now, self._in(timeout_sec))
        return True

    def release_system_lock(self, lock_name: str, worker_id: str) -> None:
        if lock_name in self.system_locks and self.system_locks[lock_name].locked_by == worker_id:
            del self.system_locks[lock_name]

    def cleanup_expired_system_locks(self) -> int:
        expired = [name for name, lock in self.system_locks.items() if self.is_past(lock.lock_expires_at)]
        for name in expired:
            del self.system_locks[name]
        return len(expired)

    # Archive.

    def archive_history(self, instance_id: str, *, lock: Lock | None = None) -> int:
        self._hold(instance_id, lock)
        return self._archive(instance_id)

    def get_archived_history(self, instance_id: str) -> list[ArchivedHistoryEvent]:
        return [event for event in self.archive if event.instance_id == instance_id]

    def cleanup_instance_subscriptions(self, instance_id: str) -> None:
        instance = self.instances.get(instance_id)
        if instance is None:
            return
        self._forget_waits(instance_id)
        self._forget_subscriptions(instance_id)
        if instance.status in WAITING:
            self._wake(instance_id)

    def _archive(self, instance_id: str) -> int:
        moved = [event for key, event in self.history.items() if key[0] == instance_id]
        for event in moved:
            del self.history[instance_id, event.activity_id]
            self.archive.append(
                ArchivedHistoryEvent(
                    instance_id,
                    event.activity_id,
                    event.event_type,
                    id=self._id(),
                    original_id=event.id or 0,
                    original_created_at=event.created_at or EPOCH,
                    archived_at=self.now,
                    event_data=event.event_data,
                    event_data_binary=event.event_data_binary,
                )
            )
        return len(moved)

    # What operations have in common.

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
        status = self._hold(instance_id, lock).status
        undoing = status == "compensating" and target not in ("compensating", "failed", "cancelled")
        if status in FINISHED or target == "recurred" or undoing:
            raise InvalidStatusTransitionError(instance_id, status, target)

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
        recorded = replace(event, id=self._id(), created_at=self.now)
        self.history[event.instance_id, event.activity_id] = recorded
        return recorded

    def _record_timeout(self, instance_id: str, wait: ChannelWait) -> HistoryEvent:
        timeout_at = "null" if wait.timeout_at is None else f'"{_iso(wait.timeout_at)}"'
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
                    self._wake(waiter)

    def _forget_waits(self, instance_id: str) -> None:
        self.timers = {key: timer for key, timer in self.timers.items() if key[0] != instance_id}
        self.channel_waits = {key: wait for key, wait in self.channel_waits.items() if key[0] != instance_id}
        self.instance_waits = {key: wait for key, wait in self.instance_waits.items() if key[0] != instance_id}

    def _forget_subscriptions(self, instance_id: str) -> None:
        self.subscriptions = {key: s for key, s in self.subscriptions.items() if key[0] != instance_id}
        self.cursors = {key: cursor for key, cursor in self.cursors.items() if key[0] != instance_id}
        self.received = {key for key in self.received if key[0] != instance_id}
        self.leave_all_groups(instance_id)

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


def _started(instance: Instance) -> datetime:
    assert instance.started_at is not None
    return instance.started_at


def _iso(moment: datetime | None) -> str:
    assert moment is not None
    return moment.isoformat(timespec="microseconds")


def _payload(message: ChannelMessage) -> str | bytes:
    if message.data_binary is not None:
        return message.data_binary
    return "null" if message.data is None else message.data


def tables(oracle: Oracle) -> dict[str, list[dict[str, Any]]]:
    """What the tables should hold, by the names and columns of `comparison.TABLES`."""
    return {
        "definitions": [
            {"workflow_name": name, "source_hash": source_hash} for name, source_hash in sorted(oracle.definitions)
        ],
        "instances": [msgspec.structs.asdict(instance) for _, instance in sorted(oracle.instances.items())],
        "history": [
            {**msgspec.structs.asdict(event), "data_type": event.data_type} for event in oracle.history.values()
        ],
        "archive": [
            {**msgspec.structs.asdict(event), "data_type": event.data_type, "created_at": event.original_created_at}
            for event in oracle.archive
        ],
        "compensations": [msgspec.structs.asdict(entry) for entry in oracle.compensations],
        "timers": [msgspec.structs.asdict(timer) for timer in oracle.timers.values()],
        "channel_waits": [
            {**msgspec.structs.asdict(wait), "instance_id": key[0]} for key, wait in oracle.channel_waits.items()
        ],
        "instance_waits": [
            {"instance_id": key[0], "activity_id": key[1], "awaited_id": wait.instance_id}
            for key, wait in oracle.instance_waits.items()
        ],
        "messages": [
            {**msgspec.structs.asdict(message), "data_type": message.data_type} for message in oracle.messages.values()
        ],
        "claims": [
            {"message": message_id, "instance_id": owner} for message_id, owner in sorted(oracle.claims.items())
        ],
        "subscriptions": [msgspec.structs.asdict(subscription) for subscription in oracle.subscriptions.values()],
        "cursors": [
            {"instance_id": instance_id, "channel": channel, "message": message_id}
            for (instance_id, channel), message_id in sorted(oracle.cursors.items())
        ],
        "groups": [{"instance_id": instance_id, "group_name": name} for instance_id, name in oracle.groups],
        "outbox": [
            {**msgspec.structs.asdict(event), "data_type": event.data_type}
            for _, event in sorted(oracle.outbox.items())
        ],
        "system_locks": [
            {"lock_name": name, **msgspec.structs.asdict(lock)} for name, lock in sorted(oracle.system_locks.items())
        ],
    }
