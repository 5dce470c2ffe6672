"""Workflows from their author's side: what is written is what happens, once, in order."""

import asyncio
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from romancy import (
    NO_RETRY,
    App,
    DuplicateNameError,
    NotInWorkflowError,
    Retry,
    SerializationError,
    TerminalError,
    WorkflowFailedError,
    WorkflowMismatchError,
    activity,
    now,
    random,
    recur,
    sleep,
    sleep_until,
    start_child,
    uuid4,
    workflow,
)
from romancy.serialization import encode
from romancy.storage import WorkflowStatus
from tests.engine.conftest import MakeApp


class Colour(Enum):
    RED = "red"


@dataclass
class Order:
    id: str
    total: int
    colour: Colour = Colour.RED
    at: datetime | None = None


@activity
async def double(number: int) -> int:
    return number * 2


@activity
def add(first: int, second: int = 1) -> int:
    return first + second


@workflow
async def calculate(number: int) -> int:
    return await add(await double(number), second=3)


async def test_a_workflow_runs_its_steps_and_returns_their_result(make_app: MakeApp) -> None:
    app = await make_app(calculate)
    handle = await app.start(calculate, 4)
    assert await handle.result(10) == 11
    assert await handle.status() is WorkflowStatus.COMPLETED
    assert [event.activity_id for event in await handle.history()] == ["double:1", "add:1"]


async def test_the_same_id_is_the_same_workflow_whatever_its_input(make_app: MakeApp) -> None:
    app = await make_app(calculate)
    first = await app.start(calculate, 4, id="one")
    again = await app.start(calculate, 400, id="one")
    assert await first.result(10) == await again.result(10) == 11


async def test_an_id_of_another_workflow_is_refused(make_app: MakeApp) -> None:
    app = await make_app(calculate, tree)
    await app.start(calculate, 4, id="one")
    with pytest.raises(WorkflowMismatchError):
        await app.start(tree, id="one")


async def test_outside_a_workflow_activities_and_workflows_just_run() -> None:
    assert await double(4) == 8
    assert await add(4, second=2) == 6
    assert add.fn(4) == 5
    assert await calculate(4) == 11


async def test_two_workflows_of_one_name_are_refused() -> None:
    @workflow(name="calculate")
    async def other() -> None: ...

    with pytest.raises(DuplicateNameError, match="calculate"):
        App("sqlite://:memory:", workflows=[calculate, other])


@activity
async def paint(order: Order) -> Order:
    return Order(order.id, order.total + 1, order.colour, order.at)


@workflow
async def typed(order: Order, blob: bytes) -> tuple[Order, bytes]:
    return await paint(order), blob


async def test_arguments_and_results_keep_their_types(make_app: MakeApp) -> None:
    app = await make_app(typed)
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    handle = await app.start(typed, Order("a", 1, at=moment), b"\x00\xff")
    assert await handle.result(10) == (Order("a", 2, Colour.RED, moment), b"\x00\xff")


class Parcel(BaseModel):
    weight: float
    labels: list[str] = []


@activity
async def label(parcel: Parcel) -> Parcel:
    return parcel.model_copy(update={"labels": [*parcel.labels, "fragile"]})


@workflow
async def pack(parcels: list[Parcel]) -> list[Parcel]:
    return [await label(parcel) for parcel in parcels]


async def test_pydantic_models_keep_their_types(make_app: MakeApp) -> None:
    app = await make_app(pack)
    handle = await app.start(pack, [Parcel(weight=1.5)])
    assert await handle.result(10) == [Parcel(weight=1.5, labels=["fragile"])]


async def test_what_cannot_be_stored_is_an_error_before_anything_happens(make_app: MakeApp) -> None:
    app = await make_app(calculate)
    with pytest.raises(SerializationError, match="argument"):
        await app.start(calculate, object())


class Weights(msgspec.Struct):
    heaviest: float


@pytest.mark.parametrize(
    "odd",
    [
        float("nan"),
        [1.0, float("inf")],
        {"x": (None, float("-inf"))},
        Weights(float("nan")),
        Parcel(weight=float("nan")),
    ],
    ids=["nan", "list", "dict", "struct", "pydantic"],
)
def test_numbers_that_json_does_not_have_are_refused_and_never_become_null(odd: Any) -> None:
    with pytest.raises(SerializationError, match="neither infinity nor NaN"):
        encode(odd, "a value")


@workflow
async def tree() -> list[int]:
    results = await asyncio.gather(double(1), helper(2), double(3))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(double(number)) for number in (4, 5)]
    first = [await done for done in asyncio.as_completed([double(6), double(7)])]
    return [*results, *(task.result() for task in tasks), *sorted(first)]


async def helper(number: int) -> int:
    return await add(await double(number))


async def test_gather_task_groups_and_as_completed_are_durable(make_app: MakeApp) -> None:
    app = await make_app(tree)
    assert await (await app.start(tree)).result(10) == [2, 5, 6, 8, 10, 12, 14]


@workflow
async def patient() -> bool:
    before = await now()
    await sleep(timedelta(milliseconds=50))
    await sleep_until(before + timedelta(milliseconds=100))
    return await now() - before >= timedelta(milliseconds=100)


