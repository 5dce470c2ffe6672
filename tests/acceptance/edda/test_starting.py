"""Either of us may be first on a database; the other one takes it as it is."""

import asyncio
from datetime import datetime
from typing import Any

import pytest

from romancy.storage import ANY, ListInstancesOptions, SQLStorage, WorkflowStatus
from tests.conftest import Database
from tests.harness import Harness, step
from tests.storage.introspection import Schema, indexes_of, schema_of

from .neighbour import Edda

pytestmark = pytest.mark.databases("sqlite", "postgres", "mariadb")


@pytest.mark.parametrize("first", ["we", "Edda", "both at once"])
async def test_both_start_on_an_empty_database_and_run_a_workflow(
    first: str, database: Database, edda_apart: Edda, ours_apart: Harness
) -> None:
    storage = await ours_apart.open()
    if first == "we":
        await storage.initialize()
        await edda_apart.open(database.url)
    elif first == "Edda":
        await edda_apart.open(database.url)
        await storage.initialize()
    else:
        await asyncio.gather(edda_apart.open(database.url, attempts=1), storage.initialize())

    assert await edda_apart.result(await edda_apart.start("doubler", number=21)) == 42
    lock = await ours_apart.locked(storage)
    await storage.append_history(step(lock.instance_id), lock=lock)
    await storage.update_instance_output(lock.instance_id, '"done"', lock=lock)

    everything = (await storage.list_instances(framework=ANY)).instances
    assert {(instance.framework, instance.status) for instance in everything} == {
        ("python", WorkflowStatus.COMPLETED),
        ("romancy-py", WorkflowStatus.COMPLETED),
    }


async def rows(storage: SQLStorage, schema: Schema) -> dict[str, list[Any]]:
    """All rows of these tables, in the columns that they have in this schema."""
    return {
        table: [
            list(row)
            for row in await storage.conn().fetch_all(f"SELECT {', '.join(shape.columns)} FROM {table} ORDER BY 1")
        ]
        for table, shape in schema.items()
        if table != "system_locks"  # where Edda's leader signs on every second
    }


async def test_what_edda_made_stays_as_it_was(database: Database, edda_apart: Edda, ours_apart: Harness) -> None:
    await edda_apart.open(database.url)
    await edda_apart.start("doubler", number=1)
    await edda_apart.start("receiver", channel="news", timeout=3600)
    await edda_apart.start("sleeper", seconds=3600)
    await edda_apart.start("emitter", event_type="order.paid", data={"n": 1})
    await edda_apart.ask("publish", channel="nobody-listens", data={"n": 1})
    storage = await ours_apart.open()
    schema, indexes = await schema_of(storage), await indexes_of(storage)
    before = await rows(storage, schema)
    assert all(before[table] for table in ("workflow_history", "channel_messages", "outbox_events"))

    await storage.initialize()

    after = await schema_of(storage)
    for table, shape in schema.items():
        assert shape.columns.items() <= after[table].columns.items()
        assert shape.unique <= after[table].unique
        assert shape.foreign_keys == after[table].foreign_keys
    assert indexes <= await indexes_of(storage)
    assert await rows(storage, schema) == before


async def test_a_database_of_ten_thousand_edda_instances_can_be_listed_page_by_page(
    database: Database, edda_apart: Edda, ours_apart: Harness
) -> None:
    await edda_apart.open(database.url)
    await edda_apart.ask("populate", count=10_000)
    storage = await ours_apart.open()
    await storage.initialize()
    await ours_apart.instance(storage)

    listed: list[tuple[datetime | None, str]] = []
    token: str | None = ""
    while token is not None and len(listed) <= 20_000:  # beyond, it would be the same ones again
        page = await storage.list_instances(ListInstancesOptions(limit=1000, page_token=token), framework=ANY)
        listed += [(instance.started_at, instance.instance_id) for instance in page.instances]
        token = page.next_page_token

    assert len(listed) == 10_001
    assert listed == sorted(set(listed), reverse=True)
