"""The values that go in and out of the storage layer: plain, typed, immutable.

Field names are those of the shared schema. JSON documents are `str`, binary payloads are `bytes`; times are aware UTC
datetimes. Only what a row makes no sense without is required; a time left `None` becomes the database's now.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple

import msgspec


class WorkflowStatus(StrEnum):
    """Where an instance stands in its life."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    WAITING_FOR_EVENT = "waiting_for_event"
    WAITING_FOR_TIMER = "waiting_for_timer"
    WAITING_FOR_MESSAGE = "waiting_for_message"
    RECURRED = "recurred"
    COMPENSATING = "compensating"


FINISHED: Final = (WorkflowStatus.COMPLETED, WorkflowStatus.FAILED, WorkflowStatus.CANCELLED)
"""Final: nothing brings an instance back from here."""
WAITING: Final = (
    WorkflowStatus.WAITING_FOR_EVENT,
    WorkflowStatus.WAITING_FOR_TIMER,
    WorkflowStatus.WAITING_FOR_MESSAGE,
)
"""Suspended: something durable will wake it."""
RUNNABLE: Final = (WorkflowStatus.RUNNING, WorkflowStatus.COMPENSATING)
"""A worker may pick it up whenever its lock is free."""
CANCELLABLE: Final = (WorkflowStatus.RUNNING, *WAITING, WorkflowStatus.RECURRED)
"""What `cancel_instance` accepts."""


class HistoryEventType(StrEnum):
    """What a history row records; unknown values of other frameworks are read as plain `str`."""

    ACTIVITY_COMPLETED = "ActivityCompleted"
    ACTIVITY_FAILED = "ActivityFailed"
    EVENT_RECEIVED = "EventReceived"
    TIMER_EXPIRED = "TimerExpired"
    CHANNEL_MESSAGE_RECEIVED = "ChannelMessageReceived"
    MESSAGE_TIMEOUT = "MessageTimeout"
    COMPENSATION_EXECUTED = "CompensationExecuted"
    COMPENSATION_FAILED = "CompensationFailed"
    WORKFLOW_FAILED = "WorkflowFailed"
    WORKFLOW_CANCELLED = "WorkflowCancelled"
    INSTANCE_FINISHED = "InstanceFinished"
    """Ours: the instance that an `InstanceWait` was waiting for has finished."""


class ChannelMode(StrEnum):
    """Who receives the messages of a channel."""

    BROADCAST = "broadcast"
    """Every subscriber receives every message."""
    COMPETING = "competing"
    """Every message goes to exactly one subscriber."""
    DIRECT = "direct"
    """Only asked for, never stored: the instance's own channel, ``{channel}:{instance_id}``."""


class OutboxStatus(StrEnum):
    """The life of an outbox event."""

    PENDING = "pending"
    PROCESSING = "processing"
    PUBLISHED = "published"
    FAILED = "failed"
    INVALID = "invalid"
    EXPIRED = "expired"


class AnyFramework:
    """The type of `ANY`."""

    def __repr__(self) -> str:
        return "ANY"


FRAMEWORK = "romancy-py"
"""Whose instances these are, where several frameworks share a database."""

ANY: Final = AnyFramework()
"""``list_instances(framework=ANY)`` lists the instances of every framework in the database."""

DataType = Literal["json", "binary"]


class Model(msgspec.Struct, frozen=True, gc=False):
    """A row's value: compared by content, hashable, changed with `msgspec.structs.replace`.

    Nothing in it leads back to it, so the garbage collector need not look at it (`gc=False`).
    """


class WorkflowInstance(Model, frozen=True):
    """A single execution of a workflow."""

    instance_id: str
    workflow_name: str
    framework: str | None = None
    status: WorkflowStatus = WorkflowStatus.RUNNING
    input_data: str | None = "{}"
    output_data: str | None = None
    current_activity_id: str | None = None
    source_hash: str = ""
    owner_service: str = ""
    continued_from: str | None = None
    locked_by: str | None = None
    locked_at: datetime | None = None
    lock_timeout_seconds: int | None = None
    lock_expires_at: datetime | None = None
    lock_token: int = 0
    """How many times the instance's lock has been acquired."""
    parked_until: datetime | None = None
    """Set while the instance is set aside (`park`); far in the future when that is for good."""
    parked_reason: str | None = None
    started_at: datetime | None = None
    updated_at: datetime | None = None


class HistoryEvent(Model, frozen=True):
    """One recorded step of an instance."""

    instance_id: str
    activity_id: str
    event_type: HistoryEventType | str
    id: int | None = None
    event_data: str | None = None
    event_data_binary: bytes | None = None
    created_at: datetime | None = None

    @property
    def data_type(self) -> DataType:
        return "json" if self.event_data_binary is None else "binary"


class ArchivedHistoryEvent(Model, frozen=True):
    """A step of an earlier round of a recurring instance."""

    instance_id: str
    activity_id: str
    event_type: HistoryEventType | str
    id: int
    original_id: int
    original_created_at: datetime
    archived_at: datetime
    event_data: str | None = None
    event_data_binary: bytes | None = None

    @property
    def data_type(self) -> DataType:
        return "json" if self.event_data_binary is None else "binary"


class TimerSubscription(Model, frozen=True):
    """An instance's wait for a moment in time."""

    instance_id: str
    timer_id: str
    expires_at: datetime
    activity_id: str | None = None
    id: int | None = None
    created_at: datetime | None = None


