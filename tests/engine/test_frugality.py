"""What a workflow does not need is not asked of the database."""

import asyncio
import gc
from collections import Counter

from romancy import App, Settings, activity, workflow
from romancy.engine.run import Run
from romancy.engine.steps import Step

from .conftest import MakeApp

WORKFLOWS = 10


@activity
async def add_one(number: int) -> int:
    return number + 1


@workflow
async def three_steps(number: int) -> int:
    for _ in range(3):
        number = await add_one(number)
    return number


async def test_a_workflow_that_is_born_and_ends_here_is_neither_replayed_nor_polled_nor_searched_for(
    make_app: MakeApp,
) -> None:
    app: App = await make_app(three_steps, settings=Settings())
    asked: Counter[str] = Counter()
    app.storage.runner.probe = lambda point, operation: asked.update([operation] * (point == "before statement"))

    async def one() -> int:
        return await (await app.start(three_steps, 0)).result()

    assert await asyncio.gather(*(one() for _ in range(WORKFLOWS))) == [3] * WORKFLOWS
    app.storage.runner.probe = None
    assert asked["_append_with_lock"] == 3 * WORKFLOWS
    assert asked["get_instance"] <= 2  # the worker knows the result; a slow machine may have looked all the same
    assert asked["get_history_paginated"] == 0
    assert asked["claim_resumable_workflows"] < WORKFLOWS


async def test_what_has_ended_is_not_left_to_the_garbage_collector(make_app: MakeApp) -> None:
    app: App = await make_app(three_steps)
    gc.collect()
    gc.disable()
    try:
        for _ in range(WORKFLOWS):
            await (await app.start(three_steps, 0)).result()
        left = Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, Run | Step))
    finally:
        gc.enable()
    assert left["Run"] + left["Step"] <= 4  # of the last one, which may just be ending
