"""Replay: the same history leads the same code to the same place, and other code is noticed before it does harm."""

import asyncio
import contextvars
import gc
from collections.abc import Callable
from typing import Any

import pytest

from romancy import App, Settings, Workflow, activity, conn, is_replaying, receive, sleep, subscribe, workflow
from romancy.engine.steps import Step
from romancy.storage import WorkflowStatus
from tests.engine.conftest import QUICK, MakeApp
from tests.engine.test_messages import until, waits
from tests.harness import Harness

COLD = Settings(poll_sec=0.05, heartbeat_sec=0.2, lock_timeout_sec=2.0, drain_sec=0.5, warm=0)

calls: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()


@activity
async def step(name: str) -> str:
    calls.append(name)
    return name


@activity
async def slow_step(name: str, seconds: float) -> str:
    await asyncio.sleep(seconds)
    calls.append(name)
    return name


@workflow
async def in_two_sittings() -> list[str]:
    first = await asyncio.gather(slow_step("late", 0.05), step("early"))
    await subscribe("go")
    await receive("go")
    order = [await done for done in asyncio.as_completed([slow_step("second", 0.05), step("first")])]
    await receive("go")
    return [*first, *order]


async def test_recorded_steps_are_not_run_again_and_come_in_the_recorded_order(make_app: MakeApp) -> None:
    app = await make_app(in_two_sittings, settings=COLD)
    handle = await app.start(in_two_sittings)
    for _ in range(2):
        await waits(handle)
        await app.publish("go", None)
        await asyncio.sleep(0.2)
    assert await handle.result(10) == ["late", "early", "first", "second"]
    assert calls == ["early", "late", "first", "second"]


seen_by_sitting: list[list[str]] = []


@workflow
async def family_walk() -> None:
    seen: list[str] = []

    async def walk(name: str) -> None:
        for place in range(2):
            seen.append(f"{name} leaves for {place}")
            await step(f"{name}{place}")
            seen.append(f"{name} comes to {place}")

    await walk("parent")
    children = [asyncio.create_task(walk(name)) for name in ("ann", "ben")]
    await walk("parent")  # the children have yet to leave
    await asyncio.gather(*children)
    seen_by_sitting.append(seen)
    await subscribe("go")
    await receive("go")


async def test_tasks_take_turns_on_replay_as_they_did_before(make_app: MakeApp) -> None:
    seen_by_sitting.clear()
    app = await make_app(family_walk, settings=COLD)
    handle = await app.start(family_walk)
    await waits(handle)
    await app.publish("go", None)
    await handle.result(10)
    live, replayed = seen_by_sitting
    assert replayed == live


left_behind = contextvars.ContextVar("left_behind", default="nothing")


@activity
async def leave_something() -> str:
    found = left_behind.get()
    left_behind.set("something")
    return found


@workflow
async def one_after_the_other() -> list[str]:
    return [await leave_something() for _ in range(3)]


async def test_an_activity_sees_no_context_variable_of_the_one_before(make_app: MakeApp) -> None:
    app = await make_app(one_after_the_other)
    handle = await app.start(one_after_the_other)
    assert await handle.result(10) == ["nothing", "nothing", "nothing"]


def version(number: int) -> Workflow[Any, str]:
    """Two versions of one workflow: the second calls another activity first."""

    @workflow(name="changing")
    async def changing() -> str:
        await step("one") if number == 1 else await other("one")
        await subscribe("go")
        await receive("go")
        return f"version {number}"

    return changing


@activity
async def other(name: str) -> str:
    return name


async def parked(app: App, instance_id: str) -> str:
    async def is_parked() -> bool:
        return (await app.handle(instance_id).instance()).parked_reason is not None

    await until(is_parked)
    return (await app.handle(instance_id).instance()).parked_reason or ""


async def test_code_that_does_not_fit_its_history_parks_the_instance_and_goes_on_when_put_back(
    harness: Harness,
) -> None:
    async with App(harness.url, workflows=[version(1)], settings=QUICK) as app:
        handle = await app.start(app.workflows["changing"], id="it")
        await waits(handle)
    async with App(harness.url, workflows=[version(2)], settings=QUICK) as app:
        await app.publish("go", None)
        reason = await parked(app, "it")
        assert "NonDeterminismError" in reason
        assert "step:1" in reason
        assert await app.handle("it").status() is WorkflowStatus.RUNNING
    async with App(harness.url, workflows=[version(1)], settings=QUICK) as app:
        await app.storage.unpark("it")
        assert await app.handle("it").result(10) == "version 1"


def called_with(argument: str) -> Workflow[Any, None]:
    @workflow(name="calling")
    async def calling() -> None:
        await step(argument)
        await subscribe("go")
        await receive("go")

    return calling


async def test_other_arguments_than_recorded_are_shown_in_the_reason(harness: Harness) -> None:
    async with App(harness.url, workflows=[called_with("old")], settings=QUICK) as app:
        await waits(await app.start(app.workflows["calling"], id="it"))
    async with App(harness.url, workflows=[called_with("new")], settings=QUICK) as app:
        await app.publish("go", None)
        reason = await parked(app, "it")
    assert '"new"' in reason
    assert '"old"' in reason


