"""Measure this library beside the bare drivers and beside other libraries; what is aimed at is marked ok or missed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from romancy import __version__
from tests.servers import ServerError

from . import appends, idling, iteration, operations, others, replay, waking, workflows
from .databases import DATABASES, places
from .machine import Machine
from .measuring import FULL, QUICK, TINY, Report
from .plot import plot

_WORKFLOWS_BY_HAND = 50
"""So many tell what a commit takes: the quicker it is, the less there is to gain by sharing one."""

MEASUREMENTS = {
    "appends": appends.measure,
    "operations": operations.measure,
    "workflows": workflows.measure,
    "others": others.measure,
    "waking": waking.measure,
    "idling": idling.measure,
    "replay": replay.measure,
    "iteration": iteration.measure,
}


async def main(arguments: argparse.Namespace) -> None:
    started = time.monotonic()
    report = Report()
    described: list[str] = []
    machine = Machine()
    print(machine.title)
    try:
        async with places(arguments.databases, durable=arguments.size is not TINY) as found:
            for place in found:
                async with place.database() as database:
                    commit_ms = 1000 * await workflows.commit_sec(database, _WORKFLOWS_BY_HAND)
                described.append(f"{await place.described()}; a bare commit takes {commit_ms:.2f} ms")
                print(described[-1])
            for name in arguments.only:
                await MEASUREMENTS[name](found, arguments.size, report)
    finally:  # what was measured is kept, even if the rest could not be
        _write(arguments, _summary(arguments, machine, described, report))
    print(f"\nA ratio is the median of its rounds, in brackets the middle half of them. {report.summary()}")
    print(f"Measured in {time.monotonic() - started:.0f} s ({arguments.size.name}). {machine.disturbances()}")


def _summary(arguments: argparse.Namespace, machine: Machine, described: list[str], report: Report) -> dict[str, Any]:
    return {
        "romancy": __version__,
        "machine": machine.title,
        "after_a_pause": machine.after_a_pause,
        "taken_away": machine.taken_away(),
        "size": arguments.size.name,
        "measured_at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "databases": described,
        "results": [result.as_json() for result in report.results],
    }


def _write(arguments: argparse.Namespace, summary: dict[str, Any]) -> None:
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    if arguments.plot:
        arguments.plot.write_text(plot(summary))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    _add_choice(parser, "--databases", DATABASES, default=None)
    _add_choice(parser, "--only", MEASUREMENTS, default=list(MEASUREMENTS))
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="size", action="store_const", const=QUICK, help="less of all; without MySQL, if not named"
    )
    size.add_argument("--tiny", dest="size", action="store_const", const=TINY, help="only to see that everything runs")
    parser.set_defaults(size=FULL)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there, for programs")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results there, as SVG")
    arguments = parser.parse_args()
    if arguments.databases is None:
        arguments.databases = [name for name in DATABASES if name != "mysql" or arguments.size is FULL]
    return arguments


def _add_choice(
    parser: argparse.ArgumentParser, flag: str, choices: Iterable[str], *, default: list[str] | None
) -> None:
    names = list(choices)
    parser.add_argument(
        flag, type=_some_of(names), default=default, metavar="NAMES", help=f"some of {','.join(names)} (default: all)"
    )


def _some_of(names: list[str]) -> Callable[[str], list[str]]:
    def some(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(names):
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}, only {', '.join(names)}")
        return text.split(",")

    return some


if __name__ == "__main__":
    try:
        asyncio.run(main(parse()))
    except ServerError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
