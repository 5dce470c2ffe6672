"""PostgreSQL, MySQL and MariaDB: operations run on connections of a thin pool.

A connection is only taken for one operation or one transaction. What the databases say differently is in `Connection`,
one small class each; here is when to begin, commit, retry and give up.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any, TypeVar

from ...errors import (
    OutcomeUnknownError,
    StorageClosedError,
    StorageError,
    StorageUnavailableError,
    TransientStorageError,
)
from ..drivers.driver import Driver
from ..operation import Call, Hint, drive_async
from ..statement import Query
from ..transactions import Session, Transactions, describe_deadline
from .runner import BaseRunner, undoing
from .settled import settled

T = TypeVar("T")

_ATTEMPTS = 8
_FIRST_PAUSE_SEC = 0.01
_LONGEST_PAUSE_SEC = 0.5
_IDLE_CHECK_SEC = 30.0
_RESERVED = 2
_CLOSE_DEADLINE_SEC = 10.0


class Trouble(Enum):
    """What a driver's error means for the operation."""

    CONFLICT = "rolled back by the database to let somebody else through: run it again"
    LOST = "the connection is gone, and with it the knowledge of what happened"
    UNREACHABLE = "there was no connection to begin with"
    REFUSED = "the statement itself was refused"
    MISUSE = "not the database's: an argument is wrong, and the caller is told so in the same words everywhere"


class Connection(ABC):
    """One connection to a server. Its methods raise the driver's own errors."""

    used_at: float = 0.0

    @abstractmethod
    async def execute(self, query: Query[Any]) -> Any:
        """Run a query and answer what it wants."""

    @abstractmethod
    async def control(self, statement: str) -> None:
        """Run a statement without parameters or answer."""

    async def begin(self) -> None:
        await self.control("BEGIN")

    @abstractmethod
    async def commit(self) -> None:
        """Commit, raising if the database rolled back instead."""

    async def rollback(self) -> None:
        await self.control("ROLLBACK")

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
    """A few connections for many callers; heartbeats wait at the head of the line."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]], size: int) -> None:
        self._connect = connect
        self._idle: list[Connection] = []
        self._taken: set[Connection] = set()
        self._open = 0
        self._size = size
        self._line: deque[asyncio.Future[None]] = deque()
        self._transactions = asyncio.Semaphore(max(1, size - _RESERVED))
        self.closed = False

    @asynccontextmanager
    async def connection(self, *, urgent: bool = False) -> AsyncIterator[Connection]:
        """A connection for the length of the block."""
        connection = await self.take(urgent=urgent)
        try:
            yield connection
        finally:
            self.give_back(connection)

    async def take(self, *, urgent: bool = False) -> Connection:
        """Wait for a connection; a new one is made when the pool is not full."""
        while True:
            if self.closed:
                raise StorageClosedError("the storage is closed")
            while self._idle:
                connection = self._idle.pop()
                if await self._alive(connection):
                    self._taken.add(connection)
                    return connection
                self._open -= 1
            if self._open < self._size:
                return await self._add()
            await self._stand_in_line(urgent=urgent)

    async def _add(self) -> Connection:
        self._open += 1
        try:
            connection = await self._connect()
        except BaseException:
            self._open -= 1
            self._next_in_line()
            raise
        self._taken.add(connection)
        return connection

    async def _alive(self, connection: Connection) -> bool:
        if connection.broken:
            return False
        if time.monotonic() - connection.used_at < _IDLE_CHECK_SEC:
            return True
        try:
            await connection.control("SELECT 1")
        except Exception:
            connection.abort()
            return False
        return True

    async def _stand_in_line(self, *, urgent: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if urgent:
            self._line.appendleft(turn)
        else:
            self._line.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._next_in_line()  # our turn came, but we are leaving
            raise

    def _next_in_line(self) -> None:
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def give_back(self, connection: Connection) -> None:
        """Return a connection; a broken one is forgotten."""
        self._taken.discard(connection)
        if connection.broken or self.closed:
            connection.abort()
            self._open -= 1
        else:
            connection.used_at = time.monotonic()
            self._idle.append(connection)
        self._next_in_line()

    async def take_for_transaction(self) -> Connection:
        """A connection for a user's transaction; some are always left for heartbeats and the like."""
        await self._transactions.acquire()
        try:
            return await self.take()
        except BaseException:
            self._transactions.release()
            raise

    def give_back_from_transaction(self, connection: Connection) -> None:
        self._transactions.release()
        self.give_back(connection)

    async def close(self, deadline_sec: float) -> None:
        """Wait for taken connections to come back, within the deadline; then close all."""
        self.closed = True
        end = time.monotonic() + deadline_sec
        while self._taken and time.monotonic() < end:  # noqa: ASYNC110 (an event would cost every call)
            await asyncio.sleep(0.01)
        for connection in list(self._taken):
            connection.abort()
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_exception(StorageClosedError("the storage was closed before the operation could run"))
        for connection in self._idle:
            await connection.close()
        self._idle.clear()


