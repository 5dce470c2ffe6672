"""Threads of their own for users' sync functions.

Not asyncio's: that has a handful on a small machine, for everybody, and a few slow functions would keep all others from
running.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MOST = 1000
"""Far more than instances run at once; one that is never used is never started."""

_threads = ThreadPoolExecutor(_MOST, thread_name_prefix="romancy-activity")


def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Call a sync function in a thread, with the context variables of the caller."""
    call = functools.partial(contextvars.copy_context().run, _call, function, *args, **kwargs)
    return asyncio.get_running_loop().run_in_executor(_threads, call)


def _call(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return function(*args, **kwargs)
    except StopIteration as error:  # which no future takes: whoever waits for it would wait for ever
        raise RuntimeError(f"{getattr(function, '__name__', function)} raised StopIteration") from error
