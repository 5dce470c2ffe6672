"""What a workflow does not need is not asked of the database."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from romancy import App, Settings, activity, receive, sleep, sleep_until, subscribe, workflow
from romancy.engine.run import Run
from romancy.engine.steps import Step
from romancy.storage import WorkflowStatus

from .conftest import MakeApp
from .test_messages import until, waits

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

    async def one() -> int:
        return await (await app.start(three_steps, 0)).result()

    assert await one() == 3  # from now on it is known how it ends
    with asked_for(app) as asked:
        assert await asyncio.gather(*(one() for _ in range(WORKFLOWS))) == [3] * WORKFLOWS
    assert asked["_append_with_lock"] == 2 * WORKFLOWS
    assert asked["_complete_untied"] == 0  # the last step is recorded with the end
    assert asked["get_instance"] <= 2  # the worker knows the result; a slow machine may have looked all the same
    assert asked["get_history_to_replay"] == 0
    assert asked["claim_resumable_workflows"] < WORKFLOWS


async def test_what_has_ended_is_not_left_to_the_garbage_collector(make_app: MakeApp) -> None:
    app: App = await make_app(three_steps)
    gc.collect()
    before = _runs_and_steps()  # what other tests have left behind
    gc.disable()
    try:
        for _ in range(WORKFLOWS):
            await (await app.start(three_steps, 0)).result()
        left = _runs_and_steps() - before
    finally:
        gc.enable()
    assert left <= 4  # of the last one, which may just be ending


def _runs_and_steps() -> int:
    return sum(type(thing) in (Run, Step) for thing in gc.get_objects())


@workflow
async def listener(messages: int) -> list[int]:
    await subscribe("numbers")
    return [(await receive("numbers")).data for _ in range(messages)]


@workflow
async def sleeper() -> str:
    await sleep(1)
    return "awake"


@workflow
async def early_riser(morning: datetime) -> str:
    await sleep_until(morning)
    return "awake"


async def test_a_message_wakes_a_receiver_here_with_two_commits_and_without_a_search(make_app: MakeApp) -> None:
    app: App = await make_app(listener, settings=Settings(poll_sec=30.0, heartbeat_sec=30.0, lock_timeout_sec=60.0))
    handle = await app.start(listener, 3)
    for number in range(2):
        await waits(handle)
        with asked_for(app) as asked:
            await app.publish("numbers", number)
            await until(lambda asked=asked: asked_to_suspend(asked))
            await until(lambda asked=asked: searched_for_others(asked))
    assert {name: count for name, count in asked.items() if name != "get_instance"} == {
        "publish_to_channel": 2,
        "get_channel_subscribers_waiting": 1,
        "deliver_and_claim": 8,
        "suspend": 7,
    }
    await waits(handle)
    await app.publish("numbers", 2)
    assert await handle.result() == [0, 1, 2]


async def test_a_timer_wakes_a_sleeper_here_with_one_commit(make_app: MakeApp) -> None:
    app: App = await make_app(sleeper, settings=Settings(poll_sec=30.0, heartbeat_sec=30.0, lock_timeout_sec=60.0))
    handle = await app.start(sleeper)

    async def sleeps() -> bool:
        return await handle.status() is WorkflowStatus.WAITING_FOR_TIMER

    await until(sleeps)
    with asked_for(app) as asked:
        assert await handle.result() == "awake"
    assert asked["fire_and_claim"] == 4
    assert asked["get_history_to_replay"] == asked["claim_resumable_workflows"] == asked["get_awaited_steps"] == 0


async def test_who_has_no_place_when_his_timer_is_due_is_woken_when_there_is_one(make_app: MakeApp) -> None:
    quiet = Settings(concurrency=2, poll_sec=30.0, heartbeat_sec=30.0, lock_timeout_sec=60.0)
    app: App = await make_app(early_riser, settings=quiet)
    morning = await app.storage.current_time() + timedelta(seconds=2)
    handles = [await app.start(early_riser, morning) for _ in range(WORKFLOWS)]

    async def all_sleep() -> bool:
        return {await handle.status() for handle in handles} == {WorkflowStatus.WAITING_FOR_TIMER}

    await until(all_sleep)
    with asked_for(app) as asked:
        assert await asyncio.gather(*(handle.result() for handle in handles)) == ["awake"] * WORKFLOWS
    assert asked["fire_timer"] == asked["claim_resumable_workflows"] == 0


@contextmanager
def asked_for(app: App) -> Iterator[Counter[str]]:
    """How many statements of each operation are sent meanwhile."""
    asked: Counter[str] = Counter()
    app.storage.runner.probe = lambda point, operation: asked.update([operation] * (point == "before statement"))
    yield asked
    app.storage.runner.probe = None


async def asked_to_suspend(asked: Counter[str]) -> bool:
    return asked["suspend"] == 7


async def searched_for_others(asked: Counter[str]) -> bool:
    """As the courier does when whoever it knows has got a message, while that one runs."""
    return asked["get_channel_subscribers_waiting"] == 1
