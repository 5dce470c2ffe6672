"""Operations that wait at the same time share commits; nobody suffers from the company."""

import asyncio
import itertools
from collections.abc import Awaitable, Coroutine
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from romancy.storage import (
    Appended,
    ChannelMode,
    HistoryConflictError,
    HistoryEvent,
    HistoryEventType,
    InstanceExistsError,
    InstanceWait,
    InvalidKeyError,
    Lock,
    LockLostError,
    OutboxEvent,
    SQLStorage,
    StorageError,
    TimerSubscription,
    WorkflowInstance,
    WorkflowStatus,
)
from romancy.storage.sql.runners.flusher import Flusher
from romancy.storage.sql.runners.mysql import MySQLConnection, MySQLRunner
from romancy.storage.sql.runners.pool import Pool
from romancy.storage.sql.runners.server import ServerRunner
from tests.harness import Harness, expect_company, history_of, step

from .arrange import status_of

MANY = 40


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """The answers of callers who come at the same time; an error of the storage is an answer."""
    answers = await asyncio.gather(*work, return_exceptions=True)
    unexpected = [
        answer for answer in answers if isinstance(answer, Exception) and not isinstance(answer, StorageError)
    ]
    assert not unexpected
    return answers


async def test_everybody_gets_an_id_of_their_own(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(MANY)]

    answers = await together(*(storage.append_history(step(lock.instance_id, "charge:1"), lock=lock) for lock in locks))

    for lock, answer in zip(locks, answers, strict=True):
        [event] = await history_of(storage, lock.instance_id)
        assert answer == Appended(event.id, already_recorded=False)


async def test_steps_of_one_instance_are_recorded_side_by_side(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage, instance_id="order-1")
    names = [f"step:{number}" for number in range(MANY)]

    answers = await together(*(storage.append_history(step("order-1", name), lock=lock) for name in names))

    recorded = {event.activity_id: event.id for event in await history_of(storage, "order-1")}
    assert recorded == dict(zip(names, (answer.id for answer in answers), strict=True))


async def test_a_lost_lock_fails_only_its_caller(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(MANY)]
    await storage.release_lock("order-7", locks[7].worker_id, lock=locks[7])

    answers = await together(*(storage.append_history(step(lock.instance_id, "charge:1"), lock=lock) for lock in locks))

    assert [number for number, answer in enumerate(answers) if isinstance(answer, LockLostError)] == [7]
    assert [number for number, answer in enumerate(answers) if isinstance(answer, Appended)] == [
        number for number in range(MANY) if number != 7
    ]


async def test_a_zombie_in_company_does_not_take_its_rivals_record_for_its_own(
    harness: Harness, storage: SQLStorage
) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(MANY)]
    await storage.release_lock("order-7", locks[7].worker_id, lock=locks[7])
    rival = await storage.try_acquire_lock("order-7", "rival", 60)
    await storage.append_history(step("order-7", "charge:1"), lock=rival)

    answers = await together(*(storage.append_history(step(lock.instance_id, "charge:1"), lock=lock) for lock in locks))

    assert [number for number, answer in enumerate(answers) if not isinstance(answer, Appended)] == [7]
    assert isinstance(answers[7], LockLostError)


async def test_a_step_that_is_taken_fails_only_its_caller(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(MANY)]
    await storage.append_history(step("order-3", "charge:1", '"earlier"'), lock=locks[3])

    answers = await together(*(storage.append_history(step(lock.instance_id, "charge:1"), lock=lock) for lock in locks))

    assert [number for number, answer in enumerate(answers) if isinstance(answer, HistoryConflictError)] == [3]
    assert sum(isinstance(answer, Appended) for answer in answers) == MANY - 1


async def test_one_step_recorded_by_many_at_once_is_recorded_once(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage, instance_id="order-1")

    answers = await together(*(storage.append_history(step("order-1", "charge:1"), lock=lock) for _ in range(MANY)))

    assert len(await history_of(storage, "order-1")) == 1
    assert sum(not answer.already_recorded for answer in answers) == 1


