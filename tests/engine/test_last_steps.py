"""Once it is known with which step a workflow ends, that step and the end are one write; and nothing else changes."""

import asyncio
from typing import Any

import msgspec
import pytest

from romancy import App, Hooks, WorkflowEvent, WorkflowFailedError, WorkflowHandle, activity, workflow
from romancy.storage import Appended, HistoryEvent, Lock, PayloadTooLargeError, SQLStorage, WorkflowStatus
from tests.engine.conftest import QUICK, MakeApp
from tests.engine.crashing import expire_locks
from tests.engine.test_lost_locks import DEAF
from tests.engine.test_messages import until
from tests.harness import history_of

at_hand: dict[str, Any] = {}
happened: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    happened.clear()
    at_hand.clear()
    for each in (one_or_two, returning, undoing, leaving_one_behind, side_by_side, sized, oddly_returning):
        each.last_steps.clear()


WRITES = {
    "_append_with_lock": "recorded",
    "_complete_untied": "ended",
    "_complete_recording": "ended",
    "_complete": "ended",
}


def watch(app: App) -> None:
    """Note what is committed from now on."""

    def note(point: str, operation: str) -> None:
        if point == "after commit" and operation in WRITES:
            happened.append(WRITES[operation])

    app.storage.runner.probe = note


async def steps_of(storage: SQLStorage, handle: WorkflowHandle[Any]) -> list[str]:
    return [event.activity_id for event in await history_of(storage, handle.id)]


@activity
async def first() -> str:
    happened.append("first")
    return "one"


@activity
async def second() -> list[str]:
    happened.append("second")
    return await steps_of(at_hand["storage"], at_hand["app"].handle("longer"))


@workflow
async def one_or_two(more: bool, spin: bool = False) -> list[str]:
    result = await first()
    happened.append("seen")
    while spin:
        await asyncio.sleep(0)
    return await second() if more else [result]


async def ended_once(make_app: MakeApp, **options: Any) -> App:
    """An app that has seen how the short one ends."""
    app: App = await make_app(one_or_two, returning, undoing, **options)
    assert await (await app.start(one_or_two, False)).result(10) == ["one"]
    assert one_or_two.last_steps == {"first:1"}
    happened.clear()
    watch(app)
    return app


async def test_the_first_time_the_step_is_recorded_before_the_body_sees_it(make_app: MakeApp) -> None:
    app: App = await make_app(one_or_two)
    watch(app)

    assert await (await app.start(one_or_two, False)).result(10) == ["one"]

    assert happened == ["first", "recorded", "seen", "ended"]


async def test_from_then_on_the_step_and_the_end_are_one_write(storage: SQLStorage, make_app: MakeApp) -> None:
    app = await ended_once(make_app)

    handle = await app.start(one_or_two, False)

    assert await handle.result(10) == ["one"]
    assert happened == ["first", "seen", "ended"]
    assert await steps_of(storage, handle) == ["first:1"]


async def test_what_the_body_asks_for_instead_waits_for_the_record(storage: SQLStorage, make_app: MakeApp) -> None:
    app = await ended_once(make_app)
    at_hand.update(storage=storage, app=app)

    handle = await app.start(one_or_two, True, id="longer")

    assert await handle.result(10) == ["first:1"]
    assert happened[:4] == ["first", "seen", "recorded", "second"]
    assert await steps_of(storage, handle) == ["first:1", "second:1"]


async def test_an_instance_that_was_taken_over_is_recorded_before_its_body_sees_anything(
    storage: SQLStorage, make_app: MakeApp
) -> None:
    client: App = await make_app(one_or_two, worker=False)
    handle = await client.start(one_or_two, False)
    assert await storage.try_acquire_lock(handle.id, "somebody", 60)
    heir = await ended_once(make_app)

    await expire_locks(storage)

    assert await heir.handle(handle.id).result(10) == ["one"]
    assert happened == ["first", "recorded", "seen", "ended"]