class OutboxEvent(Model, frozen=True):
    """An event on its way to the outside, written in the transaction that caused it."""

    event_id: str
    event_type: str
    event_source: str
    event_data: str | None = None
    event_data_binary: bytes | None = None
    content_type: str = "application/json"
    status: OutboxStatus = OutboxStatus.PENDING
    retry_count: int = 0
    last_error: str | None = None
    published_at: datetime | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None

    @property
    def data_type(self) -> DataType:
        return "json" if self.event_data_binary is None else "binary"


class CompensationEntry(Model, frozen=True):
    """How to undo one step, should the instance fail or be cancelled."""

    instance_id: str
    activity_id: str
    activity_name: str
    args: str = "{}"
    id: int | None = None
    created_at: datetime | None = None


class ChannelMessage(Model, frozen=True):
    """A message of a channel; `id` orders it, `message_id` names it."""

    channel: str
    data: str | None = None
    data_binary: bytes | None = None
    metadata: str | None = None
    id: int | None = None
    message_id: str | None = None
    published_at: datetime | None = None

    @property
    def data_type(self) -> DataType:
        return "json" if self.data_binary is None else "binary"


class ChannelSubscription(Model, frozen=True):
    """An instance's subscription to a channel; `activity_id` is set while it waits in a receive."""

    instance_id: str
    channel: str
    mode: ChannelMode
    id: int | None = None
    cursor_message_id: int = 0
    activity_id: str | None = None
    timeout_at: datetime | None = None
    subscribed_at: datetime | None = None


class ChannelDeliveryCursor(Model, frozen=True):
    """How far a broadcast subscriber has received."""

    instance_id: str
    channel: str
    last_delivered_id: int
    id: int | None = None
    updated_at: datetime | None = None


class ChannelMessageClaim(Model, frozen=True):
    """Which instance has claimed a message of a competing channel."""

    message_id: int
    instance_id: str
    id: int | None = None
    claimed_at: datetime | None = None


class ChannelDeliveryResult(Model, frozen=True):
    """To which step of which instance a message was delivered."""

    instance_id: str
    workflow_name: str
    activity_id: str


class Woken(Model, frozen=True):
    """An instance that has just been woken, by what, and its lock if whoever woke it may run it."""

    instance: WorkflowInstance
    event: HistoryEvent
    after_id: int
    """The newest event of its history when it was woken: who has seen that has now seen all."""
    lock: Lock | None = None


class GroupMembership(Model, frozen=True):
    """An instance's membership in a group."""

    instance_id: str
    group_name: str
    id: int | None = None
    joined_at: datetime | None = None


class SystemLock(Model, frozen=True):
    """A lock for background work that only one process should do."""

    lock_name: str
    locked_by: str
    locked_at: datetime | None = None
    expires_at: datetime | None = None


class ResumableWorkflow(Model, frozen=True):
    """An instance that a worker can pick up now."""

    instance_id: str
    workflow_name: str


class StaleWorkflowInfo(Model, frozen=True):
    """An unfinished instance whose expired lock was freed."""

    instance_id: str
    workflow_name: str


class Work(Model, frozen=True):
    """What there is to do for a worker, as one look saw it."""

    now: datetime
    """The database's clock."""
    runnable: bool
    """`find_resumable_workflows` would find something."""
    next_timer: datetime | None
    """When the next timer is due, or was; None if that is not soon."""
    next_timeout: datetime | None
    """When the next wait for a message times out, or did; None if that is not soon."""
    messages: bool
    """`find_deliverable_subscriptions` has something to look at."""
    events: bool
    """`get_pending_outbox_events` would find something."""


class Lock(Model, frozen=True):
    """One acquisition of an instance's lock: proof of ownership for every write bound to it with ``lock=``."""

    instance_id: str
    token: int
    worker_id: str
    expires_at: datetime
    status: WorkflowStatus = WorkflowStatus.RUNNING
    """The instance's status when the lock was taken or refreshed: how a holder learns that it was cancelled."""


class ChannelWait(Model, frozen=True):
    """A wait for the next message of a channel, until `timeout_at`."""

    channel: str
    activity_id: str
    timeout_at: datetime | None = None


class InstanceWait(Model, frozen=True):
    """A wait for another instance to finish."""

    instance_id: str
    activity_id: str


Wait = TimerSubscription | ChannelWait | InstanceWait


class HistoryIteratorOptions(Model, frozen=True):
    """How `HistoryIterator` reads."""

    batch_size: int = 1000


class ListInstancesOptions(Model, frozen=True):
    """Which instances to list; filters combine with AND."""

    limit: int = 50
    page_token: str | None = None
    status_filter: WorkflowStatus | None = None
    workflow_name_filter: str | None = None
    instance_id_filter: str | None = None
    started_after: datetime | None = None
    started_before: datetime | None = None
    input_filters: Mapping[str, Any] = {}
    instance_id_prefix: str | None = None
    """How the id begins, byte for byte; found by the index, where a part from the middle is searched for."""


class PaginationResult(Model, frozen=True):
    """A page of instances and the token of the next one."""

    instances: list[WorkflowInstance]
    next_page_token: str | None = None
    has_more: bool = False


class HistoryPage(NamedTuple):
    """A page of history."""

    events: list[HistoryEvent]
    has_more: bool


class Appended(NamedTuple):
    """The id of a recorded step, and whether it stood there before this call."""

    id: int
    already_recorded: bool
