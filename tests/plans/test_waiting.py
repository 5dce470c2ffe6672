"""Looking for what is due reads what is due, however much waits for later."""

import sqlite3
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from romancy.storage import ChannelMode, ChannelWait, SQLStorage, TimerSubscription
from tests.harness import Harness

pytestmark = pytest.mark.databases("sqlite")

LOOKS: dict[str, Callable[[SQLStorage], Awaitable[object]]] = {
    "find_expired_timers": lambda storage: storage.find_expired_timers(),
    "find_expired_channel_subscriptions": lambda storage: storage.find_expired_channel_subscriptions(),
    "look_for_work": lambda storage: storage.look_for_work(1.0),
}


async def wait_for_ever(harness: Harness, storage: SQLStorage, instances: int) -> None:
    later = await storage.current_time() + timedelta(days=1)
    for _ in range(instances):
        lock = await harness.locked(storage)
        await storage.subscribe_to_channel(lock.instance_id, "news", ChannelMode.BROADCAST)
        timer = TimerSubscription(lock.instance_id, "later", later)
        await storage.suspend(lock.instance_id, [timer, ChannelWait("news", "receive:1", later)], lock=lock)


async def work_of(storage: SQLStorage, look: Callable[[SQLStorage], Awaitable[object]]) -> int:
    """How much SQLite has to do for it, in tens of its instructions."""
    work = 0

    def count() -> int:
        nonlocal work
        work += 1
        return 0

    connections: list[sqlite3.Connection] = storage.runner._connections  # type: ignore[attr-defined]
    while not work:  # until it is a connection that was there before which looks
        for connection in connections:
            connection.set_progress_handler(count, 10)
        await look(storage)
    for connection in connections:
        connection.set_progress_handler(None, 0)
    return work


@pytest.mark.parametrize("name", LOOKS)
async def test_a_look_does_not_read_what_waits_for_later(harness: Harness, storage: SQLStorage, name: str) -> None:
    await wait_for_ever(harness, storage, 10)
    few = await work_of(storage, LOOKS[name])
    await wait_for_ever(harness, storage, 300)
    assert await work_of(storage, LOOKS[name]) < 2 * few + 10