async def test_a_body_that_spins_on_has_not_made_the_step_unrecorded(
    storage: SQLStorage, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("romancy.engine.loop._LONGEST_SPIN", 1000)  # else it takes longer than its lock lasts
    app = await ended_once(make_app)

    handle = await app.start(one_or_two, False, spin=True)

    async def parked() -> bool:
        return (await handle.instance()).parked_reason is not None

    await until(parked)
    assert happened.count("first") == 1
    assert await steps_of(storage, handle) == ["first:1"]


# Where more goes on than one step.


@workflow
async def leaving_one_behind() -> str:
    released = asyncio.Event()

    async def behind() -> None:
        await released.wait()
        await second()

    at_hand["left"] = asyncio.create_task(behind())
    result = await first()
    released.set()
    return result


async def test_what_a_task_asks_for_that_is_left_behind_is_recorded_or_not_begun(
    storage: SQLStorage, make_app: MakeApp
) -> None:
    app: App = await make_app(leaving_one_behind)
    at_hand.update(storage=storage, app=app)
    for _ in range(2):
        happened.clear()
        handle = await app.start(leaving_one_behind)
        await handle.result(10)
        await asyncio.sleep(0.1)
        assert ("second" in happened) == ("1/second:1" in await steps_of(storage, handle))


@activity
async def slow() -> str:
    await at_hand["gate"].wait()
    return "late"


@workflow
async def side_by_side(more: bool) -> list[str]:
    results = await asyncio.gather(first(), slow())
    return await second() if more else list(results)


async def test_one_that_ends_while_another_is_being_recorded_waits_for_its_own_record(
    storage: SQLStorage, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: App = await make_app(side_by_side)
    gate = at_hand["gate"] = asyncio.Event()
    at_hand.update(storage=storage, app=app)
    handle = await app.start(side_by_side, False)
    while not await steps_of(storage, handle):
        await asyncio.sleep(0.01)
    gate.set()
    await handle.result(10)
    assert side_by_side.last_steps == {"2/slow:1"}
    happened.clear()
    gate = at_hand["gate"] = asyncio.Event()
    append = app.storage.append_history

    async def append_slowly(event: HistoryEvent, *, lock: Lock | None = None) -> Appended:
        await asyncio.sleep(0.1)
        appended = await append(event, lock=lock)
        happened.append(event.activity_id)
        gate.set()
        return appended

    monkeypatch.setattr(app.storage, "append_history", append_slowly)
    await (await app.start(side_by_side, True, id="longer")).result(10)

    assert happened.index("2/slow:1") < happened.index("second")


# Where the end is refused.


@activity
async def measured() -> int:
    return 1


@workflow
async def returning(size: int) -> str:
    await measured()
    return "x" * size


async def test_a_result_that_cannot_be_stored_fails_the_workflow_and_not_the_step(
    storage: SQLStorage, make_app: MakeApp
) -> None:
    app: App = await make_app(returning)
    await (await app.start(returning, 1)).result(10)
    app.storage.max_payload_bytes = 2000

    handle = await app.start(returning, 3000)

    with pytest.raises(WorkflowFailedError, match="PayloadTooLargeError"):
        await handle.result(10)
    assert await steps_of(storage, handle) == ["measured:1", "workflow_failed"]


async def test_what_was_seen_and_cannot_be_recorded_does_not_end_the_workflow(
    storage: SQLStorage, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: App = await make_app(returning, settings=msgspec.structs.replace(QUICK, poll_sec=0.05))
    await (await app.start(returning, 1)).result(10)
    refusals = iter([PayloadTooLargeError("of the end", 2, 1), PayloadTooLargeError("of the step", 2, 1)])

    async def refused(*_: Any, **__: Any) -> Any:
        raise next(refusals)

    with monkeypatch.context() as patched:
        patched.setattr(app.storage, "update_instance_output", refused)
        patched.setattr(app.storage, "append_history", refused)
        handle = await app.start(returning, 1)

        async def parked() -> bool:
            return (await handle.instance()).parked_reason is not None

        await until(parked)
    assert "cannot be stored" in ((await handle.instance()).parked_reason or "")
    assert await steps_of(storage, handle) == []
    await storage.unpark(handle.id)
    assert await handle.result(10) == "x"
    assert await steps_of(storage, handle) == ["measured:1"]


@activity
async def large(size: int) -> str:
    happened.append("large")
    return "x" * size


@workflow
async def sized(size: int) -> int:
    return len(await large(size))


async def test_a_step_whose_result_cannot_be_stored_is_not_done_again(make_app: MakeApp) -> None:
    app: App = await make_app(sized)
    await (await app.start(sized, 1)).result(10)
    app.storage.max_payload_bytes = 2000
    happened.clear()

    with pytest.raises(WorkflowFailedError, match="PayloadTooLargeError"):
        await (await app.start(sized, 3000)).result(10)
    assert happened == ["large"]


class Odd:
    """Cannot always be made JSON of."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def model_dump(self, **_: Any) -> dict[str, int]:
        if self.broken:
            raise KeyError("broken")
        return {"odd": 1}


@workflow
async def oddly_returning(broken: bool) -> Any:
    await first()
    return Odd(broken)


async def test_a_result_that_nobody_foresaw_does_not_leave_the_step_unrecorded(
    storage: SQLStorage, make_app: MakeApp
) -> None:
    app: App = await make_app(oddly_returning)
    await (await app.start(oddly_returning, False)).result(10)

    handle = await app.start(oddly_returning, True)

    async def parked() -> bool:
        return (await handle.instance()).parked_reason is not None

    await until(parked)
    assert await steps_of(storage, handle) == ["first:1"]


async def refund(result: str | None = None) -> None:
    happened.append(f"refund {result}")


@activity(compensate=refund)
async def charge(cancelled: bool) -> str:
    if cancelled:
        await at_hand["storage"].cancel_instance("charged", "enough", compensate=True)
    return "receipt"


@workflow
async def undoing(cancelled: bool) -> str:
    return await charge(cancelled)


async def test_a_cancellation_that_comes_before_the_end_knows_the_result_of_the_step(
    storage: SQLStorage, make_app: MakeApp
) -> None:
    at_hand["storage"] = storage
    app: App = await make_app(undoing, settings=DEAF)
    storage.set_notify_enabled(False)
    await (await app.start(undoing, False)).result(10)
    happened.clear()

    handle = await app.start(undoing, True, id="charged")

    async def over() -> bool:
        return await handle.status() is WorkflowStatus.CANCELLED

    await until(over)
    assert happened == ["refund receipt"]
    assert "charge:1" in await steps_of(storage, handle)


async def test_a_cancellation_that_comes_during_the_write_waits_for_it(
    storage: SQLStorage, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: App = await make_app(undoing)  # its heartbeat hears of the cancellation while the database takes its time
    await (await app.start(undoing, False)).result(10)
    happened.clear()
    complete, append = app.storage.update_instance_output, app.storage.append_history

    async def complete_slowly(*args: Any, **options: Any) -> None:
        await storage.cancel_instance("charged", "enough", compensate=True)
        await asyncio.sleep(0.5)
        await complete(*args, **options)

    async def append_slowly(*args: Any, **options: Any) -> Appended:
        await asyncio.sleep(0.5)
        return await append(*args, **options)

    monkeypatch.setattr(app.storage, "update_instance_output", complete_slowly)
    monkeypatch.setattr(app.storage, "append_history", append_slowly)
    handle = await app.start(undoing, False, id="charged")

    async def over() -> bool:
        return await handle.status() is WorkflowStatus.CANCELLED

    await until(over)
    assert happened == ["refund receipt"]


# While the last write is under way.


class Told(Hooks):
    """Notes what is said to have become of instances."""

    def on_workflow_finished(self, event: WorkflowEvent) -> None:
        happened.append("told of the end")

    def on_workflow_suspended(self, event: WorkflowEvent) -> None:
        happened.append(f"told of {event.reason}")


async def test_a_heartbeat_that_finds_the_lock_gone_does_not_hide_the_end(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await ended_once(make_app, hooks=[Told()])
    complete = app.storage.update_instance_output

    async def complete_and_linger(*args: Any, **options: Any) -> None:
        await complete(*args, **options)
        await asyncio.sleep(0.6)

    monkeypatch.setattr(app.storage, "update_instance_output", complete_and_linger)
    await (await app.start(one_or_two, False)).result(10)

    async def told() -> bool:
        return happened[-1].startswith("told")

    await until(told)
    assert happened[-1] == "told of the end"


async def test_a_worker_that_stops_waits_for_the_record_of_the_last_step(
    storage: SQLStorage, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await ended_once(make_app)
    complete = app.storage.update_instance_output
    writing = asyncio.Event()

    async def complete_late(*args: Any, **options: Any) -> None:
        writing.set()
        await asyncio.sleep(1.5)  # longer than the worker waits for instances to come to rest
        await complete(*args, **options)

    monkeypatch.setattr(app.storage, "update_instance_output", complete_late)
    handle = await app.start(one_or_two, False)
    await writing.wait()
    await app.__aexit__(None, None, None)

    heir: App = await make_app(one_or_two)
    assert await heir.handle(handle.id).result(10) == ["one"]
    assert happened.count("first") == 1
    assert await steps_of(storage, handle) == ["first:1"]