class ServerRunner(BaseRunner):
    """Runs operations on a database server."""

    def __init__(self, driver: Driver, *, pool_size: int, transaction_deadline_sec: float) -> None:
        super().__init__(driver, transaction_deadline_sec)
        self.pool = Pool(self._connect, pool_size)
        self.transactions = Transactions(self._open_session, self.announce)

    @abstractmethod
    async def _connect(self) -> Connection:
        """Open a connection; the driver's own error when that fails."""

    @abstractmethod
    def trouble(self, error: BaseException) -> Trouble:
        """What a driver's error means."""

    @abstractmethod
    def translate(self, error: BaseException) -> StorageError:
        """What a driver's error means to the caller, once retrying is over."""

    async def open(self) -> None:
        self.check_usable()
        try:
            async with self.pool.connection():
                pass
        except Exception as error:
            raise self._final(error, Trouble.UNREACHABLE) from error

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self.pool.close(_CLOSE_DEADLINE_SEC)

    # An operation of its own.

    async def run(self, call: Call[T]) -> T:
        transaction = self.transactions.current()
        if transaction is not None:
            return await transaction.run(call)
        self.check_usable()
        undo = None
        if call.traits.undo is not None:

            async def undo(result: T) -> None:
                await self._run_alone(undoing(call, result))

        return await settled(self._run_alone(call), undo)

    async def _run_alone(self, call: Call[T]) -> T:
        """Run an operation, again when the database asks for it; bounded, with jitter."""
        pause = _FIRST_PAUSE_SEC
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._attempt(call)
            except StorageError:
                raise
            except _Unsafe as unsafe:
                if not call.traits.idempotent:
                    raise OutcomeUnknownError(
                        f"the connection broke while {call.name} was being committed: it may or may not have happened"
                    ) from unsafe.error
                failure, kind = unsafe.error, Trouble.LOST
            except Exception as error:
                failure, kind = error, self.trouble(error)
                if kind is Trouble.MISUSE:
                    raise
            if kind is Trouble.REFUSED or attempt == _ATTEMPTS:
                raise self._final(failure, kind) from failure
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE_SEC)
        raise AssertionError("unreachable")

    async def _attempt(self, call: Call[T]) -> T:
        hints: list[Hint] = []
        async with self.pool.connection(urgent=call.traits.urgent) as connection:
            if call.traits.reads:
                result = await drive_async(call.start(), self._executing(connection, call), hints)
            elif call.traits.autocommit:
                result = await self._in_autocommit(connection, call, hints)
            else:
                result = await self._in_transaction(connection, call, hints)
        self.announce(hints)
        return result

    async def _in_autocommit(self, connection: Connection, call: Call[T], hints: list[Hint]) -> T:
        try:
            result = await drive_async(call.start(), self._executing(connection, call), hints)
        except Exception as error:
            if not isinstance(error, StorageError) and self.trouble(error) is Trouble.LOST:
                raise _Unsafe(error) from error
            raise
        self._probe("after commit", call)
        return result

    async def _in_transaction(self, connection: Connection, call: Call[T], hints: list[Hint]) -> T:
        await connection.begin()
        try:
            result = await drive_async(call.start(), self._executing(connection, call), hints)
        except BaseException:
            await self._roll_back(connection)
            raise
        await self._commit(connection)
        self._probe("after commit", call)
        return result

    def _executing(self, connection: Connection, call: Call[Any]) -> Callable[[Query[Any]], Any]:
        if self.probe is None:
            return connection.execute

        async def execute(query: Query[Any]) -> Any:
            self._probe("before statement", call)
            return await connection.execute(query)

        return execute

    async def _commit(self, connection: Connection) -> None:
        try:
            await connection.commit()
        except Exception as error:
            if isinstance(error, StorageError):
                raise
            if self.trouble(error) is Trouble.LOST:
                raise _Unsafe(error) from error
            await self._roll_back(connection)
            raise

    @staticmethod
    async def _roll_back(connection: Connection) -> None:
        if connection.broken:
            return
        try:
            await connection.rollback()
        except Exception:
            connection.abort()  # the server rolls back what a lost connection leaves behind

    def _final(self, error: BaseException, kind: Trouble) -> StorageError:
        if isinstance(error, StorageError):
            return error
        if kind is Trouble.CONFLICT:
            return TransientStorageError(f"the database kept rolling the operation back: {error}")
        if kind in (Trouble.LOST, Trouble.UNREACHABLE):
            translated = self.translate(error)
            if isinstance(translated, StorageUnavailableError):
                return translated
            return StorageUnavailableError(f"the connection to the database was lost: {error}")
        return self.translate(error)

    # A user's transaction.

    async def _open_session(self, deadline_sec: float | None) -> Session:
        self.check_usable()
        try:
            connection = await self.pool.take_for_transaction()
        except Exception as error:
            raise self._final(error, Trouble.UNREACHABLE) from error
        try:
            await connection.begin()
        except Exception as error:
            self.pool.give_back_from_transaction(connection)
            raise self._final(error, self.trouble(error)) from error
        limit = self.transaction_deadline_sec if deadline_sec is None else deadline_sec
        return _Interactive(self, connection, limit)


