"""``romancy worker MODULE:APP``"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import io
import signal
import sys
from pathlib import Path

from ..app import App
from ..errors import RomancyError


def find_app(address: str) -> App:
    """The App at ``module:name``, found from the current directory too."""
    module_name, _, name = address.partition(":")
    if not name or module_name[:1] in ("", "."):  # .orders is relative to nothing
        raise RomancyError(f"{address!r} does not say which App\nhint: give module:name, such as orders:app")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that it imports itself: the traceback tells where
        hint = "\nhint: a module is named without .py" if module_name.endswith(".py") else ""
        raise RomancyError(f"cannot import {module_name!r}: {error}{hint}") from error
    if found is None:
        there = [f"{module_name}:{name}" for name, value in vars(module).items() if isinstance(value, App)]
        hint = f"\nhint: there is {', '.join(there)}" if there else ""
        raise RomancyError(f"{module_name!r} has no {name!r}{hint}")
    if not isinstance(found, App):
        raise RomancyError(f"{address} is not an App, but of type {type(found).__name__}")
    if not found.workflows:
        raise RomancyError(f"{address} has no workflows to run\nhint: App(url, workflows=[…])")
    return found


async def run(options: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT, then hand everything back."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what activities print is not lost with a process that is killed
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with find_app(options.app) as app:
        print(f"running {', '.join(sorted(app.workflows))} on {app.shown_url}", file=sys.stderr)
        await stop.wait()
        print("handing back what is not finished", file=sys.stderr)
    return 0
