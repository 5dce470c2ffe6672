"""Hooks are told what a worker does, once and only live, and can change nothing."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from romancy import (
    App,
    Hooks,
    Retry,
    StepEvent,
    WorkflowEvent,
    WorkflowFailedError,
    activity,
    receive,
    recur,
    subscribe,
    workflow,
)
from romancy.logs import InstanceFilter
from tests.engine.conftest import QUICK, MakeApp
from tests.engine.test_messages import until, waits
from tests.harness import Harness

pytestmark = pytest.mark.databases("sqlite")

EVENTS = [name for name in dir(Hooks) if name.startswith("on_")]


class Diary(Hooks):
    """Writes down all it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        for name in EVENTS:
            setattr(self, name, lambda event, name=name: self.told.append((name.removeprefix("on_"), event)))

    @property
    def lines(self) -> list[tuple[str, ...]]:
        return [(name, *self.line(event)) for name, event in self.told]

    @staticmethod
    def line(event: WorkflowEvent | StepEvent) -> tuple[str, ...]:
        if isinstance(event, StepEvent):
            return (event.step_id, str(event.attempt), *([event.error_type] if event.error_type else []))
        return tuple(filter(None, (event.status, event.reason, event.error_type)))

    async def rests(self) -> None:
        async def ended() -> bool:
            return bool(self.told) and self.told[-1][0] in ("workflow_finished", "workflow_parked")

        await until(ended)


class Broken(Hooks):
    """Raises whatever it is told."""

    def __init__(self) -> None:
        for name in EVENTS:
            setattr(self, name, self.breaks)

    def breaks(self, event: object) -> None:
        raise asyncio.CancelledError if isinstance(event, StepEvent) else ValueError("broken")


async def undo(number: int) -> None:
    return None


@activity(retry=Retry(max_attempts=3, initial_sec=0.001), compensate=undo)
async def flaky(number: int) -> int:
    tries.append(number)
    if len(tries) < number:
        raise ConnectionError("not yet")
    return number


tries: list[int] = []


@workflow
async def works(number: int) -> int:
    await subscribe("go")
    await receive("go")
    return await flaky(number)


@workflow
async def fails() -> None:
    await flaky(0)
    raise ValueError("on purpose")


@workflow
async def rounds(left: int) -> str:
    if left:
        recur(left - 1)
    return "done"


@pytest.fixture(autouse=True)
def first_try() -> None:
    tries.clear()


async def test_hooks_are_told_of_every_run_and_attempt(make_app: MakeApp) -> None:
    diary = Diary()
    app = await make_app(works, hooks=[diary])
    handle = await app.start(works, 2)
    await waits(handle)
    await app.publish("go", 1)
    assert await handle.result(10) == 2
    await diary.rests()

    assert diary.lines == [
        ("workflow_started",),
        ("step_started", "subscribe:1", "1"),
        ("step_finished", "subscribe:1", "1"),
        ("workflow_suspended", "waiting"),
        ("workflow_started",),
        ("step_started", "flaky:1", "1"),
        ("step_failed", "flaky:1", "1", "ConnectionError"),
        ("step_started", "flaky:1", "2"),
        ("step_finished", "flaky:1", "2"),
        ("workflow_finished", "completed"),
    ]
    events = [event for _, event in diary.told]
    assert {(event.instance_id, event.workflow_name) for event in events} == {(handle.id, "works")}
    assert [event.resumed for event in events if isinstance(event, WorkflowEvent)] == [False, False, True, True]
    assert all(event.duration_sec > 0 for name, event in diary.told if not name.endswith("started"))


async def test_replaying_is_not_told(make_app: MakeApp, harness: Harness) -> None:
    async with App(harness.url, workflows=[works], settings=QUICK) as first:
        await waits(await first.start(works, 1, id="i"))

    diary = Diary()
    app = await make_app(works, hooks=[diary])
    await app.publish("go", 1)
    await app.handle("i").result(10)
    await diary.rests()
    assert [line[1] for line in diary.lines if line[0] == "step_started"] == ["flaky:1"]


