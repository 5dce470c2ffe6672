"""Every workflow of the zoo, dying at every durable write in every way, ends as if nothing had happened."""

import asyncio
import os
import random
from itertools import count

import msgspec
import pytest

from romancy import App, Settings, Workflow, WorkflowFailedError
from romancy.storage import SQLStorage, open_storage
from tests.engine.crashing import HOW, Saboteur, bury, expire_locks
from tests.engine.zoo import ALL, EFFECTS, ZOO
from tests.harness import Harness

QUICK = Settings(poll_sec=0.02, heartbeat_sec=5.0, lock_timeout_sec=30.0, drain_sec=0.0, warm=10)
EVERY_POINT = bool(os.environ.get("ROMANCY_EVERY_CRASH_POINT"))
_numbers = count(1)

LEFTOVERS = (
    "workflow_timer_subscriptions",
    "romancy_channel_waits",
    "romancy_instance_waits",
    "channel_subscriptions",
    "workflow_group_memberships",
)


class Ended(msgspec.Struct, frozen=True):
    """What a run is compared by."""

    result: object
    state: object
    steps: tuple[str, ...]
    effects: frozenset[str]
    transfers: tuple[int, ...]
    events: tuple[str, ...]


async def outcome(storage: SQLStorage, app: App, instance: str, key: str) -> Ended:
    try:
        result: object = await app.handle(instance).result(20)
    except WorkflowFailedError as error:
        result = f"{error.error_type}: {error.message}"
    conn = storage.conn()
    steps = await conn.fetch_all("SELECT activity_id FROM workflow_history WHERE instance_id = :id", id=instance)
    moved = await conn.fetch_all("SELECT amount FROM transfers WHERE name = :key ORDER BY amount", key=key)
    events = await conn.fetch_all("SELECT event_id FROM outbox_events ORDER BY event_id")
    for table in LEFTOVERS:
        assert await conn.fetch_value(f"SELECT COUNT(*) FROM {table}") == 0, f"{table} has rows of finished instances"
    return Ended(
        result=result,
        state=await storage.get_instance_state(instance),
        steps=tuple(sorted(normal(row[0], key) for row in steps if "#" not in row[0])),
        effects=frozenset(EFFECTS[key]),
        transfers=tuple(row[0] for row in moved),
        events=tuple(row[0].removeprefix(key) for row in events if row[0].startswith(key)),
    )


def normal(step: str, key: str) -> str:
    """A step's id without what differs from run to run."""
    return "compensation" if step.startswith("compensation:") else step.replace(key, "KEY")


async def run_with(
    harness: Harness, helper: SQLStorage, workflow: Workflow[..., object], strike_at: int, how: str, *, knowing: bool
) -> tuple[Ended, Saboteur]:
    """Run a workflow whose `strike_at`th write is sabotaged, then, if that killed its worker, with a second one.

    `knowing` how it ends, its last step and its end are one write.
    """
    if not knowing:
        for each in ALL:
            each.last_steps.clear()
    key = f"run{next(_numbers)}"
    app = App(harness.url, workflows=ALL, settings=QUICK)
    await app.__aenter__()
    saboteur = Saboteur(app.storage, helper, strike_at, how)
    starting = asyncio.create_task(app.start(workflow, key, id=key))
    finishing = asyncio.create_task(finished(app, helper, key, starting))
    await asyncio.wait({finishing, asyncio.create_task(saboteur.dead.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if not saboteur.dead.is_set():
        try:
            return await outcome(helper, app, key, key), saboteur
        finally:
            await app.__aexit__(None, None, None)
    for task in (starting, finishing):
        task.cancel()
    await asyncio.gather(starting, finishing, return_exceptions=True)
    await bury(app)
    await expire_locks(helper)
    async with App(harness.url, workflows=ALL, settings=QUICK) as heir:
        await heir.start(workflow, key, id=key)  # what a client does that did not hear whether it was started
        return await outcome(helper, heir, key, key), saboteur


async def finished(app: App, helper: SQLStorage, key: str, starting: "asyncio.Task[object]") -> None:
    await asyncio.wait({starting})
    if starting.exception() is not None:
        await expire_locks(helper)  # the instance may be there, with a lock that nobody knows of
    try:
        await app.handle(key).result(20)
    except WorkflowFailedError:
        return


@pytest.mark.timeout(3000 if EVERY_POINT else 240)
@pytest.mark.parametrize("workflow", ZOO, ids=lambda workflow: workflow.name)
async def test_it_ends_the_same_wherever_its_worker_dies(harness: Harness, workflow: Workflow[..., object]) -> None:
    async with open_storage(harness.url) as helper:
        await helper.conn().execute("CREATE TABLE IF NOT EXISTS transfers (name VARCHAR(100), amount INTEGER)")
        expected, first = await run_with(harness, helper, workflow, 0, "before", knowing=False)
        _, second = await run_with(harness, helper, workflow, 0, "before", knowing=True)
        writes = [(write, False) for write in range(1, first.writes + 1)]
        writes += [(write, True) for write in (second.writes - 1, second.writes)]  # before, there is no difference
        points = [(write, knowing, how) for write, knowing in writes for how in HOW]
        if not EVERY_POINT:
            points = random.Random(workflow.name).sample(
                points, min(len(points), 12 if harness.name == "sqlite" else 4)
            )
        for write, knowing, how in points:
            ended, saboteur = await run_with(harness, helper, workflow, write, how, knowing=knowing)
            assert ended == expected, f"{how} write {write} ({saboteur.struck})"
