"""What is configured is checked where it is written: a wrong value is named before anything runs."""

from __future__ import annotations

from datetime import timedelta


def whole_number(name: str, value: object, least: int) -> None:
    """TypeError or ValueError if it is none, or too small."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def number(name: str, value: object, most: float) -> None:
    """TypeError or ValueError if it is none from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not 0 <= value <= most:
        raise ValueError(f"{name} must be from 0 to {most:,}, not {value}")


def optional_duration(name: str, value: object) -> None:
    """TypeError or ValueError if it is neither None nor a time that something can take."""
    if value is None:
        return
    if not isinstance(value, timedelta):
        raise TypeError(f"{name} must be a timedelta or None, not {value!r}")
    if value < timedelta(0):
        raise ValueError(f"{name} must not be negative: {value}")
