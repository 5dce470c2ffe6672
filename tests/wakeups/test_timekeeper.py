"""The timekeeper: looks when something is due, and not before."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

import pytest

from romancy.engine.clock import DatabaseClock
from romancy.storage import SQLStorage, TimerSubscription
from romancy.worker.services import Timekeeper
from tests.engine.test_messages import until
from tests.harness import Harness, history_of
from tests.plans.looking import statements_sent


@asynccontextmanager
async def at_work(storage: SQLStorage) -> AsyncIterator[Timekeeper]:
    """A timekeeper whose first look is over."""
    clock = DatabaseClock(storage)
    await clock.read()

    def fire(timer: TimerSubscription) -> Awaitable[object]:
        return storage.fire_timer(timer, worker_id="timekeeper")

    timekeeper = Timekeeper(storage, clock, ["order"], None, fire)
    working = asyncio.create_task(timekeeper.run())
    await asyncio.sleep(0.2)
    yield timekeeper
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working


async def sleeper(harness: Harness, storage: SQLStorage, seconds: float) -> TimerSubscription:
    """An instance that sleeps."""
    lock = await harness.locked(storage)
    due = await storage.current_time() + timedelta(seconds=seconds)
    timer = TimerSubscription(lock.instance_id, "sleep:1", due)
    await storage.suspend(lock.instance_id, [timer], lock=lock)
    return timer


async def fired(storage: SQLStorage, timer: TimerSubscription) -> bool:
    return len(await history_of(storage, timer.instance_id)) == 1


async def test_timers_it_knows_of_are_fired_in_their_own_order_when_they_are_due(
    harness: Harness, storage: SQLStorage
) -> None:
    async with at_work(storage) as timekeeper:
        late, soon = await sleeper(harness, storage, 0.6), await sleeper(harness, storage, 0.3)
        timekeeper.note(late.expires_at)
        timekeeper.note(soon.expires_at)
        await until(lambda: fired(storage, soon))
        assert await storage.current_time() >= soon.expires_at
        await until(lambda: fired(storage, late))
        assert await storage.current_time() >= late.expires_at


async def test_to_hear_of_a_timer_is_no_reason_to_look(harness: Harness, storage: SQLStorage) -> None:
    async with at_work(storage) as timekeeper:
        timers = [await sleeper(harness, storage, 3600 + number) for number in range(3)]
        with statements_sent() as statements:
            for timer in timers:
                timekeeper.note(timer.expires_at)
            await asyncio.sleep(0.1)
        assert statements == []


async def test_it_remembers_no_more_than_it_needs(storage: SQLStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("romancy.worker.services._MOST_KNOWN", 100)
    async with at_work(storage) as timekeeper:
        later = await storage.current_time() + timedelta(days=30)
        for number in range(1000):
            timekeeper.note(later - timedelta(seconds=number))
        assert len(timekeeper._known) <= 100
        assert timekeeper._known[0] == later - timedelta(seconds=999)
