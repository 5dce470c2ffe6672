"""A plan that is made while a database is new stays good when it has grown: it is kept for as long as a connection."""

import pytest

from romancy.storage import SQLStorage
from romancy.storage.sql.drivers.postgres import PostgresDriver
from romancy.storage.sql.history import History
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
