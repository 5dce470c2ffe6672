"""What a body should not do: it is told so, and nobody else suffers from it."""

import asyncio
import gc
from typing import Any

import pytest

from romancy import (
    NO_RETRY,
    App,
    activity,
    emit,
    receive,
    recur,
    sleep,
    subscribe,
    workflow,
)
from romancy.storage import SQLStorage, WorkflowStatus
from tests.engine.conftest import MakeApp
from tests.engine.test_messages import until

at_hand: dict[str, Any] = {}


@activity
async def take_a_step() -> None: ...


@workflow
async def well_behaved() -> str:
    await take_a_step()
    return "done"


# Swallowing and spinning.


@workflow
async def swallowing() -> None:
    while True:
        try:
            await sleep(3600)
        except BaseException:
            continue


async def test_a_body_that_swallows_everything_keeps_no_worker_from_stopping(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app: App = await make_app(swallowing)
    handle = await app.start(swallowing)

    async def asleep() -> bool:
        return await handle.status() is WorkflowStatus.WAITING_FOR_TIMER

    await until(asleep)
    assert app.worker is not None
    await app.worker.stop()
    gc.collect()
    assert "catch Exception rather than BaseException" in caplog.text


@workflow
async def spinning() -> None:
    while True:
        await asyncio.sleep(0)


async def test_a_body_that_spins_takes_no_place_for_ever(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("romancy.engine.loop._LONGEST_SPIN", 1000)
    app: App = await make_app(spinning, well_behaved)
    handle = await app.start(spinning)

    async def parked() -> bool:
        return "spins" in ((await handle.instance()).parked_reason or "")

    async def given_up() -> bool:
        return app.worker is not None and app.worker.executor.execution_of(handle.id) is None

    await until(parked)
    await until(given_up)
    assert f"instance {handle.id} could not be run; it is tried again in 2.0 s" in caplog.text


# Around the engine.


@workflow
async def meddling(how: str) -> str:
    app: App = at_hand["app"]
    try:
        match how:
            case "publish":
                await app.publish("news", 1)
            case "start":
                await app.start(well_behaved)
            case "result":
                await app.handle("first").result()
            case "status":
                await app.handle("first").status()
            case "transaction":
                async with app.storage.transaction():
                    pass
    except Exception as error:
        return str(error)
    return "unnoticed"


@pytest.mark.parametrize("how", ["publish", "start", "result", "status", "transaction"])
async def test_an_app_is_refused_in_a_body(make_app: MakeApp, how: str) -> None:
    app = at_hand["app"] = await make_app(meddling, well_behaved)
    assert await (await app.start(well_behaved, id="first")).result(10) == "done"
    assert "cannot be used in a workflow's body" in await (await app.start(meddling, how)).result(10)
    assert await (await app.start(well_behaved)).result(10) == "done"


@workflow
async def meddling_with_the_storage() -> None:
    storage: SQLStorage = at_hand["storage"]
    await storage.publish_to_channel("news", "1")


async def test_a_storage_that_is_used_in_a_body_goes_on_working_for_others(
    make_app: MakeApp, storage: SQLStorage
) -> None:
    at_hand["storage"] = storage
    app = await make_app(meddling_with_the_storage)
    handle = await app.start(meddling_with_the_storage)

    async def noticed() -> bool:
        instance = await handle.instance()
        ended = app.worker.executor.execution_of(handle.id) is None  # until then its event loop is there
        return ended and (instance.parked_reason is not None or instance.status is WorkflowStatus.FAILED)

    await until(noticed)
    async with asyncio.timeout(5):
        await storage.publish_to_channel("news", "2")


# Mistakes.


@workflow
async def mistaken(what: str) -> str:
    try:
        match what:
            case "mode":
                await subscribe("news", "brodcast")
            case "no channel":
                await receive("")
            case "long channel":
                await receive("x" * 300)
            case "same event":
                await emit("paid", {}, event_id="payment 1")
                await emit("paid", {}, event_id="payment 1")
    except Exception as error:
        return type(error).__name__
    return "unnoticed"


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("mode", "ValueError"),
        ("no channel", "InvalidKeyError"),
        ("long channel", "InvalidKeyError"),
        ("same event", "OutboxEventExistsError"),
    ],
)
async def test_a_mistake_is_an_error_where_it_is_made(make_app: MakeApp, what: str, error: str) -> None:
    app = await make_app(mistaken)
    assert await (await app.start(mistaken, what)).result(10) == error


@activity(retry=NO_RETRY)
async def cancel_myself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


@workflow
async def cancelling_itself() -> None:
    await asyncio.gather(cancel_myself(), sleep(3600))


async def test_an_activity_that_cancels_itself_is_not_waited_for_in_vain(make_app: MakeApp) -> None:
    app = await make_app(cancelling_itself)
    handle = await app.start(cancelling_itself)

    async def parked() -> bool:
        return "was cancelled by what it called" in ((await handle.instance()).parked_reason or "")

    await until(parked)


@workflow
async def started_over(rounds: int, where: str) -> int:
    async def start_over() -> None:
        await take_a_step()
        recur(rounds - 1, where)

    if rounds == 0:
        return rounds
    async with asyncio.TaskGroup() as group:
        group.create_task(sleep(3600))
        async with asyncio.TaskGroup() as inner:
            inner.create_task(sleep(3600))
            if where == "in a task":
                inner.create_task(start_over())
            else:
                await start_over()
    return -1


@pytest.mark.parametrize("where", ["in a task", "beside tasks"])
async def test_a_body_can_start_over_from_within_task_groups(make_app: MakeApp, where: str) -> None:
    app = await make_app(started_over)
    assert await (await app.start(started_over, 2, where)).result(10) == 0


begun: list[str] = []


@activity
async def begin(what: str, seconds: float = 0.0) -> None:
    begun.append(what)
    await asyncio.sleep(seconds)


@workflow
async def changing_its_mind() -> None:
    background = asyncio.ensure_future(begin("background", 0.2))
    await begin("first")
    second = asyncio.ensure_future(begin("second"))
    await asyncio.sleep(0)
    second.cancel()
    await background


async def test_an_activity_that_is_cancelled_before_it_begins_never_begins(make_app: MakeApp) -> None:
    begun.clear()
    app = await make_app(changing_its_mind)
    await (await app.start(changing_its_mind)).result(10)
    assert sorted(begun) == ["background", "first"]
