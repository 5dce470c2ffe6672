"""The storage contract: what an engine may ask of a database, and what it is promised.

`Storage` is the thirteen managers below. These laws hold for every operation, on SQLite, PostgreSQL, MariaDB and MySQL:

1. An operation is one transaction: a crash leaves all of it or nothing.
2. Every stored "now" and every comparison is the database's clock, in UTC.
3. A write given ``lock=`` happens only while that acquisition is live, else `LockLostError` and nothing is written.
4. Finished instances stay finished.
5. Every list, batch, wait, retry and payload has a limit (``limit=0`` means the default).
6. Deadlocks and busy databases are retried inside, outside a user's transaction only; there they are
   `TransientStorageError`.
7. Same result, same order, same error on every database; keys are compared byte for byte.
8. Wake-ups are hints: the ``find_…`` polls see everything that is due.
9. Safe for many tasks and processes; a cancelled caller gets `CancelledError` once the outcome is known.

Arguments keep the order of the reference; what this library adds is keyword-only. With ``record=`` a step's history
event is written in the same transaction as its effect; if that step is recorded already nothing happens, and the
recorded event is returned instead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any, Protocol, runtime_checkable

from .errors import LockLostError, StorageError
from .models import (
    AnyFramework,
    Appended,
    ArchivedHistoryEvent,
    ChannelDeliveryResult,
    ChannelMessage,
    ChannelMode,
    ChannelSubscription,
    CompensationEntry,
    HistoryEvent,
    HistoryPage,
    ListInstancesOptions,
    Lock,
    OutboxEvent,
    PaginationResult,
    ResumableWorkflow,
    StaleWorkflowInfo,
    TimerSubscription,
    Wait,
    Woken,
    Work,
    WorkflowInstance,
    WorkflowStatus,
)
from .turn import Turn

PostCommitCallback = Callable[[], Awaitable[object] | object]


class Row(Protocol):
    """A row of the user's own SQL: a sequence of values that also knows its columns by name."""

    def __getitem__(self, key: int | str) -> Any: ...
    def __iter__(self) -> Any: ...
    def __len__(self) -> int: ...


@runtime_checkable
class Executor(Protocol):
    """The user's own SQL, in the ambient transaction if there is one, else on its own.

    Positional arguments use the database's own placeholders (`Driver.placeholder`); keyword arguments use ``:name`` on
    every database.
    """

    async def execute(self, query: str, *args: Any, **named: Any) -> int:
        """Run a statement; the number of rows it touched."""

    async def fetch_one(self, query: str, *args: Any, **named: Any) -> Row | None:
        """The first row, or None."""

    async def fetch_all(self, query: str, *args: Any, **named: Any) -> list[Row]:
        """All rows."""

    async def fetch_value(self, query: str, *args: Any, **named: Any) -> Any:
        """The first column of the first row, or None."""


class TransactionManager(Protocol):
    """Transactions that every operation of the same task joins."""

    def transaction(self, *, deadline_sec: float | None = None) -> AbstractAsyncContextManager[Executor]:
        """Commit what the block did, or nothing if it raises; nested, a savepoint. Yields `conn()`."""

    async def begin_transaction(self) -> None:
        """Open a transaction that this task's operations join; nested, a savepoint."""

    async def commit_transaction(self) -> None:
        """Commit the innermost open transaction; NotInTransactionError without one."""

    async def rollback_transaction(self) -> None:
        """Undo the innermost open transaction; nothing to do without one."""

    def in_transaction(self) -> bool:
        """Whether this task's operations join an open transaction."""

    def conn(self) -> Executor:
        """Run your own SQL in the ambient transaction, or on a connection of its own outside one."""

    def register_post_commit_callback(self, cb: PostCommitCallback) -> None:
        """Call `cb` (sync or async) after the outermost commit, never after a rollback."""