async def test_what_is_recorded_in_company_is_stored_to_the_letter(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(MANY)]
    tokyo = timezone(timedelta(hours=9))
    texts = ['"plain"', '"\\u0000"', '"\\\\"', '"ü \U0001f600 %s :x $1"', "{}", None]
    events = [
        HistoryEvent(
            instance_id=lock.instance_id,
            activity_id="charge:1 'ü\\",
            event_type=HistoryEventType.ACTIVITY_COMPLETED,
            event_data=texts[number % len(texts)],
            event_data_binary=bytes(range(256)) if number % 2 else None,
            created_at=datetime(2026, 1, 2, 3, 4, 5, number, tzinfo=tokyo) if number % 3 else None,
        )
        for number, lock in enumerate(locks)
    ]

    await together(*(storage.append_history(event, lock=lock) for event, lock in zip(events, locks, strict=True)))

    for event in events:
        [recorded] = await history_of(storage, event.instance_id)
        expected = replace(event, id=recorded.id, created_at=event.created_at or recorded.created_at)
        assert recorded == expected


async def test_who_is_born_in_company_is_as_if_born_alone(harness: Harness, storage: SQLStorage) -> None:
    now = await storage.current_time()
    await harness.instance(storage, instance_id="order-7")
    born = [
        WorkflowInstance(
            instance_id=f"order-{number}",
            workflow_name="order" if number % 2 else "shipment",
            source_hash="1",
            owner_service="ü",
            input_data='{"note": "\\u0000 ü \U0001f600"}',
            started_at=now,
            locked_by="worker-1",
            locked_at=now,
            lock_expires_at=now + timedelta(seconds=60),
        )
        for number in range(MANY)
    ]
    alone = await storage.create_instance(replace(born[0], instance_id="alone"))
    assert alone is not None

    locks = await together(*(storage.create_instance(instance) for instance in born))

    assert isinstance(locks[7], InstanceExistsError)
    assert [lock for number, lock in enumerate(locks) if number != 7] == [
        replace(alone, instance_id=instance.instance_id) for number, instance in enumerate(born) if number != 7
    ]
    as_if = await storage.get_instance("alone")
    assert as_if is not None
    for number, instance in enumerate(born):
        stored = await storage.get_instance(instance.instance_id)
        if number != 7:
            assert stored is not None
            expected = replace(
                as_if,
                instance_id=instance.instance_id,
                workflow_name=instance.workflow_name,
                updated_at=stored.updated_at,
            )
            assert stored == expected


async def test_one_id_created_by_many_at_once_is_created_once(harness: Harness, storage: SQLStorage) -> None:
    answers = await together(*(storage.create_instance(WorkflowInstance("order-1", "fulfil")) for _ in range(MANY)))

    assert sum(isinstance(answer, InstanceExistsError) for answer in answers) == MANY - 1


async def test_one_lock_wanted_by_many_at_once_is_given_once(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, instance_id="order-1")

    answers = await together(*(storage.try_acquire_lock("order-1", f"worker-{number}", 60) for number in range(MANY)))

    assert sum(answer is not None for answer in answers) == 1


async def test_different_operations_share_a_flush(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(4)]

    answers = await together(
        storage.append_history(step("order-0", "charge:1"), lock=locks[0]),
        storage.update_instance_output("order-1", '"done"', lock=locks[1]),
        storage.create_instance(WorkflowInstance("order-9", "fulfil")),
        storage.publish_to_channel("news", '"hello"'),
        storage.add_outbox_event(OutboxEvent("event-1", "paid", "shop", event_data="{}")),
        storage.release_lock("order-2", locks[2].worker_id, lock=locks[2]),
        storage.update_instance_status("order-3", WorkflowStatus.FAILED, "no stock", lock=locks[3]),
    )

    assert not [answer for answer in answers if isinstance(answer, Exception)]
    instances = [await storage.get_instance(f"order-{number}") for number in (1, 3, 9)]
    statuses = [instance.status for instance in instances if instance is not None]
    assert statuses == [WorkflowStatus.COMPLETED, WorkflowStatus.FAILED, WorkflowStatus.RUNNING]
    assert await storage.try_acquire_lock("order-2", "another", 60) is not None
    assert [event.event_id for event in await storage.get_pending_outbox_events()] == ["event-1"]


