"""An operation is a coroutine without I/O; a runner drives it.

An operation reads like ordinary async code, but the only things it awaits are queries (and hints). Awaiting one hands
it to whoever drives the coroutine: a thread that owns SQLite's write lock, or a task that owns a server connection. So
each operation is written once, and how it is run (batched, retried, in a user's transaction) is decided elsewhere.

Rules: an operation never catches a statement's error, can be started again from its arguments, and reads in pages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator, Hashable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import msgspec

from .statement import Query

P = ParamSpec("P")
S = TypeVar("S", bound="HasRunner")
T = TypeVar("T")


class Hint(msgspec.Struct, frozen=True, gc=False):
    """A wake-up for whoever waits, sent after the commit; losing one delays work and never loses it."""

    topic: str
    payload: str

    def __await__(self) -> Generator[Any, None, None]:
        yield self


class Touches(msgspec.Struct, frozen=True, gc=False):
    """What an operation has to do with, by name: two that touch nothing in common can run side by side."""

    changes: tuple[str, ...] = ()
    """Nobody else may touch these meanwhile."""
    shares: tuple[str, ...] = ()
    """Others may share these, but not change them meanwhile."""
    alike: Hashable = None
    """What it looks for, if it cannot tell beforehand what it will find: only those alike go together, as one."""


class Traits(msgspec.Struct, frozen=True):
    """What a runner may know of an operation before it runs it."""

    reads: bool = False
    """It writes nothing."""
    by_key: bool = False
    """It reads a few rows by key, or a page: on SQLite quick enough for the event loop's own thread, if the disk is."""
    autocommit: bool = False
    """At most one of its statements writes, so they need no common transaction; or two, if they are `twofold`."""
    twofold: bool = False
    """That statement is followed by another one, as if both were one (`Statement.then`)."""
    idempotent: bool = False
    """Repeating it after an unknown outcome does no harm and answers the same."""
    urgent: bool = False
    """It keeps locks alive: it goes before whatever else is waiting."""
    own_sql: bool = False
    """It is the user's own statement: a key that is taken is its answer, not a rival to let through."""
    undo: str | None = None
    """The storage's method that gives back what a cancelled caller would have won."""
    touches: Callable[..., Touches | None] | None = None
    """From its arguments; operations that say so may share statements and commits with others."""
    as_one: str | None = None
    """The storage's coroutine that does what several ask who are alike: from a list of demands, a list of answers."""


class Call(Generic[T]):
    """An operation with its arguments: what is queued, so that it can be started again."""

    __slots__ = ("args", "function", "kwargs", "storage", "traits")

    def __init__(
        self,
        function: Callable[..., Coroutine[Any, Any, T]],
        storage: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        traits: Traits,
    ) -> None:
        self.function = function
        self.storage = storage
        self.args = args
        self.kwargs = kwargs
        self.traits = traits

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def is_small(self) -> bool:
        """Whether it writes a few rows that it can name."""
        return self.traits.touches is not None and self.traits.as_one is None

    def touches(self) -> Touches | None:
        """What it has to do with; None if it runs by itself."""
        return None if self.traits.touches is None else self.traits.touches(*self.args, **self.kwargs)

    def start(self) -> Coroutine[Any, Any, T]:
        return self.function(self.storage, *self.args, **self.kwargs)

    @staticmethod
    def as_one(calls: Sequence[Call[T]]) -> Call[list[T]]:
        """Several that are alike, each with one argument, its demand, as one."""
        first = calls[0]
        function = getattr(type(first.storage), str(first.traits.as_one))
        return Call(function, first.storage, ([demand for call in calls for demand in call.args],), {}, first.traits)


class Runner(Protocol):
    """Whoever runs operations."""

    async def run(self, call: Call[T]) -> T:
        """Run the operation: in the ambient transaction, else in one of its own."""


class HasRunner(Protocol):
    """An object whose operations run on `runner`."""

    @property
    def runner(self) -> Runner: ...


Operation = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


@overload
def operation(function: Operation[S, P, T], /) -> Operation[S, P, T]: ...
@overload
def operation(
    *,
    reads: bool = False,
    by_key: bool = False,
    autocommit: bool = False,
    twofold: bool = False,
    idempotent: bool = False,
    urgent: bool = False,
    undo: str | None = None,
    touches: Callable[..., Touches | None] | None = None,
    as_one: str | None = None,
) -> Callable[[Operation[S, P, T]], Operation[S, P, T]]: ...
def operation(function: Any = None, /, **traits: Any) -> Any:
    """Make a coroutine of queries a method that runs on the storage's runner."""
    known = Traits(**traits)

    def decorate(body: Operation[S, P, T]) -> Operation[S, P, T]:
        # Not a coroutine of its own: the runner's is enough, and every step of every workflow comes this way.
        @functools.wraps(body)
        def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
            return self.runner.run(Call(body, self, args, kwargs, known))

        OPERATIONS[body.__name__] = known
        return method

    return decorate if function is None else decorate(function)


OPERATIONS: dict[str, Traits] = {}
"""Every operation by name, for tests that must not miss one."""

Execute = Callable[[Query[Any]], Any]


def drive(operation: Coroutine[Any, Any, T], execute: Execute, hints: list[Hint]) -> T:
    """Run an operation to its end with a function that answers queries."""
    answer: Any = None
    try:
        while True:
            asked = operation.send(answer)
            if isinstance(asked, Hint):
                hints.append(asked)
                answer = None
            else:
                answer = execute(asked)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        operation.close()
