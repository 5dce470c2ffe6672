"""MySQL and MariaDB through asyncmy."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Sequence
from typing import Any

import asyncmy
import msgspec
from asyncmy import errors as my
from asyncmy.constants import CLIENT, SERVER_STATUS

from ...errors import (
    DatabaseError,
    InvalidURLError,
    SchemaError,
    SearchTimeoutError,
    StorageError,
    StorageUnavailableError,
    TransientStorageError,
)
from ...urls import DatabaseURL
from ..drivers.mysql import MySQLDriver
from ..operation import Call
from ..rows import Row
from ..statement import (
    ALL,
    COUNT,
    ID,
    ONE,
    Many,
    NativeQuery,
    Query,
    Rendered,
    Statement,
    Together,
    Want,
    length_of,
    same_statement,
)
from .pool import Connection, Pool
from .server import ServerRunner
from .trouble import Trouble

_LONGEST_MESSAGE = 200_000
_FEW = 3
_DUPLICATE = 1062
_NOT_ALL_FOUND = {1242, 1644}  # what the driver's `unless_found` ends a message with
_CONFLICTS = {
    1213,  # deadlock
    1205,  # lock wait timeout
    1467,  # either of them, when what was waited for is the table's next id (MariaDB)
    1020,  # record has changed since the snapshot (MariaDB)
    3572,  # NOWAIT
    1317,  # interrupted, by a server that shuts down
    _DUPLICATE,  # two rivals inserted the same key at once: the second look finds the winner's row
}
_LOST = {1053, 1152, 1158, 1159, 1160, 1161, 1927, 2006, 2013, 2055, 4031, 0}
_WRONG_ADDRESS = {1044, 1045, 1049, 1698, 1130, 2059, 2061}
_INTERRUPTED = {1317, 1969}  # of which MariaDB also speaks when all that a statement of several has to do is done
_GIVEN_UP = {1969, 3024}  # a statement's own time limit, of MariaDB and of MySQL
_NO_SCHEMA = {1146, 1054, 1176, 1305}

# Strict: never a truncation. Backslash escapes on, as the client's quoting needs them. Tables that Edda made have times
# of whole seconds: ours lose their fraction there, like its own. MySQL would round; MariaDB does not, and skips /*! */.
_SESSION = (
    "SET NAMES utf8mb4",  # whatever the server makes of what the client has asked for
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION time_zone = '+00:00', innodb_lock_wait_timeout = 10, autocommit = 1,"
    " sql_mode = CONCAT("
    "'STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION'"
    " /*!80000 , ',TIME_TRUNCATE_FRACTIONAL' */)",
)


_IDENTITY = "SELECT CONCAT_WS(' ', @@hostname, @@port, @@datadir, DATABASE())"


_KEY_COLLATION = """
    SELECT collation_name FROM information_schema.columns
     WHERE table_schema = DATABASE() AND table_name = 'workflow_instances' AND column_name = 'instance_id'"""


def error_code(error: BaseException) -> int | None:
    """The server's or client's number of an error."""
    code = error.args[0] if isinstance(error, my.MySQLError) and error.args else None
    return code if isinstance(code, int) else None


class MySQLConnection(Connection):
    """One asyncmy connection."""

    def __init__(self, connection: Any, driver: MySQLDriver, patience_sec: float) -> None:
        self.raw = connection
        self._driver = driver
        self.patience_sec: float | None = patience_sec
        """How long to wait for an answer; None if somebody else watches the time."""
        self.can_join_parameters = False
        """Whether a table of parameters is joined through indexes: only if keys are compared byte for byte."""
        self.sends_several = False
        """Whether a message may be of several statements: never where the user's SQL runs."""
        self._begins = False
        """Whether a transaction is to begin with the next message."""
        self._unsent: list[str] = []
        """What is to be written with the next message."""

    async def execute(self, query: Query[Any]) -> Any:
        text, rendered = self._spelled(query)
        if query.can_wait and self.sends_several and (self.in_transaction or self._begins):
            assert not rendered.duplicate_is_nothing, "nobody would hear of it"
            self._unsent.append(text)
            return None
        if rendered.then is not None and not self.in_transaction and not self._begins:
            return await self._execute_both(query, text, rendered.then.run(query.params))
        try:
            await self._ask(text)
        except my.IntegrityError as error:
            if not self._is_nothing(error, rendered):
                raise
            return 0 if query.want is COUNT else None
        done = self._answer(query, rendered)
        return await self.execute(rendered.then.run(query.params)) if rendered.then is not None and done else done

    async def _execute_both(self, query: Query[Any], first: str, second: Query[Any]) -> int:
        """Run two writes that are one, in a transaction of their own; 0 if the first did not find its row."""
        if self.sends_several:
            return int(await self._commit_all([first, self._spelled(second)[0]], 1))
        await self.begin()
        try:
            done = await self.execute(query)
        except Exception:
            await self._undo()
            raise
        await self.commit()
        return int(done)

    async def _undo(self) -> None:
        """Roll back; a connection that refuses even that is nobody's any more, and the server rolls back."""
        try:
            if not self.broken:
                await self.rollback()
        except Exception:
            self.abort()

    async def execute_together(self, queries: Sequence[Query[Any]]) -> list[Any]:
        answers = {number: await self.execute(query) for number, query in enumerate(queries) if query.statement.then}
        asked: list[_Asked] = []
        for alike in self._alike(queries):
            if alike[0][1].want is ID:
                answers |= await self._insert_all(alike)
            else:
                asked.append(self._united(alike))
        done = {*answers, *(number for one in asked for number, _ in one.queries)}
        asked += [self._alone(number, query) for number, query in enumerate(queries) if number not in done]
        await self._send(asked, answers)
        return [answers[number] for number in range(len(queries))]

    def _alike(self, queries: Sequence[Query[Any]]) -> list[list[tuple[int, Query[Any]]]]:
        """Queries, with their places, that one statement can do: enough of them, and not too large."""
        groups: dict[tuple[Statement[Any], Want], list[tuple[int, Query[Any]]]] = {}
        for number, query in enumerate(queries):
            joined = query.statement.many or query.statement.together
            if self.can_join_parameters and joined and query.statement.then is None:
                groups.setdefault((query.statement, query.want), []).append((number, query))
        return [
            group
            for group in groups.values()
            if len(group) > _FEW and length_of([query for _, query in group]) <= _LONGEST_MESSAGE
        ]

    def _united(self, alike: list[tuple[int, Query[Any]]]) -> _Asked:
        statement = alike[0][1].statement
        assert statement.together is not None, "nothing but inserts has only a form for many"
        text = self._for_all(statement.together, [query for _, query in alike])
        return _Asked(text, alike, self._driver.rendered(statement))

    def _for_all(self, together: Together, queries: Sequence[Query[Any]]) -> str:
        return self._with_values(*self._driver.all_together(together, [query.params for query in queries]))

    def _alone(self, number: int, query: Query[Any]) -> _Asked:
        text, rendered = self._spelled(query)
        return _Asked(text, [(number, query)], rendered)

    async def _insert_all(self, alike: list[tuple[int, Query[Any]]]) -> dict[int, Any]:
        """Insert many rows, all or none; their ids by place, or nothing if one of them is there already."""
        statement = alike[0][1].statement
        try:
            if statement.many is not None and statement.many.mysql:
                ids = await self._insert_many(statement.many, [query for _, query in alike])
                return {number: row_id for (number, _), row_id in zip(alike, ids, strict=True)}
            assert statement.together is not None, "it is one or the other"
            return await self._insert_together(statement.together, alike)
        except my.IntegrityError as error:
            if error_code(error) != _DUPLICATE:
                raise
            return {}

    async def _insert_together(self, together: Together, alike: list[tuple[int, Query[Any]]]) -> dict[int, Any]:
        insert = self._for_all(together, [query for _, query in alike])
        keys = [tuple(query.params[name] for name in together.key) for _, query in alike]
        if self._driver.is_mariadb:
            await self._ask(insert)
            inserted = {tuple(key): row_id for row_id, *key in self.raw._result.rows}
        else:
            search = self._driver.ids_of_inserted(together, len(keys))
            values = [value for key in keys for value in key]
            await self._ask(f"{insert};{self._with_values(search, values)}")
            await self._read(self.raw.next_result())
            inserted = {keys[number]: row_id for number, row_id in self.raw._result.rows}
        return {number: inserted[key] for (number, _), key in zip(alike, keys, strict=True)}

    async def _send(self, asked: list[_Asked], answers: dict[int, Any]) -> None:
        """Send statements, as many in one message as go well into it; the answers are noted by place."""
        while asked:
            message = _first_message([one.text for one in asked])
            done = 0
            try:
                for done, one in enumerate(asked[: len(message)]):
                    await (self._read(self.raw.next_result()) if done else self._ask(";".join(message)))
                    answers |= self._answers(one)
                done = len(message)
            except my.IntegrityError as error:
                # What follows it in the message has not been run.
                (number, query), *others = asked[done].queries
                if others or not self._is_nothing(error, asked[done].rendered):
                    raise
                answers[number] = 0 if query.want is COUNT else None
                done += 1
            asked = asked[done:]

    def _answers(self, asked: _Asked) -> dict[int, Any]:
        """What was asked for of the result that was read last, by place."""
        (number, query), *others = asked.queries
        if not others:
            return {number: self._answer(query, asked.rendered)}
        result = self.raw._result
        if query.want is COUNT:
            if result.affected_rows != len(asked.queries):
                raise TransientStorageError(f"not everybody's row was found: {query.statement}")
            return dict.fromkeys((number for number, _ in asked.queries), 1)
        found: list[list[Any]] = [[] for _ in asked.queries]
        places = [row[0] for row in result.rows]
        rows = [row[1:] for row in result.rows]
        for place, row in zip(places, asked.rendered.decode(rows) if asked.rendered.decode else rows, strict=True):
            found[place].append(row)
        return {number: _wanted(query.want, rows) for (number, query), rows in zip(asked.queries, found, strict=True)}

    def can_write_at_once(self, queries: Sequence[Query[Any]]) -> bool:
        statement = same_statement(queries)
        if statement is None or not self.can_join_parameters or length_of(queries) > _LONGEST_MESSAGE:
            return False
        return bool(statement.many and statement.many.mysql) or bool(statement.together and queries[0].want is COUNT)

    async def write_at_once(self, queries: Sequence[Query[Any]]) -> list[Any]:
        statement = queries[0].statement
        if statement.many is not None and statement.many.mysql:
            return await self._insert_many(statement.many, queries)
        together = statement.together
        writes: list[str] = []
        while together is not None:
            writes.append(self._for_all(together, queries))
            together = together.then
        done = await self._commit_all(writes, len(queries))
        return [int(done)] * len(queries)

    async def _commit_all(self, writes: Sequence[str], rows: int) -> bool:
        """Run writes and commit, in one message, if the first finds so many rows; else nothing is written."""
        first, *others = writes
        message = self._driver.as_one_message([first, self._driver.unless_found(rows), *others])
        try:
            await self._read(self.raw.query(message))
            while self.raw._result.has_next:
                await self._read(self.raw.next_result())
        except my.MySQLError as error:
            await self._undo()  # an error does not say whether a transaction is open
            self._must_be_clear(error)
            if error_code(error) not in (*_NOT_ALL_FOUND, _DUPLICATE):
                raise
            return False
        return True

    def _must_be_clear(self, error: my.MySQLError) -> None:
        """Complain of an error after which nobody knows whether a COMMIT has happened."""
        if self._driver.is_mariadb and error_code(error) in _INTERRUPTED:
            raise my.InternalError(f"it was interrupted, perhaps after its COMMIT: {error}") from error

    async def _insert_many(self, many: Many, queries: Sequence[Query[Any]]) -> list[Any]:
        """Insert many rows with one statement; the id of each, None where its instance is not ours."""
        rows = [query.params for query in queries]
        insert = self._with_values(*self._driver.for_many(many, rows))
        if self._driver.is_mariadb:
            await self._ask(insert)
            ids = {(first, second): row_id for row_id, first, second in self.raw._result.rows}
            first, second = many.key
            return [ids.get((row[first], row[second])) for row in rows]
        search = self._driver.search_for_inserted(many, len(rows))
        keys = [row[name] for row in rows for name in (*many.key, many.inserted_by[1])]
        await self._ask(f"{insert};{self._with_values(search, keys)}")
        inserted = self.raw._result.affected_rows
        try:
            await self._read(self.raw.next_result())
        except my.MySQLError as error:
            # The rows may be committed by now: only an answer that got lost is handled like that.
            raise my.InternalError(f"what was inserted cannot be found: {error}") from error
        return [row_id for (row_id,) in self.raw._result.rows] if inserted else [None] * len(rows)

    def _spelled(self, query: Query[Any]) -> tuple[str, Rendered]:
        rendered, args = query.resolve(self._driver)
        try:
            # Without arguments the text is sent as it is: a % in the user's SQL is no placeholder.
            plain = isinstance(query, NativeQuery) and not args
            text = rendered.text if plain else self._with_values(rendered.text, args)
        except (TypeError, ValueError) as error:
            raise DatabaseError(f"the arguments do not fit the statement: {error}") from error
        return text, rendered

    def _with_values(self, text: str, values: Sequence[Any]) -> str:
        """A statement with its values in place of their signs, quoted."""
        literal = self.raw.literal
        if self.raw.server_status & SERVER_STATUS.SERVER_STATUS_NO_BACKSLASH_ESCAPES:
            return text % tuple([literal(value) for value in values])  # the user's SQL has changed the session's mode
        return text % tuple(
            [_quoted(value) if type(value) is str else "NULL" if value is None else literal(value) for value in values]
        )

    async def _ask(self, message: str) -> None:
        """Send a message, behind what has waited for one, and read its first answer."""
        before = [*(["BEGIN"] if self._begins else []), *self._unsent]
        self._begins, self._unsent = False, []
        await self._read(self.raw.query(";".join([*before, message])))
        for _ in before:
            await self._read(self.raw.next_result())

    async def _read(self, reading: Awaitable[Any]) -> None:
        alarm = None
        if self.patience_sec is not None:  # asyncmy's own timeout makes a task for each read
            alarm = asyncio.get_running_loop().call_later(self.patience_sec, self.abort)
        try:
            await reading
        except (my.MySQLError, OSError):
            raise
        except Exception as error:
            # Reading stopped in the middle of an answer: what follows on this connection would be the rest of it.
            raise my.InternalError(f"the server's answer cannot be read: {error!r}") from error
        finally:
            if alarm is not None:
                alarm.cancel()

    @staticmethod
    def _is_nothing(error: my.IntegrityError, rendered: Rendered) -> bool:
        return rendered.duplicate_is_nothing and error_code(error) == _DUPLICATE

    def _answer(self, query: Query[Any], rendered: Rendered) -> Any:
        """What the query wants of the result that was read last."""
        result = self.raw._result
        want = query.want
        if want is COUNT:
            return result.affected_rows
        if want is ID:
            return result.insert_id if result.affected_rows > 0 else None
        rows = result.rows or ()
        if rendered.decode is not None:
            rows = rendered.decode(rows)
        elif isinstance(query, NativeQuery):
            rows = Row.many(rows, result.description or ())
        return _wanted(want, rows)

    async def control(self, statement: str) -> None:
        await self._read(self.raw.query(statement))

    async def begin(self) -> None:
        if self.sends_several:
            self._begins = True
        else:
            await self.control("BEGIN")

    async def commit(self) -> None:
        if self._begins and not self._unsent:
            self._begins = False
            return
        try:
            await self._ask("COMMIT")
        except my.MySQLError as error:
            self._must_be_clear(error)
            raise

    async def rollback(self) -> None:
        began, self._begins, self._unsent = not self._begins, False, []
        if began:
            await self.control("ROLLBACK")

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


