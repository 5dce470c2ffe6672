"""One clock, in UTC: the zones of server, session and process change nothing."""

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from romancy.storage import SQLStorage, TimerSubscription, WorkflowStatus
from tests.conftest import Database
from tests.harness import Harness
from tests.servers import Servers

ZONES = {"Asia/Tokyo": "+09:00", "America/New_York": "-05:00"}
"""Each as PostgreSQL and the operating system know it, and as MySQL knows it without its tables of zones."""

every_zone = pytest.mark.parametrize("zone", ZONES)


async def keeps_time(harness: Harness, storage: SQLStorage) -> None:
    """Locks, timers, leases and retention last as long as they should, and all times are UTC."""
    now = datetime.now(UTC)
    assert abs(await storage.current_time() - now) < timedelta(seconds=60)
    moment = datetime(2024, 3, 10, 2, 30, 0, 123456, UTC)  # a local time that does not exist in New York
    lock = await harness.locked(storage, started_at=moment, instance_id="clocked")
    instance = await storage.get_instance("clocked")
    assert instance is not None
    assert instance.updated_at is not None
    assert instance.started_at == moment
    assert abs(instance.updated_at - now) < timedelta(seconds=60)
    assert abs(lock.expires_at - now - timedelta(seconds=30)) < timedelta(seconds=60)

    rival = await harness.open()
    assert await rival.try_acquire_lock("clocked", "worker-2", 30) is None, "a lock is not born expired"
    harness.advance(seconds=20)
    assert await rival.try_acquire_lock("clocked", "worker-2", 30) is None
    assert await rival.cleanup_stale_locks(30) == []
    assert await storage.refresh_lock("clocked", "worker-1", 30, lock=lock) is not None
    harness.advance(seconds=20)
    assert await rival.try_acquire_lock("clocked", "worker-2", 30) is None
    harness.advance(seconds=11)
    stolen = await rival.try_acquire_lock("clocked", "worker-2", 30)
    assert stolen is not None, "an expired lock is free"

    due = await storage.current_time() + timedelta(seconds=10)
    await storage.suspend("clocked", [TimerSubscription("clocked", "nap", due)], lock=stolen)
    assert await storage.find_expired_timers() == []
    harness.advance(seconds=11)
    (timer,) = await storage.find_expired_timers()
    assert timer.expires_at == due
    assert await storage.fire_timer(timer, worker_id="worker-1") is True

    assert await storage.try_acquire_system_lock("leader", "worker-1", 30) is True
    assert await storage.try_acquire_system_lock("leader", "worker-2", 30) is False
    await storage.update_instance_status("clocked", WorkflowStatus.COMPLETED)
    assert await storage.delete_finished_instances(timedelta(seconds=60)) == 0
    harness.advance(seconds=61)
    assert await storage.try_acquire_system_lock("leader", "worker-2", 30) is True
    assert await storage.delete_finished_instances(timedelta(seconds=60)) == 1


async def assert_defaults_are_utc(storage: SQLStorage) -> None:
    """What another framework leaves to the database is UTC as well."""
    conn = storage.conn()
    definition = "(workflow_name, source_hash, source_code) VALUES ('w', '', '')"
    await conn.execute(f"INSERT INTO workflow_definitions {definition}")
    written = await conn.fetch_value("SELECT created_at FROM workflow_definitions WHERE workflow_name = 'w'")
    written = datetime.fromisoformat(written) if isinstance(written, str) else written
    assert abs(written.replace(tzinfo=UTC) - datetime.now(UTC)) < timedelta(seconds=60)


@pytest.fixture
def process_zone(zone: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    assert datetime.now().astimezone().utcoffset() != timedelta(0)
    yield
    monkeypatch.undo()
    time.tzset()


@every_zone
@pytest.mark.usefixtures("process_zone")
async def test_the_zone_of_the_process_does_not_matter(harness: Harness, storage: SQLStorage, zone: str) -> None:
    await keeps_time(harness, storage)
    await assert_defaults_are_utc(storage)


@every_zone
@pytest.mark.databases("postgres", "mariadb", "mysql")
async def test_the_zone_of_the_session_does_not_matter(harness: Harness, zone: str) -> None:
    storage = await harness.open(pool_size=1)
    setting = f"TIME ZONE '{zone}'" if harness.name == "postgres" else f"time_zone = '{ZONES[zone]}'"
    await storage.conn().execute(f"SET {setting}")
    local = await storage.conn().fetch_value("SELECT CAST(CURRENT_TIMESTAMP AS CHAR(40))")
    assert abs(datetime.fromisoformat(local[:19]).replace(tzinfo=UTC) - datetime.now(UTC)) > timedelta(hours=3)

    await keeps_time(harness, storage)
    await assert_defaults_are_utc(storage)


# Servers in another zone.


@every_zone
@pytest.mark.databases("postgres")
async def test_the_zone_of_a_database_does_not_matter(database: Database, zone: str) -> None:
    assert database.server is not None
    await database.server.execute(f"ALTER DATABASE {database.url.rpartition('/')[2]} SET timezone = '{zone}'")
    await keeps_time_there(Harness(database.name, database.url))


@pytest.fixture(scope="module")
def foreign_servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """MariaDB and MySQL have one zone for all databases, so these tests have servers of their own."""
    servers = Servers({"mariadb", "mysql"} & set(request.config.getoption("databases")), private=True)
    try:
        asyncio.run(servers.start())
        yield servers
    finally:
        servers.close()


@every_zone
@pytest.mark.databases("mariadb", "mysql")
async def test_the_zone_of_the_server_does_not_matter(database: Database, zone: str, foreign_servers: Servers) -> None:
    if database.name in foreign_servers.missing:
        pytest.skip(f"{database.name} is missing")
    server = foreign_servers[database.name]
    await server.execute(f"SET GLOBAL time_zone = '{ZONES[zone]}'")
    await keeps_time_there(Harness(database.name, await server.create_database()))


async def keeps_time_there(harness: Harness) -> None:
    """The same on a fresh database, whose schema is made in that zone, too."""
    try:
        storage = await harness.open()
        await storage.initialize()
        await keeps_time(harness, storage)
        await assert_defaults_are_utc(storage)
    finally:
        await harness.close()
