"""The user's own SQL, on the same connection and in the same transaction as the library's."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from ..errors import TransactionError
from ..protocols import Row
from .operation import Call, Traits
from .runners.runner import BaseRunner
from .statement import PARAMETER, NativeQuery, Query, Want

_TRAITS = Traits(autocommit=True, own_sql=True)

# Outside a transaction the statement shares one with other callers (SQLite), or leaves its connection to them.
_TRANSACTION_CONTROL = re.compile(
    r"(?>[\s;]|--[^\n]*\n|/\*.*?\*/)*(BEGIN|START|COMMIT|END|ABORT|ROLLBACK|SAVEPOINT|RELEASE)\b",
    re.IGNORECASE | re.DOTALL,
)


async def _ask(query: Query[Any]) -> Any:
    """The user's statement as an operation."""
    return await query


class SQLExecutor:
    """Implements `Executor`: in the ambient transaction, or on its own."""

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner

    async def execute(self, query: str, *args: Any, **named: Any) -> int:
        return int(await self._run(query, args, named, Want.COUNT))

    async def fetch_one(self, query: str, *args: Any, **named: Any) -> Row | None:
        row: Row | None = await self._run(query, args, named, Want.ONE)
        return row

    async def fetch_all(self, query: str, *args: Any, **named: Any) -> list[Row]:
        rows: list[Row] = await self._run(query, args, named, Want.ALL)
        return rows

    async def fetch_value(self, query: str, *args: Any, **named: Any) -> Any:
        return await self._run(query, args, named, Want.VALUE)

    async def _run(self, query: str, args: tuple[Any, ...], named: dict[str, Any], want: Want) -> Any:
        if _TRANSACTION_CONTROL.match(query):
            raise TransactionError(
                f"transactions are opened and ended by storage.transaction(), not by {query.strip()!r}"
            )
        native = self._named(query, named, want) if named else NativeQuery[Any](query, args, want)
        if named and args:
            raise TypeError("give positional or named arguments, not both")
        return await self._runner.run(Call(_ask, native, (), {}, _TRAITS))

    def _named(self, query: str, named: dict[str, Any], want: Want) -> NativeQuery[Any]:
        driver = self._runner.driver
        text, binders = driver.bind_names(query, PARAMETER, set())
        missing = [name for name, _ in binders if name not in named]
        if missing:
            raise TypeError(f"the query has no value for {', '.join(missing)}")
        values = [named[name] for name, _ in binders]
        encoded = [driver.encode_time(value) if isinstance(value, datetime) else value for value in values]
        return NativeQuery(text, encoded, want)