def _quoted(text: str) -> str:
    """A text as a literal: with backslash escapes on and in UTF-8, as in our sessions, nothing else has a meaning.

    asyncmy's own function gives the same text to the server, but looks at every character by itself: fifteen times as
    slow, which is a twentieth of a second for the largest payloads.
    """
    quoted = text.replace("\\", "\\\\").replace("'", "\\'").replace("\0", "\\0")
    return f"'{quoted}'"


class _Asked(msgspec.Struct, frozen=True):
    """What goes to the server as one statement, and whose queries it answers, with their places."""

    text: str
    queries: list[tuple[int, Query[Any]]]
    rendered: Rendered


def _wanted(want: Want, rows: Sequence[Any]) -> Any:
    if want is ALL:
        return rows
    if not rows:
        return None
    return rows[0] if want is ONE else rows[0][0]


def _first_message(texts: Sequence[str]) -> Sequence[str]:
    """As many of the statements as go well into one message, but at least one."""
    room = _LONGEST_MESSAGE
    for number, text in enumerate(texts):
        room -= len(text)
        if room < 0:
            return texts[: number or 1]
    return texts


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
        super().__init__(
            MySQLDriver(),
            pool_size=pool_size,
            transaction_deadline_sec=transaction_deadline_sec,
            statement_timeout_sec=statement_timeout_sec,
        )
        self.url = url
        self._connect_timeout_sec = url.seconds("connect_timeout", default=connect_timeout_sec)
        ssl_context(url)  # a wrong one is an error now, not at the first connection

    async def connect_raw(self, flags: int = 0) -> Any:
        """A connection outside the pool: migrations keep theirs."""
        task = asyncio.current_task()
        cancelled_before = 0 if task is None else task.cancelling()
        # asyncmy's own timeout ends when the socket is open; a peer that then says nothing would be waited for.
        async with asyncio.timeout(self._connect_timeout_sec):
            connection = await self._connect_and_prepare(flags)
        if task is not None and task.cancelling() > cancelled_before:
            # It came just when the socket opened, and was swallowed (asyncio.wait_for before Python 3.12).
            connection.close()
            raise asyncio.CancelledError
        return connection

    async def _connect_and_prepare(self, flags: int) -> Any:
        connection = await asyncmy.connect(
            host=self.url.host,
            port=self.url.port,
            unix_socket=self.url.socket or None,
            user=self.url.user,
            password=self.url.password,
            database=self.url.database or None,
            charset="utf8mb4",
            client_flag=flags | CLIENT.FOUND_ROWS,  # an UPDATE counts the rows it matched, like everywhere else
            connect_timeout=self._connect_timeout_sec,
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
        return await self._reached(self.connect_raw())

    async def _connect_for_flushes(self) -> MySQLConnection:
        # Several statements in one message are not for connections on which the user's SQL runs.
        connection = await self._reached(self.connect_raw(CLIENT.MULTI_STATEMENTS))
        try:
            await connection.control("SET SESSION innodb_lock_wait_timeout = 1")
            collation = await connection.execute(NativeQuery(_KEY_COLLATION, (), Want.VALUE))
        except BaseException:
            connection.abort()
            raise
        connection.can_join_parameters = str(collation).endswith("_bin")
        connection.sends_several = True
        connection.patience_sec = None  # whoever flushes watches the time
        return connection

    def _pool_for(self, call: Call[Any]) -> Pool:
        # Where nobody flushes, a transaction can begin there with its first statement, without a message for BEGIN. Who
        # would have to wait for a row finds out soon, and comes again to where that takes its time.
        traits = call.traits
        if traits.reads or traits.urgent or traits.own_sql:
            return self.pool
        if traits.autocommit and not traits.twofold:
            # One thread of the server answers one caller after the other quicker than two that take turns. That is
            # worth no connection: perhaps there is none to be had.
            return self._flush_pool if self._flush_pool.rests_ready else self.pool
        return self._flush_pool if self._flush_pool.rests else self.pool

    async def _reached(self, connecting: Awaitable[Any]) -> MySQLConnection:
        try:
            return MySQLConnection(await connecting, self.driver, self.statement_timeout_sec)
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
            return SchemaError(f"{_words(error)}: the schema is missing or old; run initialize() or `romancy migrate`")
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
