"""Sagas: no effect is left without its compensation; cancelling stops work wherever it is."""

import asyncio
import sys
import time
from typing import Any

import msgspec
import pytest

from romancy import (
    NO_RETRY,
    ActivityError,
    Retry,
    Settings,
    WorkflowCancelledError,
    WorkflowFailedError,
    activity,
    compensate_with,
    emit,
    recur,
    sleep,
    start_child,
    workflow,
)
from romancy.storage import SQLStorage, WorkflowStatus
from tests.engine.conftest import QUICK, MakeApp
from tests.engine.crashing import expire_locks
from tests.engine.test_messages import until

log: list[str] = []


@pytest.fixture(autouse=True)
def _fresh_log() -> None:
    log.clear()


async def refund(order: str, amount: int, result: str | None = None) -> None:
    log.append(f"refund {order} {amount} {result}")


@activity(compensate=refund)
async def charge(order: str, amount: int) -> str:
    log.append(f"charge {order} {amount}")
    return f"receipt-{order}"


def unpack(order: str) -> None:
    log.append(f"unpack {order}")


@activity(compensate=unpack)
async def pack(order: str) -> None:
    log.append(f"pack {order}")


@activity(retry=NO_RETRY, compensate=unpack)
async def ship(order: str) -> None:
    raise RuntimeError("no carrier")


@workflow
async def fulfil(order: str) -> None:
    await charge(order, amount=5)
    await compensate_with(unpack, "by hand")
    await pack(order)
    await ship(order)


@activity(compensate=refund)
async def charge_little(order: str, amount: int = 1) -> None: ...


@workflow
async def charged_by_default(order: str) -> None:
    await charge_little(order)
    raise ValueError("after all")


async def test_a_compensation_gets_the_defaults_of_its_step_too(make_app: MakeApp) -> None:
    app = await make_app(charged_by_default)
    with pytest.raises(WorkflowFailedError, match="after all"):
        await (await app.start(charged_by_default, "f")).result(10)
    assert log == ["refund f 1 None"]


async def test_a_failed_workflow_is_undone_last_step_first(make_app: MakeApp) -> None:
    app = await make_app(fulfil)
    handle = await app.start(fulfil, "a")
    with pytest.raises(WorkflowFailedError, match="no carrier"):
        await handle.result(10)
    assert log == ["charge a 5", "pack a", "unpack a", "unpack by hand", "refund a 5 receipt-a"]
    assert await handle.status() is WorkflowStatus.FAILED


@workflow
async def slow_order(order: str) -> None:
    await charge(order, amount=5)
    await sleep(3600)


async def test_a_waiting_workflow_is_cancelled_and_undone(make_app: MakeApp) -> None:
    app = await make_app(slow_order)
    handle = await app.start(slow_order, "b")

    async def sleeping() -> bool:
        return await handle.status() is WorkflowStatus.WAITING_FOR_TIMER

    await until(sleeping)
    await handle.cancel("changed my mind")
    with pytest.raises(WorkflowCancelledError, match="changed my mind"):
        await handle.result(10)
    assert log == ["charge b 5", "refund b 5 receipt-b"]


@activity(compensate=refund)
async def endless(order: str, amount: int) -> None:
    log.append("began")
    try:
        await asyncio.sleep(3600)
    finally:
        log.append("stopped")


@workflow
async def stuck(order: str) -> None:
    await endless(order, amount=1)


async def test_a_running_activity_is_stopped_before_its_compensation_runs(make_app: MakeApp) -> None:
    app = await make_app(stuck)
    handle = await app.start(stuck, "c")

    async def began() -> bool:
        return "began" in log

    await until(began)
    await handle.cancel("enough")
    with pytest.raises(WorkflowCancelledError):
        await handle.result(10)
    assert log == ["began", "stopped", "refund c 1 None"]


@activity(compensate=refund)
def endless_in_a_thread(order: str, amount: int) -> None:
    log.append("began")
    time.sleep(0.8)
    log.append("ended")


@workflow
async def stuck_in_a_thread(order: str) -> None:
    await endless_in_a_thread(order, amount=1)


