"""Two filled databases of each kind, for all tests of this directory: filling takes seconds, looking does not."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest

from romancy.storage import SQLStorage, open_storage
from tests.harness import Harness, tables_of
from tests.servers import KINDS, Servers

from .asking import DECLARED
from .filling import LARGE, SMALL, Filler


class URLs(NamedTuple):
    """A large database, and a small one in which as much is due."""

    large: str
    small: str


class Storages(NamedTuple):
    large: SQLStorage
    small: SQLStorage


@pytest.fixture(scope="package")
def database(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[URLs]:
    name: str = request.param
    if name in servers.missing:
        pytest.skip(f"{KINDS[name].title} is missing")
    if name == "sqlite":
        directory = tmp_path_factory.mktemp("plans")
        urls = URLs(f"sqlite:///{directory}/large.db", f"sqlite:///{directory}/small.db")
        asyncio.run(fill(urls))
        yield urls
        return
    urls = URLs(*(asyncio.run(servers[name].create_database()) for _ in URLs._fields))
    asyncio.run(fill(urls))
    yield urls
    for url in urls:
        asyncio.run(servers[name].drop_database(url))


async def fill(urls: URLs) -> None:
    for url in urls:
        async with open_storage(url) as storage:
            await storage.initialize()
            for path in DECLARED:
                await storage.declare_input_path(path)
            await Filler(storage, SMALL if url == urls.small else LARGE).fill()


@pytest.fixture
async def storage(harness: Harness) -> SQLStorage:
    """A storage on the test's migrated database, in which nothing is left of what other tests have deleted."""
    storage = await harness.open()
    if harness.name == "postgres":  # it keeps that for a while, and it counts as read
        await storage.conn().execute(f"TRUNCATE {', '.join(await tables_of(storage))}")
    return storage


@pytest.fixture
async def storages(database: URLs) -> AsyncIterator[Storages]:
    async with open_storage(database.large) as large, open_storage(database.small) as small:
        yield Storages(large, small)
