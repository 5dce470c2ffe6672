"""The event loop a workflow's body runs on: deterministic, without I/O, driven from outside.

Ordinary asyncio code (gather, TaskGroup, wait, timeout, queues, events) runs on it. Everything ready is run until all
tasks are blocked; what they are blocked on are durable steps, whose results are handed in one at a time, in the order
of history. So the same history leads to the same order of everything, live and on replay. A timer of the loop is a
durable timer. Threads, sockets and the like are refused: they belong in activities.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import hashlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn, Protocol

import msgspec

from ..errors import RomancyError

_LONGEST_SPIN = 1_000_000


class Timekeeper(Protocol):
    """Whoever makes the loop's timers durable."""

    def start_timer(self, delay_sec: float, fire: Callable[[], None]) -> Callable[[], None]:
        """Call `fire` after the delay; returns what withdraws the timer."""

    def time(self) -> float:
        """Seconds on a clock that replays the same."""


class WorkflowTask(asyncio.Task[Any]):
    """A task of a workflow's body; its path is numbered at its creation, so it is the same on every replay.

    So is its hash: asyncio keeps tasks in sets, and hands sets to the body (`asyncio.wait`).
    """

    path: tuple[int, ...] = ()

    def __init__(self, *args: Any, path: tuple[int, ...], number: int, **kwargs: Any) -> None:
        self.path = path
        self._number = number
        self.children = 0
        self.calls: dict[str, int] = {}
        """How often steps of a name were asked for."""
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Ready(msgspec.Struct):
    """What a task or a callback is called by, as asyncio's handle is; every step makes one, in a fifth of the time."""

    _callback: Callable[..., object]
    _args: tuple[Any, ...]
    _context: contextvars.Context
    _cancelled: bool = False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled


class WorkflowLoop(asyncio.AbstractEventLoop):
    """Runs the tasks of one workflow instance."""

    def __init__(self, timekeeper: Timekeeper, name: str) -> None:
        self._timekeeper = timekeeper
        # Tasks of different instances must not all collide in the sets that asyncio keeps for the whole process.
        self._next_number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest())
        self.ready: deque[_Ready] = deque()
        """What could run now."""
        self._withdrawals: dict[int, Callable[[], None]] = {}
        self._closed = False
        self.unhandled: list[dict[str, Any]] = []
        self.tasks: set[WorkflowTask] = set()

    def run_until_blocked(self) -> None:
        """Run everything that is ready, and what that makes ready, until every task waits for something durable."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            for _ in range(_LONGEST_SPIN):
                if not self.ready:
                    return
                handle = self.ready.popleft()
                if handle._cancelled:
                    continue
                try:
                    handle._context.run(handle._callback, *handle._args)
                except SystemExit:
                    pass  # it ends the task that raised it, and not the worker
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": "a callback failed", "exception": error})
        finally:
            asyncio._set_running_loop(outer)
        raise RomancyError("the workflow's body spins without waiting for anything durable")

    # What asyncio needs.

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> _Ready:
        handle = _Ready(callback, args, contextvars.copy_context() if context is None else context)
        self.ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        delay = when - self.time()
        if delay <= 0:
            self.call_soon(_fire, timer)
        else:
            self._withdrawals[id(timer)] = self._timekeeper.start_timer(delay, lambda: self._ring(timer))
        return timer

    def _ring(self, timer: asyncio.TimerHandle) -> None:
        self._withdrawals.pop(id(timer), None)  # another timer may have this id one day
        self.call_soon(_fire, timer)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        withdraw = self._withdrawals.pop(id(handle), None)
        if withdraw is not None:
            withdraw()

    def time(self) -> float:
        return self._timekeeper.time()

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> WorkflowTask:
        parent = asyncio.current_task(self)
        path: tuple[int, ...] = ()
        if isinstance(parent, WorkflowTask):
            parent.children += 1
            path = (*parent.path, parent.children)
        self._next_number += 1
        task = WorkflowTask(coro, loop=self, name=name, context=context, path=path, number=self._next_number)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self.ready.clear()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.unhandled.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.unhandled.append(context)


def _fire(timer: asyncio.TimerHandle) -> None:
    if not timer.cancelled():
        timer._run()


def _refuse(self: WorkflowLoop, *args: Any, **kwargs: Any) -> NoReturn:
    raise RomancyError("a workflow's body cannot use threads, sockets or processes: do it in an activity")


for _method in (
    "call_soon_threadsafe",
    "run_in_executor",
    "getaddrinfo",
    "getnameinfo",
    "create_connection",
    "create_server",
    "create_unix_connection",
    "create_datagram_endpoint",
    "connect_accepted_socket",
    "subprocess_exec",
    "subprocess_shell",
    "sock_recv",
    "sock_sendall",
    "sock_connect",
    "add_reader",
    "add_writer",
    "add_signal_handler",
):
    setattr(WorkflowLoop, _method, _refuse)


_as_completed = asyncio.as_completed


@functools.wraps(_as_completed)
def as_completed(fs: Iterable[Any], *, timeout: float | None = None) -> Any:
    # asyncio puts the coroutines into a set and makes tasks in the order of their addresses: in a workflow they would
    # be numbered differently on every replay. Here they become tasks in the order in which they are given.
    if isinstance(asyncio._get_running_loop(), WorkflowLoop):
        fs = [asyncio.ensure_future(awaitable) for awaitable in fs]
    return _as_completed(fs, timeout=timeout)


asyncio.as_completed = as_completed
