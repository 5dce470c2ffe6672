"""``romancy bench``: what this library does per second on a database of one's own."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from uuid import uuid4

from ..activity import activity
from ..app import App
from ..storage import HistoryEvent, Lock, SchemaError, SQLStorage, WorkflowInstance
from ..storage.migrations import pending
from ..workflow import workflow
from .existing import open_existing
from .measuring import Contender, Report, Result, Series, closed_loop, per_second, take_turns

CALLERS = 64
AT_ONCE = 32
STEPS = 5
_DATA = '{"activity_name": "charge", "result": {"payment_id": "p-1042", "amount": 1999, "currency": "EUR"}}'
_FRAMEWORK = "romancy-bench"
"""Kept apart from everybody's instances: no worker of others sees ours, and ours sees no others'."""


@activity(name="romancy-bench-step")
async def step(number: int) -> int:
    return number + 1


@workflow(name="romancy-bench")
async def five_steps(number: int) -> int:
    for _ in range(STEPS):
        number = await step(number)
    return number


async def run(options: argparse.Namespace) -> int:
    """Measure on the given database, and remove every row that this took."""
    report = Report(sys.stderr if options.json else sys.stdout)
    async with open_existing(options.url, framework=_FRAMEWORK) as storage:
        if await pending(storage.runner):
            raise SchemaError("the schema is missing or old; run `romancy migrate` first")
        try:
            await _appends(storage, options.rounds, report)
            await _workflows(options.url, options.rounds, report)
        finally:
            await _clean(storage)
    print("\nMedian of the rounds, in brackets the middle half of them. All rows were removed again.", file=sys.stderr)
    if options.json:
        print(json.dumps([result.as_json() for result in report.results]))
    return 0


async def _appends(storage: SQLStorage, rounds: int, report: Report) -> None:
    report.section("A fenced append, beside a plain commit of your own SQL")
    locks = [await _locked_instance(storage) for _ in range(CALLERS)]
    append = _appending(storage)
    plain, one, many = await take_turns(
        rounds,
        [
            Contender(lambda commits: _commits(storage, locks[0], commits), 50),
            Contender(lambda appends: closed_loop(lambda: append(locks[0]), appends, 1), 50),
            Contender(lambda appends: _each(append, locks, appends // CALLERS), CALLERS * 4),
        ],
    )
    database = storage.runner.driver.driver_name()
    for what, seconds in (("one caller", one), (f"{CALLERS} callers", many)):
        report.add(_beside(what, database, plain, seconds))


async def _workflows(url: str, rounds: int, report: Report) -> None:
    report.section(f"A workflow of {STEPS} durable activities, beside {STEPS + 2} plain commits")
    async with App(url, workflows=[five_steps], framework=_FRAMEWORK) as app:
        lock = await _locked_instance(app.storage)

        async def one() -> None:
            assert await (await app.start(five_steps, 1)).result() == 1 + STEPS

        seven, alone, together = await take_turns(
            rounds,
            [
                Contender(lambda times: _commits(app.storage, lock, times * (STEPS + 2)), 10),
                Contender(lambda workflows: closed_loop(one, workflows, 1), 10),
                Contender(lambda workflows: closed_loop(one, workflows, AT_ONCE), 3 * AT_ONCE),
            ],
        )
        database = app.storage.runner.driver.driver_name()
    for what, seconds in (("one at a time", alone), (f"{AT_ONCE} at once", together)):
        report.add(_beside(what, database, seven, seconds))


def _beside(what: str, database: str, plain: Series, seconds: Series) -> Result:
    beside = f"{per_second(plain)} plain"
    return Result(what, database, plain.divided_by(seconds), beside=beside, ours=per_second(seconds))


async def _locked_instance(storage: SQLStorage) -> Lock:
    instance = WorkflowInstance(f"romancy-bench-{uuid4().hex}", five_steps.name, locked_by="romancy-bench")
    lock = await storage.create_instance(instance, lock_timeout_sec=3600)
    assert lock is not None, "born locked"
    return lock


def _appending(storage: SQLStorage) -> Callable[[Lock], asyncio.Future[object]]:
    def append(lock: Lock) -> asyncio.Future[object]:
        event = HistoryEvent(lock.instance_id, uuid4().hex, "ActivityCompleted", event_data=_DATA)
        return asyncio.ensure_future(storage.append_history(event, lock=lock))

    return append


async def _each(append: Callable[[Lock], asyncio.Future[object]], locks: list[Lock], appends: int) -> None:
    async with asyncio.TaskGroup() as group:
        for lock in locks:
            group.create_task(closed_loop(lambda lock=lock: append(lock), appends, 1))  # type: ignore[misc]


async def _commits(storage: SQLStorage, lock: Lock, commits: int) -> None:
    """Insert rows with nothing around them, one commit each."""
    conn = storage.conn()
    for _ in range(commits):
        await conn.execute(
            "INSERT INTO workflow_history (instance_id, activity_id, event_type, event_data)"
            f" VALUES ('{lock.instance_id}', '{uuid4().hex}', 'ActivityCompleted', '{_DATA}')"
        )


async def _clean(storage: SQLStorage) -> None:
    """Remove what was made here; histories go with their instances."""
    conn = storage.conn()
    await conn.execute(f"DELETE FROM workflow_instances WHERE framework = '{_FRAMEWORK}'")
    await conn.execute(f"DELETE FROM workflow_definitions WHERE workflow_name = '{five_steps.name}'")
