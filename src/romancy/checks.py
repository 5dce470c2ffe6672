"""What is configured is checked where it is written: a wrong value is named before anything runs."""

from __future__ import annotations

import math
from datetime import timedelta

from .storage.sql.checks import LONGEST_SEC


def whole_number(name: str, value: object, least: int) -> None:
    """TypeError or ValueError if it is none, or too small."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def number(name: str, value: object, most: float = math.inf) -> None:
    """TypeError or ValueError if it is none from 0 to `most`."""
    if not 0 <= _number(name, value) <= most:
        raise ValueError(f"{name} must be from 0 to {most:,}, not {value}")


def seconds(name: str, value: object) -> None:
    """TypeError or ValueError if it is no time that something takes: more than none, and not for ever."""
    if not 0 < _number(name, value) <= LONGEST_SEC:
        raise ValueError(f"{name} must be more than 0 and at most {LONGEST_SEC:,}, not {value}")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return value


def optional_duration(name: str, value: object) -> None:
    """TypeError or ValueError if it is neither None nor a time that something can take."""
    if value is None:
        return
    if not isinstance(value, timedelta):
        raise TypeError(f"{name} must be a timedelta or None, not {value!r}")
    if value < timedelta(0):
        raise ValueError(f"{name} must not be negative: {value}")