async def test_a_failed_workflow_is_told_with_its_compensations(make_app: MakeApp) -> None:
    diary = Diary()
    app = await make_app(fails, hooks=[diary])
    with pytest.raises(WorkflowFailedError):
        await (await app.start(fails)).result(10)
    await diary.rests()
    assert [line[0] for line in diary.lines] == [
        "workflow_started",
        *("step_started", "step_finished"),
        *("step_started", "step_finished"),
        "workflow_finished",
    ]
    kinds = [event.kind for _, event in diary.told if isinstance(event, StepEvent)]
    assert kinds == ["activity", "activity", "compensation", "compensation"]
    assert diary.lines[-1] == ("workflow_finished", "failed", "ValueError")


async def test_each_round_is_told(make_app: MakeApp) -> None:
    diary = Diary()
    app = await make_app(rounds, hooks=[diary])
    await (await app.start(rounds, 2)).result(10)
    await diary.rests()
    again = [("workflow_started",), ("workflow_suspended", "starting over")]
    assert diary.lines == [*again, *again, ("workflow_started",), ("workflow_finished", "completed")]


async def test_what_cannot_be_run_is_told_as_parked(make_app: MakeApp, harness: Harness) -> None:
    async with App(harness.url, workflows=[works], settings=QUICK) as first:
        await waits(await first.start(works, 1, id="i"))

    @workflow(name="works")
    async def changed(number: int) -> int:
        return await flaky(number)

    diary = Diary()
    app = await make_app(changed, hooks=[diary])
    await app.publish("go", 1)
    await diary.rests()
    name, event = diary.told[-1]
    assert (name, event.error_type) == ("workflow_parked", "NonDeterminismError")


async def test_a_hook_that_raises_changes_nothing_and_is_logged(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Diary()
    app = await make_app(works, fails, hooks=[Broken(), diary])
    handle = await app.start(works, 2, id="i")
    await waits(handle)
    await app.publish("go", 1)
    assert await handle.result(10) == 2
    await diary.rests()
    failed = [record for record in caplog.records if "of Broken failed" in record.getMessage()]
    assert len(failed) == len(diary.told)
    assert {record.instance for record in failed} == {"i"}  # type: ignore[attr-defined]


async def test_a_hook_must_be_a_plain_method(harness: Harness) -> None:
    class Late(Hooks):
        async def on_step_started(self, event: StepEvent) -> None:  # type: ignore[override]
            return None

    for wrong in (Late(), object()):
        with pytest.raises(TypeError, match="plain method"):
            App("sqlite://:memory:", hooks=[wrong])  # type: ignore[list-item]


def test_events_say_no_more_than_they_should() -> None:
    assert set(msgspec.structs.asdict(WorkflowEvent(instance_id="i", workflow_name="w"))) == {
        *("instance_id", "workflow_name", "resumed", "duration_sec", "status", "reason", "error_type")
    }


# Logs.


@activity
async def talks() -> None:
    logging.getLogger("shop").warning("in an activity")


@workflow
async def talkative() -> None:
    logging.getLogger("shop").warning("in a body")
    await talks()


async def test_what_workflows_log_carries_instance_and_step(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.addFilter(carries := InstanceFilter())
    try:
        logging.getLogger("shop").warning("outside")
        app = await make_app(talkative)
        await (await app.start(talkative, id="i")).result(10)
    finally:
        caplog.handler.removeFilter(carries)
    fields = {
        record.getMessage(): (record.instance, record.step)  # type: ignore[attr-defined]
        for record in caplog.records
        if record.name == "shop"
    }
    assert fields == {"outside": (None, None), "in a body": ("i", None), "in an activity": ("i", "talks:1")}


async def test_every_record_of_the_engine_carries_the_fields(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("romancy").warning("about nothing in particular")
    [record] = caplog.records
    assert (record.instance, record.step) == (None, None)  # type: ignore[attr-defined]
