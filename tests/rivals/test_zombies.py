"""A worker that lost its lock without noticing writes nothing, however its writes and the theft interleave.

The zombie's clock stands still while the thief's is a minute ahead: what the thief takes as expired, the zombie takes
as its own. Only the fence's hold on the instance's row stands between them.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from romancy.storage import (
    ChannelMode,
    CompensationEntry,
    Lock,
    LockLostError,
    OutboxEvent,
    SQLStorage,
    TimerSubscription,
    WorkflowStatus,
)
from tests.harness import Harness, history_of, step

Write = Callable[[SQLStorage, Lock], Awaitable[object]]

WRITES: dict[str, Write] = {
    "append_history": lambda s, lock: s.append_history(step(lock.instance_id), lock=lock),
    "append_history_many": lambda s, lock: s.append_history_many([step(lock.instance_id)], lock=lock),
    "update_instance_activity": lambda s, lock: s.update_instance_activity(lock.instance_id, "charge:1", lock=lock),
    "update_instance_output": lambda s, lock: s.update_instance_output(lock.instance_id, '"zombie"', lock=lock),
    "update_instance_output with its last step": lambda s, lock: s.update_instance_output(
        lock.instance_id, '"zombie"', lock=lock, record=step(lock.instance_id)
    ),
    "update_instance_status": lambda s, lock: s.update_instance_status(
        lock.instance_id, WorkflowStatus.FAILED, "zombie", lock=lock
    ),
    "publish_to_channel": lambda s, lock: s.publish_to_channel("news", '"zombie"', lock=lock),
    "add_outbox_event": lambda s, lock: s.add_outbox_event(OutboxEvent("zombie", "paid", "shop"), lock=lock),
    "add_compensation": lambda s, lock: s.add_compensation(
        CompensationEntry(lock.instance_id, "charge:1", "refund"), lock=lock
    ),
    "subscribe_to_channel": lambda s, lock: s.subscribe_to_channel(
        lock.instance_id, "news", ChannelMode.BROADCAST, lock=lock
    ),
    "join_group": lambda s, lock: s.join_group(lock.instance_id, "zombies", lock=lock),
    "suspend": lambda s, lock: s.suspend(
        lock.instance_id, [TimerSubscription(lock.instance_id, "nap", lock.expires_at)], lock=lock
    ),
    "park": lambda s, lock: s.park(lock.instance_id, "zombie", lock=lock),
    "recur_instance": lambda s, lock: s.recur_instance(lock.instance_id, "{}", lock=lock),
    "archive_history": lambda s, lock: s.archive_history(lock.instance_id, lock=lock),
}


async def a_thief(harness: Harness) -> SQLStorage:
    """A storage whose clock is a minute ahead."""
    thief = await harness.open()
    thief.runner.driver.clock_offset = harness.clock + 60
    return thief


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
async def test_a_write_that_meets_a_theft_under_way_waits_for_it_and_is_refused(
    harness: Harness, storage: SQLStorage, write: Write
) -> None:
    lock = await harness.locked(storage, "zombie")
    thief = await a_thief(harness)

    async with thief.transaction():
        stolen = await thief.try_acquire_lock(lock.instance_id, "thief", 30)
        writing = asyncio.create_task(anyway(write, storage, lock))
        await asyncio.wait({writing}, timeout=0.1)
        assert not writing.done(), "nobody may write while the lock is being stolen"

    assert isinstance(await writing, LockLostError)
    after = await storage.get_instance(lock.instance_id)
    assert stolen is not None
    assert after is not None
    assert (after.status, after.locked_by, after.lock_token) == (WorkflowStatus.RUNNING, "thief", stolen.token)
    assert await history_of(storage, lock.instance_id) == []


async def test_a_step_that_meets_a_theft_in_company_waits_for_it_and_is_refused(
    harness: Harness, storage: SQLStorage
) -> None:
    """Steps that are recorded together may share a statement: it must hold every instance they belong to."""
    locks = [await harness.locked(storage, "zombie") for _ in range(8)]
    robbed, *others = locks
    first = [step(lock.instance_id, "first:1") for lock in locks]
    await asyncio.gather(*map(storage.append_history, first))  # connected
    thief = await a_thief(harness)

    async with thief.transaction():
        assert await thief.try_acquire_lock(robbed.instance_id, "thief", 30) is not None
        writing = [asyncio.create_task(anyway(WRITES["append_history"], storage, lock)) for lock in locks]
        await asyncio.wait({writing[0]}, timeout=0.1)
        assert not writing[0].done(), "nobody may write while the lock is being stolen"

    outcomes = await asyncio.gather(*writing)
    assert [isinstance(outcome, LockLostError) for outcome in outcomes] == [True] + [False] * len(others)
    assert [len(await history_of(storage, lock.instance_id)) for lock in locks] == [1] + [2] * len(others)


async def anyway(write: Write, storage: SQLStorage, lock: Lock) -> object:
    """What the write answers, or its error."""
    try:
        return await write(storage, lock)
    except LockLostError as error:
        return error


@pytest.mark.parametrize("write", [WRITES["append_history"], WRITES["publish_to_channel"]], ids=["append", "publish"])
async def test_a_lock_cannot_be_stolen_from_under_a_write(harness: Harness, storage: SQLStorage, write: Write) -> None:
    lock = await harness.locked(storage, "worker")
    thief = await a_thief(harness)

    async with storage.transaction():
        await write(storage, lock)
        stealing = asyncio.create_task(thief.try_acquire_lock(lock.instance_id, "thief", 30))
        await asyncio.wait({stealing}, timeout=0.1)
        assert not stealing.done() or stealing.result() is None

    stolen = await stealing or await thief.try_acquire_lock(lock.instance_id, "thief", 30)
    assert stolen is not None
    assert stolen.token == lock.token + 1


async def test_nothing_of_a_zombie_appears_after_the_theft(harness: Harness, storage: SQLStorage) -> None:
    thief = await a_thief(harness)
    for patience in range(5):
        locks = [await harness.locked(storage, "zombie") for _ in range(5)]
        await asyncio.gather(*(steal_from_a_busy_zombie(storage, thief, lock, patience) for lock in locks))


async def steal_from_a_busy_zombie(zombie: SQLStorage, thief: SQLStorage, lock: Lock, patience: int) -> None:
    written: list[str] = []

    async def write_on() -> None:
        while True:
            activity_id = f"step:{len(written)}"
            await zombie.append_history(step(lock.instance_id, activity_id), lock=lock)
            written.append(activity_id)

    writing = asyncio.create_task(write_on())
    while len(written) < patience:
        await asyncio.sleep(0)
    while await thief.try_acquire_lock(lock.instance_id, "thief", 300) is None:
        await asyncio.sleep(0)
    at_the_theft = [event.activity_id for event in await history_of(thief, lock.instance_id)]
    with pytest.raises(LockLostError):
        await writing

    assert at_the_theft == [event.activity_id for event in await history_of(thief, lock.instance_id)]
    assert at_the_theft == written, "what a zombie was told to be written is there, and nothing else"


async def test_a_thief_and_the_owner_never_both_finish_an_instance(harness: Harness, storage: SQLStorage) -> None:
    thief = await a_thief(harness)
    for _ in range(20):
        lock = await harness.locked(storage, "owner")
        owner, theft = await asyncio.gather(
            anyway(WRITES["update_instance_output"], storage, lock),
            thief.try_acquire_lock(lock.instance_id, "thief", 30),
        )
        instance = await storage.get_instance(lock.instance_id)
        assert instance is not None
        if isinstance(owner, LockLostError):
            assert (instance.status, instance.locked_by) == (WorkflowStatus.RUNNING, "thief")
            assert theft is not None
        else:
            assert (instance.status, instance.locked_by) == (WorkflowStatus.COMPLETED, None)
            assert theft is None


async def test_an_owner_keeps_its_lock_or_loses_it_to_one_thief(harness: Harness, storage: SQLStorage) -> None:
    thieves = [await a_thief(harness) for _ in range(3)]
    for _ in range(15):
        lock = await harness.locked(storage, "owner")
        refreshing = asyncio.create_task(storage.refresh_lock(lock.instance_id, "owner", 300, lock=lock))
        thefts = await asyncio.gather(
            *(thief.try_acquire_lock(lock.instance_id, f"thief-{n}", 30) for n, thief in enumerate(thieves))
        )
        try:
            kept = await refreshing
        except LockLostError:
            kept = None
        instance = await storage.get_instance(lock.instance_id)
        stolen = [theft for theft in thefts if theft is not None]
        assert instance is not None
        assert len(stolen) <= 1
        assert instance.lock_token == lock.token + len(stolen)
        assert not (kept and stolen)
        assert instance.locked_by == (stolen[0].worker_id if stolen else "owner")
