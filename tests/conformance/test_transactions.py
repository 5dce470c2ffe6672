"""Transactions: ambient, nested, bound to their task, with an end; and what runs after the commit."""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from romancy.storage import (
    HistoryConflictError,
    InstanceExistsError,
    NotInTransactionError,
    OutboxEvent,
    SQLStorage,
    StorageError,
    TransactionDeadlineError,
    WorkflowInstance,
    WorkflowStatus,
    WrongTaskError,
)
from tests.harness import Harness, contents, step


class Oops(Exception):
    """What a user's code raises."""


async def exists(storage: SQLStorage, instance_id: str) -> bool:
    return await storage.get_instance(instance_id) is not None


async def make(storage: SQLStorage, instance_id: str) -> None:
    await storage.create_instance(WorkflowInstance(instance_id=instance_id, workflow_name="order"))


# Commit and rollback.


async def test_a_block_commits_all_of_it(harness: Harness, storage: SQLStorage) -> None:
    witness = await harness.open()
    async with storage.transaction():
        assert storage.in_transaction()
        await make(storage, "one")
        await make(storage, "two")
        assert await exists(storage, "one")
        if harness.name != "sqlite":
            assert not await exists(witness, "one")
    assert not storage.in_transaction()
    assert await exists(witness, "one")
    assert await exists(witness, "two")


async def test_an_exception_undoes_all_of_it(harness: Harness, storage: SQLStorage) -> None:
    before = await contents(storage)
    with pytest.raises(Oops):
        async with storage.transaction():
            await make(storage, "one")
            await storage.add_outbox_event(OutboxEvent("event-1", "made", "test"))
            raise Oops
    assert not storage.in_transaction()
    assert await contents(storage) == before


async def test_an_outbox_event_shares_the_fate_of_the_activity_that_caused_it(
    harness: Harness, storage: SQLStorage
) -> None:
    with pytest.raises(Oops):
        async with storage.transaction():
            await storage.add_outbox_event(OutboxEvent("event-1", "made", "test"))
            raise Oops
    assert await storage.get_pending_outbox_events() == []


async def test_a_cancellation_undoes_all_of_it(harness: Harness, storage: SQLStorage) -> None:
    started = asyncio.Event()

    async def forever() -> None:
        async with storage.transaction():
            await make(storage, "one")
            started.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(forever())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await exists(storage, "one")
    await make(storage, "one")


async def test_a_timeout_inside_a_block_undoes_it(harness: Harness, storage: SQLStorage) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), storage.transaction():
            await make(storage, "one")
            await asyncio.sleep(60)
    with pytest.raises(TimeoutError):
        async with storage.transaction():
            await make(storage, "two")
            async with asyncio.timeout(0.05):
                await asyncio.sleep(60)
    assert not await exists(storage, "one")
    assert not await exists(storage, "two")


