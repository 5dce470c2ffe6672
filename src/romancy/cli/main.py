"""``romancy``: see a demo, run a worker, migrate or measure a database, look at instances, cancel and unpark them."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import RomancyError
from ..storage import StorageError, WorkflowStatus
from . import bench, demo, instances, migrate, worker
from .printing import show_everything

DATABASE_VARIABLE = "ROMANCY_URL"


def _at_least_one(text: str) -> int:
    """A number of things."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    root = argparse.ArgumentParser(
        prog="romancy",
        description="Durable workflows on the database you already have.",
        epilog=f"The database is given with --url, or by the environment variable {DATABASE_VARIABLE}.",
    )
    root.add_argument("--version", action="version", version=f"romancy {__version__}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)

    showing_off = commands.add_parser("demo", help="see an order survive kill -9; takes half a minute")
    showing_off.set_defaults(run=demo.run)

    running = commands.add_parser("worker", help="run the workflows of an app until SIGTERM")
    running.add_argument("app", metavar="MODULE:APP", help="where the App is, such as orders:app")
    running.set_defaults(run=worker.run)

    migrating = _with_url(commands.add_parser("migrate", help="bring a database's schema up to date"))
    migrating.add_argument("--print", action="store_true", dest="print_sql", help="print the SQL instead of running it")
    migrating.add_argument("--down", type=_at_least_one, metavar="N", help="undo the last N migrations of this library")
    migrating.set_defaults(run=migrate.run)

    measuring = _with_url(commands.add_parser("bench", help="measure what this library does on a database"))
    measuring.add_argument("--rounds", type=_at_least_one, default=5)
    measuring.add_argument("--json", action="store_true", help="results as JSON, for programs")
    measuring.set_defaults(run=bench.run)

    listing = _with_url(commands.add_parser("list", help="list instances, newest first"))
    listing.add_argument("--status", choices=[str(status) for status in WorkflowStatus])
    listing.add_argument("--parked", action="store_true", help="only instances that workers have set aside")
    listing.add_argument("--workflow", metavar="TEXT", help="only workflows whose name contains this")
    listing.add_argument("--id", metavar="TEXT", help="only instances whose id contains this")
    listing.add_argument("--limit", type=_at_least_one, default=20)
    listing.add_argument("--json", action="store_true", help="one JSON document per line")
    listing.set_defaults(run=instances.list_them)

    showing = _with_url(commands.add_parser("show", help="show an instance and its history"))
    showing.add_argument("id", metavar="ID")
    showing.add_argument("--payloads", action="store_true", help="show input, output and results too")
    showing.set_defaults(run=instances.show)

    cancelling = _with_url(commands.add_parser("cancel", help="cancel an instance and undo what it did"))
    cancelling.add_argument("id", metavar="ID")
    cancelling.add_argument("--reason", default="cancelled on the command line")
    cancelling.set_defaults(run=instances.cancel)

    unparking = _with_url(commands.add_parser("unpark", help="let a parked instance be tried again"))
    unparking.add_argument("id", metavar="ID")
    unparking.set_defaults(run=instances.unpark)
    return root


def _with_url(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command.add_argument("--url", default=os.environ.get(DATABASE_VARIABLE), help="the database")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit status."""
    options = parser().parse_args(arguments)
    if "url" in options and not options.url:
        print(f"error: which database?\nhint: --url sqlite:///orders.db, or set {DATABASE_VARIABLE}", file=sys.stderr)
        return 2
    show_everything(sys.stdout)
    try:
        status = int(asyncio.run(options.run(options)))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read has seen enough, as `head` does; what is left to be written at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (StorageError, RomancyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