async def test_a_caller_who_is_cancelled_takes_nobody_with_him(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(MANY)]
    tasks = [
        asyncio.ensure_future(storage.append_history(step(lock.instance_id, "charge:1"), lock=lock)) for lock in locks
    ]
    await asyncio.sleep(0)
    tasks[5].cancel()

    answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(answers[5], asyncio.CancelledError)
    assert sum(isinstance(answer, Appended) for answer in answers) == MANY - 1


async def test_a_row_that_somebody_holds_keeps_nobody_else_waiting(harness: Harness, storage: SQLStorage) -> None:
    if harness.name == "sqlite":
        return  # one writer: a transaction keeps everybody waiting, within its deadline
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(8)]
    other = await harness.open()
    async with other.transaction():
        await other.update_instance_activity("order-0", "holding", lock=locks[0])
        held = asyncio.ensure_future(storage.append_history(step("order-0", "charge:1"), lock=locks[0]))
        async with asyncio.timeout(5):
            answers = await together(
                *(storage.append_history(step(lock.instance_id, "charge:1"), lock=lock) for lock in locks[1:])
            )
        assert not held.done()
    assert all(isinstance(answer, Appended) for answer in answers)
    assert isinstance(await held, Appended)


async def test_who_comes_at_the_same_time_reads_the_clock_once(harness: Harness, storage: SQLStorage) -> None:
    born = [WorkflowInstance(f"order-{number}", "fulfil", locked_by="worker-1") for number in range(MANY)]

    locks = await together(*(storage.create_instance(instance, lock_timeout_sec=60) for instance in born))

    assert [lock.instance_id for lock in locks] == [instance.instance_id for instance in born]
    for lock in locks:
        stored = await storage.get_instance(lock.instance_id)
        assert stored is not None
        assert stored.lock_expires_at == lock.expires_at


async def asleep(harness: Harness, storage: SQLStorage) -> list[TimerSubscription]:
    """Instances that wait for timers which are due by now, each at a moment of its own."""
    now = await storage.current_time()
    timers = [
        TimerSubscription(
            f"order-{n}", f"nap:{n}", now + timedelta(seconds=30, microseconds=n), activity_id=f"rest:{n}"
        )
        for n in range(MANY)
    ]
    for timer in timers:
        lock = await harness.locked(storage, instance_id=timer.instance_id)
        await storage.append_history(step(timer.instance_id, "charge:1"), lock=lock)
        await storage.suspend(timer.instance_id, [timer], lock=lock)
    harness.advance(31)
    return timers


async def test_everybody_completes_with_an_output_of_their_own(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(MANY)]
    await harness.locked(storage, instance_id="bystander")
    outputs = [None if number % 7 == 0 else f'"{"é" * number}%s"' for number in range(MANY)]

    await together(
        *(
            storage.update_instance_output(lock.instance_id, out, lock=lock)
            for lock, out in zip(locks, outputs, strict=True)
        )
    )

    stored = [await storage.get_instance(lock.instance_id) for lock in locks]
    assert [instance.output_data for instance in stored if instance is not None] == outputs
    assert {(i.status, i.locked_by) for i in stored if i is not None} == {(WorkflowStatus.COMPLETED, None)}
    assert await status_of(storage, "bystander") is WorkflowStatus.RUNNING


async def test_completing_with_a_lost_lock_fails_only_its_caller(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(MANY)]
    await storage.release_lock("order-7", locks[7].worker_id, lock=locks[7])
    assert await storage.try_acquire_lock("order-7", "rival", 60)

    answers = await together(*(storage.update_instance_output(lock.instance_id, "1", lock=lock) for lock in locks))

    assert [number for number, answer in enumerate(answers) if answer is not None] == [7]
    assert isinstance(answers[7], LockLostError)
    assert await status_of(storage, "order-7") is WorkflowStatus.RUNNING


