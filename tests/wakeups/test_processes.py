"""Two processes on one database: one leaves work, the other does it at once, because it is told, not because it looks.

The worker looks every ten minutes, so that within the bounds below only a wake-up can explain what it does.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from romancy import App, WorkflowCancelledError
from romancy.storage import WorkflowStatus
from tests.harness import Harness

from .elsewhere import busy, greeting, guest, nap

RARELY = 600.0
SOON = 10.0
"""Seconds; generous, since the machine may be busy."""


@asynccontextmanager
async def worker_elsewhere(url: str, poll_sec: float = RARELY) -> AsyncIterator[None]:
    """A worker in another process."""
    command = (sys.executable, "-m", "tests.wakeups.elsewhere", url, str(poll_sec))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        await process.communicate(b"")


async def reaches(app: App, instance_id: str, status: WorkflowStatus) -> None:
    async with asyncio.timeout(SOON):
        while await app.handle(instance_id).status() is not status:
            await asyncio.sleep(0.02)


@pytest.fixture
async def shop(harness: Harness, home: Path) -> AsyncIterator[App]:
    """A client without a worker of its own."""
    async with App(harness.url, worker=False) as app:
        yield app


async def test_what_one_process_starts_another_does_at_once(shop: App, harness: Harness) -> None:
    async with worker_elsewhere(harness.url):
        assert await (await shop.start(greeting, "Ada")).result(SOON) == "hello, Ada"


async def test_many_results_from_one_process_reach_another_at_once(
    shop: App, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("romancy.app._FIRST_LOOK_SEC", RARELY)  # and not because it looks again
    names = [f"guest {number}" for number in range(50)]
    async with worker_elsewhere(harness.url):
        handles = await asyncio.gather(*(shop.start(greeting, name) for name in names))
        greetings = await asyncio.gather(*(handle.result(SOON) for handle in handles))
        assert greetings == [f"hello, {name}" for name in names]


async def test_a_message_from_one_process_resumes_a_workflow_in_another(shop: App, harness: Harness) -> None:
    async with worker_elsewhere(harness.url):
        waiting = await shop.start(guest)
        await reaches(shop, waiting.id, WorkflowStatus.WAITING_FOR_MESSAGE)
        await shop.publish("names", "Grace")
        assert await waiting.result(SOON) == "hello, Grace"


async def test_a_timer_fires_in_time_although_nobody_looks(shop: App, harness: Harness) -> None:
    async with worker_elsewhere(harness.url):
        assert await (await shop.start(nap, 0.5)).result(SOON) == "rested"


async def test_a_cancel_reaches_the_process_that_runs_the_instance(shop: App, harness: Harness) -> None:
    async with worker_elsewhere(harness.url):
        running = await shop.start(busy)
        async with asyncio.timeout(SOON):
            while (await running.instance()).locked_by is None:
                await asyncio.sleep(0.02)
        await running.cancel("no longer needed")
        with pytest.raises(WorkflowCancelledError):
            await running.result(SOON)


async def test_a_lost_wake_up_is_repaired_by_the_next_look(shop: App, harness: Harness) -> None:
    shop.storage.set_notify_enabled(False)
    async with worker_elsewhere(harness.url, poll_sec=0.5):
        waiting = await shop.start(guest)
        await reaches(shop, waiting.id, WorkflowStatus.WAITING_FOR_MESSAGE)
        await shop.publish("names", "Grace")
        assert await waiting.result(SOON) == "hello, Grace"


@pytest.mark.databases("sqlite", "postgres")
async def test_without_a_wake_up_nothing_happens_before_the_next_look(shop: App, harness: Harness) -> None:
    """Else the tests above would show nothing."""
    async with worker_elsewhere(harness.url):
        await (await shop.start(greeting, "Ada")).result(SOON)
        await asyncio.sleep(0.5)  # it looks once when it starts, and whenever it has finished something
        shop.storage.set_notify_enabled(False)
        with pytest.raises(TimeoutError):
            await (await shop.start(greeting, "Grace")).result(1.0)
