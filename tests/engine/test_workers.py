"""Workers: each runs what it knows, as much as it may, and gives back what it cannot finish."""

import asyncio
import gc
import os
import sys
import threading

import msgspec
import pytest

from romancy import App, DuplicateNameError, Settings, activity, sleep, workflow
from romancy.storage import SQLStorage, WorkflowStatus
from romancy.worker.services import for_each
from tests.acceptance.failing_over import fulfil
from tests.engine.conftest import QUICK, MakeApp
from tests.engine.test_messages import until
from tests.harness import Harness

running = 0
most = 0


@activity
async def busy(seconds: float) -> None:
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(seconds)
    running -= 1


@workflow
async def occupied(seconds: float) -> str:
    await busy(seconds)
    return "done"


@workflow
async def quick() -> str:
    return "quick"


async def test_unknown_names_stay_untouched(harness: Harness, storage: SQLStorage, make_app: MakeApp) -> None:
    foreign = await harness.instance(storage, workflow_name="somebody else's")
    app = await make_app(quick)
    assert await (await app.start(quick)).result(10) == "quick"
    instance = await storage.get_instance(foreign)
    assert instance is not None
    assert (instance.status, instance.lock_token) == (WorkflowStatus.RUNNING, 0)


async def test_two_apps_on_one_database_run_their_own(make_app: MakeApp) -> None:
    first, second = await make_app(quick), await make_app(occupied)
    client = await make_app(worker=False)
    handles = [await client.start(quick), await client.start(occupied, 0.0)]
    assert [await handle.result(10) for handle in handles] == ["quick", "done"]
    assert first.worker is not second.worker


async def test_services_of_one_code_never_touch_each_others_work(harness: Harness, make_app: MakeApp) -> None:
    await make_app(quick, service="north")
    south = App(harness.url, workflows=[quick], worker=False, service="south")
    async with south:
        handle = await south.start(quick)
        await asyncio.sleep(0.5)
        assert (await handle.instance()).lock_token == 0
        async with App(harness.url, workflows=[quick], service="south", settings=QUICK):
            assert await handle.result(10) == "quick"


async def test_no_more_instances_run_at_once_than_allowed(make_app: MakeApp) -> None:
    global most
    most = 0
    app = await make_app(occupied, settings=msgspec.structs.replace(QUICK, concurrency=3))
    handles = [await app.start(occupied, 0.05) for _ in range(12)]
    for handle in handles:
        await handle.result(20)
    assert most <= 3


@workflow(max_concurrent=2)
async def greedy(seconds: float) -> None:
    await busy(seconds)


@workflow(max_concurrent=1)
async def modest() -> str:
    return "modest"


@pytest.mark.parametrize("by_client", [False, True])
async def test_no_more_instances_of_a_workflow_run_at_once_than_it_allows(
    harness: Harness, make_app: MakeApp, by_client: bool
) -> None:
    global most
    most = 0
    app = await make_app(greedy)
    client = await make_app(worker=False) if by_client else app
    handles = [await client.start(greedy, 0.05) for _ in range(8)]
    for handle in handles:
        await handle.result(20)
    assert most == 2


async def test_a_workflow_at_its_limit_does_not_delay_others(make_app: MakeApp) -> None:
    app = await make_app(greedy, quick, modest)
    for _ in range(150):  # more than are claimed at once, and all of them before the others
        await app.start(greedy, 30.0)
    async with asyncio.timeout(10):
        assert await (await app.start(quick)).result() == "quick"
        assert await (await app.start(modest)).result() == "modest"


async def test_a_backlog_without_limit_leaves_room_for_a_workflow_with_one(make_app: MakeApp) -> None:
    app = await make_app(occupied, modest, settings=msgspec.structs.replace(QUICK, concurrency=1))
    for _ in range(50):
        await app.start(occupied, 0.3)
    async with asyncio.timeout(8):
        assert await (await app.start(modest)).result() == "modest"


def test_a_limit_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="max_concurrent"):
        workflow(max_concurrent=0)(occupied.fn)


