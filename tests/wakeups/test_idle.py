"""An idle process asks the database one thing per poll, and nothing else."""

import asyncio
import time
from collections import Counter
from pathlib import Path

from romancy import App, Settings, workflow
from romancy.storage import OutboxEvent
from tests.harness import Harness
from tests.plans.looking import statements_sent

POLL_SEC = 0.05


@workflow
async def unasked() -> None: ...


async def test_an_idle_worker_sends_one_statement_per_poll(harness: Harness, home: Path) -> None:
    async def publish(event: OutboxEvent) -> None: ...

    app = App(harness.url, workflows=[unasked], settings=Settings(poll_sec=POLL_SEC), outbox=publish)
    async with app:
        await asyncio.sleep(0.5)  # each service looks once when it starts
        began = time.monotonic()
        with statements_sent() as statements:
            await asyncio.sleep(20 * POLL_SEC)
        elapsed = time.monotonic() - began

    sent = Counter(statement.name for statement in statements)
    assert list(sent) == ["Looking._work"]
    assert sent.total() <= elapsed / POLL_SEC + 1


async def test_an_idle_client_sends_nothing(harness: Harness, home: Path) -> None:
    async with App(harness.url, worker=False, settings=Settings(poll_sec=POLL_SEC)):
        await asyncio.sleep(0.1)
        with statements_sent() as statements:
            await asyncio.sleep(10 * POLL_SEC)
    assert statements == []
