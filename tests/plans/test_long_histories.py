"""A page of a long history is read without the rest of it and without what others have recorded, whatever is known."""

from collections.abc import Awaitable, Callable

import pytest

from romancy.storage import HistoryPage, SQLStorage
from tests.harness import Harness
from tests.numbers import joined, numbers

from .looking import LOOKERS, statements_sent

STEPS = 20_000

ANALYZE = {"sqlite": "ANALYZE", "postgres": "ANALYZE", "mysql": "ANALYZE TABLE workflow_history"}


async def record(storage: SQLStorage, instance_id: str) -> None:
    step = joined(storage.runner.driver, "'step:'", "n")
    await storage.conn().execute(
        "INSERT INTO workflow_history (instance_id, activity_id, event_type, data_type, event_data)"
        f" SELECT '{instance_id}', {step}, 'ActivityCompleted', 'json', '{{}}' FROM {numbers(STEPS)} ORDER BY n"
    )


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("read", [SQLStorage.get_history_paginated, SQLStorage.get_history_to_replay])
async def test_a_page_is_read_without_the_rest(
    harness: Harness, storage: SQLStorage, read: Callable[..., Awaitable[HistoryPage]], analyzed: bool
) -> None:
    for name in ("another", "long"):
        await harness.instance(storage, instance_id=name)
        await record(storage, name)
    driver = storage.runner.driver.driver_name()
    if analyzed:
        await storage.conn().execute(ANALYZE[driver])
    last: int = await storage.conn().fetch_value("SELECT MAX(id) FROM workflow_history")
    for after_id in (0, last - STEPS // 2):
        with statements_sent() as sent:
            page = await read(storage, "long", after_id, 10)
        assert len(page.events) == 10
        look = await LOOKERS[driver](storage).look(sent[-1])
        assert look.read < 100, look.plan
