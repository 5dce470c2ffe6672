"""Either of us may be first on a database; the other one takes it as it is."""

import asyncio

import pytest

from romancy.storage import ANY, WorkflowStatus
from tests.conftest import Database
from tests.harness import Harness, step

from .neighbour import Edda

pytestmark = pytest.mark.databases("sqlite", "postgres", "mariadb")


@pytest.mark.parametrize("first", ["we", "Edda", "both at once"])
async def test_both_start_on_an_empty_database_and_run_a_workflow(
    first: str, database: Database, edda: Edda, ours: Harness
) -> None:
    storage = await ours.open()
    if first == "we":
        await storage.initialize()
        await edda.open(database.url)
    elif first == "Edda":
        await edda.open(database.url)
        await storage.initialize()
    else:
        await asyncio.gather(edda.open(database.url, attempts=1), storage.initialize())

    assert await edda.result(await edda.start("doubler", number=21)) == 42
    lock = await ours.locked(storage)
    await storage.append_history(step(lock.instance_id), lock=lock)
    await storage.update_instance_output(lock.instance_id, '"done"', lock=lock)

    everything = (await storage.list_instances(framework=ANY)).instances
    assert {(instance.framework, instance.status) for instance in everything} == {
        ("python", WorkflowStatus.COMPLETED),
        ("romancy-py", WorkflowStatus.COMPLETED),
    }
