"""Contexts of their own for users' async functions."""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@coroutine
def in_context_of_its_own(awaitable: Awaitable[T]) -> Generator[Any, Any, T]:
    """Await something in a copy of the context, so that nobody sees the variables it sets; a task does the same."""
    context = contextvars.copy_context()
    awaited: Any = awaitable.__await__()
    resume, value = awaited.send, None
    while True:
        try:
            pending = context.run(resume, value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            resume, value = awaited.send, (yield pending)
        except BaseException as error:
            resume, value = awaited.throw, error
