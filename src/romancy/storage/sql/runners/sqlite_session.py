"""A user's transaction on SQLite: it owns the writer while it lasts, within its deadline."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import StorageClosedError, StorageError
from ..operation import Call, Hint
from ..transactions import describe_deadline

if TYPE_CHECKING:
    from .sqlite import SQLiteRunner

T = TypeVar("T")


class TransactionGone(Exception):
    """The database ended the whole transaction, not only one statement."""

    def __init__(self, error: sqlite3.Error) -> None:
        super().__init__(str(error))
        self.error = error


class _Refused(Exception):
    """A statement of a user's transaction failed."""

    def __init__(self, error: StorageError) -> None:
        super().__init__(str(error))
        self.error = error


def closed() -> StorageClosedError:
    return StorageClosedError("the storage was closed before the operation could be done")


Command = Callable[[sqlite3.Connection], Any]


class Interactive:
    """A user's transaction: owns the writer, serves its commands, ends by itself at the deadline."""

    def __init__(self, runner: SQLiteRunner, loop: asyncio.AbstractEventLoop, deadline_sec: float) -> None:
        self._runner = runner
        self._loop = loop
        self._deadline_sec = deadline_sec
        self._commands: queue.SimpleQueue[tuple[Command, asyncio.Future[Any], bool] | None] = queue.SimpleQueue()
        self._over: StorageError | None = None
        """Why the transaction is no more."""
        self._failed: StorageError | None = None
        """The refused statement after which only going back to a savepoint, or all the way, is possible."""
        self.began: asyncio.Future[None] = loop.create_future()

    # Callers' side.

    @property
    def is_over(self) -> bool:
        return self._over is not None

    async def run(self, call: Call[T], hints: list[Hint]) -> T:
        collected: list[Hint] = []
        guarded = not (call.traits.autocommit or call.traits.reads)

        def command(connection: sqlite3.Connection) -> T:
            try:
                return self._runner._drive(connection, call, collected, guarded=guarded)
            except StorageError as error:
                if isinstance(error.__cause__, sqlite3.Error) and not call.traits.reads:
                    raise _Refused(error) from error
                raise

        self._check_able()
        result: T = await self._send(command)
        hints.extend(collected)
        return result

    async def control(self, statement: str) -> None:
        if statement.startswith("ROLLBACK TO"):
            self._failed = None
        self._check_able()
        await self._send(lambda connection: connection.execute(statement))

    async def commit(self) -> None:
        if self._failed is not None:
            await self.rollback()
            raise self._failed
        await self._send(self._runner._commit, last=True)

    async def rollback(self) -> None:
        if self._over is None:
            with suppress(StorageError):  # it was over by the time the writer saw this
                await self._send(self._runner._abandon, last=True)

    def _check_able(self) -> None:
        unable = self._over or self._failed
        if unable is not None:
            raise unable

    async def _send(self, command: Command, *, last: bool = False) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._commands.put((command, future, last))
        if self._over is not None:  # looked at after putting: the writer refuses what is there after saying so
            self._refuse_commands(self._over)
        return await future

    def abandon(self) -> None:
        """End the transaction from outside."""
        self._commands.put(None)

    def refuse(self, error: StorageError) -> None:
        """Never begin."""
        self._over = error
        self._tell(self.began, None, error)

    # The writer thread.

    def serve(self, connection: sqlite3.Connection) -> None:
        """Run the commands of this transaction until its last one or its deadline."""
        try:
            self._runner._abandon(connection)
            self._runner._begin(connection)
        except (sqlite3.Error, StorageError) as error:
            self.refuse(self._runner.translate(error))
            return
        self._tell(self.began, None, None)
        deadline = time.monotonic() + self._deadline_sec
        while self._over is None:
            try:
                told = self._commands.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._over = describe_deadline(self._deadline_sec)
                break
            if told is None:
                self._over = closed()
                break
            command, future, last = told
            self._obey(connection, command, future, last=last)
            if last:
                self._over = self._over or StorageClosedError("the transaction is over")
            elif time.monotonic() > deadline:
                self._over = describe_deadline(self._deadline_sec)
        with suppress(sqlite3.Error):
            self._runner._abandon(connection)
        self._refuse_commands(self._over)

    def _refuse_commands(self, error: StorageError) -> None:
        while True:
            try:
                told = self._commands.get_nowait()
            except queue.Empty:
                return
            if told is not None:
                self._tell(told[1], None, error)

    def _obey(
        self, connection: sqlite3.Connection, command: Command, future: asyncio.Future[Any], *, last: bool
    ) -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = command(connection)
        except TransactionGone as gone:
            failure = self._over = self._runner.translate(gone.error)
            failure.__cause__ = gone.error
        except sqlite3.Error as error:
            failure = self._over = self._runner.translate(error)
            failure.__cause__ = error
        except BaseException as error:
            failure = error
            if isinstance(error, _Refused):
                # PostgreSQL refuses everything after an error: so do we, the same on every database.
                failure = self._failed = error.error
        self._tell(future, result, failure)

    def _tell(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        def answer() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(answer)
        except Exception:  # the loop is closed, or takes no answers; the writer thread must live
            self._over = self._over or StorageClosedError("the event loop of the transaction is closed")
