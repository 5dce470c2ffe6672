"""SQLite: one thread owns the one writer and commits for everybody who waits.

Operations are queued with their arguments. The writer thread takes all that are waiting into one ``BEGIN IMMEDIATE``
transaction, a savepoint each, commits once, and only then answers: every caller waits for its own durable commit, yet
many share one fsync. A small write, or a few that are a single statement each, are committed in the event loop's own
thread, as long as the disk is quick: handing them to another thread and back takes longer, and while both threads have
something to do, they take the interpreter from each other after every statement. Reads do not wait for the writer
(WAL): by key on the event loop's own connection, as long as that is quick, the rest in reader threads. A user's
transaction owns the writer while it lasts, within its deadline.
"""

from __future__ import annotations

import asyncio
import queue
import random
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...errors import (
    DatabaseError,
    SchemaError,
    SearchTimeoutError,
    StorageError,
    StorageUnavailableError,
    TransientStorageError,
)
from ...input_filters import scalar_at
from ..drivers.sqlite import SQLiteDriver
from ..operation import Call, Execute, Hint, drive
from ..rows import Row
from ..statement import ALL, COUNT, ID, ONE, NativeQuery, Query
from ..transactions import Session, Transactions
from .job import Job
from .runner import BaseRunner, undoing
from .sqlite_company import Company
from .sqlite_log import Log
from .sqlite_session import Interactive, TransactionGone, closed

T = TypeVar("T")

MEMORY = ":memory:"
_LARGEST_BATCH = 512
_QUICK_COMMIT_SEC = 0.005
"""The event loop may stand still for so long; when a commit has taken longer, the thread commits for a while."""
_QUICK_READ_SEC = 0.01
"""As long as a read by key, or of a page of history that is then replayed in this thread, may take here."""
_RECOVERY = 5
"""So many times as long as a slow read has taken the event loop, reads are left to threads."""
_MOST_HERE = 32
"""So many single statements take about a millisecond."""
_LONGEST_SOLO_SEC = 0.002
"""So long a caller without company is served where it stands before the event loop has to come round."""
_LONGEST_LOG_BYTES = 16 << 20
_READERS = 4
_ABANDON_SEC = 2.0


