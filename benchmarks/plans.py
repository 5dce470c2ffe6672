"""Polls, pages and retention in a small and in a large database: none may take more than twice as long.

    python -m benchmarks.plans --databases sqlite --instances 1000000

Each instance has ten steps of history. Both databases hold as much that is due; the large one ten times as much that
waits, and all the rest is over.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Sequence

from romancy.storage import ListInstancesOptions, SearchTimeoutError, SQLStorage
from tests.plans.asking import DECLARED, OTHERS, PAGES, POLLS, SEARCHES, Ask, late, page
from tests.plans.filling import Filler, Size
from tests.servers import ServerError

from .databases import DATABASES, Database, places

MOST_GROWTH = 2.0
_TRIES = 5
SMALL = Size(finished=1000, steps=10, received=300, published=500, running=100, waiting=100)

ASKS: dict[str, Ask] = {
    **{f"page: {name}": page(**{field: getattr(options, field) for field in options.__struct_fields__})
       for name, (options, _) in PAGES.items()},
    "page: newest, far back": late(ListInstancesOptions()),
    **{f"page: {name}": ask for name, ask in SEARCHES.items()},
    **{f"poll: {name}": ask for name, (ask, _) in POLLS.items()},
    **OTHERS,
}  # fmt: skip

SCANS: dict[str, Ask] = {
    "part of an id": page(instance_id_filter="nothing like it"),
    "undeclared path": page(input_filters={"nowhere": 1}),
}
"""What may read everything, for a bounded time."""


def large(instances: int) -> Size:
    """Most of them finished."""
    waiting = 10 * SMALL.waiting
    return Size(
        finished=max(instances - 2 * waiting - 3 * SMALL.running, 1),
        steps=SMALL.steps,
        received=instances // 10,
        published=instances // 5,
        running=SMALL.running,
        waiting=waiting,
    )


async def measure(names: Sequence[str], instances: int, rounds: int) -> bool:
    """Print how long everything takes in both, and by how much longer in the large one; whether all is well."""
    well = True
    async with places(names, durable=False) as found:
        for place in found:
            async with place.database() as small_one, place.database() as large_one:
                await _fill(small_one, SMALL)
                await _fill(large_one, large(instances))
                well &= await _compare(small_one, large_one, rounds)
    return well


async def _fill(database: Database, size: Size) -> None:
    started = time.monotonic()
    async with database.open() as storage:
        filler = Filler(storage, size)
        await filler.fill()
        for path in DECLARED:
            await storage.declare_input_path(path)
        await filler.analyze()
    count = size.finished + size.unfinished
    print(f"{database.title}: {count:,} instances made in {time.monotonic() - started:.0f} s", file=sys.stderr)


async def _compare(small_one: Database, large_one: Database, rounds: int) -> bool:
    print(f"\n{small_one.title}: median of {rounds}")
    _row("what", "small", "large", "ratio", "target")
    well = True
    async with small_one.open() as small, large_one.open() as big:
        for name, ask in ASKS.items():
            little, much = await _seconds(ask, small, big, rounds)
            if much > MOST_GROWTH * little:  # what grows does so again; what was in the way is over by then
                little, much = await _seconds(ask, small, big, 4 * rounds)
            ratio = much / little
            well &= ratio <= MOST_GROWTH
            verdict = "ok" if ratio <= MOST_GROWTH else "missed"
            target = f"at most {MOST_GROWTH:g}×: {verdict}"
            _row(name, _milliseconds(little), _milliseconds(much), f"{ratio:.2f}×", target)
        for name, ask in SCANS.items():
            _row(name, _milliseconds(await _once(ask, small)), await _until_given_up(ask, big), "", "may scan")
    return well


async def _seconds(ask: Ask, small: SQLStorage, big: SQLStorage, rounds: int) -> tuple[float, float]:
    """Medians of turns; the first ones warm up. What else the machine does only adds: each turn counts its best try."""
    seconds: tuple[list[float], list[float]] = ([], [])
    both = list(zip((small, big), seconds, strict=True))
    for number in range(rounds + 2):
        gc.collect()
        both.reverse()  # neither is always the one that finds the machine as the other has left it
        for storage, measured in both:
            elapsed = min([await _once(ask, storage) for _ in range(_TRIES)])
            if number >= 2:
                measured.append(elapsed)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


async def _once(ask: Ask, storage: SQLStorage) -> float:
    """How long it takes, in a transaction of which nothing is left."""
    await storage.begin_transaction()
    try:
        started = time.perf_counter()
        await ask(storage)
        return time.perf_counter() - started
    finally:
        await storage.rollback_transaction()


async def _until_given_up(ask: Ask, storage: SQLStorage) -> str:
    started = time.perf_counter()
    try:
        await ask(storage)
    except SearchTimeoutError:
        return f"given up after {time.perf_counter() - started:.1f} s"
    return _milliseconds(time.perf_counter() - started)


def _row(*cells: str) -> None:
    widths = (32, 10, 24, 8, 0)
    print("  " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__.partition("\n")[0])
    known = ",".join(DATABASES)
    parser.add_argument("--databases", default=known, metavar="NAMES", help=f"some of {known} (default: all)")
    parser.add_argument("--instances", type=int, default=1_000_000, help="of the large database (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    names = arguments.databases.split(",")
    if unknown := set(names) - set(DATABASES):
        parser.error(f"there is no {', '.join(unknown)}, only {known}")
    try:
        return 0 if asyncio.run(measure(names, arguments.instances, arguments.rounds)) else 1
    except ServerError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    sys.exit(main())
