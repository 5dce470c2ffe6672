"""A process whose children are killed at each statement of an operation on SQLite, each on a copy of the database.

It reads lines of JSON, ``[database, scenario, clock offset]``. For each it leaves `1.db`, `2.db` … beside the database,
cut at that statement, the last of them undisturbed, and `after.db`, cut after the commit; it prints the number of the
undisturbed one.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from romancy.storage import open_storage

from .cutting import Cutter
from .scenarios import SCENARIOS


def main() -> None:
    for line in sys.stdin:
        database, name, clock_offset = json.loads(line)
        print(kill_everywhere(Path(database), name, clock_offset), flush=True)


def kill_everywhere(database: Path, name: str, clock_offset: float) -> int:
    number = 1
    while was_killed(copy_of(database, str(number)), name, clock_offset, number):
        number += 1
    assert was_killed(copy_of(database, "after"), name, clock_offset, None)
    return number


def copy_of(database: Path, stem: str) -> Path:
    return Path(shutil.copy(database, database.with_stem(stem)))


def was_killed(database: Path, name: str, clock_offset: float, number: int | None) -> bool:
    """Make the call in a child that kills itself there; whether it did."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.run(act(database, name, clock_offset, number))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


async def act(database: Path, name: str, clock_offset: float, number: int | None) -> None:
    async with open_storage(f"sqlite:///{database}") as storage:
        storage.runner.driver.clock_offset = clock_offset
        with Cutter(number, lambda: os.kill(os.getpid(), signal.SIGKILL)).at(storage):
            await SCENARIOS[name].act(storage)


if __name__ == "__main__":
    main()
