"""Filters on the JSON input of instances: exact match, JSON types included, the same on every database."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import InvalidJSONPathError

if TYPE_CHECKING:
    from .sql.drivers.driver import Driver

_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_INT64 = range(-(2**63), 2**63)
_LONGEST_PATH = 255


def validate_json_path(path: str) -> None:
    """Accept ASCII identifiers joined by dots, such as ``order.customer.id``; InvalidJSONPathError otherwise."""
    if len(path) > _LONGEST_PATH or not _PATH.fullmatch(path):
        raise InvalidJSONPathError(f"not a JSON path (identifiers joined by dots, at most {_LONGEST_PATH}): {path!r}")


def json_path_keys(path: str) -> list[str]:
    """The keys of a valid path, outermost first."""
    validate_json_path(path)
    return path.split(".")


def check_filter_value(value: Any) -> None:
    """Accept what a filter can match: text, a bool, None, or a number (integers within signed 64 bits)."""
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, int):
        if value not in _INT64:
            raise ValueError(f"an input filter matches integers of signed 64 bits only, not {value}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"JSON has no {value}")
    else:
        raise TypeError(f"an input filter matches text, numbers, bools and None, not {type(value).__name__}")


def whole_number(value: float) -> int | float:
    """The number as an int when it is one, so that 1.0 and 1 are the same."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def scalar_text(value: Any) -> str | None:
    """A text that is equal for equal JSON scalars and for nothing else; None for objects and arrays."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return f"s{value}"
        case int() | float():
            return f"n{whole_number(value)!r}"
    return None


def scalar_at(document: str | None, path: str) -> str | None:
    """The `scalar_text` at a path of a JSON object (a missing one counts as null); None when it is no object."""
    try:
        value = json.loads(document or "")
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return scalar_text(value)


class InputFilterBuilder:
    """Builds the SQL conditions for filters on an instance's input."""

    def __init__(self, driver: Driver, *, column: str = "input_data") -> None:
        self._driver = driver
        self._column = column

    def build_filter_query(
        self, input_filters: Mapping[str, Any], start_placeholder: int = 1
    ) -> tuple[list[str], list[Any]]:
        """The conditions and their arguments, numbered from `start_placeholder`; they combine with AND."""
        conditions: list[str] = []
        arguments: list[Any] = []
        for path, value in input_filters.items():
            check_filter_value(value)
            extract = self._driver.json_extract(self._column, path)
            condition, more = self._driver.json_compare(extract, value, start_placeholder + len(arguments))
            conditions.append(condition)
            arguments.extend(more)
        return conditions, arguments
