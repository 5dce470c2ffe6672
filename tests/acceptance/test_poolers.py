"""A pooler stands before PostgreSQL: everything works, and nothing of a session is left on the server's connections."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from romancy import App, activity, receive, sleep, subscribe, workflow
from romancy.storage import WorkflowStatus, open_storage
from romancy.storage.sql.runners.postgres import PostgresRunner
from tests.conftest import SERVERS
from tests.harness import Harness
from tests.servers.pgbouncer import PgBouncer

pytestmark = pytest.mark.databases("postgres")

# In transaction mode each statement may meet another connection, on which nothing was prepared. In session mode
# statements may be prepared, but settings cannot be given when connecting.
POOLS = {"transaction": "?prepared_statements=false", "session": ""}


@pytest.fixture(params=POOLS)
async def url(harness: Harness, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The test's database, through a pooler."""
    servers = request.config.stash[SERVERS]
    directory: Path = servers._directory / f"pgbouncer-{secrets.token_hex(4)}"
    pooler = PgBouncer(directory, servers["postgres"], mode=request.param)
    await pooler.start()
    yield pooler.before(harness.url) + POOLS[request.param]
    await pooler.stop()


@activity
async def double(number: int) -> int:
    return 2 * number


@workflow
async def orders(number: int) -> int:
    await subscribe("prices")
    doubled = await asyncio.gather(double(number), double(number + 1))
    await sleep(0.05)
    price = await receive("prices")
    return sum(doubled) * int(price.data)


async def test_workflows_run_behind_it(url: str) -> None:
    async with App(url, workflows=[orders]) as app, App(url, workflows=[orders]) as other:
        handles = [await app.start(orders, number) for number in range(20)]
        handles += await asyncio.gather(*(other.start(orders, number) for number in range(20, 40)))
        while any([await handle.status() is not WorkflowStatus.WAITING_FOR_MESSAGE for handle in handles]):
            await asyncio.sleep(0.05)
        await app.publish("prices", 3)
        async with asyncio.timeout(30):
            results = await asyncio.gather(*(handle.result() for handle in handles))
    assert results == [3 * (2 * number + 2 * (number + 1)) for number in range(40)]


async def test_transactions_stay_on_one_connection(harness: Harness, url: str) -> None:
    async with open_storage(url) as storage:
        locks = [await harness.locked(storage) for _ in range(8)]

        async def read_twice(instance_id: str) -> tuple[Any, Any]:
            async with storage.transaction():
                first = await storage.conn().fetch_value("SELECT pg_backend_pid()")
                await storage.update_instance_activity(instance_id, "busy")
                return first, await storage.conn().fetch_value("SELECT pg_backend_pid()")

        for first, second in await asyncio.gather(*(read_twice(lock.instance_id) for lock in locks)):
            assert first == second


async def test_nobody_else_meets_settings_of_ours(harness: Harness, url: str) -> None:
    async with open_storage(url) as storage:
        locks = await asyncio.gather(*(harness.locked(storage) for _ in range(40)))
        await asyncio.gather(*(storage.update_instance_output(lock.instance_id, "1", lock=lock) for lock in locks))
        for setting in ("enable_seqscan", "enable_hashjoin"):
            found = await asyncio.gather(*(storage.conn().fetch_value(f"SHOW {setting}") for _ in range(20)))
            assert set(found) == {"on"}


async def test_flushes_find_their_way(harness: Harness, url: str) -> None:
    async with open_storage(url) as storage:
        runner = storage.runner
        assert isinstance(runner, PostgresRunner)
        connection = await runner._connect_for_flushes()
        assert await connection.raw.fetchval("SELECT 1") == 1
        await connection.close()
