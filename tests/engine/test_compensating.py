"""Compensating functions: what they may do, with what they are called, and what becomes of them."""

import asyncio
import sys
import threading
import time
from typing import Any

import msgspec
import pytest

from romancy import TerminalError, WorkflowFailedError, activity, compensate_with, conn, emit, workflow
from tests.engine.conftest import MakeApp
from tests.engine.test_messages import until

log: list[Any] = []


@pytest.fixture(autouse=True)
def _fresh_log() -> None:
    log.clear()


class Receipt(msgspec.Struct):
    number: int


async def refund(order: str, result: Receipt | None) -> None:
    log.append(result)
    await emit("refunded", {"order": order})


@activity(compensate=refund)
async def charge(order: str) -> Receipt:
    return Receipt(4711)


@workflow
async def charged(order: str) -> None:
    await charge(order)
    raise TerminalError("after all")


async def test_a_compensation_gets_its_steps_result_as_it_is_hinted(make_app: MakeApp) -> None:
    app = await make_app(charged)
    with pytest.raises(WorkflowFailedError, match="after all"):
        await (await app.start(charged, "a")).result(10)
    assert log == [Receipt(4711)]


async def test_what_a_compensation_emits_goes_out(make_app: MakeApp) -> None:
    app = await make_app(charged)
    with pytest.raises(WorkflowFailedError, match="after all"):
        await (await app.start(charged, "a")).result(10)
    events = await app.storage.get_pending_outbox_events(10)
    assert [(event.event_type, event.event_data) for event in events] == [("refunded", '{"order":"a"}')]


async def misread(order: str, result: int) -> None:
    log.append(result)


@activity(compensate=misread)
async def book(order: str) -> str:
    return "seat 7"


@workflow
async def booked() -> None:
    await book("a")
    raise TerminalError("after all")


async def test_a_result_that_does_not_fit_its_hint_keeps_no_step_from_being_undone(make_app: MakeApp) -> None:
    app = await make_app(booked)
    with pytest.raises(WorkflowFailedError, match="after all"):
        await (await app.start(booked)).result(10)
    assert log == ["seat 7"]


@activity(transactional=True)
async def pay_back(account: str) -> None:
    await conn().execute("INSERT INTO repayments (account) VALUES (:account)", account=account)
    await emit("paid back", {})
    log.append("paid back")
    if len(log) == 1:
        raise ConnectionError("after the insert")


@activity(compensate=pay_back)
async def withdraw(account: str) -> None: ...


@workflow
async def withdrawn() -> None:
    await withdraw("a")
    raise TerminalError("after all")


async def test_a_transactional_activity_undoes_exactly_once(make_app: MakeApp) -> None:
    app = await make_app(withdrawn)
    await app.storage.conn().execute("CREATE TABLE IF NOT EXISTS repayments (account VARCHAR(20))")
    await app.storage.conn().execute("DELETE FROM repayments")
    with pytest.raises(WorkflowFailedError, match="after all"):
        await (await app.start(withdrawn)).result(10)
    assert log == ["paid back", "paid back"]
    assert await app.storage.conn().fetch_value("SELECT COUNT(*) FROM repayments") == 1
    assert len(await app.storage.get_pending_outbox_events(10)) == 1


def leave() -> None:
    log.append("left")
    if len(log) == 1:
        sys.exit("bye")


async def leave_too() -> None:
    leave()


@workflow
async def left(how: str) -> None:
    await compensate_with(leave if how == "in a thread" else leave_too)
    raise TerminalError("after all")


@pytest.mark.parametrize("how", ["in a thread", "in the loop"])
async def test_an_exit_in_a_compensation_is_its_error_and_not_the_workers_end(make_app: MakeApp, how: str) -> None:
    app = await make_app(left)
    with pytest.raises(WorkflowFailedError, match="after all"):
        await (await app.start(left, how)).result(10)
    assert log == ["left", "left"]


running = threading.Semaphore(1)


def take_down() -> None:
    alone = running.acquire(blocking=False)
    log.append("alone" if alone else "beside another")
    time.sleep(1.0)
    running.release()


@workflow
async def taken_down() -> None:
    await compensate_with(take_down)
    raise TerminalError("after all")


async def test_no_other_worker_undoes_beside_a_thread_that_cannot_be_stopped(make_app: MakeApp) -> None:
    first = await make_app(taken_down)
    handle = await first.start(taken_down)

    async def began() -> bool:
        return len(log) == 1

    await until(began)
    stopping = asyncio.create_task(first.worker.stop())
    second = await make_app(taken_down)
    await stopping
    with pytest.raises(WorkflowFailedError, match="after all"):
        await second.handle(handle.id).result(10)
    assert set(log) == {"alone"}


@workflow
async def undone_by_what_only_it_knows(order: str) -> None:
    async def undo() -> None:
        log.append(order)

    await compensate_with(undo)


class Shop:
    async def restock(self) -> None: ...


@workflow
async def undone_by_a_method() -> None:
    await compensate_with(Shop().restock)


async def test_a_function_that_other_processes_could_not_find_is_refused_as_a_compensation(make_app: MakeApp) -> None:
    app = await make_app(undone_by_what_only_it_knows, undone_by_a_method)
    with pytest.raises(WorkflowFailedError, match="any process must be able to find the function by its name"):
        await (await app.start(undone_by_what_only_it_knows, "a")).result(10)
    with pytest.raises(WorkflowFailedError, match=r"cannot use Shop\.restock"):
        await (await app.start(undone_by_a_method)).result(10)
