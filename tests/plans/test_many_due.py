"""The next of many timers and timeouts that are due are found without the rest, whatever is known of the tables.

So are expired locks, without all that holds none.

That is what a worker finds who comes back after an outage: much is due, and each look for it must not cost all of it.
"""

import pytest

from romancy.storage import SQLStorage
from tests.harness import Harness
from tests.numbers import joined, numbers

from .asking import Ask
from .test_plans import looks

MANY = 5000

LOOKS: dict[str, Ask] = {
    "timers": lambda storage: storage.find_expired_timers(10, workflow_names=["order"]),
    "timeouts": lambda storage: storage.find_expired_channel_subscriptions(10, workflow_names=["order"]),
    "stale locks": lambda storage: storage.cleanup_stale_locks(60, limit=10, workflow_names=["order"]),
    "all": lambda storage: storage.look_for_work(2.0, workflow_names=["order"]),
}


async def fill(storage: SQLStorage, due_sec: int = -1) -> None:
    """Instances of one workflow of which each waits for a timer, and for a message until a moment, both of them due."""
    driver, conn = storage.runner.driver, storage.conn()
    name = joined(driver, "'waiting-'", "(10000000 + n)")
    due = driver.seconds_after(driver.now(), str(due_sec))
    rows = f"FROM {numbers(MANY)} ORDER BY n"
    await conn.execute(f"""
        INSERT INTO workflow_instances
               (instance_id, workflow_name, source_hash, owner_service, framework, status, suspended_from, input_data)
        SELECT {name}, 'order', '', '', 'romancy-py', 'waiting_for_timer', 'running', '{{}}' {rows}""")
    await conn.execute(f"""
        INSERT INTO workflow_timer_subscriptions (instance_id, timer_id, expires_at)
        SELECT {name}, 'sleep:1', {due} {rows}""")
    await conn.execute(f"""
        INSERT INTO channel_subscriptions (instance_id, channel, mode, subscribed_at)
        SELECT {name}, 'news', 'broadcast', {due} {rows}""")
    await conn.execute(f"""
        INSERT INTO romancy_channel_waits (instance_id, channel, activity_id, timeout_at, created_at)
        SELECT {name}, 'news', 'receive:1', {due}, {due} {rows}""")


async def analyze(storage: SQLStorage) -> None:
    mysql = storage.runner.driver.driver_name() == "mysql"
    for table in (
        "workflow_instances",
        "workflow_timer_subscriptions",
        "channel_subscriptions",
        "romancy_channel_waits",
    ):
        await storage.conn().execute(f"ANALYZE {'TABLE' if mysql else ''} {table}")


@pytest.mark.parametrize("statistics", ["none", "true", "of another day"])
async def test_a_look_reads_no_more_than_it_finds(harness: Harness, storage: SQLStorage, statistics: str) -> None:
    await harness.instance(storage)  # the workflow is defined
    if statistics == "of another day":  # when nothing was due
        await fill(storage, due_sec=86400)
        await analyze(storage)
        await storage.conn().execute("DELETE FROM workflow_instances WHERE instance_id LIKE 'waiting-%'")
    await fill(storage)
    if statistics == "true":
        await analyze(storage)
    for what, ask in LOOKS.items():
        for name, look in (await looks(storage, ask)).items():
            assert look.read < 250, f"{what}: {name} reads {look.read}:\n{look.plan}"
