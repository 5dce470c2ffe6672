"""Ambient transactions: every operation of the task that opened one joins it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol, TypeVar

from ..errors import NotInTransactionError, StorageError, TransactionDeadlineError, WrongTaskError
from ..protocols import Executor, PostCommitCallback
from .operation import Call, Hint
from .runners.settled import settled

T = TypeVar("T")

log = logging.getLogger("romancy.storage")


class Session(Protocol):
    """One open database transaction, with a deadline after which every method raises TransactionDeadlineError."""

    async def run(self, call: Call[T], hints: list[Hint]) -> T:
        """Run an operation so that it leaves all or nothing, even if the caller goes on after its error."""

    async def control(self, statement: str) -> None:
        """Run a savepoint statement."""

    async def commit(self) -> None:
        """Commit and let go of the connection."""

    async def rollback(self) -> None:
        """Roll back and let go of the connection; never raises for a transaction that is over anyway."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended by itself: at its deadline, or because the database ended it."""


class Transaction:
    """An open transaction of one task, with the savepoints inside it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.owner = asyncio.current_task()
        self.process = os.getpid()
        self.finished = False
        self.committed = False
        self.hints: list[Hint] = []
        self.callbacks: list[PostCommitCallback] = []
        self._savepoints: list[tuple[int, int]] = []

    @property
    def depth(self) -> int:
        return len(self._savepoints)

    async def run(self, call: Call[T]) -> T:
        return await settled(self.session.run(call, self.hints))

    async def begin_nested(self) -> None:
        await settled(self.session.control(f"SAVEPOINT romancy_{self.depth}"))
        self._savepoints.append((len(self.hints), len(self.callbacks)))

    async def commit_nested(self) -> None:
        await settled(self._release_savepoint())

    async def _release_savepoint(self) -> None:
        try:
            await self.session.control(f"RELEASE SAVEPOINT romancy_{self.depth - 1}")
        except StorageError:
            await self.rollback_nested()
            raise
        self._savepoints.pop()

    async def rollback_nested(self) -> None:
        hints, callbacks = self._savepoints.pop()
        del self.hints[hints:], self.callbacks[callbacks:]
        await settled(self._undo_savepoint(f"romancy_{self.depth}"))

    async def _undo_savepoint(self, name: str) -> None:
        await self.session.control(f"ROLLBACK TO SAVEPOINT {name}")
        await self.session.control(f"RELEASE SAVEPOINT {name}")

    async def finish(self, *, commit: bool) -> None:
        self.finished = True
        await settled(self._commit() if commit else self.session.rollback())

    async def _commit(self) -> None:
        await self.session.commit()
        self.committed = True


class Transactions:
    """The ambient transaction of each task, for one storage."""

    def __init__(
        self,
        open_session: Callable[[float | None], Awaitable[Session]],
        announce: Callable[[list[Hint]], None],
    ) -> None:
        self._open_session = open_session
        self._announce = announce
        self._ambient: ContextVar[Transaction | None] = ContextVar("romancy_transaction", default=None)

    def current(self) -> Transaction | None:
        """The open transaction that this task's operations join."""
        transaction = self._ambient.get()
        if transaction is None or transaction.finished or transaction.process != os.getpid():
            return None
        if transaction.owner is not asyncio.current_task():
            raise WrongTaskError(
                "this task inherited a transaction that another task opened and still uses;"
                " open one of its own, or start the task outside (wait_for makes a task, asyncio.timeout does not)"
            )
        return transaction

    def active(self) -> bool:
        """Whether this task's operations join an open transaction."""
        transaction = self._ambient.get()
        if transaction is None or transaction.finished or transaction.session.is_over:
            return False
        return transaction.owner is asyncio.current_task()

    async def begin(self, deadline_sec: float | None = None) -> None:
        """Open a transaction, or a savepoint in the open one."""
        current = self.current()
        if current is not None:
            await current.begin_nested()
            return

        async def give_back(session: Session) -> None:
            await session.rollback()

        async def opened() -> Session:
            return await self._open_session(deadline_sec)

        self._ambient.set(Transaction(await settled(opened(), undo=give_back)))

    async def commit(self) -> None:
        """Commit the innermost savepoint or the transaction; then hints go out and callbacks run."""
        current = self._required("commit")
        if current.depth:
            await current.commit_nested()
            return
        self._ambient.set(None)
        try:
            await current.finish(commit=True)
        finally:
            if current.committed:  # even if the caller was cancelled meanwhile
                self._announce(current.hints)
                await settled(_call_back(current.callbacks))

    async def rollback(self) -> None:
        """Undo the innermost savepoint or the transaction; nothing to do without one."""
        current = self.current()
        if current is None:
            return
        if current.depth:
            await current.rollback_nested()
            return
        self._ambient.set(None)
        await current.finish(commit=False)

    def after_commit(self, callback: PostCommitCallback) -> None:
        """Call back after the outermost commit."""
        self._required("register a callback").callbacks.append(callback)

    def _required(self, purpose: str) -> Transaction:
        current = self.current()
        if current is None:
            raise NotInTransactionError(f"cannot {purpose}: no transaction is open")
        return current


async def _call_back(callbacks: list[PostCommitCallback]) -> None:
    """Run all callbacks in order, whatever becomes of one of them."""
    cancelled: asyncio.CancelledError | None = None
    for callback in callbacks:
        try:
            outcome = callback()
            if inspect.isawaitable(outcome):
                await outcome
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            log.exception("a post-commit callback failed; the transaction is committed")
    if cancelled is not None:
        raise cancelled


class TransactionBlock:
    """``async with storage.transaction():`` commits at the end, rolls back on any exception."""

    def __init__(self, transactions: Transactions, executor: Executor, deadline_sec: float | None) -> None:
        self._transactions = transactions
        self._executor = executor
        self._deadline_sec = deadline_sec

    async def __aenter__(self) -> Executor:
        await self._transactions.begin(self._deadline_sec)
        return self._executor

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self._transactions.commit()
            return
        try:
            await self._transactions.rollback()
        except TransactionDeadlineError:
            if not isinstance(error, TransactionDeadlineError):
                raise


def describe_deadline(deadline_sec: float) -> TransactionDeadlineError:
    """The error of a transaction that was open for too long."""
    return TransactionDeadlineError(
        f"the transaction was open for more than {deadline_sec:g} s and has been rolled back;"
        " keep foreign work out of transactions, or allow more with transaction(deadline_sec=…)"
    )
