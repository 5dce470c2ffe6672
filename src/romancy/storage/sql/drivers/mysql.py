"""The words MySQL and MariaDB share, and the few on which the two differ."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

from ...input_filters import check_filter_value, json_path_keys
from ..checks import can_be_stored
from ..statement import Encoder, Many, Together
from .driver import Binders, Bucket, Driver, aware, utc_naive

Rows = Sequence[Mapping[str, Any]]
"""Sets of parameters."""
Filled = tuple[str, list[Any]]
"""A text with signs in place of values, and the values."""

_KEY_BYTES = 100
_UNCLEAR = "CAST('?' AS BINARY)"


def sql_list(values: Sequence[Any] | None) -> tuple[Any, ...]:
    """A list as the client renders it behind IN; an empty one matches nothing."""
    return tuple(values) if values else (None,)


def is_none(values: Sequence[Any] | None) -> bool:
    """Whether no list was given."""
    return values is None


def all_values(column: str, path: str) -> str:
    """An array of all values at a path, each twice: asked for one path, MariaDB gives the first of two equal keys."""
    return f"JSON_EXTRACT({column}, '{path}', '{path}')"


@lru_cache(maxsize=1000)
def values_of(columns: tuple[str, ...], rows: int, same: tuple[str, ...]) -> str:
    """Parameters as a table `r` of so many rows, in MariaDB's words: a tenth quicker than those below.

    Those that are the `same` in all rows come behind the others, and once: each literal costs the server a name, an
    object and a conversion.
    """
    row = "".join(", %s" for _ in columns)
    values = ", ".join(f"({number}{row})" for number in range(rows))
    once = "".join(f", %s AS {name}" for name in same)
    return f"(WITH v ({', '.join(('number', *columns))}) AS (VALUES {values}) SELECT v.*{once} FROM v) r"


@lru_cache(maxsize=1000)
def table_of(columns: tuple[str, ...], rows: int) -> str:
    """The same in words that MySQL knows, too; it is not quicker for what all rows have in common."""
    first = ", ".join(f"%s AS {name}" for name in columns)
    other = ", ".join("%s" for _ in columns)
    selects = [f"SELECT {number} AS number, {other if number else first}" for number in range(rows)]
    return f"({' UNION ALL '.join(selects)}) r"


class MySQLDriver(Driver):
    """MySQL 8.0 and MariaDB 10.6, or newer."""

    name = "mysql"
    text_type = "CHAR"
    duplicate_is_an_error = True
    is_mariadb = False
    """Set when a connection has asked the server."""

    decode_time = staticmethod(aware)  # the tables keep UTC wall-clock time without a zone

    def encode_time(self, moment: datetime) -> datetime:
        return utc_naive(moment)

    def now(self) -> str:
        shift = f" + INTERVAL {round(self.clock_offset * 1_000_000)} MICROSECOND" if self.clock_offset else ""
        return f"(UTC_TIMESTAMP(6){shift})"

    def seconds_after(self, moment: str, parameter: str) -> str:
        return f"({moment} + INTERVAL ROUND(1000000 * {parameter}) MICROSECOND)"

    def seconds_ago(self, parameter: str) -> str:
        return f"({self.now()} - INTERVAL ROUND(1000000 * :{parameter}) MICROSECOND)"

    def select_for_update_skip_locked(self) -> str:
        return "FOR UPDATE SKIP LOCKED"

    def through_index(self, index: str) -> str:
        # MariaDB else reads all newer instances again for each further page, for each page of a history all before it,
        # and for the next message of a channel all that was received, if even more was not.
        return f"FORCE INDEX ({index})"

    def then_join(self) -> str:
        # Asked for what is due, it may begin with all that waits, and sort all that is due.
        return "STRAIGHT_JOIN"

    def keys_unchanged(self) -> str:
        # MySQL 9.6 and newer else open the table anew for each row of it, for the sake of the key to itself.
        return "" if self.is_mariadb else "/*+ SET_VAR(foreign_key_checks = OFF) */"

    def for_update(self) -> str:
        return "FOR UPDATE"

    def for_share(self) -> str:
        return "LOCK IN SHARE MODE"  # the spelling that MariaDB understands too

    def placeholder(self, n: int) -> str:
        return "%s"

    def on_conflict_do_nothing(self, *conflict_columns: str) -> str:
        # Not INSERT IGNORE, which hides foreign-key errors and truncates: the runner takes error 1062 of such a
        # statement as "nothing inserted" (InnoDB undoes the statement, not the transaction).
        return ""

    def on_conflict_update(self, *conflict_columns: str) -> str:
        return "ON DUPLICATE KEY UPDATE"

    def excluded(self, column: str) -> str:
        return f"VALUES({column})"

    def returning_clause(self, *columns: str) -> str:
        return ""  # the id of an insert comes with the server's OK

    def is_in(self, column: str, parameter: str) -> str:
        return f"{column} IN :{parameter}"

    def is_among(self, column: str, parameter: str) -> str:
        return f"(:{parameter}__none OR {column} IN :{parameter})"

    def ascii_lower(self, expression: str) -> str:
        # LOWER() of a Unicode text also folds É and the like. Read as geostd8, whose letters beyond ASCII have no case,
        # the same bytes change from A to Z only.
        return f"LOWER(CONVERT(CAST({expression} AS BINARY) USING geostd8))"

    def position(self, needle: str, haystack: str) -> str:
        return f"LOCATE({needle}, {haystack})"

    def json_extract(self, column: str, path: str) -> str:
        steps = list(accumulate((f'."{key}"' for key in json_path_keys(path)), initial="$"))[1:]
        unclear, cases = self._unclear(column, steps[:-1])
        return (
            f"(CASE WHEN {unclear} THEN NULL WHEN JSON_TYPE({column}) <> 'OBJECT' THEN JSON_ARRAY(){cases}"
            f" ELSE COALESCE({all_values(column, steps[-1])}, JSON_ARRAY(NULL)) END)"
        )

    def _unclear(self, column: str, steps: Sequence[str]) -> tuple[str, str]:
        """When the server cannot be trusted with a document, and cases in which it cannot at these steps."""
        if self.is_mariadb:
            # It compares texts as they are escaped, and looks into all of several equal keys; only the last one counts.
            cases = "".join(f" WHEN JSON_LENGTH({all_values(column, step)}) > 2 THEN NULL" for step in steps)
            return f"NOT JSON_VALID({column}) OR LOCATE('\\\\', {column}) > 0", cases
        # It fails on a document that is nested more than 100 deep; with fewer brackets than that, none is.
        brackets = f"LENGTH({column}) - LENGTH(REPLACE(REPLACE({column}, '[', ''), '{{', ''))"
        return f"{brackets} > 100 OR NOT JSON_VALID({column})", ""

    def json_compare(self, extract_expr: str, value: Any, placeholder_num: int) -> tuple[str, list[Any]]:
        check_filter_value(value)
        if isinstance(value, str) and not can_be_stored(value.replace("\0", "")):
            return "1 = 0", []  # no JSON holds half a surrogate pair
        candidates = [json.dumps(value, ensure_ascii=False)]
        if isinstance(value, int) and abs(value) > 2**53:
            candidates.append(repr(float(value)))  # what is written with a point or an exponent is read as a double
        return f"({' OR '.join(f'JSON_CONTAINS({extract_expr}, %s)' for _ in candidates)})", candidates

    def input_key(self, table: str, path: str) -> str:
        return f"{table}{self.input_index(path)}"

    def _input_key(self, path: str) -> str:
        steps = list(accumulate((f'."{key}"' for key in json_path_keys(path)), initial="$"))[1:]
        value = f"JSON_EXTRACT(input_data, '{steps[-1]}')"
        unclear, twice = self._unclear("input_data", steps)
        if self.is_mariadb:  # to which a lone minus is valid, but then not to be taken out
            dense = "input_data"
            for space in (" ", "\\t", "\\n", "\\r"):
                dense = f"REPLACE({dense}, '{space}', '')"
            unclear += "".join(f" OR LOCATE('-{end}', {dense}) > 0" for end in ",}]")
        # As bytes: then no collation has a say, nor does the session.
        binary = f"CAST({value} AS BINARY)"
        first = f"LEFT({binary}, 1)"
        point_or_power = " + ".join(f"LOCATE('{sign}', {binary})" for sign in ".eE")
        # JSON_TYPE says too little of a number on MariaDB.
        return (
            f"CASE WHEN {unclear} THEN CAST('?' AS BINARY){twice.replace('NULL', _UNCLEAR)}"
            f" WHEN {binary} IS NULL OR {first} = 'n' THEN CAST('0' AS BINARY)"
            f" WHEN {first} = '\"' THEN LEFT({self._text_key(value, binary)}, {_KEY_BYTES})"
            f" WHEN {first} IN ('{{', '[') THEN CAST('-' AS BINARY)"
            f" WHEN {first} IN ('t', 'f') THEN CONCAT(CAST('b' AS BINARY), {binary})"
            f" WHEN {point_or_power} > 0 THEN CAST('r' AS BINARY)"
            f" ELSE LEFT(CONCAT(CAST('n' AS BINARY), {binary}), {_KEY_BYTES}) END"
        )

    def _text_key(self, value: str, binary: str) -> str:
        if self.is_mariadb:  # nothing in it is escaped, else it would be unclear
            return f"CONCAT(CAST('s' AS BINARY), SUBSTRING({binary}, 2, LENGTH({binary}) - 2))"
        return f"CONCAT(CAST('s' AS BINARY), CAST(JSON_UNQUOTE({value}) AS BINARY))"

    def input_buckets(self, path: str, value: Any) -> list[Bucket]:
        check_filter_value(value)
        match value:
            case None:
                keys = ["0"]
            case bool():
                keys = [f"b{json.dumps(value)}"]
            case str():
                keys = [f"s{value}"] if can_be_stored(value.replace("\0", "")) else []
            case _:
                keys = [f"n{int(value)}"] if int(value) == value else []
                keys += ["n-0", "r"] if value == 0 else ["r"]
        return [Bucket("= {0}", key.encode()[:_KEY_BYTES]) for key in [*keys, "?"]]

    def index_input(self, path: str) -> list[str]:
        # A column that is computed when it is read, and kept in the index only. MariaDB has no other way.
        name = self.input_index(path)
        return [
            f"ALTER TABLE workflow_instances ADD COLUMN {name} VARBINARY({_KEY_BYTES})"
            f" GENERATED ALWAYS AS ({self._input_key(path)}) VIRTUAL",
            f"ALTER TABLE workflow_instances ADD INDEX {name} (framework, {name}, started_at, instance_id)",
        ]

    def unindex_input(self, path: str) -> list[str]:
        name = self.input_index(path)
        return [
            f"ALTER TABLE workflow_instances DROP INDEX {name}",
            f"ALTER TABLE workflow_instances DROP COLUMN {name}",
        ]

    def bounded(self, query: str, seconds: float) -> str:
        if self.is_mariadb:
            return f"SET STATEMENT max_statement_time = {max(0.001, seconds):.3f} FOR {query}"  # 0 is no limit at all
        return query.replace("SELECT", f"SELECT /*+ MAX_EXECUTION_TIME({max(1, round(seconds * 1000))}) */", 1)

    def as_one_message(self, statements: list[str]) -> str:
        """Statements in a transaction, which may stay open where an error ends them."""
        if self.is_mariadb:  # as one statement, which is answered once: each answer by itself wakes whoever reads
            return ";".join(["BEGIN NOT ATOMIC START TRANSACTION", *statements, "COMMIT", "END"])
        return ";".join(["BEGIN", *statements, "COMMIT"])

    def unless_found(self, rows: int) -> str:
        """Directly after a write in such a message: an error, before the COMMIT, unless it has found so many rows."""
        if self.is_mariadb:
            return f"IF ROW_COUNT() <> {rows} THEN SIGNAL SQLSTATE '45000'; END IF"
        # A subquery of two rows is an error; it is asked for by SET, which is answered with less than SELECT.
        return f"SET @romancy_found = IF(ROW_COUNT() = {rows}, 1, (SELECT 1 UNION ALL SELECT 2))"

    def for_many(self, many: Many, rows: Rows) -> Filled:
        """An insert of many rows; on MariaDB it answers with the id and the key of each it has inserted."""
        insert, values = self._with_rows(many.mysql, tuple(many.columns), rows)
        return f"{insert} RETURNING id, {', '.join(many.key)}" if self.is_mariadb else insert, values

    def all_together(self, together: Together, rows: Rows) -> Filled:
        """A statement for many sets of parameters; an insert answers like the above."""
        text, values = self._with_rows(together.text, together.columns, rows)
        return f"{text} RETURNING id, {', '.join(together.key)}" if together.key and self.is_mariadb else text, values

    def _with_rows(self, text: str, columns: Sequence[str], rows: Rows) -> Filled:
        """A statement with its parameters as a table, and what goes into it."""
        differing: dict[str, list[Any]] = {}
        same: dict[str, Any] = {}
        for name in columns:
            values = [row[name] for row in rows]
            if encode := self.encoder(name):
                values = [encode(value) for value in values]
            if self.is_mariadb and values.count(values[0]) == len(values):
                same[name] = values[0]
            else:
                differing[name] = values
        names, count = tuple(differing), len(rows)
        table = values_of(names, count, tuple(same)) if self.is_mariadb else table_of(names, count)
        filled = self.expand(text.replace("{rows}", "#rows#")).replace("#rows#", table)
        return filled, [*chain.from_iterable(zip(*differing.values(), strict=True)), *same.values()]

    @staticmethod
    def ids_of_inserted(together: Together, rows: int) -> str:
        """Directly after such an insert, where it does not say so itself: the number and the id of each row."""
        found = " AND ".join(f"t.{name} = r.{name}" for name in together.key)
        return f"SELECT r.number, t.id FROM {table_of(together.key, rows)} STRAIGHT_JOIN {together.table} t ON {found}"

    @staticmethod
    def search_for_inserted(many: Many, rows: int) -> str:
        """Directly after that insert, where it does not say so itself: the id of each row it has inserted, or NULL.

        What stood there before has a lower id; what a rival has inserted meanwhile is not marked as ours.
        """
        first, second = many.key
        column, mark = many.inserted_by
        return (
            f"SELECT t.id FROM {table_of((first, second, mark), rows)} LEFT JOIN {many.table} t"
            f" ON t.{first} = r.{first} AND t.{second} = r.{second}"
            f" AND t.id >= LAST_INSERT_ID() AND t.{column} = r.{mark} ORDER BY r.number"
        )

    def bind_names(self, text: str, parameter: re.Pattern[str], lists: set[str]) -> tuple[str, Binders]:
        binders: list[tuple[str, Encoder | None]] = []
        for name in parameter.findall(text):
            if name.endswith("__none"):
                binders.append((name.removesuffix("__none"), is_none))
            else:
                binders.append((name, sql_list if name in lists else self.encoder(name)))
        return parameter.sub("%s", text.replace("%", "%%")), tuple(binders)