async def test_a_thread_that_cannot_be_stopped_ends_before_its_compensation_runs(make_app: MakeApp) -> None:
    app = await make_app(stuck_in_a_thread)
    handle = await app.start(stuck_in_a_thread, "e")

    async def began() -> bool:
        return "began" in log

    await until(began)
    await handle.cancel("enough")
    with pytest.raises(WorkflowCancelledError):
        await handle.result(10)
    assert log == ["began", "ended", "refund e 1 None"]


async def broken(order: str) -> None:
    raise OSError("printer on fire")


@activity(compensate=broken)
async def print_label(order: str) -> None: ...


@workflow
async def unlucky(order: str) -> None:
    await print_label(order)
    raise ValueError("after all")


async def test_a_compensation_that_keeps_failing_parks_the_instance_visibly(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("romancy.compensation.COMPENSATION_RETRY", NO_RETRY)
    app = await make_app(unlucky)
    handle = await app.start(unlucky, "d")

    async def parked() -> bool:
        return (await handle.instance()).parked_reason is not None

    await until(parked)
    instance = await handle.instance()
    assert instance.status is WorkflowStatus.COMPENSATING
    assert "printer on fire" in (instance.parked_reason or "")
    assert f"{handle.id} is parked: compensation {__name__}:broken of step print_label:1 keeps failing" in caplog.text
    assert f"keeps failing; mend that, then `romancy unpark {handle.id}`" in caplog.text


@activity(retry=NO_RETRY, timeout=0.1, compensate=refund)
async def charge_late(order: str, amount: int) -> None:
    log.append("charged")
    await asyncio.sleep(60)


@activity(retry=Retry(max_attempts=2, initial_sec=0.01), timeout=0.1, compensate=refund)
def charge_late_in_a_thread(order: str, amount: int) -> None:
    log.append("charged")
    if log.count("charged") == 2:
        raise RuntimeError("charged already")
    time.sleep(0.3)


@workflow
async def charged_late(how: str) -> None:
    await (charge_late if how == "at once" else charge_late_in_a_thread)("i", amount=5)


@pytest.mark.parametrize("how", ["at once", "later"])
async def test_a_step_that_its_timeout_cut_off_is_undone_however_it_failed_then(make_app: MakeApp, how: str) -> None:
    app = await make_app(charged_late)
    error = "charge_late has not ended within 0.1 s" if how == "at once" else "charged already"
    with pytest.raises(WorkflowFailedError, match=error):
        await (await app.start(charged_late, how)).result(10)
    assert [line for line in log if line != "charged"] == ["refund i 5 None"]


@activity(retry=NO_RETRY, compensate=refund)
async def charge_once(order: str, amount: int) -> None:
    log.append("charged")
    if log.count("charged") > 1:
        raise RuntimeError("charged already")
    await asyncio.sleep(60)


@workflow
async def charged_twice() -> None:
    await charge_once("j", amount=5)


async def test_a_step_that_a_crash_cut_off_is_undone_however_it_failed_then(
    make_app: MakeApp, storage: SQLStorage
) -> None:
    app = await make_app(charged_twice)
    handle = await app.start(charged_twice)

    async def charged() -> bool:
        return "charged" in log

    await until(charged)
    await expire_locks(storage)  # as if its worker had died
    with pytest.raises(WorkflowFailedError, match="charged already"):
        await handle.result(10)
    assert log == ["charged", "charged", "refund j 5 None"]


@workflow
async def charged_after_a_rest() -> None:
    await sleep(0.01)
    log.append("charged")
    await charge_once("k", amount=5)


async def test_a_step_that_failed_in_its_only_attempt_is_not_undone(make_app: MakeApp) -> None:
    app = await make_app(charged_after_a_rest, settings=msgspec.structs.replace(QUICK, warm=0))
    with pytest.raises(WorkflowFailedError, match="charged already"):
        await (await app.start(charged_after_a_rest)).result(10)
    assert "refund k 5 None" not in log


@workflow
async def parent() -> None:
    child = await start_child(slow_order, "child")
    await child.result()


async def test_cancelling_a_parent_cancels_its_children(make_app: MakeApp) -> None:
    app = await make_app(parent, slow_order)
    handle = await app.start(parent)
    storage: SQLStorage = app.storage

    async def both_wait() -> bool:
        child = await storage.get_instance(f"{handle.id}/start_child:1")
        return child is not None and child.status is WorkflowStatus.WAITING_FOR_TIMER

    await until(both_wait)
    await handle.cancel("all of it")
    with pytest.raises(WorkflowCancelledError):
        await handle.result(10)
    with pytest.raises(WorkflowCancelledError):
        await app.handle(f"{handle.id}/start_child:1").result(10)
    assert log == ["charge child 5", "refund child 5 receipt-child"]


DEAF = Settings(poll_sec=0.05, heartbeat_sec=60.0, lock_timeout_sec=120.0, drain_sec=0.5)
"""Learns of a cancellation by its writes only."""


@activity(compensate=unpack)
async def held_up(order: str) -> None:
    log.append("began")
    while "go" not in log:
        await asyncio.sleep(0.01)


@workflow
async def cancelled_before(what: str) -> None:
    await held_up("g")
    match what:
        case "sleeping":
            await sleep(3600)
        case "failing":
            raise ValueError("after all")
        case "starting over":
            recur(what)


@pytest.mark.parametrize("what", ["sleeping", "failing", "starting over", "returning"])
async def test_a_cancelled_workflow_neither_sleeps_nor_ends_over_it(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    app = await make_app(cancelled_before, settings=DEAF)
    monkeypatch.setattr(app.worker._heart, "wake", lambda: None)
    handle = await app.start(cancelled_before, what)

    async def began() -> bool:
        return "began" in log

    await until(began)
    await handle.cancel("enough")
    log.append("go")
    with pytest.raises(WorkflowCancelledError, match="enough"):
        await handle.result(10)
    assert log == ["began", "go", "unpack g"]
    assert (await handle.instance()).parked_reason is None


@activity(retry=NO_RETRY)
async def fails_at_once() -> None:
    raise RuntimeError("no carrier")


@workflow
async def beside_each_other(order: str) -> None:
    await asyncio.gather(fails_at_once(), charge(order, amount=5))


async def test_a_step_that_begins_while_its_workflow_fails_is_undone_too(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await make_app(beside_each_other)
    storage: SQLStorage = app.storage
    add_compensation, get_compensations = storage.add_compensation, storage.get_compensations

    async def late(*args: Any, **options: Any) -> Any:
        await asyncio.sleep(0.2)
        return await add_compensation(*args, **options)

    async def early(instance_id: str) -> Any:
        found = await get_compensations(instance_id)
        await asyncio.sleep(0.4)
        return found

    monkeypatch.setattr(storage, "add_compensation", late)
    monkeypatch.setattr(storage, "get_compensations", early)
    handle = await app.start(beside_each_other, "h")
    with pytest.raises(WorkflowFailedError, match="no carrier"):
        await handle.result(10)
    assert log in ([], ["refund h 5 None"], ["charge h 5", "refund h 5 None"], ["charge h 5", "refund h 5 receipt-h"])


@activity(retry=NO_RETRY)
def leaves() -> None:
    sys.exit("bye from a thread")


@activity(retry=NO_RETRY)
async def leaves_too() -> None:
    sys.exit("bye from an activity")


@activity(retry=NO_RETRY, transactional=True)
async def leaves_in_a_transaction() -> None:
    await emit("never.sent", {})
    sys.exit("bye from a transaction")


@workflow
async def leaving() -> None:
    for leave in (leaves, leaves_too, leaves_in_a_transaction):
        try:
            await leave()
        except ActivityError as error:
            log.append(error.message)
    sys.exit("bye from a body")


async def test_an_exit_in_a_workflow_is_its_error_and_not_the_workers_end(make_app: MakeApp) -> None:
    app = await make_app(leaving)
    with pytest.raises(WorkflowFailedError, match="SystemExit: bye from a body"):
        await (await app.start(leaving)).result(10)
    assert log == ["bye from a thread", "bye from an activity", "bye from a transaction"]
    assert await app.storage.conn().fetch_value("SELECT COUNT(*) FROM outbox_events") == 0


@activity(retry=NO_RETRY)
def exhausted() -> str:
    return next(iter([]))


@workflow
async def asks_an_exhausted_iterator() -> str:
    return await exhausted()


async def test_what_no_future_can_carry_out_of_a_thread_is_an_error_and_not_silence(make_app: MakeApp) -> None:
    app = await make_app(asks_an_exhausted_iterator)
    with pytest.raises(WorkflowFailedError, match="RuntimeError: exhausted raised StopIteration"):
        await (await app.start(asks_an_exhausted_iterator)).result(10)
