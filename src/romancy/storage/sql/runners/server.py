"""PostgreSQL, MySQL and MariaDB: operations run on connections of a thin pool.

A connection is only taken for one operation or one transaction. What the databases say differently is in `Connection`,
one small class each; here is when to begin, commit, retry and give up.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from ...errors import (
    DatabaseError,
    OutcomeUnknownError,
    StorageClosedError,
    StorageError,
    StorageUnavailableError,
    TransientStorageError,
)
from ..drivers.driver import Driver
from ..operation import Call, Hint, Touches
from ..transactions import Session, Transactions, describe_deadline
from .flusher import LANES, Apart, Flusher, SharedJob
from .job import Job
from .pool import Connection, Pool
from .runner import BaseRunner, undoing
from .settled import Undo, settled, unbroken
from .trouble import Failure, Trouble

T = TypeVar("T")

_ATTEMPTS = 10
_FIRST_PAUSE_SEC = 0.01
_LONGEST_PAUSE_SEC = 0.5
_CONFLICT_PATIENCE_SEC = 30.0
_OUTAGE_PATIENCE_SEC = 3.0


class ServerRunner(BaseRunner):
    """Runs operations on a database server."""

    def __init__(
        self, driver: Driver, *, pool_size: int, transaction_deadline_sec: float, statement_timeout_sec: float
    ) -> None:
        super().__init__(driver, transaction_deadline_sec)
        self.statement_timeout_sec = statement_timeout_sec
        self.pool = Pool(self._connect, pool_size)
        # Twice as many as lanes: a flush that waits for somebody leaves its lane before it is done.
        self._flush_pool = Pool(self._connect_for_flushes, 2 * LANES)
        self.flusher = Flusher(self, self._flush_pool)
        self.transactions = Transactions(self._open_session, self.announce)

    @abstractmethod
    async def _connect(self) -> Connection:
        """Open a connection; the driver's own error when that fails."""

    async def _connect_for_flushes(self) -> Connection:
        """Open a connection on which only our own statements run, while somebody else watches the time."""
        return await self._connect()

    @abstractmethod
    def trouble(self, error: BaseException) -> Trouble:
        """What a driver's error means."""

    @abstractmethod
    def is_duplicate(self, error: BaseException) -> bool:
        """Whether a driver's error says that a key is taken."""

    @abstractmethod
    def translate(self, error: BaseException) -> StorageError:
        """What a driver's error means to the caller, once retrying is over."""

    async def open(self) -> None:
        self.check_usable()
        try:
            async with self.pool.connection():
                pass
        except StorageError:
            raise
        except Exception as error:
            raise self._final(error, Trouble.UNREACHABLE) from error

    async def _let_go(self, deadline: float) -> None:
        await asyncio.gather(self.pool.close(deadline), self._flush_pool.close(deadline))

    # An operation of its own.

    def _take_on(self, call: Call[T]) -> Job | Coroutine[Any, Any, T]:
        touches = call.touches()
        if touches is None:
            return self._run_alone(call)
        if self.flusher.plays_solo(touches):
            return self._run_solo(call, touches)
        return self.flusher.put(call, touches)

    async def _run_solo(self, call: Call[T], touches: Touches) -> T:
        with self.flusher.keeping_clear(touches):
            return await self._run_alone(call)

    async def _in_trouble(self, job: Job, error: BaseException) -> Any:
        assert isinstance(job, SharedJob), "as the flusher made it"
        if isinstance(error, Apart | Failure):
            with self.flusher.keeping_clear(job.touches):
                return await self._run_again(job.call, error if isinstance(error, Failure) else None)
        if isinstance(error, asyncio.CancelledError):
            await job.settle()
            if job.error is None and job.call.traits.undo is not None:
                await settled(self._repeated(undoing(job.call, job.result)))
        raise error

    async def _run_alone(self, call: Call[T]) -> T:
        """Run an operation to its end, even when its caller is cancelled."""
        pool = self._pool_for(call)
        connection = pool.take_now(urgent=call.traits.urgent)
        if connection is None:
            return await self._run_again(call, None)
        return await unbroken(self._here_or_again(connection, pool, call), self._undo_of(call))

    async def _here_or_again(self, connection: Connection, pool: Pool, call: Call[T]) -> T:
        try:
            return await self._attempt_on(connection, pool, call)
        except Failure as failure:
            failed = failure
        # In a task of its own: it makes connections, for which there are time limits.
        return await asyncio.ensure_future(self._repeated(call, failed))

    async def _run_again(self, call: Call[T], failed: Failure | None) -> T:
        """The same with patience; `failed` is how a first attempt ended."""
        return await settled(self._repeated(call, failed), self._undo_of(call))

    def _undo_of(self, call: Call[T]) -> Undo[T] | None:
        if call.traits.undo is None:
            return None

        async def undo(result: T) -> None:
            await self._repeated(undoing(call, result))

        return undo

    async def _repeated(self, call: Call[T], failed: Failure | None = None) -> T:
        again = failed is not None

        async def attempt() -> T:
            nonlocal again
            before, again = again, True
            return await self.attempt(call, again=before)

        return await self._retried(attempt, call.name, idempotent=call.traits.idempotent, failed=failed)

    async def _retried(
        self,
        attempt: Callable[[], Coroutine[Any, Any, T]],
        name: str,
        *,
        idempotent: bool,
        failed: Failure | None = None,
    ) -> T:
        """Repeat what the database rolled back or an outage prevented; bounded, with jitter."""
        begun = time.monotonic()
        pause = _FIRST_PAUSE_SEC
        unsafe = False
        for attempts_left in reversed(range(_ATTEMPTS)):
            if failed is None:
                try:
                    return await attempt()
                except Failure as failure:
                    failed = failure
            unsafe |= failed.unsafe
            patience = _CONFLICT_PATIENCE_SEC if failed.kind is Trouble.CONFLICT else _OUTAGE_PATIENCE_SEC
            in_vain = failed.kind is Trouble.REFUSED or not attempts_left or time.monotonic() - begun > patience
            if unsafe and (in_vain or not idempotent):
                raise OutcomeUnknownError(
                    f"the connection broke while {name.strip('_')} was being committed: it may or may not have happened"
                ) from failed.error
            if in_vain:
                raise self._final(failed.error, failed.kind) from failed.error
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE_SEC)
            failed = None
        raise AssertionError("unreachable")

    def _pool_for(self, call: Call[Any]) -> Pool:
        """Where the first attempt at an operation finds a connection."""
        return self.pool

    async def attempt(self, call: Call[T], *, again: bool = False) -> T:
        """Run an operation once, on a connection of its own."""
        pool = self.pool if again else self._pool_for(call)
        urgent = call.traits.urgent
        connection = pool.take_now(urgent=urgent) or await self.taken(pool.take(urgent=urgent))
        return await self._attempt_on(connection, pool, call)

    async def _attempt_on(self, connection: Connection, pool: Pool, call: Call[T]) -> T:
        """Run an operation on a connection, which goes back to its pool."""
        hints: list[Hint] = []
        alarm = None
        if pool is self._flush_pool:  # whose connections have no deadlines of their own
            alarm = asyncio.get_running_loop().call_later(self.statement_timeout_sec, connection.abort)
        try:
            if call.traits.reads:
                result = await self._drive(connection, call, hints)
            elif call.traits.autocommit:
                result = await self._in_autocommit(connection, call, hints)
            else:
                result = await self._in_transaction(connection, call, hints)
        except BaseException as error:
            if not isinstance(error, Exception):
                connection.abort()  # no cancellation of the caller comes here: it is the event loop that ends
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
            pool.give_back(connection)
        self.announce(hints)
        return result

    async def _drive(self, connection: Connection, call: Call[T], hints: list[Hint]) -> T:
        """Run an operation to its end; a driver's error becomes a `Failure`."""
        operation = call.start()
        answer: Any = None
        try:
            while True:
                asked = operation.send(answer)
                if isinstance(asked, Hint):
                    hints.append(asked)
                    answer = None
                    continue
                self.note("before statement", call)
                try:
                    answer = await connection.execute(asked)
                except Exception as error:
                    self._raise(connection, error, call)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            operation.close()

    async def _in_autocommit(self, connection: Connection, call: Call[T], hints: list[Hint]) -> T:
        try:
            result = await self._drive(connection, call, hints)
        except Failure as failure:
            failure.unsafe = failure.kind is Trouble.LOST
            raise
        if call.traits.own_sql and connection.in_transaction:
            await self.roll_back(connection)
            raise DatabaseError("a statement began a transaction and left it open; use `async with transaction():`")
        self.note("after commit", call)
        return result

    async def _in_transaction(self, connection: Connection, call: Call[T], hints: list[Hint]) -> T:
        await self.told(connection, connection.begin())
        try:
            result = await self._drive(connection, call, hints)
        except Exception:
            await self.roll_back(connection)
            raise
        await self.commit(connection)
        self.note("after commit", call)
        return result

    async def commit(self, connection: Connection) -> None:
        try:
            await self.told(connection, connection.commit())
        except Failure as failure:
            failure.unsafe = failure.kind is Trouble.LOST
            await self.roll_back(connection)
            raise

    @staticmethod
    async def roll_back(connection: Connection) -> None:
        if connection.broken:
            return
        try:
            await connection.rollback()
        except Exception:
            connection.abort()  # the server rolls back what a lost connection leaves behind

    # Errors of the driver.

    async def taken(self, taking: Coroutine[Any, Any, Connection]) -> Connection:
        try:
            return await taking
        except StorageError:
            raise
        except Exception as error:
            raise Failure(error, self.trouble(error)) from error

    async def told(self, connection: Connection, work: Awaitable[T]) -> T:
        """Await the database's answer; a driver's error becomes a `Failure`."""
        try:
            return await work
        except Exception as error:
            self._raise(connection, error)

    def _raise(self, connection: Connection, error: Exception, call: Call[Any] | None = None) -> NoReturn:
        """Raise a driver's error as a `Failure`; what was ours or the caller's from the beginning as it is."""
        kind = Trouble.MISUSE if isinstance(error, StorageError) else self.trouble(error)
        if kind is Trouble.MISUSE:
            raise error
        if kind is Trouble.REFUSED and connection.broken:
            kind = Trouble.LOST
        if kind is Trouble.CONFLICT and call is not None and call.traits.own_sql and self.is_duplicate(error):
            kind = Trouble.REFUSED
        if kind is Trouble.LOST:
            connection.abort()  # whatever state it is in: nobody gets it again
        raise Failure(error, kind) from error

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
        limit = self.transaction_deadline_sec if deadline_sec is None else deadline_sec
        return await self._retried(lambda: self._begin_session(limit), "begin_transaction", idempotent=True)

    async def _begin_session(self, deadline_sec: float) -> Session:
        connection = await self.taken(self.pool.take_for_transaction())
        try:
            await self.told(connection, connection.begin())
        except BaseException as error:
            if not isinstance(error, Exception):
                connection.abort()
            self.pool.give_back_from_transaction(connection)
            raise
        return _Interactive(self, connection, deadline_sec)


