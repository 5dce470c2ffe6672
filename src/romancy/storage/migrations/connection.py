"""What changing a schema needs of a database: nobody else at it, transactions where there are any, and patience."""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from ..errors import StorageError, StorageUnavailableError, TransientStorageError
from ..sql.runners.runner import BaseRunner
from ..sql.runners.server import ServerRunner
from ..sql.runners.trouble import Trouble

T = TypeVar("T")

BUSY = "another process has been migrating the database"
EDDA_BUSY = "Edda has been migrating the database"

_POLL_SEC = 0.1
_LONGEST_PAUSE_SEC = 1.0


class MigrationConnection(ABC):
    """A database whose schema is about to change. Its methods raise the driver's own errors."""

    def __init__(self, runner: BaseRunner, wait_sec: float) -> None:
        self.runner = runner
        self.wait_sec = wait_sec

    @abstractmethod
    def alone(self) -> AbstractAsyncContextManager[None]:
        """Keep every other process of this library from migrating; TransientStorageError when one takes too long."""

    @abstractmethod
    def step(self, *, in_transaction: bool = True, shared: bool = False) -> AbstractAsyncContextManager[None]:
        """What one migration runs in: a transaction where possible and, for the `shared` tables, Edda's own lock."""

    @abstractmethod
    async def execute(self, statement: str) -> None:
        """Run one statement of a migration; outside a transaction, one that has been done already is content."""

    async def check_adoptable(self) -> None:  # noqa: B027 (most databases have nothing to check)
        """SchemaError when the tables that are there cannot be shared."""

    @abstractmethod
    def translate(self, error: Exception) -> StorageError:
        """What a driver's error means to the caller."""

    async def retried(self, step: Callable[[], Awaitable[T]]) -> T:
        """Run a step; it is left as it was, or can be repeated, when it fails."""
        return await step()

    async def poll(self, attempt: Callable[[], Awaitable[bool]], *, what: str) -> None:
        """Repeat until it succeeds; TransientStorageError after `wait_sec`."""
        deadline = time.monotonic() + self.wait_sec
        while not await attempt():
            if time.monotonic() > deadline:
                raise TransientStorageError(f"{what} for more than {self.wait_sec:g} s; try again later")
            await asyncio.sleep(_POLL_SEC * random.uniform(0.5, 1.5))


class ServerMigrationConnection(MigrationConnection):
    """What the servers have in common."""

    runner: ServerRunner

    async def retried(self, step: Callable[[], Awaitable[T]]) -> T:
        """Run a step again after a deadlock, or when a table was not free in the short time we wait for one."""
        deadline = time.monotonic() + self.wait_sec
        pause = _POLL_SEC
        while True:
            try:
                return await step()
            except StorageError:
                raise
            except Exception as error:
                if self.runner.trouble(error) is not Trouble.CONFLICT or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE_SEC)

    def translate(self, error: Exception) -> StorageError:
        match self.runner.trouble(error):
            case Trouble.REFUSED:
                return self.runner.translate(error)
            case Trouble.CONFLICT:
                return TransientStorageError(f"the database kept refusing a migration: {error}")
        return StorageUnavailableError(f"the connection to the database was lost: {error}")

    def probe(self) -> None:
        """Let a test crash here."""
        if self.runner.probe is not None:
            self.runner.probe("before statement", "migrate")
