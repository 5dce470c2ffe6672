"""When a failed activity is tried again."""

from __future__ import annotations

import random
from datetime import timedelta

import msgspec

from .checks import number, optional_duration, whole_number
from .errors import NotInWorkflowError, SerializationError, TerminalError
from .storage import PayloadTooLargeError, TransactionDeadlineError
from .storage.sql.checks import LONGEST_SEC

_HOPELESS = (TerminalError, NotInWorkflowError, SerializationError, PayloadTooLargeError, TransactionDeadlineError)
"""It would be the same the next time."""

_LARGEST_FACTOR = 1000
"""Of which the highest power that is taken, the 64th, is still a number."""

Errors = type[BaseException] | tuple[type[BaseException], ...]


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """Try again with growing pauses, until `max_attempts` or `max_duration` is reached."""

    max_attempts: int = 5
    """How often in all; 1 means never again, 0 for ever."""
    initial_sec: float = 1.0
    factor: float = 2.0
    longest_sec: float = 60.0
    jitter: float = 0.1
    """By which part a pause is made longer or shorter at random."""
    max_duration: timedelta | None = None
    """Counted from the first attempt."""
    retry_on: Errors = (Exception,)
    terminal: Errors = ()
    """Errors that are never tried again, though `retry_on` has them.

    `TerminalError` is always one, and so is what would be the same the next time: a value that cannot be stored, a
    transaction that takes longer than its deadline, and a call that belongs in a workflow's body.
    """

    def __post_init__(self) -> None:
        whole_number("max_attempts", self.max_attempts, 0)
        number("initial_sec", self.initial_sec, LONGEST_SEC)
        number("factor", self.factor, _LARGEST_FACTOR)
        number("longest_sec", self.longest_sec)
        number("jitter", self.jitter, 1)
        optional_duration("max_duration", self.max_duration)
        _check_errors("retry_on", self.retry_on)
        _check_errors("terminal", self.terminal)

    def allows(self, error: BaseException, attempt: int, elapsed_sec: float) -> bool:
        """Whether attempt number `attempt`, which failed with `error`, is followed by another."""
        if isinstance(error, (_HOPELESS, self.terminal)):
            return False
        if not isinstance(error, self.retry_on) or (self.max_attempts and attempt >= self.max_attempts):
            return False
        return self.max_duration is None or elapsed_sec < self.max_duration.total_seconds()

    def pause_sec(self, attempt: int) -> float:
        """How long to wait after attempt number `attempt`."""
        pause = min(self.initial_sec * self.factor ** min(attempt - 1, 64), self.longest_sec)
        return pause * random.uniform(1 - self.jitter, 1 + self.jitter)


def _check_errors(name: str, kinds: object) -> None:
    """TypeError for what no error can be compared with."""
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(
                f"{name} must be a tuple of exception classes, such as (ConnectionError, TimeoutError), not {kinds!r}"
            )


DEFAULT_RETRY = Retry()
NO_RETRY = Retry(max_attempts=1)