async def test_who_completes_in_company_leaves_as_little_behind_as_alone(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(MANY)]
    await storage.join_group("order-1", "open")
    await storage.subscribe_to_channel("order-2", "news", ChannelMode.BROADCAST)
    later = await storage.current_time() + timedelta(hours=1)
    await storage.register_timer_subscription(TimerSubscription("order-3", "nap", later), lock=locks[3])
    await harness.locked(storage, instance_id="bystander")
    await storage.join_group("bystander", "open")
    parent = await harness.locked(storage, instance_id="parent")
    await storage.suspend("parent", [InstanceWait("order-4", "child:1")], lock=parent)

    await together(*(storage.update_instance_output(lock.instance_id, "1", lock=lock) for lock in locks))

    assert await storage.get_group_members("open") == ["bystander"]
    assert await storage.get_channel_subscription("order-2", "news") is None
    assert await storage.get_awaited_steps("order-3") == []
    assert [event.activity_id for event in await history_of(storage, "parent")] == ["child:1"]
    assert await status_of(storage, "parent") is WorkflowStatus.RUNNING


async def test_one_with_ties_does_not_send_the_others_home(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(storage.runner, ServerRunner):
        return
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(12)]
    await storage.join_group("order-1", "open")
    alone: list[str] = []
    run_again = ServerRunner._run_again

    async def noted(self: ServerRunner, call: Any, failed: Any) -> Any:
        alone.append(call.name)
        return await run_again(self, call, failed)

    monkeypatch.setattr(ServerRunner, "_run_again", noted)
    await together(*(storage.update_instance_output(lock.instance_id, "1", lock=lock) for lock in locks))

    assert alone == []
    assert {await status_of(storage, lock.instance_id) for lock in locks} == {WorkflowStatus.COMPLETED}
    assert await storage.get_group_members("open") == []


async def test_single_writes_of_several_kinds_need_no_transaction_around_them(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(storage.runner, ServerRunner):
        return
    begun = [await harness.locked(storage) for _ in range(8)]
    ending = [await harness.locked(storage) for _ in range(8)]
    driven: list[str] = []
    in_step = Flusher._in_step

    async def noted(self: Flusher, connection: Any, asking: list[Any]) -> None:
        driven.extend(job.call.name for job in asking)
        await in_step(self, connection, asking)

    monkeypatch.setattr(Flusher, "_in_step", noted)
    now = await storage.current_time()
    newborn = [
        WorkflowInstance(
            instance_id=harness.new_id(),
            workflow_name="order",
            locked_by="worker-1",
            started_at=now,
            locked_at=now,
            lock_expires_at=now + timedelta(minutes=1),
        )
        for _ in range(8)
    ]
    for_all = zip(begun, ending, newborn, strict=True)
    answers = await together(
        *itertools.chain.from_iterable(
            (
                storage.append_history(step(one.instance_id, "charge:1"), lock=one),
                storage.update_instance_output(other.instance_id, "1", lock=other),
                storage.create_instance(new),
            )
            for one, other, new in for_all
        )
    )

    assert driven == []
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    assert {await status_of(storage, lock.instance_id) for lock in ending} == {WorkflowStatus.COMPLETED}
    assert {await status_of(storage, new.instance_id) for new in newborn} == {WorkflowStatus.RUNNING}


async def test_large_steps_are_recorded_in_company_too(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(12)]
    await storage.release_lock("order-7", locks[7].worker_id, lock=locks[7])
    large = f'"{"x" * 100_000}"'

    answers = await together(
        *(storage.append_history(step(lock.instance_id, "charge:1", large), lock=lock) for lock in locks)
    )

    assert [number for number, answer in enumerate(answers) if isinstance(answer, LockLostError)] == [7]
    for number, lock in enumerate(locks):
        events = await history_of(storage, lock.instance_id)
        assert [event.event_data for event in events] == ([] if number == 7 else [large])


async def test_texts_of_types_of_their_own_are_texts(harness: Harness, storage: SQLStorage) -> None:
    class Text(str): ...

    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(4)]

    await together(*(storage.append_history(step(lock.instance_id, Text("charge:1")), lock=lock) for lock in locks))

    for lock in locks:
        assert [event.activity_id for event in await history_of(storage, lock.instance_id)] == ["charge:1"]


