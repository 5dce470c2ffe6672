"""Many operations share one commit; one that fails, fails for its own caller only and leaves nothing behind."""

import asyncio
import sqlite3
import threading
from typing import Any

import pytest

from romancy.storage import (
    DatabaseError,
    HistoryConflictError,
    InstanceExistsError,
    LockLostError,
    SQLStorage,
    WorkflowInstance,
)
from romancy.storage.sql.operation import Call, Traits
from romancy.storage.sql.runners.sqlite import SQLiteRunner
from tests.faults.leaks import assert_nothing_is_held
from tests.harness import Harness, expect_company, history_of, step

CALLERS = 64


async def at_once(*calls: Any) -> list[Any]:
    return list(await asyncio.gather(*calls, return_exceptions=True))


def errors(answers: list[Any]) -> dict[int, type[BaseException]]:
    return {number: type(answer) for number, answer in enumerate(answers) if isinstance(answer, BaseException)}


async def test_a_duplicate_among_many_fails_alone(harness: Harness, storage: SQLStorage) -> None:
    ids = [harness.new_id() for _ in range(CALLERS)]
    await storage.create_instance(WorkflowInstance(ids[40], "order"))

    answers = await at_once(*(storage.create_instance(WorkflowInstance(each, "order")) for each in ids))

    assert errors(answers) == {40: InstanceExistsError}
    assert [each for each in ids if await storage.get_instance(each) is None] == []


async def test_a_lost_lock_among_many_fails_alone(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage) for _ in range(CALLERS)]
    await storage.release_lock(locks[7].instance_id, locks[7].worker_id)

    answers = await at_once(
        *(storage.append_history_many([step(lock.instance_id)], lock=lock) for lock in locks[::2]),
        *(storage.append_history(step(lock.instance_id), lock=lock) for lock in locks[1::2]),
    )

    assert errors(answers) == {CALLERS // 2 + 3: LockLostError}
    assert await history_of(storage, locks[7].instance_id) == []


async def test_a_conflict_among_many_fails_alone(harness: Harness, storage: SQLStorage) -> None:
    ids = [await harness.instance(storage) for _ in range(CALLERS)]
    await storage.append_history(step(ids[3], data='"first"'))

    answers = await at_once(*(storage.append_history(step(each, data='"second"')) for each in ids))

    assert errors(answers) == {3: HistoryConflictError}


async def test_an_operation_that_fails_half_way_leaves_nothing_behind(harness: Harness, storage: SQLStorage) -> None:
    ids = [await harness.instance(storage) for _ in range(CALLERS)]

    def stumble(point: str, name: str) -> None:
        if name == "join_group" and point == "before statement" and stumble_at.pop(0):
            raise ZeroDivisionError("half-way")

    stumble_at = [False] * 3 + [True] + [False] * 1000  # the second operation's second statement, or thereabouts
    storage.runner.probe = stumble
    answers = await at_once(*(storage.join_group(each, "all") for each in ids))
    storage.runner.probe = None

    failed = errors(answers)
    assert list(failed.values()) == [ZeroDivisionError]
    members = await storage.get_group_members("all")
    assert sorted(members) == sorted(each for number, each in enumerate(ids) if number not in failed)
    await assert_nothing_is_held(storage)


async def test_a_users_own_statement_that_fails_leaves_its_neighbours_alone(
    harness: Harness, storage: SQLStorage
) -> None:
    ids = [await harness.instance(storage) for _ in range(10)]
    insert = "INSERT INTO system_locks (lock_name, locked_by) VALUES (:name, 'w')"
    await storage.conn().execute(insert, name="taken")

    answers = await at_once(
        *(storage.append_history(step(each)) for each in ids[:5]),
        storage.conn().execute(insert, name="taken"),
        storage.conn().execute("INSERT INTO no_such_table VALUES (1)"),
        storage.conn().execute("this is no SQL"),
        *(storage.append_history(step(each)) for each in ids[5:]),
    )

    assert set(errors(answers)) == {5, 6, 7}
    assert isinstance(answers[5], DatabaseError)
    assert [len(await history_of(storage, each)) for each in ids] == [1] * 10


@pytest.mark.databases("sqlite")
async def test_operations_that_wait_share_a_commit(harness: Harness, storage: SQLStorage) -> None:
    ids = [await harness.instance(storage) for _ in range(CALLERS)]
    assert isinstance(storage.runner, SQLiteRunner)
    statements: list[str] = []
    storage.runner._connection().set_trace_callback(statements.append)

    await at_once(*(storage.append_history(step(each)) for each in ids))

    assert statements.count("COMMIT") < CALLERS / 4


@pytest.mark.databases("sqlite")
async def test_a_statement_that_ends_the_shared_transaction_takes_nobody_with_it(
    harness: Harness, storage: SQLStorage
) -> None:
    ids = [await harness.instance(storage) for _ in range(10)]
    await storage.conn().execute("INSERT INTO system_locks (lock_name, locked_by) VALUES ('taken', 'w')")

    answers = await at_once(
        *(storage.append_history(step(each)) for each in ids[:5]),
        storage.conn().execute("INSERT OR ROLLBACK INTO system_locks (lock_name, locked_by) VALUES ('taken', 'w')"),
        *(storage.append_history(step(each)) for each in ids[5:]),
    )

    assert errors(answers) == {5: DatabaseError}
    assert [len(await history_of(storage, each)) for each in ids] == [1] * 10


@pytest.mark.databases("sqlite")
async def test_the_writer_survives_whatever_an_operation_raises(harness: Harness, storage: SQLStorage) -> None:
    async def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await storage.runner.run(Call(interrupt, None, (), {}, Traits()))

    await harness.instance(storage)
    await assert_nothing_is_held(storage)


class Crash(BaseException):
    """Not an Exception: nothing along the way takes care of it."""


async def test_an_operation_that_ends_in_a_crash_leaves_no_open_transaction(
    harness: Harness, storage: SQLStorage
) -> None:
    instance_id = await harness.instance(storage)

    def crash(point: str, name: str) -> None:
        if point == "before statement" and name == "join_group" and next(statements) == 1:
            raise Crash

    statements = iter(range(1000))
    storage.runner.probe = crash
    with pytest.raises(Crash):
        await storage.join_group(instance_id, "all")
    storage.runner.probe = None

    await storage.append_history(step(instance_id))
    assert await storage.get_group_members("all") == []
    await assert_nothing_is_held(storage)


@pytest.mark.databases("sqlite")
async def test_what_falls_in_the_event_loops_thread_is_repeated_in_the_writers(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [await harness.instance(storage) for _ in range(8)]
    threads: list[str] = []
    commit = SQLiteRunner._commit

    def fail_once(self: SQLiteRunner, connection: sqlite3.Connection) -> None:
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            raise sqlite3.OperationalError("disk I/O error")
        commit(self, connection)

    monkeypatch.setattr(SQLiteRunner, "_commit", fail_once)
    storage.runner._commit_sec = 0.0  # type: ignore[attr-defined]  # however slow the disk was just now
    expect_company(storage)
    answers = await at_once(*(storage.append_history(step(each)) for each in ids))

    assert errors(answers) == {}
    assert threads[0] == "MainThread"
    assert set(threads[1:]) == {"romancy-sqlite-writer"}
    assert [len(await history_of(storage, each)) for each in ids] == [1] * 8


async def test_a_caller_without_company_lets_the_event_loop_come_round(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    others = asyncio.create_task(take_turns())
    for number in range(500):
        await storage.append_history(step(lock.instance_id, f"charge:{number}"), lock=lock)
    others.cancel()

    assert turns >= 5
