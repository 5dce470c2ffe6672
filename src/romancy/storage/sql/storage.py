"""The storage: all managers joined, on a runner that is chosen by the database's URL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from ..errors import InvalidURLError, MissingDriverError
from ..migrations import declare_input_path, declared_input_paths, forget_input_path, migrate
from ..models import FRAMEWORK
from ..notifications import TOPICS, DatagramWakeups, InProcessWakeups, Listener, PostgresWakeups, Wakeups
from ..protocols import Executor, PostCommitCallback
from ..urls import DatabaseURL, check_options, parse_url
from .checks import check_key
from .compensations import Compensations
from .completing import Completing
from .drivers.driver import Driver
from .drivers.mysql import MySQLDriver
from .drivers.postgres import PostgresDriver
from .drivers.sqlite import SQLiteDriver
from .executor import SQLExecutor
from .groups import Groups
from .outbox import Outbox, new_relayer_id
from .runners.runner import BaseRunner
from .runners.sqlite import MEMORY, SQLiteRunner
from .seen_events import SeenEvents
from .setbacks import Setbacks
from .states import States
from .system_locks import SystemLocks
from .transactions import TransactionBlock
from .waking import Waking
from .work import Looking

MAX_PAYLOAD_BYTES = 4 * 1024 * 1024


class SQLStorage(Waking, Looking, Setbacks, SeenEvents, Completing, Outbox, Compensations, Groups, States, SystemLocks):
    """Durable workflow state in an SQL database; implements `Storage`."""

    def __init__(
        self,
        runner: BaseRunner,
        *,
        framework: str = FRAMEWORK,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        wakeups: Wakeups | None = None,
    ) -> None:
        self.runner = runner
        self.wakeups = wakeups or InProcessWakeups(runner)
        self.framework = check_key("framework", framework, 50)
        self.max_payload_bytes = max_payload_bytes
        self.relayer_id = new_relayer_id()
        self._executor = SQLExecutor(runner)

    async def initialize(self) -> None:
        await migrate(self.runner)

    async def declare_input_path(self, path: str) -> None:
        """Index the values at a path of instances' inputs, so that listing by them stays quick; once is enough."""
        await declare_input_path(self.runner, path)

    async def forget_input_path(self, path: str) -> None:
        """Remove the index of a declared path."""
        await forget_input_path(self.runner, path)

    async def declared_input_paths(self) -> list[str]:
        """The paths that have been declared."""
        return await declared_input_paths(self.runner)

    async def close(self) -> None:
        await self.wakeups.close()
        await self.runner.close()

    def db(self) -> BaseRunner:
        return self.runner

    def listen(self, topics: Iterable[str] = TOPICS) -> Listener:
        """Hear of what becomes visible: ``async with storage.listen() as hints: async for hint in hints: …``"""
        return Listener(self.wakeups, topics)

    def set_notify_enabled(self, enabled: bool) -> None:
        """Whether commits of this storage are announced to other processes."""
        self.wakeups.enabled = enabled

    def is_notify_enabled(self) -> bool:
        """Whether commits of this storage are announced to other processes."""
        return self.wakeups.enabled

    async def __aenter__(self) -> Self:
        await self.runner.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Implements `TransactionManager`.

    def transaction(self, *, deadline_sec: float | None = None) -> TransactionBlock:
        return TransactionBlock(self.runner.transactions, self._executor, deadline_sec)

    async def begin_transaction(self) -> None:
        await self.runner.transactions.begin()

    async def commit_transaction(self) -> None:
        await self.runner.transactions.commit()

    async def rollback_transaction(self) -> None:
        await self.runner.transactions.rollback()

    def in_transaction(self) -> bool:
        return self.runner.transactions.active()

    def conn(self) -> Executor:
        return self._executor

    def register_post_commit_callback(self, cb: PostCommitCallback) -> None:
        self.runner.transactions.after_commit(cb)


