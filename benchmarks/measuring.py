"""Contenders take turns; what counts is their ratio in each round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Work = Callable[[int], Awaitable[None]]
"""Do so many operations."""


async def _nothing(operations: int) -> None:
    """What most work needs beforehand."""


@dataclass(frozen=True)
class Contender:
    """One way to do the same thing."""

    work: Work
    operations: int
    """How many per round."""
    prepare: Work = _nothing
    """Make what so many operations need; not measured."""


@dataclass(frozen=True)
class Series:
    """One value per round."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def divided_by(self, other: Series) -> Series:
        """Round by round: what disturbs a round disturbs both sides of its ratio."""
        return Series([mine / theirs for mine, theirs in zip(self.values, other.values, strict=True)])

    def __str__(self) -> str:
        """The median, and how far half of the rounds spread around it."""
        if len(self.values) < 2:
            return f"{self.median:.2f}×"
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return f"{self.median:.2f}× ({low:.2f}–{high:.2f})"


class Size(NamedTuple):
    """How much to measure."""

    rounds: int
    single: int
    """Operations per round of one caller."""
    callers: int
    each: int
    """Operations per round of each of many callers."""
    history: int
    """Events of the history that is iterated."""


FULL = Size(rounds=15, single=100, callers=64, each=8, history=1_000_000)
QUICK = Size(rounds=5, single=30, callers=64, each=2, history=50_000)
TINY = Size(rounds=2, single=3, callers=4, each=1, history=300)


async def take_turns(rounds: int, contenders: Sequence[Contender]) -> list[Series]:
    """Seconds per operation of each contender, in each round; a first round that is not counted warms them up."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for number in range(rounds + 1):
        for contender, measured in zip(contenders, seconds, strict=True):
            await contender.prepare(contender.operations)
            gc.collect()
            started = time.perf_counter()
            await contender.work(contender.operations)
            elapsed = time.perf_counter() - started
            if number > 0:
                measured.append(elapsed / contender.operations)
    return [Series(measured) for measured in seconds]


def microseconds(series: Series) -> str:
    return f"{series.median * 1e6:,.0f} µs"


def per_second(series: Series) -> str:
    return f"{1 / series.median:,.0f}/s"


def verdict(ok: bool) -> str:
    return "OK" if ok else "MISSED"


class Table:
    """Columns that line up, printed row by row as they are measured."""

    def __init__(self, title: str, **widths: int) -> None:
        self._widths = list(widths.values())
        print(f"\n{title}")
        self.row(*(name.replace("_", " ") for name in widths))

    def row(self, *cells: str) -> None:
        padded = (cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True))
        print("  " + "  ".join(padded).rstrip(), flush=True)
