"""Rows of the user's own SQL: tuples that also know their columns by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class Row(tuple[Any, ...]):
    """``row[0]``, ``row["balance"]``, ``for value in row``, ``dict(zip(row.columns, row))``."""

    columns: Sequence[str]

    @classmethod
    def many(cls, rows: Iterable[Any], description: Iterable[Any]) -> list[Row]:
        """Rows of one result."""
        columns = [column[0] for column in description]
        made = []
        for values in rows:
            row = cls(values)
            row.columns = columns
            made.append(row)
        return made

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.columns:
            raise KeyError(key)
        return super().__getitem__(self.columns.index(key))
