"""Filters on the JSON input of instances: exact match, JSON types included, the same on every database.

What matches is said here once, in `input_matches`. The databases' own JSON functions disagree (on two equal keys, on
escapes, on large numbers), and some fail on a document that is nested deeply: in SQL they only narrow down what has to
be looked at.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

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


def scalar_text(value: Any) -> str:
    """A text that is equal for equal JSON scalars and for nothing else."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value)
    return number_text(repr(value))


def number_text(text: str) -> str:
    """A number by its value, exactly, however it is written: ``1``, ``1.0`` and ``10e-1`` are the same."""
    mantissa, _, power = text.lower().partition("e")
    whole, _, fraction = mantissa.removeprefix("-").partition(".")
    digits = (whole + fraction).lstrip("0")
    significant = digits.rstrip("0")
    exponent = int(power or 0) - len(fraction) + len(digits) - len(significant)
    sign = "-" if mantissa.startswith("-") else ""
    return f"{sign}{significant}e{exponent}" if significant else "0"


def scalar_at(document: str | bytes | None, path: str) -> str | None:
    """The `scalar_text` at a path of a JSON object, a missing one counting as null; None where there is no scalar."""
    try:
        members = _members.decode(document or "")
        *outer, last = path.split(".")
        for key in outer:
            inner = bytes(members.get(key, b"null"))
            members = _members.decode(inner) if inner.startswith(b"{") else {}
        return _scalar(bytes(members.get(last, b"null")))
    except (ValueError, RecursionError):  # no JSON, no object, or nested too deeply to be looked into
        return None


def _scalar(value: bytes) -> str | None:
    match value[:1]:
        case b"{" | b"[":
            return None
        case b'"':
            return json.dumps(_text.decode(value))
        case b"t" | b"f" | b"n":
            return value.decode()
    return number_text(value.decode())


# Values are cut out unread: of two equal keys the last one counts, and what is not on the path costs little.
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)


def input_matches(document: str | None, input_filters: Mapping[str, Any]) -> bool:
    """Whether an input has all these values at these paths."""
    return all(scalar_at(document, path) == scalar_text(value) for path, value in input_filters.items())


class InputFilterBuilder:
    """Builds the SQL conditions for filters on an instance's input.

    They let through every row that matches. Where `Driver.json_is_exact` is false they also let through what the
    database cannot judge, such as text that is no JSON: `input_matches` then decides.
    """

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
            conditions.append(condition if self._driver.json_is_exact else f"({condition}) IS NOT FALSE")
            arguments.extend(more)
        return conditions, arguments
