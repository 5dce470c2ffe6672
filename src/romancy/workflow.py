"""Workflows: ordinary async functions whose every step is recorded, so that they go on after any crash."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Coroutine
from functools import cached_property
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, overload

from .activity import check_name, refuse_method
from .engine.ambient import current_run
from .engine.endings import Recur
from .errors import NonDeterminismError, SerializationError
from .serialization import Signature

P = ParamSpec("P")
T = TypeVar("T")


class Workflow(Generic[P, T]):
    """A workflow's definition."""

    def __init__(
        self,
        function: Callable[P, Coroutine[Any, Any, T]],
        *,
        name: str | None = None,
        max_concurrent: int | None = None,
    ) -> None:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"a workflow must be an async function: {function!r}")
        if max_concurrent is not None and max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1, not {max_concurrent}")
        refuse_method(function)
        self.fn = function
        self.name = check_name(name or function.__name__)
        self.signature = Signature(function, self.name)
        self.source_hash = _source_hash(function)
        self.max_concurrent = max_concurrent
        """How many instances run at once in one worker; those that wait do not count."""
        self.last_steps: set[str] = set()
        """The steps with whose results bodies have returned, as far as this process has seen."""
        self.__doc__ = function.__doc__
        self.__name__ = self.name

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.fn(*args, **kwargs)

    @cached_property
    def code_hash(self) -> str:
        """Which version of the code this is, helpers and activities in the same module included."""
        module = inspect.getmodule(self.fn)
        try:
            surroundings = "" if module is None else inspect.getsource(module)
        except (OSError, TypeError):  # typed into an interpreter
            surroundings = ""
        return hashlib.sha256(f"{self.source_hash}{surroundings}".encode()).hexdigest()

    def body(self, input_json: str) -> Callable[[], Coroutine[Any, Any, T]]:
        """The function, ready to be called with stored arguments; NonDeterminismError if it takes others by now."""
        try:
            args, kwargs = self.signature.decode_arguments(input_json)
        except SerializationError as error:
            raise self._changed(error) from error

        def begin() -> Coroutine[Any, Any, T]:
            try:
                return self.fn(*args, **kwargs)
            except TypeError as error:  # of the call: nothing of an async function runs before it is awaited
                raise self._changed(error) from error

        return begin

    def _changed(self, error: Exception) -> NonDeterminismError:
        return NonDeterminismError(
            f"workflow {self.name!r} does not take the arguments with which the instance was started", f": {error}"
        )


@overload
def workflow(function: Callable[P, Coroutine[Any, Any, T]], /) -> Workflow[P, T]: ...
@overload
def workflow(
    *, name: str | None = None, max_concurrent: int | None = None
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Workflow[P, T]]: ...
def workflow(function: Any = None, /, **options: Any) -> Any:
    """Make an async function a workflow; at most `max_concurrent` of its instances run at once in a worker."""
    if function is not None:
        return Workflow(function, **options)
    return lambda decorated: Workflow(decorated, **options)


def recur(*args: Any, **kwargs: Any) -> NoReturn:
    """Start this instance over with new arguments: its history goes to the archive, its subscriptions stay."""
    run = current_run("recur")
    raise Recur(run.encode_arguments(args, kwargs))


def _source_hash(function: Callable[..., Any]) -> str:
    """Which version of the code this is."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # typed into an interpreter
        source = function.__code__.co_code.hex() if hasattr(function, "__code__") else repr(function)
    return hashlib.sha256(source.encode()).hexdigest()
