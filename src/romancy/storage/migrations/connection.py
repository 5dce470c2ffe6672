"""What changing a schema needs of a database: nobody else doing it, transactions where there are any, and patience."""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

from ..errors import StorageError, TransientStorageError
from ..sql.runners.runner import BaseRunner

EDDA_LOCK_KEY = 20251217000000
EDDA_LOCK_NAME = "edda_migration"
_POLL_SEC = 0.1


class MigrationConnection(ABC):
    """A database whose schema is about to change. Its methods raise the driver's own errors."""

    kind: ClassVar[str]

    def __init__(self, runner: BaseRunner, *, wait_sec: float) -> None:
        self.runner = runner
        self.wait_sec = wait_sec

    @abstractmethod
    def alone(self) -> AbstractAsyncContextManager[None]:
        """Keep every other process of this library from migrating; TransientStorageError when one takes too long."""

    @abstractmethod
    def step(self, *, in_transaction: bool, shared: bool = False) -> AbstractAsyncContextManager[None]:
        """What one migration runs in: a transaction where possible, and for `shared` tables Edda's own lock."""

    @abstractmethod
    async def rows(self, query: str) -> Sequence[Sequence[Any]]:
        """Read."""

    @abstractmethod
    async def execute(self, statement: str) -> None:
        """Run one statement of a migration. Where it is not in a transaction, it may have been done already."""

    @abstractmethod
    async def collation(self) -> str:
        """The collation of keys: that of the instances that are there already, else byte for byte."""

    async def check_adoptable(self) -> None:
        """SchemaError when the tables that are there cannot be shared."""

    @abstractmethod
    def translate(self, error: Exception) -> StorageError:
        """What a driver's error means to the caller."""

    def worth_retrying(self, error: Exception) -> bool:
        """Whether the database only asks to come again: a deadlock, a lock that was not free in time."""
        return False

    async def poll(self, attempt: Callable[[], Awaitable[bool]], *, what: str) -> None:
        """Repeat until it succeeds; TransientStorageError after `wait_sec`."""
        deadline = time.monotonic() + self.wait_sec
        while not await attempt():
            if time.monotonic() > deadline:
                raise TransientStorageError(f"{what} for more than {self.wait_sec:g} s; try again later")
            await asyncio.sleep(_POLL_SEC * random.uniform(0.5, 1.5))

    def probe(self) -> None:
        """Let a test crash here."""
        if self.runner.probe is not None:
            self.runner.probe("before statement", "migrate")


BUSY = "another process has been migrating the database"
EDDA_BUSY = "Edda has been migrating the database"