class SQLiteRunner(BaseRunner):
    """Runs operations on one SQLite file, or in memory."""

    driver: SQLiteDriver

    def __init__(
        self,
        path: str,
        *,
        synchronous: str = "FULL",
        transaction_deadline_sec: float = 5.0,
        busy_sec: float | None = None,
    ) -> None:
        super().__init__(SQLiteDriver(), transaction_deadline_sec)
        self.path = path
        self.in_memory = path == MEMORY
        self._synchronous = synchronous
        # Longer than another process may own the writer with a transaction of its own.
        self._busy_sec = transaction_deadline_sec + 10.0 if busy_sec is None else busy_sec
        self._queue: queue.SimpleQueue[list[Job] | Interactive | _Look | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._abandoned = False
        self._session: Interactive | None = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._arrived: list[Job] = []
        self._lonely = False
        """Whether a single write had arrived when the event loop came round the last time, and nobody else since."""
        self._soloist = 0
        """The task that has written since."""
        self._came_round = 0.0
        self._writing = threading.Lock()
        """Whoever has it may use the writer's connection."""
        self._commit_sec = 0.0
        """How long commits take of late: at once when one is slow, and slowly back."""
        self._reads_are_slow_until = 0.0
        self._company = Company(self.driver, self.note, self._drive_guarded)
        self._log = Log(path)
        self._starting = threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None
        self._loop_reader: sqlite3.Connection | None = None
        self._reader_threads: ThreadPoolExecutor | None = None
        self._readers = threading.local()
        self.transactions = Transactions(self._open_session, self.announce)

    # Callers' side.

    def _take_on(self, call: Call[T]) -> Job | Coroutine[Any, Any, T]:
        if call.traits.reads and not self.in_memory:
            return self._read(call)
        if self._thread is None:
            return self._write_first(call)
        return self._handed_in(call)

    async def open(self) -> None:
        """Open the file; a clear error when that cannot be done."""
        self.check_usable()
        await self._start_writer()

    async def identity(self) -> str:
        """What tells this file from every other, whatever path leads to it."""
        await self.open()
        found = await asyncio.to_thread(Path(self.path).stat)
        return f"sqlite {found.st_dev} {found.st_ino}"

    async def _start_writer(self) -> None:
        if self._thread is None:
            await self._in_thread(self._ensure_thread)

    async def _write_first(self, call: Call[T]) -> T:
        await self._start_writer()
        job = self._handed_in(call)
        try:
            return await job.future  # type: ignore[no-any-return]
        except asyncio.CancelledError as error:
            return await self._in_trouble(job, error)  # type: ignore[no-any-return]

    async def _in_trouble(self, job: Job, error: BaseException) -> Any:
        if isinstance(error, asyncio.CancelledError):
            await job.settle()
            if job.error is None and job.call.traits.undo is not None:
                await self._undo(job.call, job.result)
        raise error

    async def _undo(self, call: Call[T], result: T) -> None:
        """Give back what a cancelled caller has won; what cannot be given back expires by itself."""
        job = Job(undoing(call, result), asyncio.get_running_loop())
        self._enqueue([job])
        try:
            await job.future
        except asyncio.CancelledError:
            await job.settle()
            raise
        except StorageError:
            return

    def _handed_in(self, call: Call[T]) -> Job:
        """Let it go with whatever else has arrived when the event loop comes round; at once, if nobody else comes."""
        job = Job(call, asyncio.get_running_loop())
        if job.loop is not self._home:
            if self._home is not None and not self._home.is_closed():
                self._enqueue([job])
                return job
            self._home, self._arrived, self._lonely = job.loop, [], False
        if not self._arrived:
            if self._lonely and self._plays_solo() and self._did_here([job]):
                return job
            job.loop.call_soon(self._dispatch)
        self._arrived.append(job)
        return job

    def _plays_solo(self) -> bool:
        """Whether it is one caller who writes again and again; it may do so for a moment without waiting."""
        caller = id(asyncio.current_task())
        self._soloist = self._soloist or caller
        self._lonely = caller == self._soloist
        return self._lonely and time.perf_counter() - self._came_round < _LONGEST_SOLO_SEC

    def _dispatch(self) -> None:
        """The event loop has come round: do a few small writes here, the rest is the writer thread's."""
        arrived, self._arrived = self._arrived, []
        self._lonely, self._soloist, self._came_round = len(arrived) == 1, 0, time.perf_counter()
        if not self._did_here(arrived):
            self._enqueue(arrived)

    def _did_here(self, jobs: list[Job]) -> bool:
        """Do small writes in this thread and answer, if that is quick; whether they were done."""
        quick = self._commit_sec < _QUICK_COMMIT_SEC and not self._log.due and self._queue.empty()
        if not (quick and _are_small(jobs) and self._commit_here(jobs)):
            return False
        self._answer_in_loop(jobs)
        return True

    def _commit_here(self, jobs: list[Job]) -> bool:
        """Commit in this thread, unless that would mean to wait for somebody; whether it was done."""
        if not self._writing.acquire(blocking=False):
            return False
        try:
            return self._begin_here() and self._commit_begun_here(jobs)
        finally:
            self._writing.release()
            if self._log.is_long():
                self._queue.put(_Look.UP)

    def _begin_here(self) -> bool:
        if self._stopped:
            return False  # the connection may be closed
        try:
            self._abandon(self._connection())
            self._connection().execute("BEGIN IMMEDIATE")
        except sqlite3.Error:
            return False  # the writer thread finds out why
        return True

    def _commit_begun_here(self, jobs: list[Job]) -> bool:
        began = time.perf_counter()
        try:
            fallen = self._commit_begun(self._connection(), jobs)
        except BaseException as error:
            self._refuse(jobs, error)
            return True
        self._commit_sec = max(self._commit_sec, time.perf_counter() - began)
        if fallen is not None and len(jobs) > 1:
            for job in jobs:
                job.start_over()
            return False  # once more, one by one, which may take a while: not in this thread
        if fallen is not None:
            self._refuse(jobs, fallen)
        return True

    def _enqueue(self, item: list[Job] | Interactive) -> None:
        self._queue.put(item)
        if self._stopped:  # looked at after putting: the writer empties its queue after saying that it has stopped
            self._refuse_queued()

    async def _read(self, call: Call[T]) -> T:
        if call.traits.by_key and time.perf_counter() >= self._reads_are_slow_until:
            try:
                return self._read_here(await self._loop_connection(), call)
            except StorageError as error:
                if not isinstance(error, TransientStorageError):
                    raise
                # Somebody is recovering or checkpointing the file right now: wait in a thread, not in the loop.
        return await self._in_thread(lambda: self._read_on(self._thread_connection(), call))

    def _read_here(self, connection: sqlite3.Connection, call: Call[T]) -> T:
        """Read in this thread; after a read that was not quick, others read elsewhere for a while."""
        began = time.perf_counter()
        try:
            return self._read_on(connection, call)
        finally:
            ended = time.perf_counter()
            if ended - began > _QUICK_READ_SEC:
                self._reads_are_slow_until = ended + _RECOVERY * (ended - began)

    async def _loop_connection(self) -> sqlite3.Connection:
        if self._loop_reader is not None:
            return self._loop_reader
        return await self._in_thread(self._open_loop_reader)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reading_threads(), work)

    async def _open_session(self, deadline_sec: float | None) -> Session:
        await self.open()
        loop = asyncio.get_running_loop()
        session = Interactive(self, loop, self.transaction_deadline_sec if deadline_sec is None else deadline_sec)
        self._enqueue(session)
        await session.began
        return session

    async def _let_go(self, deadline: float) -> None:
        # A connection must not be closed while it is used: this one is used by event loops, in their own threads.
        if self._loop_reader is not None:
            self._connections.remove(self._loop_reader)
            self._loop_reader.close()
        # In a thread: the last connection of a file that closes writes its log back.
        await asyncio.to_thread(self._shut_down, deadline)

    def _shut_down(self, deadline: float) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._abandon_writing(self._thread)
        idle = self._reader_threads is None or self._stop_reading(self._reader_threads, deadline)
        if idle and (self._thread is None or not self._thread.is_alive()):
            with self._writing:  # the event loop's thread may just be committing something
                self._stopped = True
                for connection in self._connections:
                    connection.close()

    def _abandon_writing(self, thread: threading.Thread) -> None:
        """The deadline has passed: end what the writer is at, and refuse what it has not begun."""
        self._abandoned = True
        self._connection().interrupt()
        if (session := self._session) is not None:
            session.abandon()
        thread.join(_ABANDON_SEC)
        self._refuse_queued()

    def _stop_reading(self, readers: ThreadPoolExecutor, deadline: float) -> bool:
        """Let reads finish; those that are not done at the deadline are interrupted. Whether all have ended."""
        stopping = threading.Thread(target=readers.shutdown, daemon=True)
        stopping.start()
        stopping.join(max(0.0, deadline - time.monotonic()))
        if stopping.is_alive():
            self._abandoned = True
            for connection in self._connections:
                connection.interrupt()
            stopping.join(_ABANDON_SEC)
        return not stopping.is_alive()

    def _refuse_queued(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, list):
                self._refuse(item, closed())
                self._answer(item)
            elif isinstance(item, Interactive):
                item.refuse(closed())

    # Connections.

    def _connect(self, busy_sec: float) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                self.path, timeout=self._busy_sec, isolation_level=None, check_same_thread=False, cached_statements=512
            )
        except sqlite3.Error as error:
            raise StorageUnavailableError(f"cannot open the SQLite database {self.path!r}: {error}") from error
        try:
            if not self.in_memory:
                self._patiently(connection, "PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute(f"PRAGMA busy_timeout = {round(busy_sec * 1000)}")
            connection.execute("PRAGMA journal_size_limit = 67108864")
            connection.create_function("romancy_json_at", 2, scalar_at, deterministic=True)
        except sqlite3.Error as error:
            connection.close()
            raise self.translate(error) from error
        self._connections.append(connection)
        return connection

    def _ensure_thread(self) -> None:
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None:
                self._writer = self._connect(busy_sec=0.0)  # the writer waits by itself, see _patiently
                self._writer.execute("PRAGMA wal_autocheckpoint = 0")  # see _checkpoint
                thread = threading.Thread(target=self._work, name="romancy-sqlite-writer", daemon=True)
                thread.start()
                self._thread = thread

    def _open_loop_reader(self) -> sqlite3.Connection:
        with self._starting:
            if self._loop_reader is None:
                self._loop_reader = self._connect(busy_sec=0.0)
            return self._loop_reader

    def _thread_connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._readers, "connection", None)
        if connection is None:
            connection = self._readers.connection = self._connect(busy_sec=self._busy_sec)
        return connection

    def _reading_threads(self) -> ThreadPoolExecutor:
        if self._reader_threads is None:
            self._reader_threads = ThreadPoolExecutor(_READERS, thread_name_prefix="romancy-sqlite-reader")
        return self._reader_threads

    def _read_on(self, connection: sqlite3.Connection, call: Call[T]) -> T:
        return drive(call.start(), self._answering(connection, call), [])

    # The writer thread.

    def _work(self) -> None:
        waiting: list[Job] = []
        sessions: deque[Interactive] = deque()
        stopping = False
        while not stopping or waiting or sessions:
            if not waiting and not sessions:
                stopping |= self._sort(self._queue.get(), waiting, sessions)
            while not self._queue.empty():
                stopping |= self._sort(self._queue.get(), waiting, sessions)
            batch, waiting = self._next_batch(waiting)
            with self._writing:
                if batch:
                    self._serve(batch)
                if sessions:  # by turns: neither many operations nor many transactions keep the other from the writer
                    self._session = sessions.popleft()
                    self._session.serve(self._connection())
                    self._session = None
                if self._log.is_long_now():
                    self._checkpoint()
        self._stopped = True
        self._refuse_queued()

    @staticmethod
    def _next_batch(waiting: list[Job]) -> tuple[list[Job], list[Job]]:
        """Whose turn it is, and who waits on."""
        if any(job.call.traits.urgent for job in waiting):
            # Heartbeats first; the sort is stable, so everybody else keeps their turn.
            waiting.sort(key=lambda job: not job.call.traits.urgent)
        return waiting[:_LARGEST_BATCH], waiting[_LARGEST_BATCH:]

    def _serve(self, batch: list[Job]) -> None:
        try:
            self._commit_together(batch)
        except BaseException as error:  # the thread must live: everybody else would wait for ever
            self._refuse(batch, error)
        self._answer(batch)

    @staticmethod
    def _sort(item: list[Job] | Interactive | _Look | None, waiting: list[Job], sessions: deque[Interactive]) -> bool:
        """Put what came out of the queue where it belongs; whether it was the word to stop."""
        if isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, Interactive):
            sessions.append(item)
        return item is None

    def _connection(self) -> sqlite3.Connection:
        assert self._writer is not None, "the writer thread starts after its connection"
        return self._writer

    def _commit_together(self, batch: list[Job]) -> None:
        """Run the jobs in one transaction; alone, one by one, if the whole transaction falls."""
        connection = self._connection()
        try:
            self._abandon(connection)  # what a failed ROLLBACK may have left
            self._begin(connection)
        except (sqlite3.Error, StorageError) as error:
            self._refuse(batch, error)  # nothing has been run, and waiting again for each of them would take for ever
            return
        fallen = self._commit_begun(connection, batch)
        if fallen is not None:
            self._one_by_one(batch, fallen)

    def _commit_begun(self, connection: sqlite3.Connection, batch: list[Job]) -> sqlite3.Error | None:
        """Run the jobs in the transaction that has begun; the error with which it fell as a whole, if it did."""
        try:
            for job in self._company.without_those_served(connection, batch):
                self._run_in_batch(connection, job, alone=len(batch) == 1)
            if connection.in_transaction:
                self._commit(connection)
            if self.probe is not None:
                for job in batch:
                    self.note("after commit", job.call)
        except TransactionGone as gone:
            self._abandon(connection)
            return gone.error
        except sqlite3.Error as error:
            self._abandon(connection)
            return error
        except BaseException as error:
            self._abandon(connection)
            self._refuse(batch, error)
        return None

    def _commit(self, connection: sqlite3.Connection) -> None:
        began = time.perf_counter()
        connection.execute("COMMIT")
        self._commit_sec = max(time.perf_counter() - began, 0.95 * self._commit_sec)
        self._log.commits += 1

    def _checkpoint(self) -> None:
        """Write the log back into the file while nobody writes here, so that the next write begins it anew."""
        # Begun anew, the file keeps its length, by which nobody sees it grow again: large ones are cut off.
        mode = "TRUNCATE" if self._log.measured() > _LONGEST_LOG_BYTES else "PASSIVE"
        with suppress(sqlite3.Error):  # another process is at it, or the disk is full: next time
            self._connection().execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
        self._log.was_written_back()

    def _one_by_one(self, batch: list[Job], error: sqlite3.Error) -> None:
        if len(batch) == 1:
            self._refuse(batch, error)
            return
        for job in batch:
            job.start_over()
            self._commit_together([job])

    def _refuse(self, batch: list[Job], error: BaseException) -> None:
        for job in batch:
            if isinstance(error, sqlite3.Error):
                own = self.translate(error)  # each caller gets one of its own: raising an exception changes it
                own.__cause__ = error
                job.fail(own)
            else:
                job.fail(error)

    def _run_in_batch(self, connection: sqlite3.Connection, job: Job, *, alone: bool) -> None:
        # One statement undoes itself; alone, the whole transaction is the savepoint.
        traits = job.call.traits
        guarded = not alone and (traits.own_sql or traits.twofold or not traits.autocommit)
        try:
            job.result = self._drive(connection, job.call, job.hints, guarded=guarded)
        except TransactionGone:
            raise
        except BaseException as error:
            if alone:
                self._abandon(connection)
            job.fail(error)

    def _drive_guarded(self, connection: sqlite3.Connection, call: Call[T], hints: list[Hint]) -> T:
        return self._drive(connection, call, hints, guarded=True)

    def _drive(self, connection: sqlite3.Connection, call: Call[T], hints: list[Hint], *, guarded: bool) -> T:
        """Run an operation inside the open transaction; on an error nothing of it is left, if `guarded`."""
        try:
            if guarded:
                connection.execute("SAVEPOINT operation")
            try:
                result = drive(call.start(), self._answering(connection, call), hints)
            except BaseException as error:
                if not connection.in_transaction:
                    # Disk full and its like end the whole transaction, whatever savepoints there are.
                    cause = error.__cause__ if isinstance(error.__cause__, sqlite3.Error) else sqlite3.Error(str(error))
                    raise TransactionGone(cause) from error
                if guarded:
                    connection.execute("ROLLBACK TO operation")
                    connection.execute("RELEASE operation")
                raise
            if guarded:
                connection.execute("RELEASE operation")
        except sqlite3.Error as error:  # of the savepoint: what it kept apart is no longer apart
            raise TransactionGone(error) from error
        if not connection.in_transaction:
            raise TransactionGone(sqlite3.Error("a statement ended the transaction, as COMMIT and ROLLBACK do"))
        return result

    def _begin(self, connection: sqlite3.Connection) -> None:
        self._patiently(connection, "BEGIN IMMEDIATE")

    def _patiently(self, connection: sqlite3.Connection, statement: str) -> None:
        """Wait for the file's locks, with jitter: SQLite's own waiting is unfair between processes."""
        deadline = time.monotonic() + self._busy_sec
        while True:
            if self._abandoned:
                raise closed()
            try:
                connection.execute(statement)
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.0005, 0.003))

    @staticmethod
    def _abandon(connection: sqlite3.Connection) -> None:
        if connection.in_transaction:
            connection.execute("ROLLBACK")

    def _answer(self, batch: Sequence[Job]) -> None:
        for loop in {job.loop for job in batch}:
            jobs = [job for job in batch if job.loop is loop]
            try:
                loop.call_soon_threadsafe(self._answer_in_loop, jobs)
            except Exception:  # the loop is closed, or takes no answers; the thread must live
                continue

    def _answer_in_loop(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.answer()
        self.announce([hint for job in jobs for hint in job.hints])

    # Statements.

    def _answering(self, connection: sqlite3.Connection, call: Call[Any]) -> Execute:
        """What answers an operation's queries."""
        if self.probe is None:
            return partial(self._execute, connection)

        def execute(query: Query[Any]) -> Any:
            self.note("before statement", call)
            return self._execute(connection, query)

        return execute

    def _execute(self, connection: sqlite3.Connection, query: Query[Any]) -> Any:
        rendered, args = query.resolve(self.driver)
        if self._abandoned:
            raise closed()
        if rendered.within_sec is not None:
            deadline = time.monotonic() + rendered.within_sec
            connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            cursor = connection.execute(rendered.text, args)
            want = query.want
            if want is COUNT:
                done = cursor.rowcount
                return self._execute(connection, rendered.then.run(query.params)) if rendered.then and done else done
            if want is ID:
                return cursor.lastrowid if cursor.rowcount > 0 else None
            if want is ALL:
                rows: list[Any] = cursor.fetchall()
                if rendered.decode is None:
                    return Row.many(rows, cursor.description) if isinstance(query, NativeQuery) else rows
                return rendered.decode(rows)
            row = cursor.fetchone()
            description = cursor.description
            cursor.close()
        except sqlite3.Error as error:
            raise self.translate(error) from error
        except OverflowError as error:
            raise DatabaseError(f"SQLite holds integers of 64 bits: {error}") from error
        finally:
            if rendered.within_sec is not None:
                connection.set_progress_handler(None, 0)
        if row is None:
            return None
        if want is not ONE:
            return row[0]
        if rendered.decode is not None:
            return rendered.decode([row])[0]
        return Row.many([row], description)[0] if isinstance(query, NativeQuery) else row

    def translate(self, error: BaseException) -> StorageError:
        """What a driver's error means to the caller."""
        if isinstance(error, StorageError):
            return error
        if isinstance(error, sqlite3.ProgrammingError) and self.closed:
            return closed()
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_INTERRUPT:
            return closed() if self._abandoned else SearchTimeoutError()
        if any(missing in str(error) for missing in ("no such table", "no such column", "no such index")):
            return SchemaError(f"{error}: the schema is missing or old; run initialize() or `romancy migrate`")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return TransientStorageError(f"the SQLite database stayed busy: {error}")
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM):
            return StorageUnavailableError(f"SQLite cannot write or read {self.path!r}: {error}")
        return DatabaseError(f"SQLite refused a statement: {error}")


def _are_small(jobs: Sequence[Job]) -> bool:
    """Whether it is one small write, or some that are a single statement each, or two that are one."""
    if len(jobs) == 1:
        return jobs[0].call.is_small
    return len(jobs) <= _MOST_HERE and all(job.call.is_small and job.call.traits.autocommit for job in jobs)


class _Look(Enum):
    """What wakes the writer thread when there is nothing to write."""

    UP = "look at what there is to do"
