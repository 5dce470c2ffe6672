"""``romancy migrate``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..storage import open_storage
from ..storage.migrations import Migration, pending, render_pending, rollback


async def run(options: argparse.Namespace) -> int:
    """Bring the schema up to date, undo migrations, or print what would be run."""
    async with open_storage(options.url) as storage:
        if options.print_sql:
            print(await render_pending(storage.runner))
            return 0
        if options.down:
            print(f"undone: {named(await rollback(storage.runner, options.down))}", file=sys.stderr)
            return 0
        due = await pending(storage.runner)
        await storage.initialize()
        print(f"applied: {named(due)}" if due else "the schema is up to date", file=sys.stderr)
    return 0


def named(migrations: Sequence[Migration]) -> str:
    """Migrations as a person reads them."""
    return ", ".join(f"{migration.version}_{migration.name}" for migration in migrations) or "none"
