"""Every error the storage layer raises, shaped by what the caller can do about it.

    StorageError
    ├── TransientStorageError            try the same call (or the whole transaction block) again
    │   └── StorageUnavailableError      the database cannot be reached right now
    ├── OutcomeUnknownError              the commit may or may not have happened: look before repeating
    ├── LockLostError                    another worker owns the instance now: stop writing
    ├── InstanceExistsError              this instance id is taken
    ├── InstanceNotFoundError            no such instance
    ├── HistoryConflictError             this step is recorded already, and differently
    ├── OutboxEventExistsError           this event id is taken
    ├── InvalidStatusTransitionError     the instance's state forbids it
    ├── ForeignInstanceError             another framework's instance: it ends without telling us
    ├── WorkflowNotCancellableError      finished, compensating or missing: nothing to cancel
    ├── ChannelModeConflictError         the channel has subscribers of the other mode
    ├── NotSubscribedError               subscribe before receiving
    ├── PayloadTooLargeError             keep the bytes elsewhere and store a reference
    ├── InvalidKeyError (ValueError)     a key that is empty, too long, or holds a NUL
    ├── InvalidJSONError (ValueError)    text that is not JSON
    ├── InvalidJSONPathError (ValueError)
    ├── InvalidPageTokenError (ValueError)
    ├── InvalidURLError (ValueError)     a database URL that cannot be understood
    ├── MissingDriverError (ImportError) the database's client library is an extra: install it
    ├── TransactionError                 transactions used in a way that cannot work
    │   ├── NotInTransactionError
    │   ├── WrongTaskError               a transaction belongs to the task that opened it
    │   └── TransactionDeadlineError     it was open for too long and has been rolled back
    ├── SearchTimeoutError               a search that no index could help took too long: ask for less
    ├── SchemaError                      the tables are missing, foreign, or newer than this code
    ├── DatabaseError                    the database refused a statement; its words are in the message
    └── StorageClosedError               closed, or inherited through a fork

Driver exceptions never leak; the original is always the ``__cause__``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .models import HistoryEvent, WorkflowStatus


class StorageError(Exception):
    """Root of everything the storage layer raises."""


class TransientStorageError(StorageError):
    """A passing failure (deadlock, busy database, lost connection); nothing was written, the caller may repeat."""


class StorageUnavailableError(TransientStorageError):
    """The database cannot be reached, or it does not let us in."""


class OutcomeUnknownError(StorageError):
    """The connection broke around the commit: the write may have happened. Read before repeating it."""


class LockLostError(StorageError):
    """The lock this write is bound to is no longer the live one; nothing was written."""

    def __init__(self, instance_id: str, worker_id: str) -> None:
        super().__init__(f"{worker_id!r} no longer holds the lock of instance {instance_id!r}; nothing was written")
        self.instance_id = instance_id
        self.worker_id = worker_id


class InstanceExistsError(StorageError):
    """An instance with this id exists already."""

    def __init__(self, instance_id: str) -> None:
        super().__init__(f"instance {instance_id!r} exists already")
        self.instance_id = instance_id


class InstanceNotFoundError(StorageError):
    """No instance has this id."""

    def __init__(self, instance_id: str) -> None:
        super().__init__(f"there is no instance {instance_id!r}")
        self.instance_id = instance_id


class HistoryConflictError(StorageError):
    """This step of this instance is recorded already; ``recorded`` is what stands there."""

    def __init__(self, recorded: HistoryEvent) -> None:
        super().__init__(
            f"step {recorded.activity_id!r} of instance {recorded.instance_id!r} is recorded already"
            f" as {recorded.event_type} (history id {recorded.id})"
        )
        self.recorded = recorded


class OutboxEventExistsError(StorageError):
    """An outbox event with this id exists already."""

    def __init__(self, event_id: str) -> None:
        super().__init__(f"outbox event {event_id!r} exists already")
        self.event_id = event_id


class InvalidStatusTransitionError(StorageError):
    """The instance cannot go from the status it has to the one asked for."""

    def __init__(self, instance_id: str, status: WorkflowStatus | str, target: WorkflowStatus | str) -> None:
        super().__init__(f"instance {instance_id!r} is {status} and cannot become {target}")
        self.instance_id = instance_id
        self.status = status
        self.target = target


class ForeignInstanceError(StorageError):
    """An instance of a framework that knows nothing of our waits; nobody would tell us of its end."""

    def __init__(self, instance_id: str, framework: str) -> None:
        super().__init__(
            f"instance {instance_id!r} belongs to the framework {framework!r}, which will not tell us of its end:"
            " it cannot be waited for; let it publish a message"
        )
        self.instance_id = instance_id
        self.framework = framework


class WorkflowNotCancellableError(StorageError):
    """Only a running, waiting or recurred instance can be cancelled; ``status`` is None when there is none."""

    def __init__(self, instance_id: str, status: WorkflowStatus | str | None) -> None:
        why = "does not exist" if status is None else f"is {status}"
        super().__init__(f"instance {instance_id!r} cannot be cancelled: it {why}")
        self.instance_id = instance_id
        self.status = status


class ChannelModeConflictError(StorageError):
    """A channel has one mode while it has subscribers."""

    def __init__(self, channel: str, mode: str, requested: str) -> None:
        super().__init__(f"channel {channel!r} has {mode} subscribers; it cannot be subscribed to as {requested}")
        self.channel = channel
        self.mode = mode
        self.requested = requested


class NotSubscribedError(StorageError):
    """The instance has no subscription to this channel."""

    def __init__(self, instance_id: str, channel: str) -> None:
        named = channel.removesuffix(f":{instance_id}")  # as it was subscribed to: a direct one is kept per instance
        given = repr(named) if named == channel else f"{named!r}, 'direct'"
        super().__init__(
            f"instance {instance_id!r} is not subscribed to channel {named!r}:"
            f" await subscribe({given}) before receiving"
        )
        self.instance_id = instance_id
        self.channel = channel


class PayloadTooLargeError(StorageError):
    """A payload above the limit; nothing was sent to the database."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} has {size:,} bytes; the limit is {limit:,}")
        self.size = size
        self.limit = limit


