"""What all runners share."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from ...errors import StorageClosedError
from ..drivers.driver import Driver
from ..operation import Call, Hint, Traits
from ..transactions import Transactions
from .job import Job

T = TypeVar("T")

log = logging.getLogger("romancy.storage")

CLOSE_DEADLINE_SEC = 10.0
MOST_UNDER_WAY = 5_000
"""Operations that may be queued or running at once; who comes with more waits before anything is kept for it."""

Probe = Callable[[str, str], None]
"""Called with a point ("before statement", "after commit") and an operation's name; tests raise from it."""


class _Forks:
    """How many forks lie between this process and the one that imported us: asking for its id costs every call."""

    def __init__(self) -> None:
        self.count = 0
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        self.count += 1


_forks = _Forks()


class BaseRunner(ABC):
    """Runs operations on one database."""

    transactions: Transactions

    def __init__(self, driver: Driver, transaction_deadline_sec: float) -> None:
        self.driver = driver
        self.transaction_deadline_sec = transaction_deadline_sec
        self.payload_limit: int | None = None
        """The largest payload the server accepts, once it was asked."""
        self.closed = False
        self.pid = os.getpid()
        self._forks = _forks.count
        self.most_under_way = MOST_UNDER_WAY
        self._under_way = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self.probe: Probe | None = None
        self.listeners: list[Callable[[list[Hint]], None]] = []

    async def run(self, call: Call[T]) -> T:
        """Run the operation: in the ambient transaction, else in one of its own."""
        if _forks.count != self._forks:
            self.check_process()
        transaction = self.transactions.current()
        if transaction is not None:
            return await transaction.run(call)
        if self.closed:
            raise StorageClosedError("the storage is closed")
        if self._under_way < self.most_under_way or call.traits.urgent:
            self._under_way += 1
        else:
            await self._wait_in_line()
        try:
            taken = self._take_on(call)
            if not isinstance(taken, Job):
                return await taken
            try:
                return await taken.future  # type: ignore[no-any-return]
            except (Exception, asyncio.CancelledError) as error:
                trouble = error
            return await self._in_trouble(taken, trouble)  # type: ignore[no-any-return]
        finally:
            self._leave()

    async def _wait_in_line(self) -> None:
        """Wait for the place of somebody who leaves."""
        turn = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # the turn had come, but who waited for it is leaving
            raise

    def _leave(self) -> None:
        """Give one's place to the next in line, whose event loop may be another one."""
        # Who is urgent has a place of its own, which is nobody else's.
        while self._line and self._under_way <= self.most_under_way:
            turn = self._line.popleft()
            with suppress(RuntimeError):  # its loop is closed
                turn.get_loop().call_soon_threadsafe(self._let_in, turn)
                return
        self._under_way -= 1

    def _let_in(self, turn: asyncio.Future[None]) -> None:
        if turn.done():
            self._leave()  # it has left the line meanwhile
        else:
            turn.set_result(None)

    # Each level of coroutines between a caller and what it waits for costs every step of every workflow: hence a job.

    @abstractmethod
    def _take_on(self, call: Call[T]) -> Job | Coroutine[Any, Any, T]:
        """Queue an operation outside any transaction of a user's; or the coroutine that runs it by itself."""

    @abstractmethod
    async def _in_trouble(self, job: Job, error: BaseException) -> Any:
        """What comes of a queued operation after all that was answered with an error, or whose caller is cancelled."""

    @abstractmethod
    async def open(self) -> None:
        """Reach the database once, so that a wrong address is an error now and not later."""

    async def close(self) -> None:
        """Let operations finish, within a deadline, then let go of the database."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self.pid:
            return  # the connections are our parent's
        deadline = time.monotonic() + CLOSE_DEADLINE_SEC
        while self._under_way and time.monotonic() < deadline:  # noqa: ASYNC110 (an event would cost every call)
            await asyncio.sleep(0.01)
        while self._line:
            turn = self._line.popleft()
            with suppress(RuntimeError):
                turn.get_loop().call_soon_threadsafe(_send_home, turn)
        await self._let_go(deadline)

    @abstractmethod
    async def _let_go(self, deadline: float) -> None:
        """Wait for transactions until the deadline, then close all connections."""

    def check_usable(self) -> None:
        """StorageClosedError when closed, or when a forked child tries its parent's connections."""
        self.check_process()
        if self.closed:
            raise StorageClosedError("the storage is closed")

    def check_process(self) -> None:
        """StorageClosedError in a forked child: connections cannot be shared with its parent."""
        if _forks.count != self._forks:
            raise StorageClosedError("this process was forked from the one that opened the storage; open its own")

    def announce(self, hints: list[Hint]) -> None:
        """Tell listeners of this process what has just become visible."""
        if hints:
            unique = list(dict.fromkeys(hints))
            for listener in self.listeners:
                try:
                    listener(unique)
                except Exception:
                    log.exception("a listener failed; what it was told of is committed")

    def note(self, point: str, call: Call[T]) -> None:
        """Tell the probe, if there is one, where an operation is."""
        if self.probe is not None:
            self.probe(point, call.name)


def _send_home(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_exception(StorageClosedError("the storage was closed before the operation could run"))


def undoing(call: Call[Any], result: Any) -> Call[None]:
    """The operation that gives back what a cancelled caller had won."""

    async def undo(storage: Any) -> None:
        await getattr(storage, str(call.traits.undo))(result)

    return Call(undo, call.storage, (), {}, Traits(urgent=True))
