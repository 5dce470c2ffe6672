"""A workflow of five durable activities, beside the seven commits that it needs at least, written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from romancy import App, activity, workflow
from romancy.storage import SQLStorage

from .bare import STEPS, HandWritten
from .databases import Database, Place
from .measuring import Contender, Report, Result, Series, Size, Target, closed_loop, per_second, take_turns

AT_ONCE = 32
CONNECTIONS = 8
"""Of the hand-written loop: more were not quicker, neither were fewer."""

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


async def run_workflows(app: App, workflows: int, at_once: int) -> None:
    """Start workflows and wait for their results, so many at once."""

    async def one() -> None:
        handle = await app.start(five_steps, 1)
        assert await handle.result() == 1 + STEPS

    await closed_loop(one, workflows, at_once)


async def define_bare(storage: SQLStorage) -> None:
    """The definition that hand-written instances refer to."""
    if await storage.conn().fetch_one("SELECT 1 FROM workflow_definitions WHERE workflow_name = 'bare'") is None:
        await storage.conn().execute(
            "INSERT INTO workflow_definitions (workflow_name, source_hash, source_code) VALUES ('bare', '', '')"
        )


async def measure(places: Sequence[Place], size: Size, report: Report) -> None:
    """How many workflows per second, many at once and one after the other."""
    report.section(f"A workflow of {STEPS} durable activities, beside a hand-written loop of {STEPS + 2} commits")
    for place in places:
        for at_once, target in ((AT_ONCE, MANY.get(place.name)), (1, ONE)):
            async with place.database() as database:
                by_hand, ours = await _measure(database, size, at_once)
            report.add(
                Result(
                    f"{at_once} at once" if at_once > 1 else "one at a time",
                    place.title,
                    by_hand.divided_by(ours),
                    beside=f"{per_second(by_hand)} by hand",
                    ours=per_second(ours),
                    target=target,
                )
            )


async def _measure(database: Database, size: Size, at_once: int) -> tuple[Series, Series]:
    workflows = size.workflows if at_once > 1 else max(2, size.workflows // 8)
    by_hand = HandWritten(database.name, database.url, min(CONNECTIONS, at_once))
    async with App(database.url, workflows=[five_steps]) as app:
        await define_bare(app.storage)
        await by_hand.connect()
        try:
            by_hand_seconds, our_seconds = await take_turns(
                size.rounds,
                [
                    Contender(by_hand.run, workflows),
                    Contender(lambda operations: run_workflows(app, operations, at_once), workflows),
                ],
            )
        finally:
            await by_hand.close()
    done = (size.rounds + 1) * workflows
    for name in ("bare", "five_steps"):
        assert await database.count("workflow_instances", f"workflow_name = '{name}' AND status = 'completed'") == done
    assert await database.count("workflow_history") == 2 * done * STEPS
    return by_hand_seconds, our_seconds
