"""The examples: each runs to its end and prints what its reader expects."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import Database

EXAMPLES = Path(__file__).parents[2] / "examples"

_FAILURE = re.compile(r"instance \S+( of \w+)?(: attempt \d+ at step \S+)? has failed with \w+")
"""What the log tells of the failures that are part of the story."""

PRINTED = {
    "order_saga.py": [
        "=> order-1 is on its way to Paris",
        "  order-2: refund 40 euros, receipt R-order-2",
        "=> workflow 'order-2' failed: TerminalError: there is no such address",
        "  order-3: put the goods back on the shelf",
        "  order-3: refund 50 euros, receipt R-order-3",
        "=> workflow 'order-3' was cancelled: the customer changed their mind",
    ],
    "approval_with_timeout.py": [
        "  to the director: please decide about 'a helicopter'",
        "=> a train ticket: approved by Ada",
        "=> a dinner: rejected by Grace",
        "=> a helicopter: rejected, since nobody cared",
    ],
    "chat.py": [
        "  Ada:   Knock, knock.",
        "  Bob:   Who's there?",
        "  Ada:   Tank.",
        "  Bob:   Tank who?",
        "  Ada:   You're welcome.",
        "=> Ada has heard 21 letters, Bob 33",
    ],
    "billing_loop.py": [
        "  month 1: Ada pays 9 euros",
        "  month 2: Ada pays 9 euros",
    ],
    "fastapi_service.py": [
        'PUT  /orders/7?pizza=margherita  202  {"id":"7","status":"running"}',
        'GET  /orders/8                   404  {"detail":"there is no order 8"}',
        'GET  /orders/7/pizza             200  "a hot margherita for 9 euros"',
    ],
    "transfer.py": [
        "before: {'Ada': 100, 'Bob': 20}, 120 in all",
        "  Bob has paid 5 euros to Ada, and the power fails ...",
        "=> Bob now has 50; Ada now has 75; Bob does not have 500 euros",
        "after:  {'Ada': 75, 'Bob': 45}, 120 in all",
    ],
}


async def run(example: str, url: str, *arguments: str) -> list[str]:
    """The lines that an example prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / example),
        *arguments,
        env={**os.environ, "ROMANCY_URL": url, "PYTHONWARNINGS": "error"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        printed, troubles = await process.communicate()
    unexpected = [line for line in troubles.decode().splitlines() if not _FAILURE.match(line)]
    assert (process.returncode, unexpected) == (0, [])
    return printed.decode().splitlines()


@pytest.mark.parametrize("example", PRINTED)
async def test_an_example_prints_what_its_reader_expects(example: str) -> None:
    lines = await run(example, "sqlite://:memory:", *(["0.5"] if example == "billing_loop.py" else []))
    unread = iter(lines)
    assert [line for line in PRINTED[example] if line not in unread] == [], lines


@pytest.mark.databases("postgres", "mariadb", "mysql")
async def test_money_is_transferred_exactly_once_on_every_database(database: Database) -> None:
    assert await run("transfer.py", database.url) == await run("transfer.py", "sqlite://:memory:")


async def test_each_job_of_the_queue_is_done_once() -> None:
    lines = await run("work_queue.py", "sqlite://:memory:")
    jobs = sorted(line.split()[-1] for line in lines if "resizes" in line)
    assert jobs == [f"picture-{number}.jpg" for number in range(1, 10)]


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PRINTED, "work_queue.py", "storage_tour.py"}
