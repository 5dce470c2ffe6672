"""A plan that is made while a database is new stays good when it has grown: it is kept for as long as a connection."""

import pytest

from romancy.storage import SQLStorage
from romancy.storage.sql.completing import Completing
from romancy.storage.sql.drivers.postgres import PostgresDriver
from romancy.storage.sql.history import History
from romancy.storage.sql.runners.postgres import PostgresRunner
from tests.harness import Harness


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("analyzed", [False, True])
async def test_many_steps_are_recorded_without_reading_all_instances(
    harness: Harness, storage: SQLStorage, analyzed: bool
) -> None:
    for _ in range(10):
        await harness.locked(storage)
    if analyzed:
        await storage.conn().execute("ANALYZE workflow_instances")
    driver, many = storage.runner.driver, History._append_fenced.many
    assert isinstance(driver, PostgresDriver)
    assert many is not None
    async with storage.transaction():
        await storage.conn().execute("SET LOCAL plan_cache_mode = force_generic_plan")
        await storage.conn().execute(f"PREPARE many (text) AS {driver.for_many(many)}")
        plan = "\n".join(line for (line,) in await storage.conn().fetch_all("EXPLAIN EXECUTE many ('[]')"))
        await storage.conn().execute("DEALLOCATE many")
    # Row by row, by whatever is quickest for one row of a table of this size; with a hash join, all rows are read.
    assert "Subquery Scan on i" in plan
    assert "Hash" not in plan


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("finished", [0, 5000])
async def test_many_instances_are_completed_without_reading_all_of_them(
    harness: Harness, storage: SQLStorage, finished: int
) -> None:
    for _ in range(10):
        await harness.locked(storage)
    await storage.conn().execute(
        "INSERT INTO workflow_instances"
        " (instance_id, workflow_name, source_hash, owner_service, framework, status, input_data)"
        " SELECT 'done-' || g, 'order', '', '', 'romancy-py', 'completed', '{}' FROM generate_series(1, $1::int) g",
        finished,
    )
    await storage.conn().execute("ANALYZE workflow_instances")
    runner, many = storage.runner, Completing._finish_untied.many
    assert isinstance(runner, PostgresRunner)
    assert many is not None
    flushing = await runner._connect_for_flushes()
    try:
        await flushing.raw.execute("SET plan_cache_mode = force_generic_plan")
        await flushing.raw.execute(f"PREPARE many (text) AS {runner.driver.for_many(many)}")
        plan = "\n".join(line for (line,) in await flushing.raw.fetch("EXPLAIN EXECUTE many ('[]')"))
    finally:
        await flushing.close()
    # Found by key, then written where it was found. Of a table of one page any index will do.
    assert "Tid Scan on workflow_instances" in plan
    assert "Seq Scan" not in plan
    assert "romancy_instances_runnable" not in plan
    if finished:
        assert "Index Scan using workflow_instances_pkey" in plan
