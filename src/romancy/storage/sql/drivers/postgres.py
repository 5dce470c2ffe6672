"""PostgreSQL's words."""

from __future__ import annotations

import functools
import json
import re
from datetime import datetime
from typing import Any

from ...input_filters import check_filter_value, json_path_keys
from ..checks import can_be_stored
from ..statement import Many, Rendered
from .driver import Binders, Bucket, Driver, aware, utc_naive


class PostgresDriver(Driver):
    """PostgreSQL 12 or newer."""

    name = "postgres"

    decode_time = staticmethod(aware)  # the tables keep UTC wall-clock time without a zone

    def encode_time(self, moment: datetime) -> datetime:
        return utc_naive(moment)

    def now(self) -> str:
        # Not now(): that is the start of the transaction, and a lock taken late in a long one would be born expired.
        shift = f" + interval '{self.clock_offset:.6f} seconds'" if self.clock_offset else ""
        return f"(timezone('UTC', clock_timestamp()){shift})"

    def statement_now(self) -> str:
        # clock_timestamp() may differ from row to row, so no index is searched by it: every timer would be read.
        return self.now().replace("clock_timestamp", "statement_timestamp")

    def seconds_after(self, moment: str, parameter: str) -> str:
        return f"({moment} + make_interval(secs => {parameter}))"

    def seconds_ago(self, parameter: str) -> str:
        return f"({self.statement_now()} - make_interval(secs => :{parameter}))"

    def returning_id(self) -> str:
        return "RETURNING id"

    def unforeseen(self, parameter: str) -> str:
        # Told that most instances are completed, it reads through the newest of any status until enough turn up.
        return f"(SELECT {parameter}::text)"

    # Else it may look for the rows among everybody's by primary key, or read all that have the key and sort them, by
    # statistics that are about other keys, old, or missing. Of an array, even of one, it does not know that the key is
    # the same in all rows: no other index has their order. And with a limit that it does not know, it begins quickly.

    def key_of_page(self, key: str) -> str:
        return self.same_key(key, f"(SELECT :{key.rpartition('.')[2]}::text)")

    def same_key(self, key: str, value: str) -> str:
        return f"{key} = ANY(ARRAY[{value}])"

    def order_of_page(self, key: str, column: str, direction: str = "ASC") -> str:
        return f"{key} {direction}, {column} {direction}"

    def limit_of_page(self, parameter: str) -> str:
        return f"(SELECT :{parameter}::bigint)"

    def then_each(self, table: str, condition: str) -> str:
        # Without statistics, it expects hardly any instance to be waiting, and looks for the timer of each. OFFSET is
        # what it does not see through.
        return f"CROSS JOIN LATERAL (SELECT * FROM {table} WHERE {condition} OFFSET 0) {table.split()[-1]}"

    def hidden(self, column: str) -> str:
        return f"({column} || '')"

    def select_for_update_skip_locked(self) -> str:
        # Not FOR UPDATE: a mere foreign-key insert would make the row look taken.
        return "FOR NO KEY UPDATE SKIP LOCKED"

    def for_update(self) -> str:
        return "FOR NO KEY UPDATE"

    def for_share(self) -> str:
        return "FOR SHARE"

    def placeholder(self, n: int) -> str:
        return f"${n}"

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
        return f"{column} = ANY(:{parameter})"

    def is_among(self, column: str, parameter: str) -> str:
        return f"(:{parameter}::text[] IS NULL OR {column} = ANY(:{parameter}::text[]))"

    def ascii_lower(self, expression: str) -> str:
        return f'lower(({expression}) COLLATE "C")'

    def position(self, needle: str, haystack: str) -> str:
        return f"strpos({haystack}, {needle})"

    def text(self, parameter: str) -> str:
        return f":{parameter}::text"

    def forever(self) -> str:
        return "TIMESTAMP '9999-12-31 00:00:00'"

    def any_id(self, parameter: str) -> str:
        # Without its type it would be taken for an integer of the column's size, 32 bits on tables that Edda made.
        return f":{parameter}::bigint"

    def byte_order(self, column: str) -> str:
        # The column has this collation on tables we made, but not on those of another framework.
        return f'{column} COLLATE "C"'

    def json_extract(self, column: str, path: str) -> str:
        # A function of ours: a plain cast would fail the whole listing for one odd row.
        return f"romancy_json_at({column}, '{{{','.join(json_path_keys(path))}}}')"

    def json_compare(self, extract_expr: str, value: Any, placeholder_num: int) -> tuple[str, list[Any]]:
        check_filter_value(value)
        if isinstance(value, str) and not can_be_stored(value):
            return f"{extract_expr} IS NULL", []  # what holds such a text cannot be read by jsonb
        return f"{extract_expr} = {self.placeholder(placeholder_num)}::text::jsonb", [json.dumps(value)]

    def input_key(self, table: str, path: str) -> str:
        return f"jsonb_hash_extended({self.json_extract(f'{table}input_data', path)}, 0)"

    def input_buckets(self, path: str, value: Any) -> list[Bucket]:
        check_filter_value(value)
        unclear = Bucket("IS NULL")
        if isinstance(value, str) and not can_be_stored(value):
            return [unclear]
        return [Bucket("= jsonb_hash_extended({0}::text::jsonb, 0)", json.dumps(value)), unclear]

    def index_input(self, path: str) -> list[str]:
        return [
            f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {self.input_index(path)} ON workflow_instances"
            f' (framework, ({self.input_key("", path)}), started_at, instance_id COLLATE "C")'
        ]

    def unindex_input(self, path: str) -> list[str]:
        return [f"DROP INDEX CONCURRENTLY IF EXISTS {self.input_index(path)}"]

    def for_many(self, many: Many) -> str:
        """A write of many rows, given as one JSON text."""
        found = self._expanded.get(many.postgres)
        if found is None:
            types = ", ".join(f"{name} {kind}" for name, kind in many.columns.items())
            rows = (
                f"ROWS FROM (json_to_recordset($1::text::json) AS ({types}))"
                f" WITH ORDINALITY r({', '.join(many.columns)}, number)"
            )
            found = self._expanded[many.postgres] = self.expand(many.postgres.replace("{rows}", rows))
        return found

    @staticmethod
    @functools.lru_cache(maxsize=512)
    def numbered(rendered: Rendered, *, counted: bool) -> str:
        """The statement with a number behind its parameters that comes back in front of each row it answers with."""
        number = f"${len(rendered.binders) + 1}::int"
        if rendered.text.startswith("WITH"):
            # It writes within its WITH, and so cannot stand in one itself. Who finds nothing gets no answer.
            return f"{rendered.text} RETURNING {number}, 1"
        if counted:
            return f"WITH written AS ({rendered.text} RETURNING 1) SELECT {number}, COUNT(*) FROM written"
        if rendered.text.startswith("SELECT"):
            return f"SELECT {number}, found.* FROM ({rendered.text}) found"
        return f"WITH written AS ({rendered.text}) SELECT {number}, written.* FROM written"

    def bind_names(self, text: str, parameter: re.Pattern[str], lists: set[str]) -> tuple[str, Binders]:
        names = list(dict.fromkeys(parameter.findall(text)))
        numbers = {name: number for number, name in enumerate(names, start=1)}
        return (
            parameter.sub(lambda match: f"${numbers[match.group(1)]}", text),
            tuple((name, self.encoder(name)) for name in names),
        )
