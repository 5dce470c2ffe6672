"""A page in the middle of a long history is found as quickly as the first."""

from typing import Any

import pytest

from romancy.storage import SQLStorage
from tests.harness import Harness
from tests.numbers import numbers

STEPS = 20_000


async def rows_seen(storage: SQLStorage) -> int:
    """How many rows this connection has had to do with so far, entries of an index included."""
    found: Any = await storage.conn().fetch_all("SHOW SESSION STATUS LIKE 'Handler%'")
    return sum(int(value) for _, value in found)


@pytest.mark.databases("mariadb", "mysql")
@pytest.mark.parametrize("for_replay", [False, True])
async def test_a_page_is_read_without_those_before_it(harness: Harness, storage: SQLStorage, for_replay: bool) -> None:
    instance_id = await harness.instance(storage)
    await storage.conn().execute(
        "INSERT INTO workflow_history (instance_id, activity_id, event_type, data_type, event_data)"
        f" SELECT '{instance_id}', CONCAT('step:', n), 'ActivityCompleted', 'json', '{{}}' FROM {numbers(STEPS)}"
    )
    await storage.conn().fetch_all("ANALYZE TABLE workflow_history")
    (last,) = await storage.conn().fetch_one("SELECT MAX(id) FROM workflow_history")  # type: ignore[misc]
    after_id = last - STEPS // 2
    async with storage.transaction():
        before = await rows_seen(storage)
        page = await storage.get_history_paginated(instance_id, after_id, 10, for_replay=for_replay)
        read = await rows_seen(storage) - before
    assert len(page.events) == 10
    assert read < 500
