"""Edda and we on one database: on SQLite, PostgreSQL and MariaDB, on tables that either of us made."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from romancy.storage import SQLStorage
from tests.conftest import Database
from tests.harness import Harness

from .neighbour import Edda

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(600))  # the first one may install Edda


@pytest.fixture(scope="session")
def process() -> Iterator[Edda]:
    edda = Edda()
    yield edda
    edda.end()


@pytest.fixture
async def edda(process: Edda, database: Database) -> AsyncIterator[Edda]:
    """Edda, not yet on the database."""
    yield process
    await process.close()


@pytest.fixture
async def ours(database: Database) -> AsyncIterator[Harness]:
    """Our side, not yet on the database either."""
    harness = Harness(database.name, database.url)
    yield harness
    await harness.close()


@pytest.fixture(params=["our tables", "Edda's tables"])
async def storage(request: pytest.FixtureRequest, database: Database, edda: Edda, ours: Harness) -> SQLStorage:
    """Our storage on a database that Edda has open too, made by one of us."""
    storage = await ours.open()
    if request.param == "our tables":
        await storage.initialize()
        await edda.open(database.url)
    else:
        await edda.open(database.url)
        await storage.initialize()
    return storage
