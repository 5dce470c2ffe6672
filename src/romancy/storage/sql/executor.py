"""The user's own SQL, on the same connection and in the same transaction as the library's."""

from __future__ import annotations

from typing import Any

from ..protocols import Row
from .operation import Call, Traits
from .runners.runner import BaseRunner
from .statement import NativeQuery, Query, Statement, Want, render

_TRAITS = Traits(autocommit=True)


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
        if named:
            if args:
                raise TypeError("give positional or named arguments, not both")
            rendered = render(Statement(query.replace("{", "{{").replace("}", "}}")), self._runner.driver)
            text = rendered.text.replace("{{", "{").replace("}}", "}")
            native: NativeQuery[Any] = NativeQuery(text, rendered.bind(named), want)
        else:
            native = NativeQuery(query, args, want)
        return await self._runner.run(Call(_ask, native, (), {}, _TRAITS))
