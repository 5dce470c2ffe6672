"""What happens to a run whose lock is gone: it stops, at once, whoever notices."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from romancy import (
    App,
    TerminalError,
    WorkflowCancelledError,
    WorkflowHandle,
    activity,
    compensate_with,
    workflow,
)
from romancy.storage import Lock, SQLStorage, TransientStorageError, WorkflowInstance
from romancy.worker.services import Resumer
from tests.engine.conftest import QUICK, MakeApp
from tests.engine.crashing import expire_locks
from tests.engine.test_messages import until

DEAF = msgspec.structs.replace(QUICK, heartbeat_sec=60.0, lock_timeout_sec=120.0)
"""Never asks whether its locks are still its own."""

log: list[str] = []


@pytest.fixture(autouse=True)
async def _fresh_log() -> AsyncIterator[None]:
    log.clear()
    yield
    log.append("over")


async def linger() -> None:
    """Take very long the first time."""
    log.append("began")
    try:
        while log.count("began") == 1:
            await asyncio.sleep(0.01)
    finally:
        log.append("ended")


@activity
async def lingering() -> None:
    await linger()


@workflow
async def charged() -> None:
    await lingering()


@workflow
async def undone() -> None:
    await compensate_with(linger)
    raise TerminalError("after all")


@activity
def hold_out() -> str:
    """In a thread, which nobody can stop."""
    log.append("began")
    while "enough" not in log:
        time.sleep(0.01)
    log.append("ended")
    return "ours"


@workflow
async def unstoppable() -> str:
    return await hold_out()


async def begun(app: App, what: Any) -> WorkflowHandle[None]:
    handle = await app.start(what)

    async def began() -> bool:
        return "began" in log

    await until(began)
    return handle


@pytest.mark.parametrize("what", [charged, undone], ids=["activity", "compensation"])
async def test_an_attempt_ends_before_the_same_worker_makes_the_next(
    storage: SQLStorage, make_app: MakeApp, what: Any
) -> None:
    app = await make_app(what, settings=DEAF)
    handle = await begun(app, what)
    await expire_locks(storage)

    async def finished() -> bool:
        return (await handle.instance()).status in ("completed", "failed")

    await until(finished)
    assert log == ["began", "ended", "began", "ended"]


@pytest.mark.parametrize("what", [charged, undone], ids=["activity", "compensation"])
async def test_an_attempt_ends_when_another_worker_has_the_lock(
    storage: SQLStorage, make_app: MakeApp, what: Any
) -> None:
    handle = await begun(await make_app(what), what)
    async with storage.transaction():
        await expire_locks(storage)
        assert await storage.try_acquire_lock(handle.id, "rival", 60)

    async def ended() -> bool:
        return log == ["began", "ended"]

    await until(ended)


@pytest.mark.parametrize("how", ["fail", "hang"])
async def test_an_attempt_ends_when_its_lock_has_run_out_because_no_heartbeat_is_answered(
    storage: SQLStorage, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    app = await make_app(charged)

    async def unanswered(*_: Any) -> None:
        if how == "hang":
            await asyncio.Event().wait()
        raise TransientStorageError("the line is cut")

    async def nothing(*_: Any, **__: Any) -> list[Any]:
        return []

    monkeypatch.setattr(app.storage, "refresh_locks", unanswered)
    monkeypatch.setattr(app.storage, "claim_resumable_workflows", nothing)
    handle = await begun(app, charged)

    async def taken_over() -> bool:
        return await storage.try_acquire_lock(handle.id, "rival", 60) is not None

    async def ended() -> bool:
        return "ended" in log

    await until(taken_over)
    await until(ended)
    assert log == ["began", "ended"]


async def test_heartbeats_that_fail_are_repeated_before_the_lock_runs_out(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await make_app(charged)
    refresh_locks, failures = app.storage.refresh_locks, iter(range(4))

    async def troubled(*args: Any) -> Any:
        if next(failures, None) is not None:
            raise TransientStorageError("the database starts again")
        log.append("refreshed")
        return await refresh_locks(*args)

    monkeypatch.setattr(app.storage, "refresh_locks", troubled)
    handle = await begun(app, charged)

    async def refreshed() -> bool:
        return "refreshed" in log

    await until(refreshed)
    assert (await handle.instance()).lock_token == 1
    assert log.count("began") == 1


async def test_heartbeats_do_not_ask_for_a_lock_that_is_new(make_app: MakeApp) -> None:
    app: App = await make_app(charged, settings=DEAF)
    handle = await begun(app, charged)
    executor = app.worker.executor

    assert executor.locks_to_renew(20.0) == []
    assert [lock.instance_id for lock in executor.locks_to_renew(0.0)] == [handle.id]  # it is older than that
    assert [lock.instance_id for lock in executor.locks_to_renew(60.0)] == [handle.id]  # it may not last so long
    await app.storage.cancel_instance(handle.id, "enough", compensate=True)
    with pytest.raises(WorkflowCancelledError):  # nevertheless, at once
        await handle.result(10)


async def test_an_answer_to_what_was_asked_before_a_cancel_does_not_settle_it(make_app: MakeApp) -> None:
    app: App = await make_app(charged, settings=DEAF)
    await begun(app, charged)
    executor = app.worker.executor
    asked_at = time.monotonic()
    [lock] = executor.locks_to_renew(0.0)

    executor.some_cancelled()
    executor.heard(lock, asked_at)
    assert executor.locks_to_renew(20.0) == [lock]
    executor.heard(lock, time.monotonic())
    assert executor.locks_to_renew(20.0) == []


@pytest.mark.databases("sqlite")
async def test_a_result_can_be_waited_for_in_another_event_loop(make_app: MakeApp) -> None:
    handle = await begun(await make_app(unstoppable), unstoppable)
    elsewhere = asyncio.create_task(asyncio.to_thread(asyncio.run, handle.result(30)))
    await asyncio.sleep(0.2)
    log.append("enough")

    async with asyncio.timeout(10):
        assert await elsewhere == "ours"


async def test_who_waits_for_a_result_is_not_kept_by_a_run_that_has_lost_its_lock(
    storage: SQLStorage, make_app: MakeApp
) -> None:
    app: App = await make_app(unstoppable)
    handle = await begun(app, unstoppable)
    waiting = asyncio.create_task(handle.result(10))
    async with storage.transaction():
        await expire_locks(storage)
        rival = await storage.try_acquire_lock(handle.id, "rival", 60)
    assert rival is not None
    await storage.update_instance_output(handle.id, '{"result": "the rival\'s"}', lock=rival)

    assert await waiting == "the rival's"
    assert "ended" not in log
    log.append("enough")


async def test_a_cancel_that_is_heard_of_before_the_claims_answer_is_not_forgotten(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: App = await make_app(charged, worker=False)
    app: App = await make_app(charged, settings=DEAF)
    claim = app.storage.claim_resumable_workflows

    async def claim_and_be_late(*args: Any, **options: Any) -> Any:
        claims = await claim(*args, **options)
        for instance, _ in claims:
            if not log:
                await app.storage.cancel_instance(instance.instance_id, "never mind", compensate=True)
                await asyncio.sleep(0.05)
        return claims

    monkeypatch.setattr(app.storage, "claim_resumable_workflows", claim_and_be_late)
    with pytest.raises(WorkflowCancelledError):
        await (await client.start(charged)).result(10)


@workflow
async def prompt() -> str:
    return "done"


async def test_a_lock_that_is_lost_before_its_run_has_begun_keeps_no_place(make_app: MakeApp) -> None:
    app = await make_app(prompt, settings=msgspec.structs.replace(DEAF, concurrency=1))
    executor = app.worker.executor
    adopt = executor.start

    def start_and_lose(instance: WorkflowInstance, lock: Lock, **how: Any) -> None:
        adopt(instance, lock, **how)
        executor.lost(lock)

    executor.start = start_and_lose
    handle = await app.start(prompt)
    del executor.start

    async def has_room() -> bool:
        return executor.room_for("prompt") == 1

    await until(has_room)
    assert executor.execution_of(handle.id) is None
    assert await (await app.start(prompt)).result() == "done"


async def test_an_instance_that_was_just_started_is_given_back_by_who_stops(
    storage: SQLStorage, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Resumer, "look", see_nothing)  # or it takes back what is given back
    app = await make_app(charged, settings=DEAF)
    handle = await app.start(charged)
    await app.worker.executor.stop(0.0)  # its task had no chance to begin yet
    instance = await storage.get_instance(handle.id)
    assert instance is not None
    assert instance.locked_by is None
    assert app.worker.executor.execution_of(handle.id) is None


async def see_nothing(resumer: Resumer) -> bool:
    return False


@activity
async def stubborn() -> None:
    log.append("began")
    try:
        while "enough" not in log:
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        while "enough" not in log:
            await asyncio.sleep(0.01)
        raise
    finally:
        log.append("ended")


@workflow
async def unhurried() -> None:
    await stubborn()


async def test_whoever_takes_an_instance_the_third_time_waits_for_the_first(
    storage: SQLStorage, make_app: MakeApp
) -> None:
    app = await make_app(unhurried, settings=DEAF)
    handle = await begun(app, unhurried)
    executor = app.worker.executor

    async def taken_again(before: Any) -> bool:
        return executor.execution_of(handle.id) is not before

    try:
        for _ in range(2):
            running = executor.execution_of(handle.id)
            await expire_locks(storage)
            await until(lambda running=running: taken_again(running))
        await asyncio.sleep(0.1)
        assert log == ["began"]
    finally:
        log.append("enough")
    await handle.result()
    assert log == ["began", "enough", "ended", "began", "ended"]
