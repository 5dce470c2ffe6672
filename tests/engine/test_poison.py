"""What no worker survives, or no code can run, is set aside where everybody sees it, and goes on when it can."""

import asyncio
import os
import sys
import time
from typing import Any

import msgspec
import pytest

from romancy import App, Workflow, WorkflowFailedError, activity, receive, subscribe, workflow
from romancy.cli.main import main as romancy
from romancy.storage import HistoryEventType, SQLStorage, WorkflowInstance
from tests.engine.conftest import QUICK, MakeApp
from tests.engine.crashing import expire_locks
from tests.engine.poisonous import SETTINGS, deadly
from tests.engine.test_messages import until, waits
from tests.harness import Harness

PARKS_AT_FIVE = msgspec.structs.replace(QUICK, takeovers=5)


@activity
async def prepare() -> None: ...


@workflow
async def harmless() -> str:
    await prepare()
    return "done"


async def left_behind(storage: SQLStorage, *, takeovers: int) -> None:
    """An instance that a worker has just vanished with, after so many others."""
    await storage.create_instance(WorkflowInstance("victim", "harmless"))
    for number in range(takeovers + 1):
        lock = await storage.try_acquire_lock("victim", f"dead-{number}", 30)
        assert lock is not None
        if number:
            await storage.count_takeover("victim", lock=lock)
        await expire_locks(storage)


async def is_parked(app: App, instance_id: str) -> None:
    async def parked() -> bool:
        return (await app.handle(instance_id).instance()).parked_until is not None

    await until(parked)