class InstanceManager(Protocol):
    """Workflow instances and their states."""

    async def create_instance(
        self, instance: WorkflowInstance, *, lock_timeout_sec: float | None = None
    ) -> Lock | None:
        """Store a new instance; with `locked_by` set it is born locked and its `Lock` is returned."""

    async def get_instance(self, instance_id: str) -> WorkflowInstance | None:
        """The instance with all its fields, or None."""

    async def update_instance_status(
        self,
        instance_id: str,
        status: WorkflowStatus,
        error_msg: str = "",
        *,
        output_data: str | None = None,
        lock: Lock | None = None,
    ) -> None:
        """Change the status; a message given with failed or compensating is recorded once as WorkflowFailed."""

    async def update_instance_activity(self, instance_id: str, activity_id: str, *, lock: Lock | None = None) -> None:
        """Note which activity the instance is in."""

    async def update_instance_output(
        self,
        instance_id: str,
        output_data: str | None,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> None:
        """Complete the instance with its output, release its lock and drop all it was waiting for.

        With `record`, the step that it completes with is appended to its history by the same write.
        """

    async def cancel_instance(self, instance_id: str, reason: str, *, compensate: bool = False) -> None:
        """Cancel a running, waiting or recurred instance; else WorkflowNotCancellableError.

        One that waits in the middle of compensating counts as compensating: what is left to undo must still be undone.
        With ``compensate=True`` it becomes `compensating` and keeps a live lock: its holder finds out and ends it.
        """

    async def list_instances(
        self,
        options: ListInstancesOptions | None = None,
        *,
        payloads: bool = False,
        framework: str | AnyFramework | None = None,
    ) -> PaginationResult:
        """A page of our framework's instances, newest first; input and output only with ``payloads=True``."""

    async def find_resumable_workflows(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ResumableWorkflow]:
        """Running or compensating instances whose lock is free, longest runnable first."""

    async def look_for_work(
        self,
        soon_sec: float = 0.0,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> Work:
        """Which polls would find something, and what is due within `soon_sec`: all in one statement."""

    async def suspend(
        self,
        instance_id: str,
        waits: Sequence[Wait],
        *,
        lock: Lock,
        keep_lock: bool = False,
        withdrawn: Sequence[str] = (),
        one_message: bool = False,
        only_running: bool = False,
    ) -> list[HistoryEvent]:
        """Record and return what is due already; if nothing is, register all waits and release the lock.

        With ``keep_lock=True`` only record what is due. Waits of the steps `withdrawn` are forgotten first. With
        ``one_message=True`` a message is taken only if nothing else is due, and only one: for a caller that may
        withdraw its other waits when it has the first result, and then must not have received what it drops. With
        ``only_running=True`` a compensating instance is refused: its body must not fall asleep over its cancellation.
        """

    async def get_awaited_steps(self, instance_id: str) -> list[str]:
        """The steps for which the instance has waits registered."""

    async def get_waits(self, instance_id: str) -> list[Wait]:
        """The waits that the instance has registered, in the order of their steps."""

    async def park(
        self, instance_id: str, reason: str, *, until: datetime | None = None, lock: Lock | None = None
    ) -> None:
        """Set an unfinished instance aside, lock released: no poll returns it before `until` (None: before unpark)."""

    async def unpark(self, instance_id: str) -> bool:
        """Let polls see the instance again, its setbacks forgotten; whether it was parked."""

    async def recur_instance(self, instance_id: str, input_data: str, *, lock: Lock) -> None:
        """Start the instance over with new input: history archived, waits and compensations gone, the lock kept."""

    async def delete_finished_instances(
        self, older_than: timedelta, limit: int = 100, *, turn: Turn | None = None
    ) -> int:
        """Delete up to `limit` of our instances that finished longer ago, with all their rows, oldest first.

        Given a `turn`, it stops when that is over, and the turn says so.
        """

    async def current_time(self) -> datetime:
        """The database's clock, the only one that counts."""


class LockManager(Protocol):
    """Who may run an instance."""

    async def try_acquire_lock(self, instance_id: str, worker_id: str, timeout_sec: float) -> Lock | None:
        """Take a free or expired lock; None when held (by oneself too), finished, missing, or locked right now.

        A `lock_timeout_seconds` set on the instance beats `timeout_sec`.
        """

    async def claim_resumable_workflows(
        self,
        worker_id: str,
        timeout_sec: float,
        limit: int = 100,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> list[tuple[WorkflowInstance, Lock]]:
        """Find what can be picked up and take its locks, in one transaction: what two workers claim never overlaps."""

    async def release_lock(self, instance_id: str, worker_id: str, *, lock: Lock | None = None) -> None:
        """Give the lock back; nothing happens unless it is the live acquisition."""

    async def refresh_lock(
        self, instance_id: str, worker_id: str, timeout_sec: float, *, lock: Lock | None = None
    ) -> Lock | None:
        """Extend our lock; None when its row is busy right now (ask again), LockLostError when it is lost."""

    async def refresh_locks(self, locks: Sequence[Lock], timeout_sec: float) -> list[Lock | LockLostError | None]:
        """Extend many locks at once; for each, in order, what `refresh_lock` would return or raise."""

    async def cleanup_stale_locks(
        self,
        timeout_sec: float,
        *,
        limit: int = 100,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> list[StaleWorkflowInfo]:
        """Free up to `limit` expired locks and return exactly the unfinished instances whose lock was freed."""


class HistoryManager(Protocol):
    """What an instance has done."""

    async def append_history(self, event: HistoryEvent, *, lock: Lock | None = None) -> Appended:
        """Record a step once; HistoryConflictError when it is recorded already.

        Outside a transaction, the same acquisition repeating the same type and payload is told `already_recorded`.
        """

    async def append_history_many(
        self, events: Sequence[HistoryEvent], *, lock: Lock | None = None
    ) -> list[Appended | StorageError]:
        """Record many steps in one transaction; for each, in order, what `append_history` would return or raise.

        A lost lock raises, and nothing is written.
        """

    async def get_history_paginated(self, instance_id: str, after_id: int = 0, limit: int = 100) -> HistoryPage:
        """Steps with an id above `after_id`, in order."""

    async def get_history_to_replay(self, instance_id: str, after_id: int = 0, limit: int = 100) -> HistoryPage:
        """The same as quickly as can be, and without the times of steps that were completed."""

    async def get_history_event(self, instance_id: str, activity_id: str) -> HistoryEvent | None:
        """The record of one step, or None."""

    async def get_history_count(self, instance_id: str) -> int:
        """How many steps are recorded."""


class TimerSubscriptionManager(Protocol):
    """Waits for a moment in time."""

    async def register_timer_subscription(self, subscription: TimerSubscription, *, lock: Lock | None = None) -> None:
        """Store a timer; registering the same timer again keeps the first expiry."""

    async def register_timer_subscription_and_release_lock(
        self, subscription: TimerSubscription, instance_id: str, worker_id: str, *, lock: Lock | None = None
    ) -> HistoryEvent | None:
        """Wait for a timer and release the lock; a timer due already is recorded at once and returned."""

    async def find_expired_timers(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[TimerSubscription]:
        """Due timers of waiting instances, oldest first."""

    async def fire_timer(self, timer: TimerSubscription, *, worker_id: str) -> bool:
        """Record TimerExpired, remove the timer and wake the instance together; False if it is not ours to fire."""

    async def fire_and_claim(
        self,
        timer: TimerSubscription,
        worker_id: str,
        timeout_sec: float,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> Woken | None:
        """Fire a timer and take the instance's lock together, if a poll with these options would find the instance.

        Else it is woken without a lock. None if the timer is not ours to fire.
        """

    async def remove_timer_subscription(self, instance_id: str, timer_id: str) -> None:
        """Forget a timer, if there is one; an instance left without any wait runs again."""


class OutboxManager(Protocol):
    """Events on their way out: pending → processing → published | pending again | failed | invalid | expired."""

    async def add_outbox_event(
        self, event: OutboxEvent, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        """Store an event, in the ambient transaction if there is one."""

    async def get_pending_outbox_events(
        self, limit: int = 100, *, lease_sec: float = 60.0, owner: str | None = None
    ) -> list[OutboxEvent]:
        """Lease due events to `owner`, oldest first; nobody else gets them before the lease ends."""

    async def mark_outbox_event_sent(self, event_id: str) -> bool:
        """What went out went out, whoever says so; False for an unknown or already published event."""

    async def mark_outbox_event_failed(
        self, event_id: str, *, error: str = "", invalid: bool = False, owner: str | None = None
    ) -> bool:
        """Give the event up for good; False for an unknown or already settled one.

        With `owner`, the relayer whose lease it was, also False if another one holds the event by now.
        """

    async def increment_outbox_attempts(self, event_id: str, *, error: str = "", owner: str | None = None) -> bool:
        """Count a failed attempt; the event is pending again, after a longer pause each time. `owner` as above."""

    async def cleanup_old_outbox_events(
        self, older_than: timedelta, *, limit: int = 1000, turn: Turn | None = None
    ) -> int:
        """Delete up to `limit` events published longer ago."""


class CompensationManager(Protocol):
    """How to undo what an instance did."""

    async def add_compensation(
        self, entry: CompensationEntry, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        """Push a compensation; a second one for the same step is ignored."""

    async def get_compensations(self, instance_id: str) -> list[CompensationEntry]:
        """All compensations, last in first out."""


class ChannelManager(Protocol):
    """Messages between instances: once to each subscriber, or once to one of them, in order."""

    async def publish_to_channel(
        self,
        channel_name: str,
        data: str | bytes,
        metadata: str | None = None,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> int | HistoryEvent:
        """Store a message (JSON text or bytes) and return its id; ids of a channel become visible in order."""

    async def publish_many(self, messages: Sequence[ChannelMessage], *, lock: Lock | None = None) -> list[int]:
        """Publish messages in one transaction; their ids, in the order given."""

    async def publish_once(
        self, event_key: str, channel_name: str, data: str | bytes, metadata: str | None = None
    ) -> int | None:
        """Publish unless something was published under this key before; the message's id, None for a repetition."""

    async def cleanup_seen_events(self, older_than: timedelta, *, limit: int = 1000, turn: Turn | None = None) -> int:
        """Forget up to `limit` older keys of `publish_once`; what comes again after that is published again."""

    async def subscribe_to_channel(
        self,
        instance_id: str,
        channel_name: str,
        mode: ChannelMode,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> HistoryEvent | None:
        """Subscribe, once; broadcast starts after what is visible now. ChannelModeConflictError for the other mode."""

    async def unsubscribe_from_channel(
        self,
        instance_id: str,
        channel_name: str,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> HistoryEvent | None:
        """End the subscription and forget its cursor; nothing to do without one."""

    async def get_channel_subscription(self, instance_id: str, channel_name: str) -> ChannelSubscription | None:
        """The subscription, `activity_id` set while it waits; any framework's."""

    async def get_channel_mode(self, channel_name: str) -> ChannelMode | None:
        """The mode of the channel's subscribers, None without any."""

    async def register_channel_receive_and_release_lock(
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
        """Wait for a message and release the lock; a pending message is delivered at once instead.

        The lock is released either way, unless ``keep_lock=True`` and a message was delivered.
        """

    async def get_pending_channel_messages(
        self, channel_name: str, after_id: int = 0, limit: int = 100
    ) -> list[ChannelMessage]:
        """Messages of the channel with an id above `after_id`, in order."""

    async def get_pending_channel_messages_for_instance(
        self, instance_id: str, channel_name: str, *, limit: int = 100
    ) -> list[ChannelMessage]:
        """What this subscriber has yet to receive (broadcast), or what nobody has claimed (competing)."""

    async def claim_channel_message(self, message_id: int, instance_id: str) -> bool:
        """Claim a message of a competing channel; False when it is claimed by a living instance, or gone."""

    async def delete_channel_message(self, message_id: int) -> None:
        """Remove a message; nothing to do when it is gone."""

    async def update_delivery_cursor(self, instance_id: str, channel_name: str, last_message_id: int) -> None:
        """Count everything visible up to `last_message_id` as received; the cursor never moves back."""

    async def get_delivery_cursor(self, instance_id: str, channel_name: str) -> int:
        """The id of the last message received, 0 without one."""

    async def get_channel_subscribers_waiting(
        self, channel_name: str, *, limit: int = 100
    ) -> list[ChannelSubscription]:
        """Subscribers of any framework that wait for a message of this channel, longest first."""

    async def clear_channel_waiting_state(self, instance_id: str, channel_name: str) -> None:
        """Stop waiting for the channel; an instance left without any wait runs again."""

    async def deliver_channel_message(
        self, instance_id: str, message: ChannelMessage, *, lock: Lock | None = None
    ) -> ChannelDeliveryResult | None:
        """Deliver the oldest pending message of `message.channel` to an instance whose lock the caller holds."""

    async def deliver_channel_message_with_lock(
        self,
        instance_id: str,
        channel_name: str,
        message: ChannelMessage,
        worker_id: str,
        lock_timeout_sec: float,
    ) -> ChannelDeliveryResult | None:
        """Deliver the oldest pending message to an instance that waits for it; None if it is held or does not wait."""

    async def deliver_and_claim(
        self,
        subscription: ChannelSubscription,
        worker_id: str,
        timeout_sec: float,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> Woken | None:
        """Deliver the same and take the instance's lock together, if a poll with these options would find the instance.

        Else it is woken without a lock.
        """

    async def find_deliverable_subscriptions(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ChannelSubscription]:
        """Waiting subscriptions with a pending message, oldest first: the poll that repairs any lost hint."""

    async def find_expired_channel_subscriptions(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ChannelSubscription]:
        """Waiting subscriptions past their timeout, oldest first."""

    async def expire_channel_receive(self, subscription: ChannelSubscription) -> bool:
        """Record MessageTimeout for the wait and wake its instance; False when it no longer waits or is not due."""

    async def cleanup_old_channel_messages(
        self, older_than: timedelta, *, limit: int = 1000, turn: Turn | None = None
    ) -> int:
        """Delete up to `limit` older messages that every current subscriber has received."""


class GroupManager(Protocol):
    """Named sets of instances."""

    async def join_group(
        self, instance_id: str, group_name: str, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        """Become a member, once."""

    async def leave_group(
        self, instance_id: str, group_name: str, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        """End the membership; nothing to do without one."""

    async def get_group_members(self, group_name: str) -> list[str]:
        """The ids of all unfinished members, in the order they joined."""

    async def leave_all_groups(self, instance_id: str) -> None:
        """End all memberships of the instance."""


class StateManager(Protocol):
    """What instances show of themselves."""

    async def set_instance_state(
        self, instance_id: str, state: str, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        """Show this JSON text instead of what the unfinished instance has shown before."""

    async def get_instance_state(self, instance_id: str) -> str | None:
        """What the instance has shown last, also when it has finished; None when it has shown nothing."""


class SetbackManager(Protocol):
    """What keeps an instance from going on, although nothing is wrong with the database."""

    async def count_takeover(self, instance_id: str, *, lock: Lock) -> int:
        """Count that our lock was taken over from a worker that vanished; how often in a row, without a new step."""

    async def note_refusal(self, instance_id: str, code: str, *, lock: Lock) -> None:
        """Note which code (a hash) does not fit the instance's history; to be parked next."""

    async def unpark_refused(
        self, workflow_name: str, code: str, limit: int = 100, *, owner_service: str | None = None
    ) -> list[str]:
        """Unpark up to `limit` instances that other code than this has refused; their ids."""


class SystemLockManager(Protocol):
    """Locks for background work that only one process should do."""

    async def try_acquire_system_lock(self, lock_name: str, worker_id: str, timeout_sec: float) -> bool:
        """Take the lock when absent, expired or one's own (renewal)."""

    async def release_system_lock(self, lock_name: str, worker_id: str) -> None:
        """Give the lock back; nothing happens unless it is one's own."""

    async def cleanup_expired_system_locks(self) -> int:
        """Delete expired locks."""


class HistoryArchiveManager(Protocol):
    """The earlier rounds of recurring instances."""

    async def archive_history(self, instance_id: str, *, lock: Lock | None = None) -> int:
        """Move the instance's history to the archive, ids and times kept; how many steps."""

    async def get_archived_history(self, instance_id: str) -> list[ArchivedHistoryEvent]:
        """All archived steps, in order."""

    async def cleanup_instance_subscriptions(self, instance_id: str) -> None:
        """Remove the instance's timers, waits, subscriptions, cursors and group memberships."""


@runtime_checkable
class Storage(
    TransactionManager,
    InstanceManager,
    LockManager,
    HistoryManager,
    TimerSubscriptionManager,
    OutboxManager,
    CompensationManager,
    ChannelManager,
    GroupManager,
    StateManager,
    SetbackManager,
    SystemLockManager,
    HistoryArchiveManager,
    Protocol,
):
    """Durable workflow state in one database. Safe for concurrent use."""

    async def initialize(self) -> None:
        """Bring the schema up to date; safe when many processes do it at once."""

    async def close(self) -> None:
        """Let queued operations finish, within a deadline, then let go of the database."""

    def db(self) -> object:
        """The database this storage runs on (connections, queue); for diagnosis."""
