"""Who wakes an instance may take its lock in the same transaction."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from romancy.storage import (
    ChannelSubscription,
    ChannelWait,
    Lock,
    SQLStorage,
    TimerSubscription,
    Woken,
    WorkflowStatus,
)
from tests.harness import Harness, contents, history_of, step

from .arrange import BROADCAST, another, lock_of, publish, status_of

Wake = Callable[[SQLStorage, str], Awaitable[Woken | None]]
"""Wakes an instance and claims it for a worker."""


async def with_message(harness: Harness, storage: SQLStorage, lock: Lock, **options: Any) -> Wake:
    """The instance waits for a message, and there is one."""
    await storage.subscribe_to_channel(lock.instance_id, lock.instance_id, BROADCAST)
    await storage.suspend(lock.instance_id, [ChannelWait(lock.instance_id, "receive:1")], lock=lock)
    await publish(storage, channel=lock.instance_id)
    waiting = ChannelSubscription(lock.instance_id, lock.instance_id, BROADCAST)
    return lambda storage, worker_id: storage.deliver_and_claim(waiting, worker_id, 30, **options)


async def with_timer(harness: Harness, storage: SQLStorage, lock: Lock, **options: Any) -> Wake:
    """The instance waits for a timer, and that is due."""
    timer = TimerSubscription(lock.instance_id, "nap", await storage.current_time() + timedelta(seconds=60))
    await storage.suspend(lock.instance_id, [timer], lock=lock)
    harness.advance(61)
    return lambda storage, worker_id: storage.fire_and_claim(timer, worker_id, 30, **options)


pytestmark = pytest.mark.parametrize("asleep", [with_message, with_timer])


async def test_the_event_and_the_lock_come_together(harness: Harness, storage: SQLStorage, asleep: Any) -> None:
    lock = await harness.locked(storage)
    before = await storage.append_history(step(lock.instance_id), lock=lock)
    wake = await asleep(harness, storage, lock)
    woken = await wake(storage, "worker-2")
    assert woken.lock == Lock(lock.instance_id, lock.token + 1, "worker-2", woken.lock.expires_at)
    assert (woken.instance.instance_id, woken.instance.status) == (lock.instance_id, WorkflowStatus.RUNNING)
    assert woken.event == (await history_of(storage, lock.instance_id))[-1]
    assert woken.after_id == before.id
    assert (await storage.refresh_lock(lock.instance_id, "worker-2", 30, lock=woken.lock)) is not None
    await storage.append_history(step(lock.instance_id, "charge:2"), lock=woken.lock)


async def test_of_many_that_wake_it_one_has_the_lock(harness: Harness, storage: SQLStorage, asleep: Any) -> None:
    lock = await harness.locked(storage)
    wake = await asleep(harness, storage, lock)
    storages = [storage, await another(harness), await another(harness)]
    answers = await asyncio.gather(*(wake(storages[n % 3], f"worker-{n}") for n in range(6)))
    [woken] = [woken for woken in answers if woken is not None]
    assert woken.lock is not None
    assert (await lock_of(storage, lock.instance_id))[0] == woken.lock.worker_id
    assert len(await history_of(storage, lock.instance_id)) == 1


@pytest.mark.parametrize(
    "options", [{"workflow_names": ["bill"]}, {"workflow_names": []}, {"owner_service": "shop"}], ids=str
)
async def test_what_is_not_asked_for_is_woken_for_others(
    harness: Harness, storage: SQLStorage, asleep: Any, options: dict[str, Any]
) -> None:
    lock = await harness.locked(storage)
    wake = await asleep(harness, storage, lock, **options)
    woken = await wake(storage, "worker-2")
    assert woken.lock is None
    assert await lock_of(storage, lock.instance_id) == (None, None, None)
    assert [found.instance_id for found in await storage.find_resumable_workflows()] == [lock.instance_id]


async def test_what_belongs_to_another_framework_is_woken_for_it(
    harness: Harness, storage: SQLStorage, asleep: Any
) -> None:
    lock = await harness.locked(storage, framework="neighbour")
    wake = await asleep(harness, storage, lock)
    assert (await wake(storage, "worker-2")).lock is None
    assert await status_of(storage, lock.instance_id) is WorkflowStatus.RUNNING


async def test_what_is_set_aside_is_woken_and_stays_there(harness: Harness, storage: SQLStorage, asleep: Any) -> None:
    lock = await harness.locked(storage)
    wake = await asleep(harness, storage, lock)
    await storage.park(lock.instance_id, "why not")
    assert (await wake(storage, "worker-2")).lock is None
    assert len(await history_of(storage, lock.instance_id)) == 1
    assert await storage.find_resumable_workflows() == []


@pytest.mark.parametrize("holder", ["worker-2", "worker-3"])
async def test_what_is_held_is_left_alone_even_by_its_holder(
    harness: Harness, storage: SQLStorage, asleep: Any, holder: str
) -> None:
    lock = await harness.locked(storage)
    wake = await asleep(harness, storage, lock)
    assert await storage.try_acquire_lock(lock.instance_id, holder, 30)
    before = await contents(storage)
    assert await wake(storage, "worker-2") is None
    assert await contents(storage) == before


async def test_an_instance_that_was_compensating_goes_on_so(harness: Harness, storage: SQLStorage, asleep: Any) -> None:
    lock = await harness.locked(storage)
    await storage.update_instance_status(lock.instance_id, WorkflowStatus.COMPENSATING, lock=lock)
    wake = await asleep(harness, storage, lock)
    woken = await wake(storage, "worker-2")
    assert woken.instance.status is woken.lock.status is WorkflowStatus.COMPENSATING
    assert await status_of(storage, lock.instance_id) is WorkflowStatus.COMPENSATING


async def test_a_lock_timeout_of_the_instance_beats_the_callers(
    harness: Harness, storage: SQLStorage, asleep: Any
) -> None:
    lock = await harness.locked(storage, lock_timeout_seconds=3600)
    wake = await asleep(harness, storage, lock)
    woken = await wake(storage, "worker-2")
    assert woken.lock.expires_at > await storage.current_time() + timedelta(seconds=3000)


async def test_a_second_time_there_is_nothing_to_wake(harness: Harness, storage: SQLStorage, asleep: Any) -> None:
    lock = await harness.locked(storage)
    wake = await asleep(harness, storage, lock)
    woken = await wake(storage, "worker-2")
    await storage.release_lock(lock.instance_id, "worker-2", lock=woken.lock)
    before = await contents(storage)
    assert await wake(storage, "worker-3") is None
    assert await contents(storage) == before