class InvalidKeyError(StorageError, ValueError):
    """A key must be 1 to 255 characters of valid Unicode without NUL."""


class InvalidJSONError(StorageError, ValueError):
    """The text is not a JSON document."""


class InvalidJSONPathError(StorageError, ValueError):
    """A JSON path is made of ASCII identifiers joined by dots."""


class InvalidPageTokenError(StorageError, ValueError):
    """A page token has the form ``ISO_DATETIME||INSTANCE_ID``."""


class InvalidURLError(StorageError, ValueError):
    """A database URL that cannot be understood; the message never shows its password."""


class MissingDriverError(StorageError, ImportError):
    """The client library of this kind of database is not installed."""

    def __init__(self, database: str, extra: str) -> None:
        super().__init__(f"the client library for {database} is not installed: run pip install 'romancy[{extra}]'")


class TransactionError(StorageError):
    """A transaction was used in a way that cannot work."""


class NotInTransactionError(TransactionError):
    """This needs an open transaction."""


class WrongTaskError(TransactionError):
    """A transaction can only be used by the task that opened it."""


class TransactionDeadlineError(TransactionError):
    """The transaction stayed open past its deadline and was rolled back."""


class SearchTimeoutError(StorageError):
    """A listing that no index could help was given up; nothing is wrong with the database."""

    def __init__(self) -> None:
        super().__init__(
            "the search took too long and was given up: filter by status, name, time or the beginning of the id,"
            " or declare the input path (declare_input_path)"
        )


class SchemaError(StorageError):
    """The tables are missing, cannot be shared, or belong to a newer version of this library."""


class DatabaseError(StorageError):
    """The database refused a statement for a reason this library does not foresee."""


class StorageClosedError(StorageError):
    """The storage is closed, or this process inherited it through a fork."""
