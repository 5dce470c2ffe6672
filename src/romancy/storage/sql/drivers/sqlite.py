"""SQLite's words. Our times are text of fixed width, so they compare and sort as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import msgspec

from ...input_filters import check_filter_value, json_path_keys, scalar_text
from ..checks import can_be_stored
from ..statement import Many, Rendered
from .driver import Binders, Bucket, Driver, utc_naive

_EXACT = 2**53 - 1
"""Up to here every whole number is exact, however it is kept."""
_KEY_LENGTH = 100
_TIME = "'%Y-%m-%d %H:%M:%f000'"


def json_list(values: Sequence[Any] | None) -> str | None:
    """A list as SQLite's ``json_each`` reads it."""
    return None if values is None else msgspec.json.encode(list(values)).decode()


class SQLiteDriver(Driver):
    """SQLite 3.35 or newer."""

    name = "sqlite"
    json_is_exact = True

    @staticmethod
    def decode_time(text: str) -> datetime:
        """``YYYY-MM-DD HH:MM:SS[.ffffff]`` in UTC, with or without the fraction that other frameworks leave out."""
        try:
            return datetime.fromisoformat(text + "+00:00")
        except ValueError:  # it says more than that
            return datetime.fromisoformat(text).replace(tzinfo=UTC)

    def encode_time(self, moment: datetime) -> str:
        return utc_naive(moment).isoformat(" ", "microseconds")

    def now(self) -> str:
        shift = f", '{self.clock_offset:+.3f} seconds'" if self.clock_offset else ""
        return f"strftime({_TIME}, 'now'{shift})"

    def publishing_now(self) -> str:
        # On tables that Edda made the default of published_at, which its messages get, is a whole second.
        default = "SELECT dflt_value FROM pragma_table_info('channel_messages') WHERE name = 'published_at'"
        return f"CASE WHEN ({default}) LIKE 'datetime(%' THEN datetime({self.now()}) ELSE {self.now()} END"

    def make_datetime_comparable(self, column: str) -> str:
        # Edda leaves out the fraction, and the text without it sorts before the same moment with zeros. The indexes of
        # list_instances have this expression.
        return f"substr({column} || '.000000', 1, 26)"

    def seconds_after(self, moment: str, parameter: str) -> str:
        return f"strftime({_TIME}, {moment}, printf('%+.6f seconds', {parameter}))"

    def seconds_ago(self, parameter: str) -> str:
        return f"strftime({_TIME}, {self.now()}, printf('%+.6f seconds', -:{parameter}))"

    def select_for_update_skip_locked(self) -> str:
        return ""  # every writing operation owns the database's one write lock from its start

    def for_update(self) -> str:
        return ""

    def for_share(self) -> str:
        return ""

    def placeholder(self, n: int) -> str:
        return "?"

    def on_conflict_do_nothing(self, *conflict_columns: str) -> str:
        target = f" ({', '.join(conflict_columns)})" if conflict_columns else ""
        return f"ON CONFLICT{target} DO NOTHING"

    def on_conflict_update(self, *conflict_columns: str) -> str:
        return f"ON CONFLICT ({', '.join(conflict_columns)}) DO UPDATE SET"

    def excluded(self, column: str) -> str:
        return f"excluded.{column}"

    def returning_clause(self, *columns: str) -> str:
        return f"RETURNING {', '.join(columns)}"

    def is_in(self, column: str, parameter: str) -> str:
        return f"{column} IN (SELECT value FROM json_each(:{parameter}))"

    def is_among(self, column: str, parameter: str) -> str:
        return f"(:{parameter} IS NULL OR {self.is_in(column, parameter)})"

    def ascii_lower(self, expression: str) -> str:
        return f"lower({expression})"

    def position(self, needle: str, haystack: str) -> str:
        return f"instr({haystack}, {needle})"

    def through_index(self, index: str) -> str:
        # Its planner guesses from statistics that may be old, or missing.
        return f"INDEXED BY {'sqlite_autoindex_workflow_instances_1' if index == 'PRIMARY' else index}"

    def insertion_order(self) -> str:
        return "rowid"

    def greatest(self, first: str, second: str) -> str:
        return f"max({first}, {second})"

    def json_extract(self, column: str, path: str) -> str:
        # A function of our own, `input_filters.scalar_at`. As bytes, since a column may hold anything.
        return f"romancy_json_at(CAST({column} AS BLOB), '{'.'.join(json_path_keys(path))}')"

    def json_compare(self, extract_expr: str, value: Any, placeholder_num: int) -> tuple[str, list[Any]]:
        check_filter_value(value)
        return f"{extract_expr} = ?", [scalar_text(value)]

    def input_key(self, table: str, path: str) -> str:
        # Of SQLite's own functions: another framework's insert must find them all, and none may fail.
        text = f"{table}input_data"
        steps = list(accumulate((f".{key}" for key in json_path_keys(path)), initial="$"))[1:]
        value = f"json_extract({text}, '{steps[-1]}')"
        # It takes the first of two equal keys, and we the last.
        twice = " OR ".join(f"json_type(json_remove({text}, '{step}'), '{step}') IS NOT NULL" for step in steps)
        return (
            f"CASE WHEN typeof({text}) <> 'text' THEN '?' WHEN NOT json_valid({text}) THEN '?'"
            f" WHEN {text} GLOB '*\\u00[0-7]*' THEN '?' WHEN {twice} THEN '?'"
            f" ELSE CASE json_type({text}, '{steps[-1]}')"
            f" WHEN 'text' THEN 's' || substr({value}, 1, {_KEY_LENGTH})"
            f" WHEN 'integer' THEN CASE WHEN {value} BETWEEN {-_EXACT} AND {_EXACT} THEN 'n' || {value} ELSE 'r' END"
            " WHEN 'real' THEN 'r' WHEN 'true' THEN 't' WHEN 'false' THEN 'f'"
            " WHEN 'object' THEN '-' WHEN 'array' THEN '-' ELSE '0' END END"
        )

    def input_buckets(self, path: str, value: Any) -> list[Bucket]:
        check_filter_value(value)
        match value:
            case None:
                keys = ["0"]
            case bool():
                keys = ["t" if value else "f"]
            case str():
                keys = [f"s{value[:_KEY_LENGTH]}"] if can_be_stored(value) else []
            case _:
                whole = int(value) == value and -_EXACT <= value <= _EXACT
                keys = [f"n{int(value)}", "r"] if whole else ["r"]
        return [Bucket("= {0}", key) for key in [*keys, "?"]]

    def index_input(self, path: str) -> list[str]:
        started = self.make_datetime_comparable("started_at")
        return [
            f"CREATE INDEX IF NOT EXISTS {self.input_index(path)} ON workflow_instances"
            f" (framework, {self.input_key('', path)}, {started}, instance_id)"
        ]

    def unindex_input(self, path: str) -> list[str]:
        return [f"DROP INDEX IF EXISTS {self.input_index(path)}"]

    def then_join(self) -> str:
        # Asked for what is due, it would begin with all that waits, and look for the timer of each.
        return "CROSS JOIN"

    def for_many(self, many: Many) -> Rendered:
        """The statement for many rows; each is bound by itself, and all of them are given as one JSON text."""
        found = self._rendered.get(many.sqlite)
        if found is None:
            columns = [f"json_extract(value, '$[{place}]') AS {name}" for place, name in enumerate(many.columns)]
            rows = f"(SELECT {', '.join(columns)} FROM json_each(?)) r"
            text = self.expand(many.sqlite.replace("{rows}", "#rows#")).replace("#rows#", rows)
            binders = tuple((name, self.encoder(name)) for name in many.columns)
            found = Rendered("(many)", text.strip(), binders, duplicate_is_nothing=False, decode=None)
            self._rendered[many.sqlite] = found
        return found

    def bind_names(self, text: str, parameter: re.Pattern[str], lists: set[str]) -> tuple[str, Binders]:
        names = parameter.findall(text)
        binders = tuple((name, json_list if name in lists else self.encoder(name)) for name in names)
        return parameter.sub("?", text), binders
