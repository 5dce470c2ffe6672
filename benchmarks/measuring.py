"""How much to measure."""

from __future__ import annotations

from typing import NamedTuple

from romancy.cli.measuring import (
    Contender,
    Report,
    Result,
    Series,
    Target,
    closed_loop,
    number,
    per_second,
    take_turns,
)

__all__ = [
    "FULL",
    "QUICK",
    "TINY",
    "Contender",
    "Report",
    "Result",
    "Series",
    "Size",
    "Target",
    "closed_loop",
    "number",
    "per_second",
    "take_turns",
]


class Size(NamedTuple):
    """How much to measure."""

    name: str
    rounds: int
    single: int
    """Operations per round of one caller."""
    callers: int
    each: int
    """Operations per round of each of many callers."""
    workflows: int
    """Workflows per round when many run at once; one after the other, half of them.

    Ours was seen to get an eighth quicker within the first 200 of a turn on MariaDB; why, was not found out.
    """
    wakes: int
    """Messages and timers of which the latency is measured."""
    due: int
    """Timers that are due at once."""
    waiting: int
    """Instances that wait while a worker idles."""
    idle_sec: float
    """How long to watch it."""
    history: int
    """Events of the history that is iterated."""
    replayed: int
    """Recorded steps of the history that is replayed."""


FULL = Size("full", 9, 60, 64, 8, 320, 200, 10_000, 100_000, 20.0, 1_000_000, 100_000)
QUICK = Size("quick", 2, 15, 64, 2, 64, 15, 200, 1_000, 1.0, 20_000, 30_000)
TINY = Size("tiny", 1, 2, 4, 1, 8, 3, 10, 20, 0.2, 300, 50)