class _Unsafe(Exception):
    """The connection broke when the write may have been committed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _Interactive:
    """A user's transaction on a connection of its own; rolled back by itself at the deadline."""

    def __init__(self, runner: ServerRunner, connection: Connection, deadline_sec: float) -> None:
        self._runner = runner
        self._connection = connection
        self._deadline_sec = deadline_sec
        self._over: StorageError | None = None
        self._busy = False
        self._released = False
        self._aborting: asyncio.Task[None] | None = None
        self._alarm = asyncio.get_running_loop().call_later(deadline_sec, self._expire)

    async def run(self, call: Call[T], hints: list[Hint]) -> T:
        collected: list[Hint] = []
        if call.traits.reads or call.traits.autocommit:
            result = await self._doing(self._drive(call, collected))
        else:
            result = await self._doing(self._in_savepoint(call, collected))
        hints.extend(collected)
        return result

    async def _drive(self, call: Call[T], hints: list[Hint]) -> T:
        return await drive_async(call.start(), self._runner._executing(self._connection, call), hints)

    async def _in_savepoint(self, call: Call[T], hints: list[Hint]) -> T:
        await self._connection.control("SAVEPOINT operation")
        try:
            result = await self._drive(call, hints)
        except Exception as error:
            if isinstance(error, StorageError) or self._runner.trouble(error) is Trouble.MISUSE:
                await self._connection.control("ROLLBACK TO SAVEPOINT operation")
                await self._connection.control("RELEASE SAVEPOINT operation")
            raise
        await self._connection.control("RELEASE SAVEPOINT operation")
        return result

    async def control(self, statement: str) -> None:
        await self._doing(self._connection.control(statement))

    async def commit(self) -> None:
        if self._over is not None:
            self._release()
            raise self._over
        self._alarm.cancel()
        try:
            await self._runner._commit(self._connection)
            call_over = StorageClosedError("the transaction is over")
            self._over = call_over
        except _Unsafe as unsafe:
            raise OutcomeUnknownError(
                "the connection broke while the transaction was being committed: it may or may not have happened"
            ) from unsafe.error
        except StorageError:
            raise
        except Exception as error:
            raise self._runner._final(error, self._runner.trouble(error)) from error
        finally:
            self._release()

    async def rollback(self) -> None:
        self._alarm.cancel()
        if self._over is None:
            await self._runner._roll_back(self._connection)
            self._over = StorageClosedError("the transaction is over")
        self._release()

    async def _doing(self, work: Awaitable[T]) -> T:
        """Run one thing on the connection; an error of the database ends the transaction."""
        if self._over is not None:
            if asyncio.iscoroutine(work):
                work.close()
            raise self._over
        self._busy = True
        try:
            return await work
        except StorageError:
            raise
        except Exception as error:
            if self._over is not None:
                raise self._over from error
            kind = self._runner.trouble(error)
            if kind is Trouble.MISUSE:
                raise
            failure = self._runner._final(error, kind)
            # PostgreSQL refuses everything after an error, MySQL has rolled back after a deadlock: neither can go on.
            self._over = failure
            await self._runner._roll_back(self._connection)
            raise failure from error
        finally:
            self._busy = False

    def _expire(self) -> None:
        if self._over is not None:
            return
        self._over = describe_deadline(self._deadline_sec)
        # The server rolls back what a closed connection leaves behind; a statement under way fails at once.
        self._connection.abort()
        self._release()

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._runner.pool.give_back_from_transaction(self._connection)