async def test_an_instance_that_workers_keep_dying_with_is_parked_for_good(
    storage: SQLStorage, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    await left_behind(storage, takeovers=4)
    app = await make_app(harmless, settings=PARKS_AT_FIVE)
    await is_parked(app, "victim")
    instance = await app.handle("victim").instance()
    assert "5 workers in a row vanished" in (instance.parked_reason or "")
    assert (instance.parked_until or instance.started_at).year == 9999  # type: ignore[union-attr]
    assert await app.handle("victim").history() == []
    assert "; mend that, then `romancy unpark victim`" in caplog.text

    await storage.unpark("victim")
    assert await app.handle("victim").result(10) == "done"


async def test_before_that_it_backs_off_and_is_tried_again(
    storage: SQLStorage, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    await left_behind(storage, takeovers=2)
    app = await make_app(harmless, settings=PARKS_AT_FIVE)
    await is_parked(app, "victim")
    assert "; it is tried again in " in caplog.text
    assert await app.handle("victim").result(10) == "done"


async def test_the_first_workers_that_die_are_followed_at_once(storage: SQLStorage, make_app: MakeApp) -> None:
    await left_behind(storage, takeovers=1)
    app = await make_app(harmless, settings=PARKS_AT_FIVE)
    assert await app.handle("victim").result(10) == "done"
    assert await storage.conn().fetch_value("SELECT takeovers FROM romancy_setbacks") == 2


@pytest.mark.databases("sqlite")
async def test_a_workflow_that_kills_its_process_does_so_a_few_times_only(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    async with App(harness.url, worker=False) as client:
        handle = await client.start(deadly, id="poison")
        died = 0
        while (await handle.instance()).parked_until is None or died < 3:
            died += await run_until_it_dies(harness, handle)
        assert died == 3
        assert "vanished" in ((await handle.instance()).parked_reason or "")

        await asyncio.to_thread(romancy, ["list", "--url", harness.url])
        await asyncio.to_thread(romancy, ["show", "poison", "--url", harness.url])
        shown = capsys.readouterr().out
        assert "(parked)" in shown
        assert "until it is unparked: WorkerVanishedError: 3 workers in a row vanished" in shown
        await asyncio.to_thread(romancy, ["unpark", "poison", "--url", harness.url])
        async with App(harness.url, workflows=[deadly], settings=SETTINGS):
            assert await handle.result(10) == "alive"


async def run_until_it_dies(harness: Harness, handle: Any) -> bool:
    """Run a worker; whether its workflow has killed it, or else was set aside."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.engine.poisonous", harness.url, env={**os.environ, "DEADLY": "1"}
    )
    try:
        async with asyncio.timeout(30):
            while process.returncode is None:
                reason = (await handle.instance()).parked_reason or ""
                if "3 workers" in reason:
                    return False
                await asyncio.sleep(0.02)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    return process.returncode == 42


# Code that does not fit.


@activity
async def old_step() -> None: ...


@activity
async def new_step() -> None: ...


def first_version() -> Workflow[Any, str]:
    @workflow(name="moving")
    async def moving() -> str:
        await old_step()
        await subscribe("go")
        await receive("go")
        return "first"

    return moving


def second_version() -> Workflow[Any, str]:
    @workflow(name="moving")
    async def moving() -> str:
        await new_step()
        await subscribe("go")
        await receive("go")
        return "second"

    return moving


async def test_what_the_code_does_not_fit_rests_until_there_is_other_code(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    async with App(harness.url, workflows=[first_version()], settings=QUICK) as app:
        await waits(await app.start(app.workflows["moving"], id="it"))
    async with App(harness.url, workflows=[second_version()], settings=QUICK) as app:
        await app.publish("go", None)
        await is_parked(app, "it")
        token = (await app.handle("it").instance()).lock_token
    assert "; it goes on when a worker with other code starts, or after `romancy unpark it`" in caplog.text
    async with App(harness.url, workflows=[second_version()], settings=QUICK) as app:
        await asyncio.sleep(0.5)
        instance = await app.handle("it").instance()
        assert "NonDeterminismError" in (instance.parked_reason or "")
        assert (instance.parked_until.year if instance.parked_until else None, instance.lock_token) == (9999, token)
    async with App(harness.url, workflows=[first_version()], settings=QUICK) as app:
        assert await app.handle("it").result(10) == "first"


def returning(kind: type[Any], *, undone: list[str]) -> Workflow[Any, str]:
    """A workflow whose one activity returns text, whatever its type hint says."""

    async def refund() -> None:
        undone.append("refund")

    async def charge() -> Any:
        return "receipt"

    charge.__annotations__["return"] = kind
    charged = activity(compensate=refund)(charge)

    @workflow(name="paying")
    async def paying() -> str:
        receipt = str(await charged())
        await subscribe("go")
        await receive("go")
        return receipt

    return paying


async def test_another_type_of_a_recorded_result_parks_and_undoes_nothing(harness: Harness) -> None:
    undone: list[str] = []
    async with App(harness.url, workflows=[returning(str, undone=undone)], settings=QUICK) as app:
        await waits(await app.start(app.workflows["paying"], id="it"))
    async with App(harness.url, workflows=[returning(int, undone=undone)], settings=QUICK) as app:
        await app.publish("go", None)
        await is_parked(app, "it")
        reason = (await app.handle("it").instance()).parked_reason or ""
        assert "step 'charge:1': its recorded result is not what the code expects by now" in reason
        assert "Expected `int`, got `str`" in reason
    assert undone == []
    async with App(harness.url, workflows=[returning(str, undone=undone)], settings=QUICK) as app:
        await app.storage.unpark("it")
        assert await app.handle("it").result(10) == "receipt"


async def test_a_result_that_does_not_fit_its_type_hint_is_a_failure_of_the_step(harness: Harness) -> None:
    undone: list[str] = []
    async with App(harness.url, workflows=[returning(int, undone=undone)], settings=QUICK) as app:
        handle = await app.start(app.workflows["paying"], id="it")
        with pytest.raises(WorkflowFailedError, match="the result of charge does not fit its type hint"):
            await handle.result(10)
        (charged,) = [event for event in await handle.history() if event.activity_id == "charge:1"]
    assert charged.event_type is HistoryEventType.ACTIVITY_FAILED


def taking_cents(*, required: bool) -> Workflow[Any, str]:
    if not required:

        @workflow(name="taking")
        async def taking(order: str) -> str:
            await subscribe("go")
            await receive("go")
            return order

        return taking

    @workflow(name="taking")
    async def taking_more(order: str, cents: int) -> str:
        await subscribe("go")
        await receive("go")
        return f"{order}: {cents}"

    return taking_more


async def test_an_argument_more_than_an_instance_was_started_with_parks_until_there_is_other_code(
    harness: Harness,
) -> None:
    async with App(harness.url, workflows=[taking_cents(required=False)], settings=QUICK) as app:
        await waits(await app.start(app.workflows["taking"], "17", id="it"))
    async with App(harness.url, workflows=[taking_cents(required=True)], settings=QUICK) as app:
        await app.publish("go", None)
        await is_parked(app, "it")
        instance = await app.handle("it").instance()
    assert "does not take the arguments with which the instance was started" in (instance.parked_reason or "")
    assert "cents" in (instance.parked_reason or "")
    assert (instance.parked_until.year if instance.parked_until else None) == 9999
    async with App(harness.url, workflows=[taking_cents(required=False)], settings=QUICK) as app:
        assert await app.handle("it").result(10) == "17"


async def test_an_input_of_another_type_parks_too(storage: SQLStorage, make_app: MakeApp) -> None:
    await storage.create_instance(WorkflowInstance("it", "taking", input_data='{"order": 17}'))
    app = await make_app(taking_cents(required=False))
    await is_parked(app, "it")
    assert "Expected `str`, got `int`" in ((await app.handle("it").instance()).parked_reason or "")


async def test_a_body_that_fails_before_its_history_ends_says_with_what(harness: Harness) -> None:
    @workflow(name="moving")
    async def moving() -> str:
        raise KeyError("cents")

    async with App(harness.url, workflows=[first_version()], settings=QUICK) as app:
        await waits(await app.start(app.workflows["moving"], id="it"))
    async with App(harness.url, workflows=[moving], settings=QUICK) as app:
        await app.publish("go", None)
        await is_parked(app, "it")
        assert "it has ended with KeyError: 'cents'" in ((await app.handle("it").instance()).parked_reason or "")


@activity
async def block_the_loop() -> None:
    time.sleep(0.8)  # noqa: ASYNC251 (what beginners write)


@workflow
async def blocking() -> None:
    await block_the_loop()


@pytest.mark.databases("sqlite")
async def test_an_activity_that_blocks_the_event_loop_for_too_long_is_not_repeated_for_ever(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    hasty = msgspec.structs.replace(QUICK, heartbeat_sec=0.1, lock_timeout_sec=0.4, takeovers=3)
    app = await make_app(blocking, settings=hasty)
    handle = await app.start(blocking, id="slow")

    async def parked() -> bool:
        return "3 workers in a row" in ((await handle.instance()).parked_reason or "")

    await until(parked)
    assert "a blocking call in an async function?" in ((await handle.instance()).parked_reason or "")
    assert [record for record in caplog.records if "the event loop stood still for" in record.getMessage()]
