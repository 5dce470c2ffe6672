"""States: what an instance shows of itself, to anybody, also after its end."""

from datetime import timedelta

import pytest

from romancy.storage import (
    HistoryConflictError,
    InstanceNotFoundError,
    InvalidJSONError,
    InvalidStatusTransitionError,
    LockLostError,
    PayloadTooLargeError,
    SQLStorage,
)
from tests.harness import Harness, history_of, step


async def test_an_instance_shows_nothing_at_first(harness: Harness, storage: SQLStorage) -> None:
    assert await storage.get_instance_state(await harness.instance(storage)) is None
    assert await storage.get_instance_state("unknown") is None


@pytest.mark.parametrize("state", ['{"b": 1,"a":2, "b": 3}', "9007199254740993", "null", ' "Grüße 🎉 \\u00e9 %s :x" '])
async def test_a_state_is_shown_byte_for_byte(harness: Harness, storage: SQLStorage, state: str) -> None:
    instance_id = await harness.instance(storage)

    await storage.set_instance_state(instance_id, state)

    assert await (await harness.open()).get_instance_state(instance_id) == state


async def test_each_instance_shows_its_newest_state(harness: Harness, storage: SQLStorage) -> None:
    first, second = await harness.instance(storage), await harness.instance(storage)
    for state in ("1", "2", "2"):
        await storage.set_instance_state(first, state)
    await storage.set_instance_state(second, '"other"')

    assert await storage.get_instance_state(first) == "2"
    assert await storage.get_instance_state(second) == '"other"'


async def test_a_state_and_its_record_are_written_once_and_together(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    record = step(lock.instance_id, "set_state:1")

    assert await storage.set_instance_state(lock.instance_id, "1", lock=lock, record=record) is None
    await storage.set_instance_state(lock.instance_id, "2", lock=lock)
    replayed = await storage.set_instance_state(lock.instance_id, "1", lock=lock, record=record)

    assert replayed is not None
    assert replayed.activity_id == "set_state:1"
    assert await storage.get_instance_state(lock.instance_id) == "2"
    assert len(await history_of(storage, lock.instance_id)) == 1


async def test_a_state_rolls_back_with_its_transaction(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.append_history(step(lock.instance_id), lock=lock)

    with pytest.raises(HistoryConflictError):
        async with storage.transaction():
            await storage.set_instance_state(lock.instance_id, "1", lock=lock)
            await storage.append_history(step(lock.instance_id), lock=lock)

    assert await storage.get_instance_state(lock.instance_id) is None


async def test_a_zombie_shows_nothing(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    harness.advance(seconds=31)

    with pytest.raises(LockLostError):
        await storage.set_instance_state(lock.instance_id, "1", lock=lock)
    assert await storage.get_instance_state(lock.instance_id) is None


async def test_a_finished_instance_keeps_showing_its_last_state(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.set_instance_state(lock.instance_id, '"packed"', lock=lock)
    await storage.update_instance_output(lock.instance_id, "null", lock=lock)

    with pytest.raises(InvalidStatusTransitionError):
        await storage.set_instance_state(lock.instance_id, '"late"')
    assert await storage.get_instance_state(lock.instance_id) == '"packed"'


async def test_a_state_survives_starting_over_and_goes_with_its_instance(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.set_instance_state(lock.instance_id, "1", lock=lock)

    await storage.recur_instance(lock.instance_id, "{}", lock=lock)
    assert await storage.get_instance_state(lock.instance_id) == "1"

    await storage.update_instance_output(lock.instance_id, "null", lock=lock)
    harness.advance(seconds=60)
    assert await storage.delete_finished_instances(timedelta(seconds=30)) == 1
    assert await storage.conn().fetch_value("SELECT COUNT(*) FROM romancy_states") == 0


async def test_what_cannot_be_shown_is_refused(harness: Harness) -> None:
    storage = await harness.open(max_payload_bytes=10)
    instance_id = await harness.instance(storage)

    with pytest.raises(InstanceNotFoundError):
        await storage.set_instance_state("unknown", "1")
    with pytest.raises(InvalidJSONError):
        await storage.set_instance_state(instance_id, "{")
    with pytest.raises(PayloadTooLargeError):
        await storage.set_instance_state(instance_id, '"0123456789"')
    assert await storage.get_instance_state(instance_id) is None