class _Interactive:
    """A user's transaction on a connection of its own; rolled back by itself at the deadline."""

    def __init__(self, runner: ServerRunner, connection: Connection, deadline_sec: float) -> None:
        self._runner = runner
        self._connection = connection
        self._deadline_sec = deadline_sec
        self._over: StorageError | None = None
        """Why the transaction is no more."""
        self._failed: StorageError | None = None
        """The refused statement after which only going back to a savepoint, or all the way, is possible."""
        self._released = False
        self._alarm = asyncio.get_running_loop().call_later(deadline_sec, self._expire)

    @property
    def is_over(self) -> bool:
        return self._over is not None

    async def run(self, call: Call[T], hints: list[Hint]) -> T:
        collected: list[Hint] = []
        if call.traits.reads or call.traits.autocommit:
            result = await self._doing(self._drive(call, collected))
        else:
            result = await self._doing(self._in_savepoint(call, collected))
        hints.extend(collected)
        return result

    async def _drive(self, call: Call[T], hints: list[Hint]) -> T:
        result = await self._runner._drive(self._connection, call, hints)
        if call.traits.own_sql and not self._connection.in_transaction:
            self._over = DatabaseError("a statement ended the transaction, as COMMIT does, and on MySQL also CREATE")
            raise self._over
        return result

    async def _in_savepoint(self, call: Call[T], hints: list[Hint]) -> T:
        await self._control("SAVEPOINT operation")
        try:
            result = await self._drive(call, hints)
        except Failure:
            raise
        except Exception:
            await self._control("ROLLBACK TO SAVEPOINT operation")
            await self._control("RELEASE SAVEPOINT operation")
            raise
        await self._control("RELEASE SAVEPOINT operation")
        return result

    async def _control(self, statement: str) -> None:
        await self._runner.told(self._connection, self._connection.control(statement))

    async def control(self, statement: str) -> None:
        if statement.startswith("ROLLBACK TO"):
            self._failed = None
        await self._doing(self._control(statement))

    async def commit(self) -> None:
        self._alarm.cancel()
        try:
            if self._over is not None:
                raise self._over
            if self._failed is not None:
                await self._runner.roll_back(self._connection)
                raise self._failed
            await self._runner.commit(self._connection)
        except Failure as failure:
            if failure.unsafe:
                raise OutcomeUnknownError(
                    "the connection broke while the transaction was being committed: it may or may not have happened"
                ) from failure.error
            raise self._runner._final(failure.error, failure.kind) from failure.error
        finally:
            self._end()

    async def rollback(self) -> None:
        self._alarm.cancel()
        if self._over is None:
            await self._runner.roll_back(self._connection)
        self._end()

    async def _doing(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one thing on the connection, in a transaction that can still do things."""
        unable = self._over or self._failed
        if unable is not None:
            work.close()
            raise unable
        try:
            return await work
        except Failure as failure:
            if self._over is not None:
                raise self._over from failure.error
            final = self._runner._final(failure.error, failure.kind)
            if failure.kind is Trouble.REFUSED:
                # PostgreSQL refuses everything after an error: so do we, the same on every database.
                self._failed = final
            else:
                self._over = final  # MySQL has rolled everything back after a deadlock
                await self._runner.roll_back(self._connection)
            raise final from failure.error

    def _expire(self) -> None:
        if self._over is not None:
            return
        # The server rolls back what a closed connection leaves behind; a statement under way fails at once.
        self._connection.abort()
        self._over = describe_deadline(self._deadline_sec)
        self._end()

    def _end(self) -> None:
        self._over = self._over or StorageClosedError("the transaction is over")
        if not self._released:
            self._released = True
            self._runner.pool.give_back_from_transaction(self._connection)