async def test_timers_that_are_due_together_fire_each_for_its_own(harness: Harness, storage: SQLStorage) -> None:
    timers = await asleep(harness, storage)

    answers = await together(*(storage.fire_and_claim(timer, "worker-2", 60) for timer in timers))

    for timer, woken in zip(timers, answers, strict=True):
        before, event = await history_of(storage, timer.instance_id)
        assert (woken.event, woken.after_id) == (event, before.id)
        assert event.activity_id == timer.activity_id
        assert woken.lock == Lock(timer.instance_id, 2, "worker-2", woken.lock.expires_at)
        assert await storage.refresh_lock(timer.instance_id, "worker-2", 60, lock=woken.lock) is not None
        assert await storage.get_awaited_steps(timer.instance_id) == []


async def test_a_timer_that_cannot_fire_keeps_no_other_from_it(harness: Harness, storage: SQLStorage) -> None:
    timers = await asleep(harness, storage)
    assert await storage.fire_and_claim(timers[3], "rival", 60)
    await storage.cancel_instance("order-5", "no stock")
    timers[8] = replace(timers[8], timer_id="unknown")
    timers[9] = replace(timers[9], expires_at=timers[9].expires_at - timedelta(seconds=1))  # not quite as registered

    answers = await together(*(storage.fire_and_claim(timer, "worker-2", 60) for timer in timers))

    assert [number for number, woken in enumerate(answers) if woken is None] == [3, 5, 8]
    assert await status_of(storage, "order-8") is WorkflowStatus.WAITING_FOR_TIMER
    recorded = [len(await history_of(storage, f"order-{number}")) for number in range(MANY)]
    assert recorded == [1 if number == 8 else 2 for number in range(MANY)]


async def test_a_timer_whose_step_is_recorded_already_keeps_the_record(harness: Harness, storage: SQLStorage) -> None:
    timers = await asleep(harness, storage)
    recorded = await storage.append_history(step("order-6", "rest:6", '"earlier"'))

    answers = await together(*(storage.fire_and_claim(timer, "worker-2", 60) for timer in timers))

    assert (answers[6].event.id, answers[6].event.event_data) == (recorded.id, '"earlier"')
    assert all(answer.lock is not None for answer in answers)


