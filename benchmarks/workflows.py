"""A workflow of five durable activities, beside the seven commits that it needs at least, written by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from romancy import App, activity, workflow
from romancy.storage import SQLStorage

from .bare import STEPS, HandWritten
from .databases import Database, Place
from .measuring import Contender, Report, Result, Series, Size, Target, closed_loop, per_second, take_turns

AT_ONCE = 32
CONNECTIONS = 8
"""Of the hand-written loop: more were not quicker, neither were fewer."""

LENGTHS = (3, 8, 1, 6, 5, 9, 2, 7, 4)
"""Of workflows that are not in step with each other, as those of one length are: some begin while others end."""

MANY = {"sqlite": Target(least=2.5), "postgres": Target(least=1.4), "mariadb": Target(least=1.4)}
ONE = Target(least=0.6)


@activity
async def add_one(number: int) -> int:
    return number + 1


@workflow
async def five_steps(number: int) -> int:
    for _ in range(STEPS):
        number = await add_one(number)
    return number


@workflow
async def some_steps(number: int, steps: int) -> int:
    for _ in range(steps):
        number = await add_one(number)
    return number


async def run_workflows(app: App, workflows: int, at_once: int) -> None:
    """Start workflows and wait for their results, so many at once."""

    async def one() -> None:
        handle = await app.start(five_steps, 1)
        assert await handle.result() == 1 + STEPS

    await closed_loop(one, workflows, at_once)


async def run_different_workflows(app: App, workflows: int, lengths: Iterator[int]) -> None:
    """The same with workflows of different lengths."""

    async def one() -> None:
        steps = next(lengths)
        handle = await app.start(some_steps, 1, steps)
        assert await handle.result() == 1 + steps

    await closed_loop(one, workflows, AT_ONCE)


async def define_bare(storage: SQLStorage) -> None:
    """The definition that hand-written instances refer to."""
    if await storage.conn().fetch_one("SELECT 1 FROM workflow_definitions WHERE workflow_name = 'bare'") is None:
        await storage.conn().execute(
            "INSERT INTO workflow_definitions (workflow_name, source_hash, source_code) VALUES ('bare', '', '')"
        )


async def commit_sec(database: Database, workflows: int = 3) -> float:
    """What a commit of the bare driver takes at this moment."""
    by_hand = HandWritten(database.name, database.url, 1)
    async with database.open() as storage:
        await define_bare(storage)
    await by_hand.connect()
    try:
        await by_hand.run(1)
        started = time.perf_counter()
        await by_hand.run(workflows)
        return (time.perf_counter() - started) / (workflows * (STEPS + 2))
    finally:
        await by_hand.close()


async def measure(places: Sequence[Place], size: Size, report: Report) -> None:
    """How many workflows per second, many at once and one after the other."""
    report.section(f"A workflow of {STEPS} durable activities, beside a hand-written loop of {STEPS + 2} commits")
    for place in places:
        for what, at_once, lengths, target in (
            (f"{AT_ONCE} at once", AT_ONCE, (STEPS,), MANY.get(place.name)),
            (f"{AT_ONCE} at once, 1 to 9 steps", AT_ONCE, LENGTHS, None),
            ("one at a time", 1, (STEPS,), ONE),
        ):
            async with place.database() as database:
                by_hand, ours = await _measure(database, size, at_once, lengths)
            report.add(
                Result(
                    what,
                    place.title,
                    by_hand.divided_by(ours),
                    beside=f"{per_second(by_hand)} by hand",
                    ours=per_second(ours),
                    target=target,
                )
            )


async def _measure(database: Database, size: Size, at_once: int, lengths: Sequence[int]) -> tuple[Series, Series]:
    workflows = size.workflows if at_once > 1 else max(2, size.workflows // 2)
    by_hand = HandWritten(database.name, database.url, min(CONNECTIONS, at_once), cycle(lengths))
    ours = cycle(lengths)

    async def run(app: App, operations: int) -> None:
        if len(lengths) > 1:
            await run_different_workflows(app, operations, ours)
        else:
            await run_workflows(app, operations, at_once)

    async with App(database.url, workflows=[five_steps, some_steps]) as app:
        await define_bare(app.storage)
        await by_hand.connect()
        try:
            by_hand_seconds, our_seconds = await take_turns(
                size.rounds,
                [
                    Contender(by_hand.run, workflows),
                    Contender(lambda operations: run(app, operations), workflows),
                ],
            )
        finally:
            await by_hand.close()
    done = (size.rounds + 1) * workflows
    for name in ("= 'bare'", "<> 'bare'"):
        assert await database.count("workflow_instances", f"workflow_name {name} AND status = 'completed'") == done
    assert await database.count("workflow_history") == 2 * sum(islice(cycle(lengths), done))
    return by_hand_seconds, our_seconds