@pytest.mark.parametrize("argument", ["o" * 3000, "n" * 3000], ids=["the same", "others"])
async def test_arguments_too_large_to_be_recorded_are_known_by_their_hash(harness: Harness, argument: str) -> None:
    async with App(harness.url, workflows=[called_with("o" * 3000)], settings=QUICK, max_payload_bytes=5000) as app:
        await waits(await app.start(app.workflows["calling"], id="it"))
        recorded = await app.storage.get_history_event("it", "step:1")
        assert recorded is not None
        assert '"input":' not in (recorded.event_data or "")  # beside a result that is as large
    async with App(harness.url, workflows=[called_with(argument)], settings=QUICK, max_payload_bytes=5000) as app:
        await app.publish("go", None)
        if argument.startswith("o"):
            await app.handle("it").result(10)
        else:
            assert "other arguments than were recorded" in await parked(app, "it")


@workflow
async def knows_its_past() -> list[bool]:
    seen = [is_replaying()]
    await step("a")
    seen.append(is_replaying())
    await subscribe("go")
    await receive("go")
    seen.append(is_replaying())
    return seen


async def test_a_body_can_tell_replay_from_the_present(make_app: MakeApp) -> None:
    app = await make_app(knows_its_past, settings=COLD)
    handle = await app.start(knows_its_past)
    await waits(handle)
    await app.publish("go", None)
    assert (await handle.result(10))[:2] == [True, True]


@workflow
async def guarded() -> str:
    try:
        await sleep(3600)
    except BaseException as error:
        calls.append(type(error).__name__)
        raise
    finally:
        await step("in finally")
    return "never"


async def test_a_suspended_body_is_unwound_without_doing_anything(make_app: MakeApp) -> None:
    app = await make_app(guarded, settings=COLD)
    handle = await app.start(guarded)

    async def asleep() -> bool:
        return await handle.status() is WorkflowStatus.WAITING_FOR_TIMER and "Teardown" in calls

    await until(asleep)
    assert calls == ["Teardown"]
    assert await handle.history() == []


@activity(transactional=True)
async def pay(name: str, fail: bool) -> int:
    await conn().execute("INSERT INTO payments (name) VALUES (:name)", name=name)
    if fail and not calls:
        calls.append("failed once")
        raise ConnectionError("after the insert")
    return int(await conn().fetch_value("SELECT COUNT(*) FROM payments"))


@workflow
async def paying(fail: bool) -> int:
    return await pay("a", fail)


@pytest.mark.parametrize("fail", [False, True])
async def test_a_transactional_activity_does_its_sql_exactly_once(
    harness: Harness, make_app: Callable[..., Any], fail: bool
) -> None:
    app = await make_app(paying)
    await app.storage.conn().execute("CREATE TABLE IF NOT EXISTS payments (name VARCHAR(20))")
    await app.storage.conn().execute("DELETE FROM payments")
    assert await (await app.start(paying, fail)).result(10) == 1


@workflow
async def by_a_deadline() -> list[bool]:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 0.1
    missed = []
    for _ in range(4):
        await slow_step("tick", 0.04)
        missed.append(loop.time() > deadline)
        await subscribe("go")
        await receive("go")
    return missed


async def test_the_loops_time_is_the_same_on_every_replay(make_app: MakeApp) -> None:
    app = await make_app(by_a_deadline, settings=COLD)
    handle = await app.start(by_a_deadline)
    for _ in range(4):
        await waits(handle)
        seen = await handle.history()
        await app.publish("go", None)

        async def went_on(seen: list[Any] = seen) -> bool:
            return len(await handle.history()) > len(seen)

        await until(went_on)
    missed = await handle.result(10)
    assert missed == sorted(missed)
    assert missed[-1]


@workflow
async def tries_twice() -> list[Any]:
    await subscribe("mail")
    heard: list[Any] = []
    try:
        async with asyncio.timeout(0.2):
            heard.append((await receive("mail")).data)
    except TimeoutError:
        heard.append(None)
    heard.append((await receive("mail")).data)
    return heard


async def test_a_message_never_goes_to_a_receive_that_was_given_up(make_app: MakeApp) -> None:
    app = await make_app(tries_twice, settings=COLD)
    handle = await app.start(tries_twice)

    async def gave_up() -> bool:
        history = await handle.history()
        return [event.event_type for event in history][-1:] == ["TimerExpired"]

    await until(gave_up)
    await waits(handle)
    await app.publish("mail", "only one")
    assert await handle.result(10) == [None, "only one"]


@workflow
async def alarmed() -> list[str]:
    loop, rung = asyncio.get_running_loop(), asyncio.Event()
    heard: list[str] = []

    def first() -> None:
        heard.append("first")
        loop.call_later(0.3, second)

    def second() -> None:
        heard.append("second")
        rung.set()

    loop.call_later(0.05, first)
    before = loop.time()
    await rung.wait()
    assert loop.time() - before >= 0.3
    await subscribe("go")
    await receive("go")
    return heard


async def test_a_callback_that_sets_another_timer_waits_for_that_one(make_app: MakeApp) -> None:
    app = await make_app(alarmed, settings=COLD)
    handle = await app.start(alarmed)
    await waits(handle)
    await app.publish("go", None)
    assert await handle.result(10) == ["first", "second"]
    timers = [event.activity_id for event in await handle.history() if event.event_type == "TimerExpired"]
    assert timers == ["0/timer:1", "0/timer:2"] or len(set(timers)) == 2


@workflow
async def long_past() -> int:
    for _ in range(300):
        await step("again")
    await subscribe("go")
    await receive("go")
    gc.collect()  # of tests before this one
    return sum(isinstance(thing, Step) for thing in gc.get_objects())


async def test_a_replay_keeps_no_step_that_it_has_passed(make_app: MakeApp) -> None:
    app = await make_app(long_past, settings=COLD)
    handle = await app.start(long_past)
    await waits(handle)
    await app.publish("go", None)
    assert await handle.result(10) < 100
