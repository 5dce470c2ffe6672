"""A bounded number of operations is queued or running; the others wait in line, and nobody is forgotten there."""

import asyncio

import pytest

from romancy.storage import SQLStorage, StorageClosedError, StorageError
from romancy.storage.sql.runners import runner
from tests.harness import Harness, history_of, step

CALLERS = 60
FEW = 4


@pytest.fixture
async def narrow(storage: SQLStorage) -> SQLStorage:
    """A storage that few can use at once."""
    storage.runner.most_under_way = FEW
    return storage


def watched(storage: SQLStorage) -> list[int]:
    """How many were under way, each time one of them came to a statement or a commit."""
    seen: list[int] = []
    storage.runner.probe = lambda point, name: seen.append(storage.runner._under_way)
    return seen


async def test_all_are_served_and_few_at_once(harness: Harness, narrow: SQLStorage) -> None:
    lock = await harness.locked(narrow)
    under_way = watched(narrow)
    steps = [step(lock.instance_id, f"charge:{number}") for number in range(CALLERS)]
    await asyncio.gather(*(narrow.append_history(one, lock=lock) for one in steps))

    assert max(under_way) == FEW
    assert len(await history_of(narrow, lock.instance_id)) == CALLERS
    assert narrow.runner._under_way == 0


async def test_a_heartbeat_does_not_wait_in_line(harness: Harness, narrow: SQLStorage) -> None:
    lock = await harness.locked(narrow)
    others = [
        asyncio.create_task(narrow.append_history(step(lock.instance_id, f"charge:{number}"), lock=lock))
        for number in range(CALLERS)
    ]
    await asyncio.sleep(0)
    assert len(narrow.runner._line) > CALLERS / 2

    await narrow.refresh_lock(lock.instance_id, lock.worker_id, 30, lock=lock)

    assert not all(task.done() for task in others)
    await asyncio.gather(*others)


async def test_heartbeats_do_not_make_room_for_others(harness: Harness, narrow: SQLStorage) -> None:
    lock = await harness.locked(narrow)
    under_way = watched(narrow)
    writers = [
        narrow.append_history(step(lock.instance_id, f"charge:{number}"), lock=lock) for number in range(CALLERS)
    ]

    async def beat() -> None:
        for _ in range(20):
            await narrow.refresh_lock(lock.instance_id, lock.worker_id, 30, lock=lock)

    await asyncio.gather(beat(), *writers)

    assert max(under_way) <= FEW + 1
    assert narrow.runner._under_way == 0


async def test_whoever_is_cancelled_in_line_keeps_nobody_out(harness: Harness, narrow: SQLStorage) -> None:
    lock = await harness.locked(narrow)
    for turns in range(8):
        callers = [
            asyncio.create_task(narrow.append_history(step(lock.instance_id, f"{turns}:{number}"), lock=lock))
            for number in range(CALLERS)
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in callers[::2]:
            task.cancel()
        answers = await asyncio.gather(*callers, return_exceptions=True)
        assert [answer for answer in answers[1::2] if isinstance(answer, BaseException)] == []

    assert narrow.runner._under_way == 0
    await harness.locked(narrow)


async def test_closing_serves_who_is_in_line_too(harness: Harness, narrow: SQLStorage) -> None:
    lock = await harness.locked(narrow)
    callers = [
        asyncio.create_task(narrow.append_history(step(lock.instance_id, f"charge:{number}"), lock=lock))
        for number in range(CALLERS)
    ]
    await asyncio.sleep(0)

    await narrow.close()

    await asyncio.gather(*callers)
    with pytest.raises(StorageClosedError):
        await narrow.get_instance(lock.instance_id)
    assert len(await history_of(await harness.open(), lock.instance_id)) == CALLERS


async def test_who_is_still_in_line_at_the_deadline_is_told_so(
    harness: Harness, narrow: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CLOSE_DEADLINE_SEC", 0.3)
    lock = await harness.locked(narrow)
    rival = await harness.open()
    async with rival.transaction():
        await rival.update_instance_activity(lock.instance_id, "holding", lock=lock)
        callers = [
            asyncio.create_task(narrow.append_history(step(lock.instance_id, f"charge:{number}"), lock=lock))
            for number in range(CALLERS)
        ]
        await asyncio.sleep(0)
        await narrow.close()
        async with asyncio.timeout(4):
            answers = await asyncio.gather(*callers, return_exceptions=True)

    assert all(isinstance(answer, StorageError) for answer in answers[:FEW])  # under way: some may have happened
    assert all(isinstance(answer, StorageClosedError) for answer in answers[FEW:])
    assert len(await history_of(rival, lock.instance_id)) <= FEW
