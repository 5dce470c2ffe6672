"""Operations that wait at the same time share commits; nobody suffers from the company."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from romancy.storage import (
    Appended,
    HistoryConflictError,
    InstanceExistsError,
    LockLostError,
    OutboxEvent,
    SQLStorage,
    StorageError,
    WorkflowInstance,
    WorkflowStatus,
)
from tests.harness import Harness, history_of, step

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