class SQLiteStorage(SQLStorage):
    """Storage in one SQLite file, or in memory with ``:memory:``."""

    runner: SQLiteRunner

    def __init__(
        self,
        path: str,
        *,
        framework: str = FRAMEWORK,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        synchronous: str | None = None,
        transaction_deadline_sec: float = 5.0,
    ) -> None:
        url = _expect("sqlite", path)
        level = (synchronous or url.option("synchronous") or "FULL").upper()
        if level not in ("OFF", "NORMAL", "FULL", "EXTRA"):
            raise InvalidURLError(f"synchronous must be OFF, NORMAL, FULL or EXTRA, not {level!r}")
        runner = SQLiteRunner(url.database, synchronous=level, transaction_deadline_sec=transaction_deadline_sec)
        wakeups = None if runner.in_memory else DatagramWakeups(runner, runner.identity)
        super().__init__(runner, framework=framework, max_payload_bytes=max_payload_bytes, wakeups=wakeups)


class PostgresStorage(SQLStorage):
    """Storage in PostgreSQL."""

    def __init__(
        self,
        conn_str: str,
        *,
        framework: str = FRAMEWORK,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        pool_size: int = 10,
        transaction_deadline_sec: float = 30.0,
        prepared_statements: bool = True,
        listen_url: str | None = None,
    ) -> None:
        url = _expect("postgres", conn_str)
        try:
            from .runners.postgres import PostgresRunner
        except ModuleNotFoundError as error:
            raise MissingDriverError("PostgreSQL", "postgres") from error

        runner = PostgresRunner(
            url,
            pool_size=pool_size,
            transaction_deadline_sec=transaction_deadline_sec,
            prepared_statements=prepared_statements,
        )
        # Past a pooler, which would swallow notifications.
        direct = None if listen_url is None else PostgresRunner(_expect("postgres", listen_url))
        super().__init__(
            runner, framework=framework, max_payload_bytes=max_payload_bytes, wakeups=PostgresWakeups(runner, direct)
        )


class MySQLStorage(SQLStorage):
    """Storage in MySQL or MariaDB."""

    def __init__(
        self,
        conn_str: str,
        *,
        framework: str = FRAMEWORK,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        pool_size: int = 10,
        transaction_deadline_sec: float = 30.0,
    ) -> None:
        url = _expect("mysql", conn_str)
        try:
            from .runners.mysql import MySQLRunner
        except ModuleNotFoundError as error:
            raise MissingDriverError("MySQL and MariaDB", "mysql") from error

        runner = MySQLRunner(url, pool_size=pool_size, transaction_deadline_sec=transaction_deadline_sec)
        super().__init__(
            runner,
            framework=framework,
            max_payload_bytes=max_payload_bytes,
            wakeups=DatagramWakeups(runner, runner.identity),
        )


_STORAGES: dict[str, Callable[..., SQLStorage]] = {
    "sqlite": SQLiteStorage,
    "postgres": PostgresStorage,
    "mysql": MySQLStorage,
}
_DRIVERS: dict[str, type[Driver]] = {"sqlite": SQLiteDriver, "postgres": PostgresDriver, "mysql": MySQLDriver}


def open_storage(url: str, *, framework: str = FRAMEWORK, **options: Any) -> SQLStorage:
    """The storage a URL names; use it as ``async with open_storage(url) as storage:``. Connects on first use."""
    return _STORAGES[parse_url(url).kind](url, framework=framework, **options)


def new_driver(db_url: str) -> Driver:
    """The driver a URL names: how its database spells what the others spell differently."""
    return _DRIVERS[parse_url(db_url).kind]()


async def initialize_test_schema(storage: SQLStorage) -> None:
    """Make the schema for a test, by the real migrations."""
    await storage.initialize()


def _expect(kind: str, url: str) -> DatabaseURL:
    parsed = DatabaseURL(kind="sqlite", database=MEMORY) if url == MEMORY else parse_url(url)
    if parsed.kind != kind:
        raise InvalidURLError(f"this is a {parsed.kind} URL, and a {kind} storage cannot use it")
    return check_options(parsed)
