"""Measure what the storage costs on each database; what must hold is marked OK or MISSED."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterable

from tests.servers import ServerError

from . import appends, iteration, operations
from .databases import DATABASES, fresh_databases
from .measuring import FULL, QUICK, TINY

MEASUREMENTS = {
    "appends": appends.measure,
    "iteration": iteration.measure,
    "operations": operations.measure,
}


async def main(arguments: argparse.Namespace) -> None:
    started = time.monotonic()
    async with fresh_databases(arguments.databases) as databases:
        for name in arguments.only:
            await MEASUREMENTS[name](databases, arguments.size)
    print(f"\nA ratio is the median of {arguments.size.rounds} rounds, in brackets the middle half of them.")
    print(f"Measured in {time.monotonic() - started:.0f} s.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    _add_choice(parser, "--databases", DATABASES)
    _add_choice(parser, "--only", MEASUREMENTS)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const=QUICK, help="less of all, under two minutes")
    size.add_argument("--tiny", dest="size", action="store_const", const=TINY, help="only to see that everything runs")
    parser.set_defaults(size=FULL)
    return parser.parse_args()


def _add_choice(parser: argparse.ArgumentParser, flag: str, choices: Iterable[str]) -> None:
    names = list(choices)
    parser.add_argument(
        flag, type=_some_of(names), default=names, metavar="NAMES", help=f"some of {','.join(names)} (default: all)"
    )


def _some_of(names: list[str]) -> Callable[[str], list[str]]:
    def some(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(names):
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}, only {', '.join(names)}")
        return text.split(",")

    return some


try:
    asyncio.run(main(parse()))
except ServerError as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit(130)
