"""Connections are killed and processes end in the middle of operations; nothing is lost, halved or doubled."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from romancy.storage import OutcomeUnknownError, SQLStorage, StorageError, open_storage
from tests.harness import Harness

from .cutting import Cutter, Outcome
from .proxy import Proxy
from .scenarios import HARD, SCENARIOS, Scenario

SERVERS = ("postgres", "mariadb", "mysql")
ONE_STATEMENT = ("append_history", "create_instance of a known workflow")
"""Committed by itself, and not to be run again when the outcome is unknown."""
UNREPEATABLE = (*ONE_STATEMENT, "publish_to_channel")
ROUND_TRIPS = (*UNREPEATABLE, "append_history with a lock", "refresh_lock")

CONNECTION_ID = {"postgres": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}
KILL = {"postgres": "SELECT pg_terminate_backend({})", "mysql": "KILL {}"}
IS_THERE = {
    "postgres": "SELECT 1 FROM pg_stat_activity WHERE pid = {}",
    "mysql": "SELECT 1 FROM information_schema.processlist WHERE id = {}",
}


async def executioner(harness: Harness, storage: SQLStorage) -> Callable[[], None]:
    """What ends the storage's one connection from outside, and returns when it is gone."""
    kind = storage.runner.driver.driver_name()
    connection_id = await storage.conn().fetch_value(CONNECTION_ID[kind])

    async def kill() -> None:
        async with open_storage(harness.url) as other:
            await other.conn().fetch_all(KILL[kind].format(connection_id))
            while await other.conn().fetch_value(IS_THERE[kind].format(connection_id)):
                await asyncio.sleep(0.001)

    def kill_from_another_thread() -> None:
        thread = threading.Thread(target=lambda: asyncio.run(kill()))
        thread.start()
        thread.join()

    return kill_from_another_thread


@pytest.mark.databases(*SERVERS)
@pytest.mark.parametrize("name", HARD)
async def test_an_operation_is_repeated_when_its_connection_is_killed(
    harness: Harness, storage: SQLStorage, name: str
) -> None:
    victim = await harness.open(pool_size=1)
    watcher = Cutter(0)
    undisturbed = await Outcome.of(harness, storage, SCENARIOS[name], watcher, actor=victim)
    untouched = await Outcome.of(harness, storage, Scenario(SCENARIOS[name].arrange, do_nothing))
    statements = len(watcher.seen)
    for number in {1, statements // 2 + 1, statements}:
        cutter = Cutter(number, await executioner(harness, victim))
        left = await Outcome.of(harness, storage, SCENARIOS[name], cutter, actor=victim)
        assert cutter.struck
        if name in ONE_STATEMENT:
            assert isinstance(left.answer, OutcomeUnknownError)
            left.must_equal(untouched)
        else:
            assert not isinstance(left.answer, StorageError)
            left.must_equal(undisturbed)


@pytest.mark.databases(*SERVERS)
@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("name", ROUND_TRIPS)
async def test_a_connection_that_breaks_at_any_round_trip_leaves_all_or_nothing(
    harness: Harness, storage: SQLStorage, name: str, reply: bool
) -> None:
    """Either the request is lost or the reply to it; an operation that may be repeated is, the others say so."""
    async with Proxy(harness.url) as proxy:
        behind = Harness(harness.name, proxy.url)
        actor = await behind.open(pool_size=1)
        scenario, number, unknown = SCENARIOS[name], 0, 0
        undisturbed = await Outcome.of(harness, storage, scenario, actor=actor)
        untouched = await Outcome.of(harness, storage, Scenario(scenario.arrange, do_nothing))

        async def act(storage: SQLStorage) -> object:
            proxy.lose(number, reply=reply)
            try:
                return await scenario.act(storage)
            finally:
                proxy.relent()

        while proxy.has_lost or not number:
            number += 1
            left = await Outcome.of(harness, storage, Scenario(scenario.arrange, act), actor=actor)
            if isinstance(left.answer, OutcomeUnknownError):
                unknown += 1
                assert left.equals(untouched) or (reply and left.equals(undisturbed))
            else:
                assert not isinstance(left.answer, StorageError)
                left.must_equal(undisturbed)
        await behind.close()
    assert number > 1
    assert (unknown > 0) == (name in UNREPEATABLE)


Kill = Callable[[Path, str, float], int]


@pytest.fixture(scope="module")
def kill_everywhere() -> Iterator[Kill]:
    """Cut a scenario at every statement by killing the process that plays it; see `victim.py`."""
    command = [sys.executable, "-m", "tests.crash.victim"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdin is not None
        assert victim.stdout is not None
        stdin, stdout = victim.stdin, victim.stdout

        def kill(database: Path, name: str, clock_offset: float) -> int:
            print(json.dumps([str(database), name, clock_offset]), file=stdin, flush=True)
            return int(stdout.readline())

        yield kill


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("name", HARD)
async def test_a_process_that_is_killed_in_an_operation_leaves_all_of_it_or_nothing(
    harness: Harness, storage: SQLStorage, kill_everywhere: Kill, name: str, tmp_path: Path
) -> None:
    await SCENARIOS[name].arrange(harness, storage)
    original = tmp_path / "original.db"
    with closing(sqlite3.connect(tmp_path / "romancy.db")) as source, closing(sqlite3.connect(original)) as target:
        source.backup(target)
    undisturbed = await asyncio.to_thread(kill_everywhere, original, name, harness.clock)

    async def left_in(stem: object) -> Outcome:
        async with open_storage(f"sqlite:///{tmp_path}/{stem}.db") as victim:
            return await Outcome.read(victim)

    before = await left_in("original")
    for number in range(1, undisturbed):
        assert (await left_in(number)).tables == before.tables, f"killed at statement {number}"
    (await left_in("after")).must_equal(await left_in(undisturbed))
    assert undisturbed > 1
    assert (await left_in("after")).tables != before.tables


async def do_nothing(storage: SQLStorage) -> None:
    pass