async def test_a_slow_workflow_does_not_delay_others(make_app: MakeApp) -> None:
    app = await make_app(occupied, quick)
    await app.start(occupied, 30.0)
    async with asyncio.timeout(5):
        assert await (await app.start(quick)).result() == "quick"


@workflow
async def napper() -> str:
    await sleep(1)
    return "awake"


async def test_a_worker_that_has_no_room_fires_timers_for_others(make_app: MakeApp) -> None:
    app = await make_app(occupied, napper, settings=msgspec.structs.replace(QUICK, concurrency=1))
    nap = await app.start(napper)

    async def has_become(status: WorkflowStatus) -> bool:
        return await nap.status() is status

    await until(lambda: has_become(WorkflowStatus.WAITING_FOR_TIMER))
    await app.start(occupied, 30.0)
    await until(lambda: has_become(WorkflowStatus.RUNNING))


@workflow
async def waits_for_nobody() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_poisoned_instance_backs_off_visibly_and_never_fails(make_app: MakeApp) -> None:
    app = await make_app(waits_for_nobody)
    await app.start(waits_for_nobody, id="poison")

    async def parked() -> bool:
        return (await app.handle("poison").instance()).parked_reason is not None

    await until(parked)
    instance = await app.handle("poison").instance()
    assert instance.status is WorkflowStatus.RUNNING
    assert "nothing durable will ever bring about" in (instance.parked_reason or "")
    assert instance.parked_until is not None
    assert instance.parked_until.year < 9999


@pytest.mark.databases("sqlite", "postgres")
async def test_sigterm_hands_everything_back(harness: Harness) -> None:
    environment = {**os.environ, "ROMANCY_TEST_URL": harness.url, "HANG": "charge"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "romancy", "worker", "tests.engine.served:app"),
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    async with App(harness.url, worker=False) as client:
        handle = await client.start(fulfil, "17")

        async def taken() -> bool:
            return (await handle.instance()).locked_by is not None

        await until(taken)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
        assert (await handle.instance()).locked_by is None


async def test_stopping_an_app_lets_others_go_on_at_once(harness: Harness) -> None:
    async with App(harness.url, workflows=[occupied], settings=msgspec.structs.replace(QUICK, drain_sec=0.0)) as app:
        handle = await app.start(occupied, 0.3)
        await asyncio.sleep(0.1)
    patient = Settings(poll_sec=0.1, lock_timeout_sec=60.0)
    async with App(harness.url, workflows=[occupied], settings=patient) as heir:
        assert await heir.handle(handle.id).result(10) == "done"


def test_an_app_refuses_what_is_no_workflow() -> None:
    with pytest.raises(TypeError, match="@workflow"):
        App("sqlite://:memory:", workflows=[test_an_app_refuses_what_is_no_workflow])  # type: ignore[list-item]
    with pytest.raises(DuplicateNameError):
        App("sqlite://:memory:", workflows=[quick, workflow(name="quick")(occupied.fn)])


released = threading.Event()


@activity
def wait_for_release() -> None:
    released.wait(10)


@activity
def at_once() -> str:
    return "done"


@workflow
async def held_up() -> None:
    await wait_for_release()


@workflow
async def prompt() -> str:
    return await at_once()


async def test_many_slow_threads_do_not_keep_a_quick_one_waiting(make_app: MakeApp) -> None:
    app = await make_app(held_up, prompt)
    released.clear()
    slow = [await app.start(held_up) for _ in range(40)]
    try:
        assert await (await app.start(prompt)).result(5) == "done"
    finally:
        released.set()
    for handle in slow:
        await handle.result(10)


async def test_what_fails_keeps_nothing_else_from_being_done() -> None:
    done = []

    async def item(number: int) -> None:
        if number == 1:
            raise ConnectionError("the line is cut")
        await asyncio.sleep(0.01)
        done.append(number)

    with pytest.raises(ExceptionGroup) as caught:
        await for_each(range(4), item)
    assert done == [0, 2, 3]
    assert [str(error) for error in caught.value.exceptions] == ["the line is cut"]


@pytest.mark.filterwarnings("error")
async def test_what_is_given_up_before_it_began_is_given_up_quietly() -> None:
    doing = asyncio.create_task(for_each(range(1000), lambda _: asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    gc.collect()
