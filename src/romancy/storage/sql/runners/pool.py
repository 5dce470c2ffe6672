"""A few connections to a server for many callers, with a place kept free for heartbeats.

Callers wait for a *place*, not for a connection: a connection that turns out to be dead is replaced by whoever has the
place. Places are handed over in the order of asking, to heartbeats first; the last one is for heartbeats only, since
ordinary operations may all be waiting for a row that somebody's transaction has locked.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from ...errors import StorageClosedError
from ..statement import Query

_IDLE_CHECK_SEC = 30.0
_IDLE_CHECK_DEADLINE_SEC = 5.0
_POLITE_CLOSE_SEC = 2.0


class Connection(ABC):
    """One connection to a server. Its methods raise the driver's own errors."""

    used_at: float = 0.0
    has_given_up: bool = False
    """Whether it may still be busy with a statement for which nobody waits any more."""

    @abstractmethod
    async def execute(self, query: Query[Any]) -> Any:
        """Run a query and answer what it wants."""

    async def execute_together(self, queries: Sequence[Query[Any]]) -> list[Any]:
        """Run queries that have nothing to do with each other, in as few messages as can be; their answers."""
        return [await self.execute(query) for query in queries]

    @abstractmethod
    def can_write_at_once(self, queries: Sequence[Query[Any]]) -> bool:
        """Whether these are writes that a single message can do and commit."""

    @abstractmethod
    async def write_at_once(self, queries: Sequence[Query[Any]]) -> list[Any]:
        """Do so; the answers, None for who has to start over alone. After any error but a loss nothing was written."""

    @abstractmethod
    async def control(self, statement: str) -> None:
        """Run a statement without parameters or answer."""

    async def begin(self) -> None:
        await self.control("BEGIN")

    async def begin_impatiently(self) -> None:
        """Begin a transaction that fails rather than wait long for a row."""
        await self.begin()

    @abstractmethod
    async def commit(self) -> None:
        """Commit, raising if the database rolled back instead."""

    async def rollback(self) -> None:
        await self.control("ROLLBACK")

    @property
    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether a transaction is open, as the server last said."""

    @property
    @abstractmethod
    def broken(self) -> bool:
        """Whether nothing more can be done with it."""

    @abstractmethod
    def abort(self) -> None:
        """Close at once, whatever is under way."""

    @abstractmethod
    async def close(self) -> None:
        """Close politely."""


class Pool:
    """Connections, made when they are needed and kept for the next caller."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]], size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one connection, not {size}")
        self._connect = connect
        self._size = size
        # From three on, one place is for heartbeats only, and one more is out of reach of users' transactions.
        self._for_operations = size - 1 if size > 2 else size
        self._for_transactions = max(1, size - 2)
        self.closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forget()

    def _forget(self) -> None:
        self._busy = 0
        self._taken: set[Connection] = set()
        self._idle: list[Connection] = []
        self._line: deque[asyncio.Future[None]] = deque()
        self._urgent_line: deque[asyncio.Future[None]] = deque()
        self._transactions = asyncio.Semaphore(self._for_transactions)

    @property
    def rests(self) -> bool:
        """Whether nobody has taken a connection."""
        return not self._busy

    @property
    def rests_ready(self) -> bool:
        """Whether nobody has taken a connection, and one is at hand."""
        return not self._busy and bool(self._idle) and self._is_ready(self._idle[-1])

    @asynccontextmanager
    async def connection(self, *, urgent: bool = False) -> AsyncIterator[Connection]:
        """A connection for the length of the block."""
        connection = await self.take(urgent=urgent)
        try:
            yield connection
        finally:
            self.give_back(connection)

    async def take(self, *, urgent: bool = False) -> Connection:
        """Wait for a place, then use an idle connection or make one."""
        self.settle_in()
        await self._take_place(urgent=urgent)
        try:
            connection = await self._alive_or_new()
            if self.closed:
                connection.abort()
                raise _closed()
        except BaseException:
            self._leave_place()
            raise
        self._taken.add(connection)
        return connection

    def take_now(self, *, urgent: bool = False) -> Connection | None:
        """A connection that is at hand and was used lately; None if it takes more than that."""
        places = self._size if urgent else self._for_operations
        if not self._idle or self._line or self._urgent_line or self._busy >= places or self.closed:
            return None
        connection = self._idle[-1]
        if not self._is_ready(connection) or asyncio.get_running_loop() is not self._loop:
            return None
        self._idle.pop()
        self._busy += 1
        self._taken.add(connection)
        return connection

    @staticmethod
    def _is_ready(connection: Connection) -> bool:
        """Whether it was used lately: another may have been cut meanwhile."""
        return not connection.broken and time.monotonic() - connection.used_at < _IDLE_CHECK_SEC

    def give_back(self, connection: Connection) -> None:
        """Return a connection; a broken one is forgotten."""
        if connection not in self._taken:
            return  # of an event loop that has ended
        self._taken.discard(connection)
        if connection.broken or self.closed:
            connection.abort()
        else:
            # Who takes it then asks first whether it is ready, with a time limit.
            connection.used_at = -math.inf if connection.has_given_up else time.monotonic()
            connection.has_given_up = False
            self._idle.append(connection)
        self._leave_place()

    async def take_for_transaction(self) -> Connection:
        """A connection for a user's transaction; some are always left for heartbeats and the like."""
        self.settle_in()
        await self._transactions.acquire()
        try:
            return await self.take()
        except BaseException:
            self._transactions.release()
            raise

    def give_back_from_transaction(self, connection: Connection) -> None:
        if connection in self._taken:
            self._transactions.release()
            self.give_back(connection)

    async def close(self, end: float) -> None:
        """Wait until `end` for taken connections to come back, then close all."""
        self.settle_in()
        while self._busy and time.monotonic() < end:  # noqa: ASYNC110 (an event would cost every call)
            await asyncio.sleep(0.01)
        self.closed = True
        for connection in list(self._taken):
            connection.abort()
        for turn in (*self._urgent_line, *self._line):
            if not turn.done():
                turn.set_exception(_closed())
        self._transactions.release()  # who waits for a transaction comes, sees that all is closed, and lets the next in
        await asyncio.gather(*(self._close_politely(connection) for connection in self._idle))
        self._idle.clear()

    # Places.

    async def _take_place(self, *, urgent: bool) -> None:
        if self.closed:
            raise _closed()
        line = self._urgent_line if urgent else self._line
        if not line and self._busy < (self._size if urgent else self._for_operations):
            self._busy += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave_place()  # our turn came, but we are leaving
            raise

    def _leave_place(self) -> None:
        self._busy -= 1
        self._call_up(self._urgent_line, self._size)
        self._call_up(self._line, self._for_operations)

    def _call_up(self, line: deque[asyncio.Future[None]], places: int) -> None:
        while line and self._busy < places:
            turn = line.popleft()
            if not turn.done():
                self._busy += 1
                turn.set_result(None)

    # Connections.

    async def _alive_or_new(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if await self._alive(connection):
                return connection
        return await self._connect()

    async def _alive(self, connection: Connection) -> bool:
        if connection.broken:
            connection.abort()
            return False
        if time.monotonic() - connection.used_at < _IDLE_CHECK_SEC:
            return True
        try:
            async with asyncio.timeout(_IDLE_CHECK_DEADLINE_SEC):
                await connection.control("SELECT 1")
        except BaseException as error:
            connection.abort()
            if not isinstance(error, Exception):
                raise
            return False
        return True

    @staticmethod
    async def _close_politely(connection: Connection) -> None:
        try:
            async with asyncio.timeout(_POLITE_CLOSE_SEC):
                await connection.close()
        except Exception:
            connection.abort()

    def settle_in(self) -> None:
        """Connections belong to an event loop; start anew when that of the earlier ones has ended."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise StorageClosedError("this storage belongs to another event loop that is still there; open one in each")
        for connection in (*self._idle, *self._taken):
            with suppress(RuntimeError):  # the loop that would close it is closed
                connection.abort()
        self._forget()
        self._loop = loop


def _closed() -> StorageClosedError:
    return StorageClosedError("the storage was closed before the operation could run")
