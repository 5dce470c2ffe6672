"""Cancelling a caller must not cut an operation in half."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

Undo = Callable[[T], Coroutine[Any, Any, None]]
"""Gives back what a cancelled caller would have won."""


async def settled(work: Coroutine[Any, Any, T], undo: Undo[T] | None = None) -> T:
    """Await `work` to its end even if the caller is cancelled meanwhile; then `undo` what it won and raise."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            await _finish(task)
            if undo is not None and not task.cancelled() and task.exception() is None:
                await _undone(undo(task.result()))
            elif not task.cancelled():
                task.exception()  # seen: the cancellation is the answer
        raise


async def _undone(undoing: Awaitable[None]) -> None:
    task = asyncio.ensure_future(undoing)
    await _finish(task)
    task.exception()  # seen: a lock that could not be given back expires by itself


async def _finish(task: asyncio.Future[Any]) -> None:
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})


@coroutine
def unbroken(work: Coroutine[Any, Any, T], undo: Undo[T] | None = None) -> Generator[Any, Any, T]:
    """The same in the caller's own task, which costs a fraction of that.

    Only for work that sets itself no time limits by `asyncio.timeout`: that cancels the task it is in, which here has
    to wait like any other cancellation.
    """
    cancelled: asyncio.CancelledError | None = None
    try:
        while True:
            awaited = work.send(None)
            try:
                yield None if awaited is None else _Uncancellable(awaited)
            except asyncio.CancelledError as error:
                if awaited is None or not awaited.cancelled() or is_cancelled():
                    cancelled = error
            except Exception:
                pass  # of what is awaited: `work` is told by that itself
    except StopIteration as end:
        if cancelled is None:
            return end.value  # type: ignore[no-any-return]
        if undo is not None:
            yield from _undone(undo(end.value))
    except Exception:
        if cancelled is None:
            raise
    finally:
        work.close()
    raise cancelled


def is_cancelled() -> bool:
    """Whether somebody wants the running task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Uncancellable:
    """A future as a task sees it that waits for it; cancelling it does nothing, so the task is told when it is done."""

    __slots__ = ("_asyncio_future_blocking", "_future")

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future
        # By this mark a task knows that it is awaited, and takes it off.
        future._asyncio_future_blocking = False
        self._asyncio_future_blocking = True

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()

    def add_done_callback(self, callback: Callable[[asyncio.Future[Any]], object], *, context: Any = None) -> None:
        self._future.add_done_callback(callback, context=context)

    def cancel(self, msg: Any = None) -> bool:
        return False