async def test_a_timeout_that_is_caught_inside_a_block_leaves_it_usable(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        await make(storage, "one")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.sleep(60)
        await make(storage, "two")
    assert await exists(storage, "one")
    assert await exists(storage, "two")


async def test_transactions_can_be_driven_by_hand(harness: Harness, storage: SQLStorage) -> None:
    await storage.begin_transaction()
    await make(storage, "kept")
    await storage.commit_transaction()
    await storage.begin_transaction()
    await make(storage, "undone")
    await storage.rollback_transaction()

    assert not storage.in_transaction()
    assert await exists(storage, "kept")
    assert not await exists(storage, "undone")


async def test_there_is_nothing_to_commit_without_a_transaction(storage: SQLStorage) -> None:
    assert not storage.in_transaction()
    with pytest.raises(NotInTransactionError):
        await storage.commit_transaction()
    await storage.rollback_transaction()
    with pytest.raises(NotInTransactionError):
        storage.register_post_commit_callback(lambda: None)


async def test_two_storages_have_a_transaction_each(harness: Harness, storage: SQLStorage) -> None:
    other = await harness.open()
    async with storage.transaction():
        assert storage.in_transaction()
        assert not other.in_transaction()
        with pytest.raises(NotInTransactionError):
            await other.commit_transaction()


# Nesting.


async def test_an_inner_block_is_undone_alone(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        await make(storage, "outer")
        with pytest.raises(Oops):
            async with storage.transaction():
                await make(storage, "inner")
                async with storage.transaction():
                    await make(storage, "innermost")
                raise Oops
        assert storage.in_transaction()
        async with storage.transaction():
            await make(storage, "second")
    assert await exists(storage, "outer")
    assert await exists(storage, "second")
    assert not await exists(storage, "inner")
    assert not await exists(storage, "innermost")


async def test_an_inner_block_commits_only_with_the_outer_one(harness: Harness, storage: SQLStorage) -> None:
    with pytest.raises(Oops):
        async with storage.transaction():
            async with storage.transaction():
                await make(storage, "inner")
            raise Oops
    assert not await exists(storage, "inner")


async def test_nesting_by_hand_needs_as_many_commits_as_begins(harness: Harness, storage: SQLStorage) -> None:
    await storage.begin_transaction()
    await storage.begin_transaction()
    await make(storage, "inner")
    await storage.rollback_transaction()
    assert storage.in_transaction()
    await make(storage, "outer")
    await storage.commit_transaction()
    assert not storage.in_transaction()
    assert await exists(storage, "outer")
    assert not await exists(storage, "inner")


# Others, and time.


async def test_reading_before_writing_does_not_fail_because_somebody_else_wrote(
    harness: Harness, storage: SQLStorage
) -> None:
    """A transaction that only becomes a writer at its first write cannot, once another has written since it read."""
    mine, other = await harness.locked(storage), await harness.locked(storage)
    rival = await harness.open()
    async with storage.transaction():
        assert await storage.get_history_count(mine.instance_id) == 0
        writing = asyncio.ensure_future(rival.append_history(step(other.instance_id), lock=other))
        await asyncio.wait({writing}, timeout=0.1)
        await storage.append_history(step(mine.instance_id), lock=mine)
    await writing
    assert await storage.get_history_count(mine.instance_id) == await storage.get_history_count(other.instance_id) == 1


async def test_the_clock_goes_on_inside_a_transaction(harness: Harness, storage: SQLStorage) -> None:
    """Or a lock taken late in a long one would be born expired."""
    instance_id = await harness.instance(storage)
    async with storage.transaction():
        first = await storage.current_time()
        await asyncio.sleep(0.3)
        lock = await storage.try_acquire_lock(instance_id, "worker-1", 0.2)
        assert lock is not None
        assert lock.expires_at > first + timedelta(seconds=0.49)


# Errors inside.


async def test_a_refused_operation_leaves_no_partial_writes_in_the_block(harness: Harness, storage: SQLStorage) -> None:
    """Creating writes the definition first: it must not stay when the instance itself is refused."""
    await make(storage, "taken")
    async with storage.transaction():
        with pytest.raises(InstanceExistsError):
            await storage.create_instance(
                WorkflowInstance(instance_id="taken", workflow_name="another", locked_by="worker-1")
            )
        await make(storage, "free")
    definitions = await storage.conn().fetch_all("SELECT workflow_name FROM workflow_definitions")
    assert [row["workflow_name"] for row in definitions] == ["order"]
    assert await exists(storage, "free")


async def test_every_kind_of_refusal_leaves_the_block_usable(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.append_history(step(instance_id))
    refusals: list[Callable[[], Any]] = [
        lambda: make(storage, instance_id),
        lambda: make(storage, ""),
        lambda: storage.append_history(step(instance_id)),
        lambda: storage.append_history(step("nobody")),
        lambda: storage.append_history(step(instance_id, "b:1", "{")),
        lambda: storage.update_instance_status(instance_id, "pending"),  # type: ignore[arg-type]
        lambda: storage.update_instance_status(instance_id, WorkflowStatus.RECURRED),
        lambda: storage.cancel_instance("nobody", "why not"),
        lambda: storage.try_acquire_lock(instance_id, "worker-1", 0),
        lambda: storage.get_history_paginated(instance_id, 0, -1),
    ]
    async with storage.transaction():
        for refusal in refusals:
            with pytest.raises((StorageError, ValueError)):
                await refusal()
        await storage.append_history(step(instance_id, "after:1"))
    assert await storage.get_history_count(instance_id) == 2


async def test_a_failed_statement_of_ones_own_ends_the_block_or_leaves_it_usable_but_never_half(
    harness: Harness, storage: SQLStorage
) -> None:
    """PostgreSQL cannot go on after an error, SQLite and MySQL can: either way the block commits all or nothing."""
    committed = False
    try:
        async with storage.transaction() as conn:
            await make(storage, "one")
            with pytest.raises(StorageError):
                await conn.execute("INSERT INTO nowhere VALUES (1)")
            await make(storage, "two")
        committed = True
    except StorageError:
        pass
    assert await exists(storage, "one") == await exists(storage, "two") == committed


async def test_a_conflict_inside_a_block_undoes_the_losers_business_writes(
    harness: Harness, storage: SQLStorage
) -> None:
    instance_id = await harness.instance(storage)
    await storage.append_history(step(instance_id))
    with pytest.raises(HistoryConflictError):
        async with storage.transaction():
            await make(storage, "business")
            await storage.append_history(step(instance_id))
    assert not await exists(storage, "business")


# Tasks.


async def test_another_task_cannot_use_an_open_transaction(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        with pytest.raises(WrongTaskError):
            await asyncio.create_task(make(storage, "one"))
        with pytest.raises(WrongTaskError):
            await asyncio.create_task(storage.get_instance("one"))
        with pytest.raises(WrongTaskError):
            await asyncio.create_task(storage.commit_transaction())
        with pytest.raises(WrongTaskError):
            await asyncio.create_task(storage.rollback_transaction())
        with pytest.raises(WrongTaskError):
            await asyncio.create_task(storage.conn().fetch_value("SELECT 1"))
        await make(storage, "two")
    assert await exists(storage, "two")


async def test_another_task_is_not_in_the_transaction(harness: Harness, storage: SQLStorage) -> None:
    async def asked() -> bool:
        return storage.in_transaction()

    async with storage.transaction():
        assert await asyncio.create_task(asked()) is False


async def test_a_task_that_inherited_a_finished_transaction_is_outside(harness: Harness, storage: SQLStorage) -> None:
    finished = asyncio.Event()

    async def later() -> None:
        await finished.wait()
        assert not storage.in_transaction()
        await make(storage, "later")
        async with storage.transaction():
            await make(storage, "its own")

    async with storage.transaction():
        task = asyncio.create_task(later())
        await make(storage, "first")
    finished.set()
    await task
    assert await exists(storage, "later")
    assert await exists(storage, "its own")


async def test_tasks_have_a_transaction_each(harness: Harness, storage: SQLStorage) -> None:
    await make(storage, "so that the definition is there already")

    async def one(number: int) -> None:
        async with storage.transaction():
            await make(storage, f"instance-{number}")
            await asyncio.sleep(0)
            if number % 2:
                raise Oops

    outcomes = await asyncio.gather(*(one(number) for number in range(20)), return_exceptions=True)
    assert [isinstance(outcome, Oops) for outcome in outcomes] == [bool(number % 2) for number in range(20)]
    for number in range(20):
        assert await exists(storage, f"instance-{number}") is (number % 2 == 0)


async def test_open_transactions_leave_a_connection_for_the_heartbeat(harness: Harness) -> None:
    storage = await harness.open(**({} if harness.name == "sqlite" else {"pool_size": 4}))
    lock = await harness.locked(storage)
    release = asyncio.Event()

    async def holds() -> None:
        async with storage.transaction():
            await release.wait()

    holders = [asyncio.create_task(holds()) for _ in range(8)]
    await asyncio.sleep(0.1)
    beating = asyncio.create_task(storage.refresh_lock(lock.instance_id, "worker-1", 30, lock=lock))
    if harness.name != "sqlite":  # there a transaction owns the one writer; its deadline is the bound
        assert await asyncio.wait_for(beating, 5) is not None
    release.set()
    await asyncio.gather(*holders)
    assert await beating is not None


# The deadline.


async def test_a_transaction_that_is_open_for_too_long_is_rolled_back(harness: Harness, storage: SQLStorage) -> None:
    with pytest.raises(TransactionDeadlineError):
        async with storage.transaction(deadline_sec=0.2):
            await make(storage, "one")
            await asyncio.sleep(0.4)
            await make(storage, "two")
    assert not storage.in_transaction()
    assert not await exists(storage, "one")
    await make(storage, "one")


async def test_an_overdue_transaction_does_not_commit(harness: Harness, storage: SQLStorage) -> None:
    with pytest.raises(TransactionDeadlineError):
        async with storage.transaction(deadline_sec=0.2):
            await make(storage, "one")
            await asyncio.sleep(0.4)
    assert not await exists(storage, "one")


async def test_the_deadline_frees_the_database_for_others(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    other = await harness.open()
    with pytest.raises(TransactionDeadlineError):
        async with storage.transaction(deadline_sec=0.2):
            await storage.append_history(step(lock.instance_id), lock=lock)
            # Waits for the row (or SQLite's writer) until the deadline has freed it.
            await asyncio.wait_for(other.update_instance_activity(lock.instance_id, "next:1", lock=lock), 10)


async def test_the_users_own_error_is_not_hidden_by_the_deadline(harness: Harness, storage: SQLStorage) -> None:
    with pytest.raises((Oops, TransactionDeadlineError)) as raised:
        async with storage.transaction(deadline_sec=0.1):
            await asyncio.sleep(0.3)
            raise Oops
    seen = {type(raised.value), type(raised.value.__context__)}
    assert Oops in seen


# After the commit.


async def test_callbacks_run_after_the_commit_in_order(harness: Harness, storage: SQLStorage) -> None:
    witness = await harness.open()
    seen: list[object] = []

    async def asynchronous() -> None:
        await asyncio.sleep(0)
        seen.append(("async", await exists(witness, "one"), storage.in_transaction()))

    async with storage.transaction():
        storage.register_post_commit_callback(lambda: seen.append("first"))
        storage.register_post_commit_callback(asynchronous)
        async with storage.transaction():
            storage.register_post_commit_callback(lambda: seen.append("nested"))
        storage.register_post_commit_callback(lambda: seen.append("last"))
        await make(storage, "one")
        assert seen == []

    assert seen == ["first", ("async", True, False), "nested", "last"]


async def test_callbacks_run_before_commit_transaction_returns(harness: Harness, storage: SQLStorage) -> None:
    seen: list[int] = []
    await storage.begin_transaction()
    storage.register_post_commit_callback(lambda: seen.append(1))
    await storage.commit_transaction()
    assert seen == [1]


async def test_a_rollback_forgets_the_callbacks(harness: Harness, storage: SQLStorage) -> None:
    seen: list[str] = []
    with pytest.raises(Oops):
        async with storage.transaction():
            storage.register_post_commit_callback(lambda: seen.append("outer"))
            raise Oops
    async with storage.transaction():
        with pytest.raises(Oops):
            async with storage.transaction():
                storage.register_post_commit_callback(lambda: seen.append("inner"))
                raise Oops
        storage.register_post_commit_callback(lambda: seen.append("kept"))
    with pytest.raises(TransactionDeadlineError):
        async with storage.transaction(deadline_sec=0.1):
            storage.register_post_commit_callback(lambda: seen.append("overdue"))
            await asyncio.sleep(0.3)
    assert seen == ["kept"]


async def test_a_failing_callback_hides_neither_the_commit_nor_the_others(
    harness: Harness, storage: SQLStorage, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    def fails() -> None:
        raise Oops

    async def fails_later() -> None:
        raise Oops

    with caplog.at_level(logging.ERROR, logger="romancy.storage"):
        async with storage.transaction():
            storage.register_post_commit_callback(fails)
            storage.register_post_commit_callback(fails_later)
            storage.register_post_commit_callback(lambda: seen.append(1))
            await make(storage, "one")

    assert await exists(storage, "one")
    assert seen == [1]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


async def test_a_callback_may_use_the_storage(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        storage.register_post_commit_callback(lambda: make(storage, "from the callback"))
    assert await exists(storage, "from the callback")


async def test_past_its_deadline_a_transaction_is_no_longer_open(storage: SQLStorage) -> None:
    with pytest.raises(TransactionDeadlineError):
        async with storage.transaction(deadline_sec=0.05):
            assert storage.in_transaction()
            await asyncio.sleep(0.3)
            assert not storage.in_transaction()