async def test_sleeping_lasts_as_long_as_it_says(make_app: MakeApp) -> None:
    app = await make_app(patient)
    assert await (await app.start(patient)).result(10)


@workflow
async def impatient() -> str:
    try:
        async with asyncio.timeout(0.05):
            await sleep(60)
    except TimeoutError:
        return "gave up"
    return "slept"


async def test_a_timeout_is_a_durable_timer(make_app: MakeApp) -> None:
    app = await make_app(impatient)
    handle = await app.start(impatient)
    assert await handle.result(10) == "gave up"
    assert [event.event_type for event in await handle.history()] == ["TimerExpired"]


@workflow
async def chance() -> list[str]:
    return [str(await uuid4()), str(await random())]


async def test_chance_is_recorded(make_app: MakeApp) -> None:
    app = await make_app(chance)
    handle = await app.start(chance)
    assert len(set(await handle.result(10))) == 2
    assert [event.activity_id for event in await handle.history()] == ["uuid4:1", "random:1"]


class TooPoorError(Exception): ...


attempts: dict[str, int] = {}


@activity(retry=Retry(max_attempts=3, initial_sec=0.01))
async def flaky(key: str, failures: int) -> int:
    attempts[key] = attempts.get(key, 0) + 1
    if attempts[key] <= failures:
        raise TooPoorError(f"attempt {attempts[key]}")
    return attempts[key]


@workflow
async def stubborn(key: str, failures: int) -> str:
    try:
        return f"after {await flaky(key, failures)}"
    except TooPoorError as error:
        return f"gave up: {error}"


async def test_a_failed_activity_is_tried_again_and_each_attempt_is_recorded(make_app: MakeApp) -> None:
    app = await make_app(stubborn)
    handle = await app.start(stubborn, f"again-{secrets.token_hex(8)}", 2)
    assert await handle.result(10) == "after 3"
    assert [event.activity_id for event in await handle.history()] == ["flaky:1#1", "flaky:1#2", "flaky:1"]


async def test_an_error_that_outlasts_its_attempts_keeps_its_type(make_app: MakeApp) -> None:
    app = await make_app(stubborn)
    assert await (await app.start(stubborn, f"never-{secrets.token_hex(8)}", 99)).result(10) == "gave up: attempt 3"


@activity
async def hopeless() -> None:
    raise TerminalError("no use")


@workflow
async def doomed() -> None:
    await hopeless()


async def test_a_terminal_error_is_not_tried_again_and_fails_the_workflow(make_app: MakeApp) -> None:
    app = await make_app(doomed)
    handle = await app.start(doomed)
    with pytest.raises(WorkflowFailedError, match="TerminalError: no use"):
        await handle.result(10)
    assert [event.activity_id for event in await handle.history()] == ["hopeless:1", "workflow_failed"]


@activity(timeout=0.05, retry=NO_RETRY)
async def slow() -> None:
    await asyncio.sleep(60)


@workflow
async def hurried() -> str:
    try:
        await slow()
    except TimeoutError:
        return "too slow"
    return "in time"


async def test_an_attempt_has_a_timeout(make_app: MakeApp) -> None:
    app = await make_app(hurried)
    assert await (await app.start(hurried)).result(10) == "too slow"


@workflow
async def countdown(left: int) -> str:
    await double(left)
    if left:
        recur(left - 1)
    return "lift-off"


async def test_recurring_starts_over_and_archives_each_round(make_app: MakeApp) -> None:
    app = await make_app(countdown)
    handle = await app.start(countdown, 3)
    assert await handle.result(10) == "lift-off"
    assert len(await handle.history()) == 1
    assert len(await app.storage.get_archived_history(handle.id)) == 3


@workflow
async def parent() -> list[int]:
    children = [await start_child(calculate, number) for number in (1, 2)]
    return [await child.result() for child in children]


async def test_a_parent_waits_for_its_children(make_app: MakeApp) -> None:
    app = await make_app(parent, calculate)
    handle = await app.start(parent)
    assert await handle.result(10) == [5, 7]
    assert {event.event_type for event in await handle.history()} == {"ActivityCompleted", "InstanceFinished"}


@workflow
async def disappointed() -> str:
    child = await start_child(doomed)
    try:
        await child.result()
    except WorkflowFailedError as error:
        return error.message
    return "a miracle"


async def test_a_childs_failure_reaches_its_parent(make_app: MakeApp) -> None:
    app = await make_app(disappointed, doomed)
    assert await (await app.start(disappointed)).result(10) == "no use"


async def test_a_body_call_outside_a_workflow_is_a_clear_error() -> None:
    with pytest.raises(NotInWorkflowError, match="sleep"):
        await sleep(1)


@workflow
async def reaches_out() -> None:
    await asyncio.to_thread(print)


async def test_threads_in_a_body_are_refused_with_advice(make_app: MakeApp) -> None:
    app = await make_app(reaches_out)
    with pytest.raises(WorkflowFailedError, match="do it in an activity"):
        await (await app.start(reaches_out)).result(10)
