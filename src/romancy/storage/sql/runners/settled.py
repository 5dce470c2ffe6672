"""Cancelling a caller must not cut an operation in half."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def settled(work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None) -> T:
    """Await `work` to its end even if the caller is cancelled meanwhile; then `undo` what it won and raise."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            await _finish(task)
            if undo is not None and not task.cancelled() and task.exception() is None:
                undoing = asyncio.ensure_future(undo(task.result()))
                await _finish(undoing)
                undoing.exception()  # seen: a lock that could not be given back expires by itself
            elif not task.cancelled():
                task.exception()  # seen: the cancellation is the answer
        raise


async def _finish(task: asyncio.Future[Any]) -> None:
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})
