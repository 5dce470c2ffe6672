"""MySQL and MariaDB through asyncmy."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import asyncmy
from asyncmy import errors as my
from asyncmy.constants import CLIENT

from ...errors import (
    DatabaseError,
    InvalidURLError,
    SchemaError,
    SearchTimeoutError,
    StorageError,
    StorageUnavailableError,
)
from ...urls import DatabaseURL
from ..drivers.mysql import MySQLDriver
from ..rows import Row
from ..statement import NativeQuery, Query, Want
from .pool import Connection
from .server import ServerRunner, Trouble

_DUPLICATE = 1062
_CONFLICTS = {
    1213,  # deadlock
    1205,  # lock wait timeout
    1020,  # record has changed since the snapshot (MariaDB)
    3572,  # NOWAIT
    1317,  # interrupted, by a server that shuts down
    _DUPLICATE,  # two rivals inserted the same key at once: the second look finds the winner's row
}
_LOST = {1053, 1152, 1158, 1159, 1160, 1161, 1927, 2006, 2013, 2055, 4031, 0}
_WRONG_ADDRESS = {1044, 1045, 1049, 1698, 1130, 2059, 2061}
_GIVEN_UP = {1969, 3024}  # a statement's own time limit, of MariaDB and of MySQL
_NO_SCHEMA = {1146, 1054, 1305}

# Strict: never a truncation. Backslash escapes on, as the client's quoting needs them. Tables that Edda made have times
# of whole seconds: ours lose their fraction there, like its own. MySQL would round; MariaDB does not, and skips /*! */.
_SESSION = (
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION time_zone = '+00:00', innodb_lock_wait_timeout = 10, autocommit = 1,"
    " sql_mode = CONCAT("
    "'STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION'"
    " /*!80000 , ',TIME_TRUNCATE_FRACTIONAL' */)",
)


_IDENTITY = "SELECT CONCAT_WS(' ', @@hostname, @@port, @@datadir, DATABASE())"


def error_code(error: BaseException) -> int | None:
    """The server's or client's number of an error."""
    code = error.args[0] if isinstance(error, my.MySQLError) and error.args else None
    return code if isinstance(code, int) else None


class MySQLConnection(Connection):
    """One asyncmy connection."""

    def __init__(self, connection: Any, driver: MySQLDriver) -> None:
        self.raw = connection
        self._driver = driver

    async def execute(self, query: Query[Any]) -> Any:
        rendered, args = query.resolve(self._driver)
        cursor = self.raw.cursor()
        try:
            # Without arguments the text is sent as it is: a % in the user's SQL is no placeholder.
            text = cursor.mogrify(rendered.text, args if args or not isinstance(query, NativeQuery) else None)
        except (TypeError, ValueError) as error:
            raise DatabaseError(f"the arguments do not fit the statement: {error}") from error
        try:
            await cursor.execute(text)
        except my.IntegrityError as error:
            if rendered.duplicate_is_nothing and error_code(error) == _DUPLICATE:
                return 0 if query.want is Want.COUNT else None
            raise
        except (my.MySQLError, OSError):
            raise
        except Exception as error:
            # Reading stopped in the middle of an answer: what follows on this connection would be the rest of it.
            raise my.InternalError(f"the server's answer cannot be read: {error!r}") from error
        match query.want:
            case Want.COUNT:
                return cursor.rowcount
            case Want.ID:
                return cursor.lastrowid if cursor.rowcount > 0 else None
        rows = await cursor.fetchall()
        if rendered.decode is not None:
            rows = [rendered.decode(row) for row in rows]
        elif isinstance(query, NativeQuery):
            rows = Row.many(rows, cursor.description or ())
        if query.want is Want.ALL:
            return rows
        if not rows:
            return None
        return rows[0] if query.want is Want.ONE else rows[0][0]

    async def control(self, statement: str) -> None:
        await self.raw.query(statement)

    async def commit(self) -> None:
        await self.raw.query("COMMIT")

    @property
    def in_transaction(self) -> bool:
        return bool(self.raw.get_transaction_status())

    @property
    def broken(self) -> bool:
        return not self.raw.connected or self.raw._stream_broken

    def abort(self) -> None:
        if self.raw._transport is not None:
            self.raw._transport.abort()  # close() would first wait for a peer to read what is still to be sent
        self.raw._close_on_cancel()

    async def close(self) -> None:
        await self.raw.ensure_closed()


class MySQLRunner(ServerRunner):
    """Runs operations on MySQL or MariaDB."""

    driver: MySQLDriver

    def __init__(
        self,
        url: DatabaseURL,
        *,
        pool_size: int = 10,
        transaction_deadline_sec: float = 30.0,
        statement_timeout_sec: float = 60.0,
        connect_timeout_sec: float = 5.0,
    ) -> None:
        super().__init__(MySQLDriver(), pool_size=pool_size, transaction_deadline_sec=transaction_deadline_sec)
        self.url = url
        self._statement_timeout_sec = statement_timeout_sec
        self._connect_timeout_sec = url.seconds("connect_timeout", default=connect_timeout_sec)
        ssl_context(url)  # a wrong one is an error now, not at the first connection

    async def connect_raw(self) -> Any:
        """A connection outside the pool: migrations keep theirs."""
        # asyncmy's own timeout ends when the socket is open; a peer that then says nothing would be waited for.
        async with asyncio.timeout(self._connect_timeout_sec):
            return await self._connect_and_prepare()

    async def _connect_and_prepare(self) -> Any:
        connection = await asyncmy.connect(
            host=self.url.host,
            port=self.url.port,
            unix_socket=self.url.socket or None,
            user=self.url.user,
            password=self.url.password,
            database=self.url.database or None,
            charset="utf8mb4",
            client_flag=CLIENT.FOUND_ROWS,  # an UPDATE counts the rows it matched, like everywhere else
            connect_timeout=self._connect_timeout_sec,
            read_timeout=self._statement_timeout_sec,
            autocommit=True,
            binary_prefix=True,
            ssl=ssl_context(self.url),
        )
        try:
            for statement in _SESSION:
                await connection.query(statement)
            cursor = connection.cursor()
            await cursor.execute("SELECT @@max_allowed_packet, VERSION()")
            packet, version = await cursor.fetchone()
        except BaseException:
            connection.close()
            raise
        self.driver.is_mariadb = "mariadb" in str(version).lower()
        # A payload may double when it is quoted, and the statement around it needs room too.
        self.payload_limit = int(packet) // 2 - 65536
        return connection

    async def identity(self) -> str:
        """What tells this database from every other, whatever address leads to it."""
        async with self.pool.connection() as connection:
            query: NativeQuery[str] = NativeQuery(_IDENTITY, (), Want.VALUE)
            return f"mysql {await connection.execute(query)}"

    async def _connect(self) -> MySQLConnection:
        try:
            return MySQLConnection(await self.connect_raw(), self.driver)
        except StorageError:
            raise
        except Exception as error:
            raise _Unreachable(self.url.shown, error) from error

    def trouble(self, error: BaseException) -> Trouble:
        if isinstance(error, _Unreachable):
            return Trouble.UNREACHABLE if error.worth_retrying else Trouble.REFUSED
        code = error_code(error)
        if code in _CONFLICTS:
            return Trouble.CONFLICT
        if code in _LOST or isinstance(error, OSError | TimeoutError | my.InterfaceError | my.InternalError):
            return Trouble.LOST
        return Trouble.MISUSE if isinstance(error, ValueError | TypeError) else Trouble.REFUSED

    def is_duplicate(self, error: BaseException) -> bool:
        return error_code(error) == _DUPLICATE

    def translate(self, error: BaseException) -> StorageError:
        if isinstance(error, _Unreachable):
            return StorageUnavailableError(str(error))
        if error_code(error) in _GIVEN_UP:
            return SearchTimeoutError()
        if error_code(error) in _NO_SCHEMA:
            return SchemaError(f"{_words(error)}: the schema is missing or old; run initialize() first")
        return DatabaseError(f"MySQL refused a statement: {_words(error)}")


def _words(error: BaseException) -> str:
    return str(error.args[1]) if len(error.args) > 1 else str(error)


class _Unreachable(Exception):
    """No connection could be made."""

    def __init__(self, shown: str, error: BaseException) -> None:
        reason = "no answer in time" if type(error) is TimeoutError else _words(error) or type(error).__name__
        super().__init__(f"cannot connect to {shown}: {reason}")
        # A wrong password or database stays wrong; a server that is starting or full does not.
        self.worth_retrying = error_code(error) not in _WRONG_ADDRESS


# MySQL's words, PostgreSQL's, and those of Go's `tls` parameter.
_SSL_MODES = {
    "disable": ("disable", "disabled", "allow", "prefer", "preferred", "false"),
    "require": ("require", "required", "skip-verify"),
    "verify-ca": ("verify-ca",),
    "verify-full": ("verify-full", "verify-identity", "true"),
}


def ssl_context(url: DatabaseURL) -> ssl.SSLContext | None:
    """What the URL's sslmode (or Go's tls), ssl_ca, ssl_cert and ssl_key ask for, or InvalidURLError."""
    word = (url.option("sslmode") or url.option("ssl-mode") or url.option("tls") or "disable").lower().replace("_", "-")
    mode = next((mode for mode, words in _SSL_MODES.items() if word in words), None)
    if mode is None:
        known = ", ".join(name for names in _SSL_MODES.values() for name in names)
        raise InvalidURLError(f"sslmode or tls must be one of {known}, not {word!r}")
    if mode == "disable":
        return None
    try:
        context = ssl.create_default_context(cafile=url.option("ssl_ca"))
        context.check_hostname = mode == "verify-full"
        if mode == "require":
            context.verify_mode = ssl.CERT_NONE
        if url.option("ssl_cert"):
            context.load_cert_chain(str(url.option("ssl_cert")), url.option("ssl_key"))
    except OSError as error:
        raise InvalidURLError(f"ssl_ca, ssl_cert or ssl_key cannot be used: {error}") from error
    return context
