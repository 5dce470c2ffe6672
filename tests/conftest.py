"""Which databases the tests run on, and a fresh one for each test.

A test that asks for the fixture `database` runs once on each of SQLite, PostgreSQL, MariaDB and MySQL, or on those that
`--databases` or its own mark `@pytest.mark.databases("postgres")` leave. The servers that the collected tests need are
started after collection; `tests/servers` says where they come from.
"""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from romancy.storage import SQLStorage, open_storage
from tests.harness import Harness, empty
from tests.servers import KINDS, Server, ServerError, Servers

DATABASES = ("sqlite", *KINDS)
FIXTURES = ("database", "harness", "shared_database")

SERVERS = pytest.StashKey[Servers]()
MIGRATED = pytest.StashKey[dict[str, str]]()
TESTS_RUN = pytest.StashKey[Counter[str]]()


@dataclass(frozen=True)
class Database:
    """A fresh, empty database."""

    name: str
    url: str
    server: Server | None = None


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Servers:
    return request.config.stash[SERVERS]


@pytest.fixture
async def database(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> AsyncIterator[Database]:
    name: str = request.param
    if name in servers.missing:
        pytest.skip(f"{KINDS[name].title} is missing")
    request.config.stash[TESTS_RUN][name] += 1

    if name == "sqlite":
        yield Database(name, f"sqlite:///{tmp_path}/romancy.db")
        return
    server = servers[name]
    url = await server.create_database()
    try:
        yield Database(name, url, server)
    finally:
        await server.drop_database(url)


@pytest.fixture
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    """A migrated database that nobody else uses meanwhile; see `tests/harness.py`."""
    name: str = request.param
    config = request.config
    servers = config.stash[SERVERS]
    if name in servers.missing:
        pytest.skip(f"{KINDS[name].title} is missing")
    config.stash[TESTS_RUN][name] += 1

    url = config.stash[MIGRATED].get(name) or f"sqlite:///{tmp_path}/romancy.db"
    if name != "sqlite" and name not in config.stash[MIGRATED]:
        url = config.stash[MIGRATED][name] = await servers[name].create_database()
    made = Harness(name, url)
    first = await made.open()
    await first.initialize()
    yield made
    await made.close()
    if name != "sqlite":
        async with open_storage(url) as janitor:
            await empty(janitor)


@pytest.fixture
async def storage(harness: Harness) -> SQLStorage:
    """A storage on the test's migrated database."""
    return await harness.open()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--databases",
        type=_database_names,
        default=DATABASES,
        metavar="NAMES",
        help=f"the databases to test on, separated by commas (default: {','.join(DATABASES)})",
    )


def _database_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in DATABASES:
            raise pytest.UsageError(f"--databases: there is no {name!r}, only {', '.join(DATABASES)}")
    return names


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "databases(*names): run this test on these databases only")
    config.stash[TESTS_RUN] = Counter()
    config.stash[MIGRATED] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in FIXTURES:
        if fixture in metafunc.fixturenames:
            mark = metafunc.definition.get_closest_marker("databases")
            metafunc.parametrize(fixture, mark.args if mark else DATABASES, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = (None, *config.getoption("databases"))
    config.hook.pytest_deselected(items=[item for item in items if _database_of(item) not in selected])
    items[:] = [item for item in items if _database_of(item) in selected]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the servers that the collected tests need."""
    config = session.config
    if config.option.collectonly:
        return
    needed = {_database_of(item) for item in session.items}
    config.stash[SERVERS] = servers = Servers(name for name in KINDS if name in needed)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and any(server.ours for server in servers.values()):
        reporter.ensure_newline()
        reporter.write_line("starting the database servers; the first time, this may fetch their packages")
    try:
        asyncio.run(servers.start())
    except ServerError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.TESTS_FAILED)


def pytest_unconfigure(config: pytest.Config) -> None:
    if SERVERS in config.stash:
        config.stash[SERVERS].close()


def _database_of(item: pytest.Item) -> str | None:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return next((str(parameters[fixture]) for fixture in FIXTURES if fixture in parameters), None)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    needed = {_database_of(item) for item in items} - {None}
    if SERVERS not in config.stash or not needed:
        return []
    servers = config.stash[SERVERS]
    names = [_title(servers, name) for name in DATABASES if name in needed and name not in servers.missing]
    return [f"databases: {', '.join(names)}", *_missing(servers)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if SERVERS not in config.stash:
        return
    servers = config.stash[SERVERS]
    tests_run = config.stash[TESTS_RUN]
    for name in DATABASES:
        if name in tests_run:
            terminalreporter.write_line(f"{tests_run[name]} tests ran on {_title(servers, name)}")
    for line in _missing(servers):
        terminalreporter.write_line(line, red=True, bold=True)


def _title(servers: Servers, name: str) -> str:
    if name == "sqlite":
        return f"SQLite {sqlite3.sqlite_version}"
    return f"{servers[name].title} {servers[name].version}"


def _missing(servers: Servers) -> list[str]:
    return [f"WARNING: NOT TESTED ON {KINDS[name].title}: {reason}" for name, reason in servers.missing.items()]
