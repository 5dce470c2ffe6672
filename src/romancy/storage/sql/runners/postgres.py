"""PostgreSQL through asyncpg, without session state, so that a transaction pooler may stand in between."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import asyncpg

from ...errors import (
    DatabaseError,
    InvalidURLError,
    SchemaError,
    SearchTimeoutError,
    StorageError,
    StorageUnavailableError,
)
from ...urls import DatabaseURL
from ..drivers.postgres import PostgresDriver
from ..rows import Row
from ..statement import (
    ALL,
    COUNT,
    ONE,
    Many,
    NativeQuery,
    Query,
    Statement,
    Want,
    as_json,
    length_of,
    picker,
    same_statement,
)
from .pool import Connection
from .server import ServerRunner
from .trouble import Trouble

_CONFLICTS = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
    asyncpg.InvalidCachedStatementError,  # a migration changed the table under a prepared statement
    asyncpg.UniqueViolationError,  # two rivals inserted the same key at once: the second look finds the winner's row
)
_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
_LONGEST_JSON = 200_000
# A prepared statement keeps the plan that was made while its tables were small: reading all of them, which was quick
# then. Whoever flushes finds every row by its key. Where that cannot be said, each plan is made for the moment.
_BY_KEY = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
_REFUSALS = (
    asyncpg.ProtocolViolationError,
    asyncpg.FeatureNotSupportedError,
    asyncpg.SyntaxOrAccessError,
    asyncpg.DataError,
)
"""How a pooler may say that it does not take settings."""
_NO_SCHEMA = (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError, asyncpg.UndefinedFunctionError)


class PostgresConnection(Connection):
    """One asyncpg connection."""

    def __init__(self, connection: asyncpg.Connection[Any], driver: PostgresDriver) -> None:
        self.raw = connection
        self._driver = driver

    async def execute(self, query: Query[Any]) -> Any:
        rendered, args = query.resolve(self._driver)
        want = query.want
        try:
            if want is COUNT:
                status: str = await self.raw.execute(rendered.text, *args)
                count = status.rpartition(" ")[2]
                return int(count) if count.isdigit() else 0
            if want is ALL:
                rows = await self.raw.fetch(rendered.text, *args, timeout=rendered.within_sec)
                if rendered.decode is None:
                    return [_row(row) for row in rows] if isinstance(query, NativeQuery) else rows
                return rendered.decode(rows)
            row = await self.raw.fetchrow(rendered.text, *args)
            if row is None:
                return None
            if want is not ONE:
                return row[0]
            if rendered.decode is not None:
                return rendered.decode([row])[0]
            return _row(row) if isinstance(query, NativeQuery) else row
        except TimeoutError as error:
            if rendered.within_sec is None:
                raise
            self.has_given_up = True
            raise SearchTimeoutError from error
        except (asyncpg.DataError, asyncpg.InterfaceError):
            await self._end_what_was_begun()
            raise

    async def execute_together(self, queries: Sequence[Query[Any]]) -> list[Any]:
        answers: list[Any] = [None] * len(queries)
        equal: dict[tuple[Statement[Any], Want], list[int]] = {}
        for number, query in enumerate(queries):
            equal.setdefault((query.statement, query.want), []).append(number)
        for (statement, want), numbers in equal.items():
            if len(numbers) == 1:
                answers[numbers[0]] = await self.execute(queries[numbers[0]])
            elif statement.many is not None and self._are_short(alike := [queries[number] for number in numbers]):
                ids = await self._write_many(statement.many, alike)
                for number, row_id in zip(numbers, ids, strict=True):
                    answers[number] = row_id
            else:
                await self._execute_equal(queries, numbers, want, answers)
        return answers

    def can_write_at_once(self, queries: Sequence[Query[Any]]) -> bool:
        statement = same_statement(queries)
        return statement is not None and statement.many is not None and self._are_short(queries)

    @staticmethod
    def _are_short(queries: Sequence[Query[Any]]) -> bool:
        """Whether they go well into one JSON text, which has to be read from its beginning to its end."""
        return length_of(queries) <= _LONGEST_JSON

    async def write_at_once(self, queries: Sequence[Query[Any]]) -> list[Any]:
        many = queries[0].statement.many
        assert many is not None, "as was asked before"
        try:
            return await self._write_many(many, queries)
        except (asyncpg.DataError, asyncpg.InterfaceError):
            await self._end_what_was_begun()
            raise

    async def _write_many(self, many: Many, queries: Sequence[Query[Any]]) -> list[Any]:
        """Write many rows with one statement; the answer of each."""
        rows = [query.params for query in queries]
        found = await self.raw.fetch(self._driver.for_many(many), self._as_json(many, rows))
        answers = {row[1:]: row[0] for row in found}
        key = picker(many.key)
        return [answers.get(key(row), many.left_out) for row in rows]

    def _as_json(self, many: Many, rows: Sequence[Mapping[str, Any]]) -> str:
        """Parameters as one: of a list asyncpg asks every element whether it is a list, too."""
        columns = [name for name, kind in many.columns.items() if kind in _SPELLED]
        spelled = [{name: self._spelled(row[name]) for name in columns if row[name] is not None} for row in rows]
        return as_json([{**row, **special} if special else row for row, special in zip(rows, spelled, strict=True)])

    def _spelled(self, value: Any) -> Any:
        """Times and bytes as PostgreSQL reads them."""
        return f"\\x{value.hex()}" if isinstance(value, bytes) else self._driver.encode_time(value)

    async def _execute_equal(
        self, queries: Sequence[Query[Any]], numbers: list[int], want: Want, answers: list[Any]
    ) -> None:
        """Run one statement with many arguments in one message; each row says which of them it answers."""
        rendered = self._driver.rendered(queries[numbers[0]].statement)
        text = self._driver.numbered(rendered, counted=want is COUNT)
        arguments = [(*rendered.bind(queries[number].params), number) for number in numbers]
        rows = await self.raw.fetchmany(text, arguments)
        found = [row[1:] for row in rows]
        if want is not ALL and want is not ONE:
            values = [row[0] for row in found]
        else:
            values = found if rendered.decode is None else rendered.decode(found)
        if want is ALL:
            for number in numbers:
                answers[number] = []
        for row, value in zip(rows, values, strict=True):
            number = row[0]
            if want is ALL:
                answers[number].append(value)
            elif answers[number] is None:
                answers[number] = value

    async def _end_what_was_begun(self) -> None:
        """asyncpg refuses an argument after the server has begun the statement, whose locks then stay: end it."""
        if not self.raw.is_closed():
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await self.raw.execute("SELECT 1")

    async def control(self, statement: str) -> None:
        await self.raw.execute(statement)

    async def begin(self) -> None:
        await self.raw.execute("BEGIN ISOLATION LEVEL READ COMMITTED")

    async def begin_impatiently(self) -> None:
        await self.raw.execute("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '100ms'")

    async def commit(self) -> None:
        # A transaction in which a statement failed answers COMMIT with a silent ROLLBACK.
        if await self.raw.execute("COMMIT") != "COMMIT":
            raise DatabaseError("the transaction was rolled back: one of its statements had failed")

    @property
    def in_transaction(self) -> bool:
        return bool(self.raw.is_in_transaction())

    @property
    def broken(self) -> bool:
        return bool(self.raw.is_closed())

    def abort(self) -> None:
        if not self.raw.is_closed():
            self.raw.terminate()

    async def close(self) -> None:
        await self.raw.close()


_SPELLED = ("timestamp", "bytea")
"""The types whose values JSON has no words for."""


def _row(record: Any) -> Row:
    return Row.many([tuple(record)], [(name,) for name in record.keys()])[0]  # noqa: SIM118 (a record is no dict)


class PostgresRunner(ServerRunner):
    """Runs operations on PostgreSQL."""

    driver: PostgresDriver

    def __init__(
        self,
        url: DatabaseURL,
        *,
        pool_size: int = 10,
        transaction_deadline_sec: float = 30.0,
        statement_timeout_sec: float = 60.0,
        connect_timeout_sec: float = 5.0,
        prepared_statements: bool = True,
    ) -> None:
        super().__init__(
            PostgresDriver(),
            pool_size=pool_size,
            transaction_deadline_sec=transaction_deadline_sec,
            statement_timeout_sec=statement_timeout_sec,
        )
        self.url = url
        self._connect_timeout_sec = url.seconds("connect_timeout", default=connect_timeout_sec)
        ssl_mode(url)  # a wrong one is an error now, not at the first connection
        self._prepared_statements = prepared_statements and url.flag("prepared_statements", default=True)
        self._takes_settings = True

    async def connect_raw(
        self, *, timed: bool = True, prepared: bool = True, settings: Mapping[str, str] | None = None
    ) -> asyncpg.Connection[Any]:
        """A connection outside the pool: migrations and listeners keep theirs."""
        return await asyncpg.connect(
            host=self.url.host or None,
            port=self.url.port or 5432,
            user=self.url.user or None,
            password=self.url.password or None,
            database=self.url.database or None,
            ssl=ssl_mode(self.url),
            timeout=self._connect_timeout_sec,
            command_timeout=self.statement_timeout_sec if timed else None,
            statement_cache_size=1024 if prepared and self._prepared_statements else 0,
            server_settings={
                "application_name": self.url.option("application_name") or "romancy",
                **(settings or {}),
            },
        )

    async def _connect(self) -> PostgresConnection:
        return await self._reached(self.connect_raw())

    async def _connect_for_flushes(self) -> PostgresConnection:
        if self._prepared_statements and self._takes_settings:
            try:
                return await self._reached(self.connect_raw(timed=False, settings=_BY_KEY))
            except _Unreachable as error:
                if not isinstance(error.__cause__, _REFUSALS):
                    raise
                self._takes_settings = False  # a pooler stands in between, and does not know them
        return await self._reached(self.connect_raw(timed=False, prepared=False))

    async def _reached(self, connecting: Awaitable[asyncpg.Connection[Any]]) -> PostgresConnection:
        try:
            return PostgresConnection(await connecting, self.driver)
        except StorageError:
            raise
        except Exception as error:
            raise _Unreachable(self.url.shown, error) from error

    def trouble(self, error: BaseException) -> Trouble:
        if isinstance(error, _Unreachable):
            return Trouble.UNREACHABLE if error.worth_retrying else Trouble.REFUSED
        if isinstance(error, _CONFLICTS):
            return Trouble.CONFLICT
        if isinstance(error, _LOST):
            return Trouble.LOST
        return Trouble.MISUSE if isinstance(error, ValueError | TypeError) else Trouble.REFUSED

    def is_duplicate(self, error: BaseException) -> bool:
        return isinstance(error, asyncpg.UniqueViolationError)

    def translate(self, error: BaseException) -> StorageError:
        if isinstance(error, _Unreachable):
            return StorageUnavailableError(str(error))
        if isinstance(error, _NO_SCHEMA):
            return SchemaError(f"{error}: the schema is missing or old; run initialize() or `romancy migrate`")
        if isinstance(error, asyncpg.InsufficientResourcesError):
            return StorageUnavailableError(f"PostgreSQL is out of resources: {error}")
        return DatabaseError(f"PostgreSQL refused a statement: {error}")


class _Unreachable(Exception):
    """No connection could be made."""

    def __init__(self, shown: str, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        if type(error) is TimeoutError:
            reason = "no answer in time"
        super().__init__(f"cannot connect to {shown}: {reason}")
        # A wrong password or database stays wrong; a server that is starting or full does not.
        self.worth_retrying = not isinstance(
            error, asyncpg.InvalidAuthorizationSpecificationError | asyncpg.InvalidCatalogNameError
        )


_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")


def ssl_mode(url: DatabaseURL) -> str | ssl.SSLContext | bool | None:
    """What the URL's sslmode, sslrootcert, sslcert and sslkey ask for; InvalidURLError when it cannot be had."""
    mode = url.option("sslmode") or "prefer"
    if mode not in _SSL_MODES:
        raise InvalidURLError(f"sslmode must be one of {', '.join(_SSL_MODES)}, not {mode!r}")
    root, certificate, key = (url.option(name) for name in ("sslrootcert", "sslcert", "sslkey"))
    if mode == "disable" or (url.host or "").startswith("/"):
        return False
    if not (root or certificate):
        return mode
    try:
        context = ssl.create_default_context(cafile=root)
        context.check_hostname = mode == "verify-full"
        # As in libpq, "require" with a root certificate verifies: whoever names one wants it used.
        if mode not in ("verify-ca", "verify-full") and not (mode == "require" and root):
            context.verify_mode = ssl.CERT_NONE
        if certificate:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        raise InvalidURLError(f"sslrootcert, sslcert or sslkey cannot be used: {error}") from error
    return context