async def test_mysql_is_asked_once_for_all_who_ask_the_same(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(storage.runner, MySQLRunner):
        return
    asked: list[str] = []
    ask = MySQLConnection._ask

    async def noted(self: MySQLConnection, message: str) -> None:
        if self.sends_several and "information_schema" not in message:  # which a new connection asks
            asked.append(message)
        await ask(self, message)

    monkeypatch.setattr(MySQLConnection, "_ask", noted)
    timers = (await asleep(harness, storage))[:16]  # more would be divided among two flushes
    asked.clear()

    answers = await together(*(storage.fire_and_claim(timer, "worker-2", 60) for timer in timers))
    assert [message.split()[0] for message in asked] == ["SELECT", "DELETE", "INSERT", "UPDATE", "COMMIT"]
    asked.clear()

    await together(*(storage.update_instance_output(w.instance.instance_id, "1", lock=w.lock) for w in answers))
    assert [message.split()[0] for message in asked] == ["UPDATE", "SELECT", "COMMIT"]


async def test_mysql_begins_a_transaction_without_company_with_its_first_statement(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(storage.runner, MySQLRunner):
        return
    lock = await harness.locked(storage)
    begins: list[bool] = []
    ask = MySQLConnection._ask

    async def noted(self: MySQLConnection, message: str) -> None:
        begins.append(self._begins)
        await ask(self, message)

    monkeypatch.setattr(MySQLConnection, "_ask", noted)
    await storage.update_instance_status(lock.instance_id, WorkflowStatus.COMPLETED, lock=lock)
    assert begins == [True, False, False, False]
    assert await status_of(storage, lock.instance_id) is WorkflowStatus.COMPLETED


async def test_one_caller_after_the_other_needs_one_connection_to_mysql(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(storage.runner, MySQLRunner):
        return
    lock = await harness.locked(storage)
    await storage.append_history(step(lock.instance_id, "charge:1"), lock=lock)
    used: set[MySQLConnection] = set()
    read = MySQLConnection._read

    async def noted(self: MySQLConnection, reading: Awaitable[Any]) -> None:
        used.add(self)
        await read(self, reading)

    monkeypatch.setattr(MySQLConnection, "_read", noted)
    for number in (2, 3):
        await storage.append_history(step(lock.instance_id, f"charge:{number}"), lock=lock)
    await storage.update_instance_output(lock.instance_id, "1", lock=lock, record=step(lock.instance_id, "charge:4"))

    assert len(used) == 1
    steps = [event.activity_id for event in await history_of(storage, lock.instance_id)]
    assert steps == ["charge:1", "charge:2", "charge:3", "charge:4"]


async def test_a_single_write_needs_no_second_connection_to_mysql(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(storage.runner, MySQLRunner):
        return
    lock = await harness.locked(storage)
    runner = storage.runner

    async def refused() -> MySQLConnection:
        raise AssertionError("one connection is enough")

    await runner._flush_pool.close(0)
    runner._flush_pool = Pool(refused, 1)
    for number in range(4):
        await asyncio.create_task(storage.append_history(step(lock.instance_id, f"charge:{number}"), lock=lock))
    for number in range(4, 8):
        await storage.append_history(step(lock.instance_id, f"charge:{number}"), lock=lock)

    assert len(await history_of(storage, lock.instance_id)) == 8


async def test_mariadb_is_sent_once_what_all_rows_have_in_common(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(storage.runner, MySQLRunner):
        return
    locks = [await harness.locked(storage, worker_id="worker-7") for _ in range(10)]
    asked: list[str] = []
    ask = MySQLConnection._ask

    async def noted(self: MySQLConnection, message: str) -> None:
        asked.append(message)
        await ask(self, message)

    monkeypatch.setattr(MySQLConnection, "_ask", noted)
    await together(*(storage.append_history(step(lock.instance_id, "charge:1"), lock=lock) for lock in locks))

    (insert,) = (message for message in asked if "INSERT INTO workflow_history" in message)
    assert insert.count("'worker-7'") == (1 if storage.runner.driver.is_mariadb else len(locks))
    assert [len(await history_of(storage, lock.instance_id)) for lock in locks] == [1] * len(locks)


async def test_who_comes_alone_may_wait_long_for_a_row(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    other = await harness.open()
    async with other.transaction():
        await other.update_instance_activity(lock.instance_id, "holding", lock=lock)
        completing = asyncio.ensure_future(storage.update_instance_output(lock.instance_id, "1", lock=lock))
        await asyncio.sleep(1.2)  # longer than a flush would wait
        assert not completing.done()
    await completing
    assert await status_of(storage, lock.instance_id) is WorkflowStatus.COMPLETED


async def test_of_many_who_claim_each_gets_instances_of_its_own(harness: Harness, storage: SQLStorage) -> None:
    for number in range(MANY):
        await harness.instance(storage, instance_id=f"order-{number:02}")

    answers = await together(
        *(storage.claim_resumable_workflows(f"worker-{number}", 60 + number, 1 + number % 3) for number in range(MANY))
    )

    locks = [lock for claims in answers for _, lock in claims]
    assert sorted(lock.instance_id for lock in locks) == [f"order-{number:02}" for number in range(MANY)]
    for lock in locks:
        stored = await storage.get_instance(lock.instance_id)
        assert stored is not None
        assert (stored.locked_by, stored.lock_token, stored.lock_expires_at) == (lock.worker_id, 1, lock.expires_at)
    for number, claims in enumerate(answers):
        assert {lock.worker_id for _, lock in claims} <= {f"worker-{number}"}
        assert len(claims) <= 1 + number % 3
    assert await together(*(storage.append_history(step(lock.instance_id), lock=lock) for lock in locks))


async def test_claims_for_different_workflows_keep_to_their_own(harness: Harness, storage: SQLStorage) -> None:
    names = ["fulfil", "refund"]
    for number in range(MANY):
        await harness.instance(storage, instance_id=f"order-{number}", workflow_name=names[number % 2])

    answers = await together(
        *(
            storage.claim_resumable_workflows("worker", 60, 1, workflow_names=[names[number % 2]])
            for number in range(MANY)
        )
    )

    claimed = [[instance.workflow_name for instance, _ in claims] for claims in answers]
    assert claimed == [[names[number % 2]] for number in range(MANY)]


async def test_of_many_who_lease_each_gets_events_of_its_own(harness: Harness, storage: SQLStorage) -> None:
    for number in range(MANY):
        await storage.add_outbox_event(OutboxEvent(f"event-{number:02}", "paid", "shop"))

    answers = await together(
        *(storage.get_pending_outbox_events(2, owner=f"relayer-{number}") for number in range(MANY))
    )

    leased = {event.event_id: f"relayer-{number}" for number, events in enumerate(answers) for event in events}
    assert sum(len(events) for events in answers) == len(leased) == MANY
    assert dict(await storage.conn().fetch_all("SELECT event_id, lease_owner FROM outbox_events")) == leased


async def test_a_claim_that_is_wrong_fails_only_its_caller(harness: Harness, storage: SQLStorage) -> None:
    for number in range(MANY):
        await harness.instance(storage, instance_id=f"order-{number}")
        await storage.add_outbox_event(OutboxEvent(f"event-{number}", "paid", "shop"))
    workers = ["" if number == 7 else "worker" for number in range(MANY)]

    claims = await together(*(storage.claim_resumable_workflows(worker, 60, 1) for worker in workers))
    leases = await together(*(storage.get_pending_outbox_events(1, owner=worker) for worker in workers))

    for answers in (claims, leases):
        assert [number for number, answer in enumerate(answers) if isinstance(answer, InvalidKeyError)] == [7]
        assert sum(len(answer) for answer in answers if isinstance(answer, list)) == MANY - 1


async def test_a_claim_of_a_cancelled_caller_is_given_back_and_the_others_keep_theirs(
    harness: Harness, storage: SQLStorage
) -> None:
    for number in range(MANY):
        await harness.instance(storage, instance_id=f"order-{number}")
    tasks = [
        asyncio.ensure_future(storage.claim_resumable_workflows(f"worker-{number}", 60, 1)) for number in range(MANY)
    ]
    await asyncio.sleep(0)
    tasks[5].cancel()

    answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(answers[5], asyncio.CancelledError)
    kept = {lock.instance_id for answer in answers if isinstance(answer, list) for _, lock in answer}
    free = {instance.instance_id for instance in await storage.find_resumable_workflows()}
    assert len(kept) == MANY - 1
    assert free == {f"order-{number}" for number in range(MANY)} - kept


async def test_many_who_claim_are_served_by_one_look(harness: Harness, storage: SQLStorage) -> None:
    for number in range(MANY):
        await harness.instance(storage, instance_id=f"order-{number}")
        await storage.add_outbox_event(OutboxEvent(f"event-{number}", "paid", "shop"))
    asked: list[str] = []
    storage.runner.probe = lambda point, name: asked.append(point)

    claims = await together(*(storage.claim_resumable_workflows("worker", 60, 1) for _ in range(MANY)))
    leases = await together(*(storage.get_pending_outbox_events(1) for _ in range(MANY)))

    assert asked.count("before statement") == 5  # look, clock, locks; look, leases
    assert len({instance.instance_id for [(instance, _)] in claims}) == MANY
    assert len({event.event_id for [event] in leases}) == MANY


@pytest.mark.parametrize("zombie_comes", ["first", "last"])
async def test_a_zombie_in_the_owners_company_is_told_that_its_lock_is_gone(
    harness: Harness, storage: SQLStorage, zombie_comes: str
) -> None:
    zombie = await harness.locked(storage, instance_id="order-1")
    harness.advance(100)
    owner = await storage.try_acquire_lock("order-1", "owner", 60)
    others = [await harness.locked(storage) for _ in range(8)]
    assert owner is not None
    rivals = [(zombie, '"zombie"'), (owner, '"owner"')]
    expect_company(storage)

    first, last, *rest = await together(
        *(
            storage.append_history(step("order-1", "charge:1", data), lock=lock)
            for lock, data in (rivals if zombie_comes == "first" else reversed(rivals))
        ),
        *(storage.append_history(step(lock.instance_id, "charge:1"), lock=lock) for lock in others),
    )

    told, appended = (first, last) if zombie_comes == "first" else (last, first)
    assert isinstance(told, LockLostError)
    assert not appended.already_recorded
    assert all(isinstance(answer, Appended) for answer in rest)
    assert [event.event_data for event in await history_of(storage, "order-1")] == ['"owner"']


async def test_who_asks_for_nonsense_harms_nobody(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage) for _ in range(12)]
    half = replace(locks[0], worker_id="\ud800")
    odd = HistoryEvent(locks[1].instance_id, "charge:1", "ActivityCompleted", created_at="yesterday")  # type: ignore[arg-type]

    expect_company(storage)
    answers = await asyncio.gather(
        storage.append_history(step(locks[0].instance_id), lock=half),
        storage.append_history(odd, lock=locks[1]),
        *(storage.append_history(step(lock.instance_id), lock=lock) for lock in locks[2:]),
        return_exceptions=True,
    )
    claims = await asyncio.gather(
        storage.claim_resumable_workflows("worker", 60, "1"),  # type: ignore[arg-type]
        *(storage.claim_resumable_workflows("worker", 60, 1) for _ in range(5)),
        return_exceptions=True,
    )

    assert all(isinstance(answer, Exception) for answer in answers[:2])
    assert all(isinstance(answer, Appended) for answer in answers[2:])
    assert isinstance(claims[0], Exception)
    assert all(isinstance(answer, list) for answer in claims[1:])


async def test_the_users_sql_in_company_is_answered_as_alone(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage) for _ in range(8)]

    expect_company(storage)
    answers = await together(
        *(storage.conn().fetch_value(f"SELECT {number} + 1") for number in range(8)),
        *(storage.append_history(step(lock.instance_id), lock=lock) for lock in locks),
    )

    assert answers[:8] == list(range(1, 9))
    assert all(isinstance(answer, Appended) for answer in answers[8:])


async def test_steps_of_all_sizes_are_recorded_as_they_are(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage) for _ in range(20)]
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    events = [
        HistoryEvent(
            lock.instance_id,
            f"charge:{'9' * number}:1",
            "ActivityCompleted" if number % 3 else "X" * (1 + number),
            event_data=None if number == 7 else msgspec.json.encode("é'\\\"%s\n" * number * 40).decode(),
            event_data_binary=b"\0\xff'" * number if number == 7 else None,
            created_at=at if number % 4 == 3 else None,
        )
        for number, lock in enumerate(locks)
    ]

    await together(*(storage.append_history(event, lock=lock) for event, lock in zip(events, locks, strict=True)))

    for event, lock in zip(events, locks, strict=True):
        (recorded,) = await history_of(storage, lock.instance_id)
        assert recorded.activity_id == event.activity_id
        assert recorded.event_type == event.event_type
        assert (recorded.event_data, recorded.event_data_binary) == (event.event_data, event.event_data_binary)
        assert event.created_at in (None, recorded.created_at)


async def test_one_instance_that_many_create_is_created_once(harness: Harness, storage: SQLStorage) -> None:
    await storage.create_instance(WorkflowInstance("first", "order", source_hash="known"))

    def born(number: int) -> WorkflowInstance:
        return WorkflowInstance(
            "order-1" if number < 4 else f"order-{number}",
            "order",
            source_hash="known" if number else "new",
            input_data=str(number),
            locked_by=f"worker-{number}",
        )

    expect_company(storage)
    answers = await together(*(storage.create_instance(born(number), lock_timeout_sec=60) for number in range(12)))

    created = await storage.get_instance("order-1")
    assert created is not None
    winners = [answer for answer in answers[:4] if isinstance(answer, Lock)]
    assert [winner.worker_id for winner in winners] == [created.locked_by]
    assert created.locked_by == f"worker-{created.input_data}"
    assert sum(isinstance(answer, InstanceExistsError) for answer in answers) == 3
    assert all(isinstance(answer, Lock) for answer in answers[4:])
