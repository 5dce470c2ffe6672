"""SQLite's words. Our times are text of fixed width, so they compare and sort as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...input_filters import check_filter_value, json_path_keys, scalar_text
from .driver import Binders, Driver, utc_naive

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

    def bind_names(self, text: str, parameter: re.Pattern[str], lists: set[str]) -> tuple[str, Binders]:
        names = parameter.findall(text)
        binders = tuple((name, json_list if name in lists else self.encoder(name)) for name in names)
        return parameter.sub("?", text), binders
