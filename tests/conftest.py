"""Which databases the tests run on, and a fresh one for each test.

A test that asks for the fixture `database` runs once on each of SQLite, PostgreSQL, MariaDB and MySQL, or on those that
`--databases` or its own mark `@pytest.mark.databases("postgres")` leave. The servers that the collected tests need are
started after collection; `tests/servers` says where they come from. Several processes (`-n`) share one set of servers,
and each test still has its database to itself.
"""

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    if not session.config.option.collectonly:
        _start_servers(session.config, {_database_of(item) for item in session.items})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Start the servers for the processes that are to run the tests, which find them by their environment."""
    _start_servers(config, config.getoption("databases"))
    for server in config.stash[SERVERS].values():
        os.environ[server.variable()] = server.url
    for line in _databases(config, DATABASES):
        _say(config, line)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Whoever cannot be had is not looked for again in each process."""
    node.workerinput["missing"] = node.config.stash[SERVERS].missing


def _start_servers(config: pytest.Config, needed: Collection[str | None]) -> None:
    missing = getattr(config, "workerinput", {}).get("missing", {})
    config.stash[SERVERS] = servers = Servers(name for name in KINDS if name in needed and name not in missing)
    servers.missing.update(missing)
    if any(server.ours for server in servers.values()):
        _say(config, "starting the database servers; the first time, this may fetch their packages")
    try:
        asyncio.run(servers.start())
    except ServerError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.TESTS_FAILED)


def _say(config: pytest.Config, line: str) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.ensure_newline()
        reporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    if SERVERS in config.stash:
        config.stash[SERVERS].close()


def _database_of(item: pytest.Item) -> str | None:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return next((str(parameters[fixture]) for fixture in FIXTURES if fixture in parameters), None)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    return _databases(config, {_database_of(item) for item in items}) if SERVERS in config.stash else []


def _databases(config: pytest.Config, needed: Collection[str | None]) -> list[str]:
    servers = config.stash[SERVERS]
    there = [name for name in config.getoption("databases") if name in needed and name not in servers.missing]
    titles = [_title(servers, name) for name in there]
    return [*([f"databases: {', '.join(titles)}"] if titles else []), *_missing(servers)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What ran in this process, for the one that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tests run"] = dict(session.config.stash[TESTS_RUN])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[TESTS_RUN].update(getattr(node, "workeroutput", {}).get("tests run", {}))


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
