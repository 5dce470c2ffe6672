"""What a sequence is made of: calls, moves of the clock, transactions, and calls that are made at the same time.

A step knows nothing of one run's ids, locks and times: it names them by references, which both sides resolve when they
come to the step. So steps can be left out of a failing sequence, and the rest still means something.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec

from romancy.storage import Lock, StorageError, Woken

from .oracle import EPOCH, OURS, Oracle

TICK = timedelta(seconds=1000)
"""How far the clock moves at once: so far that the real seconds between two steps do not matter."""


@dataclass(frozen=True)
class Held:
    """The lock that a worker was given for an instance, the newest or an older one; else one that never was."""

    instance_id: str
    worker_id: str
    age: int = 0


@dataclass(frozen=True)
class Published:
    """The id of a message, counted from the newest; 0 when there are not so many."""

    back: int


@dataclass(frozen=True)
class Drawn:
    """An id that another framework drew for a message and has not used; None without one."""


@dataclass(frozen=True)
class In:
    """A moment, in half ticks from now: an odd number of them, so that it is never quite now."""

    halves: int


@dataclass(frozen=True)
class Call:
    """A call of one of the storage's operations, by one of the frameworks in the database."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    by: str = OURS

    def __str__(self) -> str:
        arguments = [*map(show, self.args), *(f"{name}={show(value)}" for name, value in self.kwargs.items())]
        return f"{'' if self.by == OURS else self.by + ': '}{self.name}({', '.join(arguments)})"


@dataclass(frozen=True)
class Advance:
    """The clock moves."""

    ticks: int

    def __str__(self) -> str:
        return f"advance {self.ticks} ticks"


@dataclass(frozen=True)
class Transaction:
    """Steps in one transaction, or in a savepoint inside one."""

    steps: tuple["Step", ...]
    commit: bool

    def __str__(self) -> str:
        return f"transaction ({'committed' if self.commit else 'rolled back'})" + indented(self.steps)


@dataclass(frozen=True)
class Together:
    """Calls that are made without waiting for each other's answers."""

    steps: tuple[Call, ...]

    def __str__(self) -> str:
        return "together" + indented(self.steps)


Step = Call | Advance | Transaction | Together


def indented(steps: tuple[Any, ...]) -> str:
    return "".join("\n    " + str(step).replace("\n", "\n    ") for step in steps)


def show(value: Any) -> str:
    """A value as it would be written, without what it leaves at its default."""
    if isinstance(value, msgspec.Struct):
        fields = zip(value.__struct_fields__, msgspec.structs.fields(value), strict=True)
        given = [
            f"{name}={show(getattr(value, name))}" for name, known in fields if getattr(value, name) != known.default
        ]
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show, value))}]"
    return repr(str(value)) if isinstance(value, str) else repr(value)


class Handles:
    """What callers were given and may use later; each as the oracle knows it and as the storage does."""

    def __init__(self) -> None:
        self.locks: dict[tuple[str, str], tuple[Lock, ...]] = {}
        self.published: tuple[tuple[int, int], ...] = ()
        self.drawn: tuple[tuple[int, int], ...] = ()

    def copy(self) -> "Handles":
        copied = Handles()
        vars(copied).update(vars(self))
        return copied

    def note(self, name: str, expected: Any, actual: Any) -> None:
        """Remember what an answer gave."""
        if isinstance(actual, list) or type(actual) is tuple:
            for pair in zip(expected, actual, strict=True):
                self.note(name, *pair)
        elif isinstance(actual, Lock):
            key = (actual.instance_id, actual.worker_id)
            self.locks[key] = (actual, *self.locks.get(key, ()))
        elif isinstance(actual, Woken):
            self.note(name, expected.lock, actual.lock)
        elif name == "reserve_foreign":
            self.drawn = (*self.drawn, (expected, actual))
        elif name.startswith("publish") and isinstance(actual, int):
            self.published = ((expected, actual), *self.published)

    def resolve(self, arguments: Any, moment: Callable[[int, int], datetime]) -> tuple[Any, Any]:
        """Arguments for the oracle and for the storage; `moment` gives a time `halves` away on either side."""
        drawn = self.drawn[0] if self.drawn else (None, None)

        def on(side: int, value: Any) -> Any:
            match value:
                case Held(instance_id, worker_id, age):
                    known = self.locks.get((instance_id, worker_id), ())
                    never = Lock(instance_id, 0, worker_id, moment(side, 9))
                    return known[min(age, len(known) - 1)] if known else never
                case Published(back):
                    return self.published[back][side] if back < len(self.published) else 0
                case Drawn():
                    self.drawn = self.drawn[1:] if side else self.drawn
                    return drawn[side]
                case In(halves):
                    return moment(side, halves)
                case msgspec.Struct():
                    names = value.__struct_fields__
                    return type(value)(**{name: on(side, getattr(value, name)) for name in names})
                case list() | tuple():
                    return type(value)(on(side, item) for item in value)
                case dict():
                    return {name: on(side, item) for name, item in value.items()}
            return value

        return on(0, arguments), on(1, arguments)


class Rehearsal:
    """Steps played on the oracle alone."""

    def __init__(self) -> None:
        self.oracle = Oracle()
        self.handles = Handles()
        self.ticks = 0

    def moment(self, side: int, halves: int) -> datetime:
        return EPOCH + (2 * self.ticks + halves) * TICK / 2

    def advance(self, ticks: int) -> None:
        self.ticks += ticks
        self.oracle.now += ticks * TICK

    def arguments(self, call: Call) -> tuple[Any, Any]:
        """The call's arguments for the oracle and for the storage."""
        return self.handles.resolve((call.args, call.kwargs), self.moment)

    def ask_oracle(self, call: Call, arguments: Any) -> Any:
        """The oracle's answer, or the error it raises; then nothing has happened."""
        self.oracle.now += timedelta(milliseconds=10)
        self.oracle.framework = call.by
        before = self.oracle.snapshot()
        args, kwargs = arguments
        try:
            return getattr(self.oracle, call.name)(*args, **kwargs)
        except StorageError as error:
            self.oracle.restore(before)
            return error

    @contextmanager
    def transaction(self, *, commit: bool) -> Iterator[None]:
        """What is played inside counts only if it is committed."""
        before, handles = self.oracle.snapshot(), self.handles.copy()
        outermost = not self.oracle.in_transaction
        self.oracle.in_transaction = True
        yield
        if not commit:
            now = self.oracle.now
            self.oracle.restore(before)
            self.oracle.now, self.handles = now, handles
        self.oracle.in_transaction = not outermost
