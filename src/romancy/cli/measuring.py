"""Contenders take turns; what counts is their ratio in each round."""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

Work = Callable[[int], Awaitable[object]]
"""Do so many operations; a number in answer is the seconds that it took, where whoever did it has a better clock."""


async def _nothing(operations: int) -> None:
    """What most work needs beforehand and afterwards."""


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

    @property
    def middle_half(self) -> tuple[float, float]:
        """Between which values half of the rounds lie."""
        if len(self.values) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def divided_by(self, other: Series) -> Series:
        """Round by round: what disturbs a round disturbs both sides of its ratio."""
        return Series([mine / theirs for mine, theirs in zip(self.values, other.values, strict=True)])


async def take_turns(rounds: int, contenders: Sequence[Contender]) -> list[Series]:
    """Seconds per operation of each contender, in each round; a first round that is not counted warms them up."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for number in range(rounds + 1):
        for contender, measured in zip(contenders, seconds, strict=True):
            await contender.prepare(contender.operations)
            gc.collect()
            started = time.perf_counter()
            answer = await contender.work(contender.operations)
            elapsed = answer if isinstance(answer, float) else time.perf_counter() - started
            if number > 0:
                measured.append(elapsed / contender.operations)
    return [Series(measured) for measured in seconds]


async def closed_loop(one: Callable[[], Awaitable[object]], operations: int, at_once: int) -> None:
    """Do operations, so many at once: each caller begins its next one when its last has ended."""

    async def caller(number: int) -> None:
        for _ in range(number, operations, at_once):
            await one()

    async with asyncio.TaskGroup() as group:
        for number in range(at_once):
            group.create_task(caller(number))


@dataclass(frozen=True)
class Target:
    """What a measured value has to reach, or not to exceed."""

    least: float | None = None
    most: float | None = None

    def met_by(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def said(self, unit: str) -> str:
        sign, bound = ("≥", self.least) if self.least is not None else ("≤", self.most)
        return f"{sign} {number(bound or 0)}{unit}"


@dataclass(frozen=True)
class Result:
    """One line of a table."""

    what: str
    database: str
    value: Series
    unit: str = "×"
    beside: str = ""
    """The other side of a ratio: what it is and how much of it."""
    ours: str = ""
    target: Target | None = None
    spread: str = ""
    """How the value spreads, where that is not the middle half of the rounds."""
    section: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.target.met_by(self.value.median)

    @property
    def measured(self) -> str:
        low, high = self.value.middle_half
        spread = self.spread or (f"{number(low)}–{number(high)}" if len(self.value.values) > 1 else "")
        return f"{number(self.value.median)}{self.unit}" + (f" ({spread})" if spread else "")

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        low, high = self.value.middle_half
        return {
            "section": self.section,
            "what": self.what,
            "database": self.database,
            "unit": self.unit.strip(),
            "median": self.value.median,
            "low": low,
            "high": high,
            "rounds": list(self.value.values),
            "beside": self.beside,
            "ours": self.ours,
            "target": None if self.target is None else self.target.said(self.unit),
            "met": self.met,
        }


_WIDTHS = (32, 10, 24, 11, 25, 0)
_HEADS = ("", "database", "beside", "ours", "measured", "target")


@dataclass
class Report:
    """Results, printed line by line as they come."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    results: list[Result] = field(default_factory=list)
    _section: str = ""

    def section(self, title: str) -> None:
        """What the following results are about."""
        self._section = title
        print(f"\n{self._strong(title)}", file=self.out)
        print(self._faint(_row(_HEADS)), file=self.out, flush=True)

    def add(self, result: Result) -> None:
        """Keep a result and print it."""
        placed = Result(**{**vars(result), "section": self._section})
        self.results.append(placed)
        verdict = ""
        if placed.target is not None:
            word = self._good("ok") if placed.met else self._bad("missed")
            verdict = f"{placed.target.said(placed.unit):<13}{word}"
        cells = (placed.what, placed.database, placed.beside, placed.ours, placed.measured, verdict)
        print(_row(cells), file=self.out, flush=True)

    def note(self, text: str) -> None:
        """A line between results, such as why one is missing."""
        print(self._faint(f"  {text}"), file=self.out, flush=True)

    def summary(self) -> str:
        """How many targets were met."""
        judged = [result for result in self.results if result.target is not None]
        missed = [result for result in judged if not result.met]
        return f"{len(judged) - len(missed)} of {len(judged)} targets met."

    def _painted(self, code: str, text: str) -> str:
        plain = not self.out.isatty() or "NO_COLOR" in os.environ
        return text if plain else f"\033[{code}m{text}\033[0m"

    def _strong(self, text: str) -> str:
        return self._painted("1", text)

    def _faint(self, text: str) -> str:
        return self._painted("2", text)

    def _good(self, text: str) -> str:
        return self._painted("32", text)

    def _bad(self, text: str) -> str:
        return self._painted("31", text)


def _row(cells: Sequence[str]) -> str:
    return ("  " + " ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True))).rstrip()


def number(value: float) -> str:
    """A number with as many digits as mean something."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def per_second(seconds: Series) -> str:
    """A rate, from seconds per operation."""
    return f"{number(1 / seconds.median)}/s"
