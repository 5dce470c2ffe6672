"""Edda and we on one database: on SQLite, PostgreSQL and MariaDB, on tables that either of us made.

Most tests meet in a *neighbourhood*: a database that Edda has open too, shared by the tests of a module and emptied
after each. Tests of how such a place comes about start from an empty `database`, with `edda_apart` and `ours_apart`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from romancy.storage import SQLStorage, open_storage
from tests.conftest import TESTS_RUN, Database
from tests.harness import Harness, empty
from tests.servers import KINDS, Servers

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


# Neighbours.


@pytest.fixture(scope="module")
def shared_database(request: pytest.FixtureRequest) -> str:
    """The kind of database, chosen as for `database`."""
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=["our tables", "Edda's tables"])
def neighbourhood(
    request: pytest.FixtureRequest,
    shared_database: str,
    servers: Servers,
    process: Edda,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Database]:
    """A database that both of us use, made by one of us."""
    if shared_database in servers.missing:
        pytest.skip(f"{KINDS[shared_database].title} is missing")
    if shared_database == "sqlite":
        place = Database("sqlite", f"sqlite:///{tmp_path_factory.mktemp('neighbourhood')}/shared.db")
    else:
        server = servers[shared_database]
        place = Database(shared_database, asyncio.run(server.create_database()), server)

    async def settle() -> None:
        if request.param == "our tables":
            await _initialize(place.url)
            await process.open(place.url)
        else:
            await process.open(place.url)
            await _initialize(place.url)

    try:
        asyncio.run(settle())
        yield place
    finally:
        asyncio.run(process.close())
        if place.server is not None:
            asyncio.run(place.server.drop_database(place.url))


async def _initialize(url: str) -> None:
    async with open_storage(url) as storage:
        await storage.initialize()


@pytest.fixture
def edda(process: Edda, neighbourhood: Database) -> Edda:
    """Edda, on the same database."""
    return process


@pytest.fixture
async def ours(request: pytest.FixtureRequest, neighbourhood: Database) -> AsyncIterator[Harness]:
    """Our side of it."""
    request.config.stash[TESTS_RUN][neighbourhood.name] += 1
    harness = Harness(neighbourhood.name, neighbourhood.url)
    yield harness
    await harness.close()
    async with open_storage(neighbourhood.url) as janitor:
        await empty(janitor)


@pytest.fixture
async def storage(ours: Harness) -> SQLStorage:
    """Our storage in the neighbourhood."""
    return await ours.open()


# Before they are neighbours.


@pytest.fixture
async def edda_apart(process: Edda, database: Database) -> AsyncIterator[Edda]:
    """Edda, not yet on the database."""
    yield process
    await process.close()


@pytest.fixture
async def ours_apart(database: Database) -> AsyncIterator[Harness]:
    """Our side, not yet on the database either."""
    harness = Harness(database.name, database.url)
    yield harness
    await harness.close()
