"""What a database does for a statement: its plan in the database's own words, and how much it reads for it."""

import json
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any, NamedTuple
from unittest import mock

from romancy.storage import SQLStorage
from romancy.storage.input_filters import scalar_at
from romancy.storage.sql.runners.sqlite import SQLiteRunner
from romancy.storage.sql.statement import NativeQuery, Query, Rendered


class Sent(NamedTuple):
    """A statement as it was sent."""

    name: str
    text: str
    args: Sequence[Any]


class Look(NamedTuple):
    """What the database did for a statement."""

    plan: str
    read: int
    """Rows and index entries on MySQL, pages on PostgreSQL, tens of steps of its virtual machine on SQLite."""


@contextmanager
def statements_sent() -> Iterator[list[Sent]]:
    """The statements that are sent meanwhile."""
    statements: list[Sent] = []

    def noting(resolve: Any) -> Any:
        def resolve_and_note(query: Query[Any], driver: Any) -> tuple[Rendered, Sequence[Any]]:
            rendered, args = resolve(query, driver)
            statements.append(Sent(rendered.name, rendered.text, args))
            return rendered, args

        return resolve_and_note

    with (
        mock.patch.object(Query, "resolve", noting(Query.resolve)),
        mock.patch.object(NativeQuery, "resolve", noting(NativeQuery.resolve)),
    ):
        yield statements


class Looker(ABC):
    """Looks at statements on one database and leaves nothing of them behind."""

    def __init__(self, storage: SQLStorage) -> None:
        self.storage = storage
        self.conn = storage.conn()

    async def look(self, statement: Sent) -> Look:
        """Run the statement and say how it was done."""
        await self.storage.begin_transaction()
        try:
            return await self._look(statement)
        finally:
            await self.storage.rollback_transaction()

    @abstractmethod
    async def _look(self, statement: Sent) -> Look: ...


class SQLiteLooker(Looker):
    """EXPLAIN QUERY PLAN, and the progress handler."""

    async def look(self, statement: Sent) -> Look:
        assert isinstance(self.storage.runner, SQLiteRunner)
        with closing(sqlite3.connect(self.storage.runner.path)) as connection:
            connection.create_function("romancy_json_at", 2, scalar_at, deterministic=True)
            plan = connection.execute(f"EXPLAIN QUERY PLAN {statement.text}", statement.args).fetchall()
            progress = mock.Mock(return_value=0)
            connection.set_progress_handler(progress, 10)
            connection.execute(statement.text, statement.args).fetchall()
            connection.rollback()
        return Look("\n".join(detail for *_, detail in plan), progress.call_count)

    async def _look(self, statement: Sent) -> Look:
        raise NotImplementedError


class PostgresLooker(Looker):
    """EXPLAIN ANALYZE, of the plan for these parameters and of the one that a much-used statement settles for."""

    async def _look(self, statement: Sent) -> Look:
        looks = [await self._planned(statement, mode) for mode in ("force_custom_plan", "force_generic_plan")]
        return Look("\n".join(look.plan for look in looks), max(look.read for look in looks))

    async def _planned(self, statement: Sent, mode: str) -> Look:
        arguments = f"({', '.join(map(literal, statement.args))})" if statement.args else ""
        await self.conn.execute(f"SET LOCAL plan_cache_mode = {mode}")
        await self.conn.execute(f"PREPARE looked_at AS {statement.text}")
        explained = await self.conn.fetch_value(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE looked_at{arguments}")
        await self.conn.execute("DEALLOCATE looked_at")
        plan = json.loads(explained)[0]["Plan"]
        return Look(json.dumps(plan, indent=1), plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


class MySQLLooker(Looker):
    """EXPLAIN, and the session's counters."""

    async def _look(self, statement: Sent) -> Look:
        # MariaDB's time limit stands in front, and cannot be explained.
        query = re.sub(r"^SET STATEMENT .*? FOR ", "", statement.text)
        plan = await self.conn.fetch_all(f"EXPLAIN FORMAT=TRADITIONAL {query}", *statement.args)
        counting = await self._read_by(None)
        described = (f"{row['table']} by {row['key']}: {row['type']}, {row['Extra']}" for row in plan)
        return Look("\n".join(described), await self._read_by(statement) - counting)

    async def _read_by(self, statement: Sent | None) -> int:
        before = await self._counters()
        if statement is not None:
            await self.conn.fetch_all(statement.text, *statement.args)
        return await self._counters() - before

    async def _counters(self) -> int:
        # What MariaDB passes over within an index it does not count as read, but has looked at all the same.
        counters = await self.conn.fetch_all(
            "SHOW SESSION STATUS WHERE Variable_name LIKE 'Handler_read%' OR Variable_name LIKE 'Handler_icp%'"
        )
        return sum(-int(value) if name == "Handler_icp_match" else int(value) for name, value in counters)


LOOKERS = {"sqlite": SQLiteLooker, "postgres": PostgresLooker, "mysql": MySQLLooker}


def literal(value: Any) -> str:
    """A parameter as PostgreSQL's EXECUTE wants it."""
    match value:
        case None:
            return "NULL"
        case bool() | int() | float():
            return str(value)
        case list():
            return f"ARRAY[{', '.join(map(literal, value))}]"
        case datetime():
            return f"'{value.isoformat(' ')}'"
        case _:
            return "'" + str(value).replace("'", "''") + "'"
