"""An instance completes with its output, and perhaps with the record of the step that it completes with."""

import asyncio
from contextlib import suppress

import pytest

from romancy.storage import (
    ChannelMode,
    DatabaseError,
    HistoryConflictError,
    InstanceNotFoundError,
    InvalidJSONError,
    InvalidStatusTransitionError,
    Lock,
    LockLostError,
    PayloadTooLargeError,
    SQLStorage,
    WorkflowStatus,
)
from tests.harness import Harness, history_of, step

from .arrange import status_of
from .test_company import MANY, together


async def steps_of(storage: SQLStorage, instance_id: str) -> list[str]:
    return [event.activity_id for event in await history_of(storage, instance_id)]


async def assert_untouched(storage: SQLStorage, lock: Lock, status: WorkflowStatus = WorkflowStatus.RUNNING) -> None:
    assert await status_of(storage, lock.instance_id) is status
    assert await steps_of(storage, lock.instance_id) == []


@pytest.mark.parametrize("acquired", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
async def test_the_last_step_is_recorded_with_the_end(
    harness: Harness, storage: SQLStorage, acquired: int, tied: bool
) -> None:
    lock = await harness.locked(storage)
    if acquired == 2:
        await storage.release_lock(lock.instance_id, lock.worker_id, lock=lock)
        again = await storage.try_acquire_lock(lock.instance_id, lock.worker_id, 60)
        assert again is not None
        lock = again
    if tied:
        await storage.subscribe_to_channel(lock.instance_id, "news", ChannelMode.BROADCAST, lock=lock)
    last = step(lock.instance_id, "last:1", '{"result": "é"}')

    await storage.update_instance_output(lock.instance_id, '"done"', lock=lock, record=last)

    instance = await storage.get_instance(lock.instance_id)
    assert instance is not None
    assert (instance.status, instance.output_data, instance.locked_by) == (WorkflowStatus.COMPLETED, '"done"', None)
    [event] = await history_of(storage, lock.instance_id)
    assert (event.activity_id, event.event_data) == ("last:1", '{"result": "é"}')
    assert event.created_at is not None
    assert await storage.get_channel_subscription(lock.instance_id, "news") is None


async def test_both_are_one_commit(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    points: list[str] = []
    storage.runner.probe = lambda point, name: points.append(point)

    await storage.update_instance_output(lock.instance_id, "1", lock=lock, record=step(lock.instance_id))

    assert points == ["before statement", "after commit"]


async def test_a_last_step_in_bytes_is_recorded_as_it_is(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage) for _ in range(3)]
    events = [step(lock.instance_id, data=None, event_data_binary=b"\x00\xff") for lock in locks]

    await together(
        *(
            storage.update_instance_output(lock.instance_id, "1", lock=lock, record=event)
            for lock, event in zip(locks, events, strict=True)
        )
    )

    for lock in locks:
        [event] = await history_of(storage, lock.instance_id)
        assert event.event_data_binary == b"\x00\xff"


async def test_without_the_lock_nothing_of_both_is_written(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.release_lock(lock.instance_id, lock.worker_id, lock=lock)
    assert await storage.try_acquire_lock(lock.instance_id, "rival", 60)

    with pytest.raises(LockLostError):
        await storage.update_instance_output(lock.instance_id, "1", lock=lock, record=step(lock.instance_id))

    await assert_untouched(storage, lock)


async def test_of_one_that_was_cancelled_nothing_of_both_is_written(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.cancel_instance(lock.instance_id, "enough", compensate=True)

    with pytest.raises(InvalidStatusTransitionError):
        await storage.update_instance_output(lock.instance_id, "1", lock=lock, record=step(lock.instance_id))

    assert await status_of(storage, lock.instance_id) is WorkflowStatus.COMPENSATING
    assert await steps_of(storage, lock.instance_id) == ["workflow_cancelled"]


async def test_a_step_that_stands_there_already_is_accepted_if_it_is_the_same(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await harness.locked(storage)
    await storage.append_history(step(lock.instance_id), lock=lock)

    with pytest.raises(HistoryConflictError):
        await storage.update_instance_output(
            lock.instance_id, "1", lock=lock, record=step(lock.instance_id, data='{"result": 2}')
        )
    assert await status_of(storage, lock.instance_id) is WorkflowStatus.RUNNING

    await storage.update_instance_output(lock.instance_id, "1", lock=lock, record=step(lock.instance_id))
    assert await status_of(storage, lock.instance_id) is WorkflowStatus.COMPLETED
    assert await steps_of(storage, lock.instance_id) == ["charge:1"]


async def test_what_cannot_be_stored_is_refused_before_anything_is(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    large = f'"{"x" * storage.payload_limit}"'

    with pytest.raises(PayloadTooLargeError):
        await storage.update_instance_output(lock.instance_id, large, lock=lock, record=step(lock.instance_id))
    with pytest.raises(PayloadTooLargeError):
        await storage.update_instance_output(
            lock.instance_id, "1", lock=lock, record=step(lock.instance_id, data=large)
        )
    with pytest.raises(InvalidJSONError):
        await storage.update_instance_output(lock.instance_id, "1", lock=lock, record=step(lock.instance_id, data="{"))
    with pytest.raises(ValueError, match="'other' cannot be recorded with the end of"):
        await storage.update_instance_output(lock.instance_id, "1", lock=lock, record=step("other"))
    with pytest.raises(InstanceNotFoundError):
        await storage.update_instance_output("nobody", "1", record=step("nobody"))

    await assert_untouched(storage, lock)


@pytest.mark.parametrize("size", [1, 20_000])
async def test_nobody_suffers_from_the_company(harness: Harness, storage: SQLStorage, size: int) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(MANY)]
    await storage.release_lock("order-3", locks[3].worker_id, lock=locks[3])
    await storage.join_group("order-5", "open")
    await storage.append_history(step("order-7", data='{"result": 2}'), lock=locks[7])
    await storage.append_history(step("order-9", data=f'"{"x" * size} 9"'), lock=locks[9])

    answers = await together(
        *(
            storage.update_instance_output(
                lock.instance_id,
                f'"{number}"',
                lock=lock,
                record=step(lock.instance_id, data=f'"{"x" * size} {number}"'),
            )
            for number, lock in enumerate(locks)
        )
    )

    refused = {number: type(answer) for number, answer in enumerate(answers) if answer is not None}
    assert refused == {3: LockLostError, 7: HistoryConflictError}
    for number, lock in enumerate(locks):
        instance = await storage.get_instance(lock.instance_id)
        events = await history_of(storage, lock.instance_id)
        assert instance is not None
        if number in refused:
            assert (instance.status, len(events)) == (WorkflowStatus.RUNNING, int(number == 7))
        else:
            assert (instance.status, instance.output_data) == (WorkflowStatus.COMPLETED, f'"{number}"')
            assert [event.event_data for event in events] == [f'"{"x" * size} {number}"']
    assert await storage.get_group_members("open") == []


class Undone(Exception):
    """So that nothing of a transaction remains."""


async def test_in_a_transaction_it_is_undone_with_it(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)

    with pytest.raises(Undone):
        async with storage.transaction():
            await storage.update_instance_output(lock.instance_id, "1", lock=lock, record=step(lock.instance_id))
            raise Undone

    await assert_untouched(storage, lock)


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("many", [1, 3])
async def test_an_end_that_the_database_refuses_takes_the_record_with_it(
    harness: Harness, storage: SQLStorage, many: int
) -> None:
    locks = [await harness.locked(storage, instance_id=f"order-{number}") for number in range(many)]
    await storage.conn().execute(
        "CREATE TRIGGER veto BEFORE UPDATE ON workflow_instances WHEN NEW.finished_at IS NOT NULL"
        " AND NEW.instance_id = 'order-0' BEGIN SELECT RAISE(ABORT, 'no'); END"
    )

    answers = await together(
        *(
            storage.update_instance_output(lock.instance_id, "1", lock=lock, record=step(lock.instance_id))
            for lock in locks
        )
    )

    assert [isinstance(answer, DatabaseError) for answer in answers] == [True, *[False] * (many - 1)]
    await assert_untouched(storage, locks[0])


@pytest.mark.databases("postgres")
async def test_beside_somebody_who_changes_the_row_both_are_written_or_neither(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await harness.locked(storage)
    rival = await harness.open()
    written: list[tuple[bool, int]] = []

    async def disturb() -> None:
        while len(written) < 600:
            await rival.conn().execute("UPDATE workflow_instances SET updated_at = updated_at")

    async def complete() -> None:
        while len(written) < 600:
            with suppress(Undone):
                async with storage.transaction():
                    done = await storage._complete_recording(lock.instance_id, "1", lock, step(lock.instance_id))
                    written.append((done, len(await history_of(storage, lock.instance_id))))
                    raise Undone

    await asyncio.gather(disturb(), complete())

    assert set(written) <= {(True, 1), (False, 0)}
