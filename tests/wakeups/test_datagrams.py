"""Datagrams: heard by whoever is on the same database, refused where others could listen, harmless whoever sends."""

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from romancy.storage import SQLStorage, open_storage
from romancy.storage.notifications import CATCH_UP, Listener, Meeting, told
from romancy.storage.notifications.datagrams import LARGEST_DATAGRAM, NoMeetingError, packed, unpacked
from romancy.storage.sql.operation import Hint
from tests.harness import Harness

pytestmark = pytest.mark.usefixtures("home")

ON_SQLITE = pytest.mark.databases("sqlite")


async def next_hint(hints: Listener) -> Hint:
    async with asyncio.timeout(5):
        return await anext(hints)


async def heard(hints: Listener, channel: str) -> None:
    """Wait for the announcement of a message on this channel."""
    while told(await next_hint(hints)).channel != channel:
        pass


def sockets(home: Path) -> list[Path]:
    return sorted(home.glob("*/*.sock"))


def send(address: Path, *datagrams: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        for datagram in datagrams:
            mouth.sendto(datagram, str(address))


def dead_socket(directory: Path) -> Path:
    """What a process leaves that was killed."""
    path = directory / "1-dead.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(path))
    return path


# Who meets whom.


@ON_SQLITE
async def test_two_ways_to_write_a_path_lead_to_one_meeting(harness: Harness, storage: SQLStorage) -> None:
    path = Path(harness.url.removeprefix("sqlite:///"))
    link = path.with_name("link.db")
    link.symlink_to(path)
    async with open_storage(f"{path.parent}/../{path.parent.name}/{path.name}") as roundabout:
        assert await roundabout.runner.identity() == await storage.runner.identity()  # type: ignore[attr-defined]
    async with open_storage(str(link)) as linked, linked.listen() as hints:
        await storage.publish_to_channel("orders", "{}")
        await heard(hints, "orders")


@pytest.mark.databases("mariadb", "mysql")
async def test_two_ways_to_write_an_address_lead_to_one_meeting(harness: Harness, storage: SQLStorage) -> None:
    other = harness.url.replace("127.0.0.1", "localhost").replace("mysql://", "mariadb://")
    assert other != harness.url
    async with open_storage(other) as elsewhere, elsewhere.listen() as hints:
        await storage.publish_to_channel("orders", "{}")
        await heard(hints, "orders")


@ON_SQLITE
async def test_other_databases_hear_nothing(harness: Harness, storage: SQLStorage, tmp_path: Path) -> None:
    async with open_storage(f"{tmp_path}/other.db") as other, other.listen() as strangers:
        elsewhere = await harness.open()
        async with elsewhere.listen() as hints:
            await storage.publish_to_channel("orders", "{}")
            await heard(hints, "orders")
        assert strangers._waiting.empty()


@ON_SQLITE
async def test_nothing_remains_when_everybody_has_left(home: Path, storage: SQLStorage) -> None:
    async with storage.listen():
        assert len(sockets(home)) == 1
    assert list(home.iterdir()) == []


@ON_SQLITE
async def test_what_dead_processes_left_goes_with_the_last_one_who_leaves(home: Path, storage: SQLStorage) -> None:
    async with storage.listen():
        dead_socket(sockets(home)[0].parent)
    assert list(home.iterdir()) == []


@ON_SQLITE
async def test_who_only_speaks_leaves_nothing_behind(home: Path, storage: SQLStorage) -> None:
    await storage.publish_to_channel("orders", "{}")
    await storage.close()
    assert not home.exists()


@ON_SQLITE
async def test_a_socket_whose_file_is_tidied_away_is_made_again(
    harness: Harness, storage: SQLStorage, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("romancy.storage.notifications.datagrams._LOOK_AFTER_SEC", 0.01)
    elsewhere = await harness.open()
    async with elsewhere.listen() as hints:
        for file in sockets(home):
            file.unlink()
        assert await next_hint(hints) is CATCH_UP
        await storage.publish_to_channel("orders", "{}")
        await heard(hints, "orders")


# Dead processes.


@ON_SQLITE
async def test_a_listener_sweeps_away_what_dead_processes_left(
    harness: Harness, home: Path, storage: SQLStorage
) -> None:
    async with storage.listen():
        dead = dead_socket(sockets(home)[0].parent)
        elsewhere = await harness.open()
        assert dead.exists()
        async with elsewhere.listen():
            assert not dead.exists()


@ON_SQLITE
async def test_a_listener_removes_what_is_left_of_a_meeting_that_nobody_attends(
    home: Path, storage: SQLStorage
) -> None:
    deserted, unrelated = home / ("0" * 16), home / "somebody's"
    for directory in (home, deserted, unrelated):
        directory.mkdir(mode=0o700)
    dead_socket(deserted)
    async with storage.listen():
        assert (deserted.exists(), unrelated.exists()) == (False, True)


@ON_SQLITE
async def test_a_sender_removes_a_socket_that_nobody_has_open(
    harness: Harness, storage: SQLStorage, home: Path
) -> None:
    elsewhere = await harness.open()
    async with elsewhere.listen() as hints:
        [living] = sockets(home)
        dead = dead_socket(living.parent)
        await storage.publish_to_channel("orders", "{}")
        await heard(hints, "orders")
        await storage.close()
        assert (living.exists(), dead.exists()) == (True, False)


@ON_SQLITE
async def test_a_forked_child_does_not_keep_its_parents_socket_alive(
    harness: Harness, storage: SQLStorage, home: Path
) -> None:
    """The parent of the orphan is killed; its socket must be seen to be dead although its child lives on."""
    await storage.publish_to_channel("orders", "{}")
    script = """
import asyncio, os, sys, time
from romancy.storage import open_storage

async def parent():
    async with open_storage(sys.argv[1]) as storage, storage.listen():
        if os.fork() == 0:
            try:
                asyncio.run(storage.close())  # does nothing to what is its parent's
            finally:
                print(os.getpid(), flush=True)
                os.close(1)  # or whoever reads it would wait for us
                time.sleep(30)
                os._exit(0)
        time.sleep(30)

asyncio.run(parent())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, harness.url, stdout=PIPE)
    assert parent.stdout is not None
    orphan = int(await parent.stdout.readline())
    [left] = sockets(home)
    parent.kill()
    await parent.wait()
    try:
        async with storage.listen():
            assert not left.exists()
    finally:
        os.kill(orphan, signal.SIGKILL)


# Where nobody can meet.


def unsafe(home: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match how:
        case "open to others":
            home.mkdir(mode=0o700)
            home.chmod(0o755)
        case "somebody else's":
            home.mkdir(mode=0o700)
            monkeypatch.setattr("os.geteuid", lambda: 12345)
        case "a link":
            home.with_name("elsewhere").mkdir(mode=0o700)
            home.symlink_to(home.with_name("elsewhere"))
        case "a file":
            home.touch(mode=0o700)
        case "too deep":
            monkeypatch.setenv("ROMANCY_WAKEUP_DIR", f"{home.parent}/{'d' * 120}")
        case "nowhere":
            monkeypatch.setenv("ROMANCY_WAKEUP_DIR", f"{home.parent}/no/such")


UNSAFE = ("open to others", "somebody else's", "a link", "a file", "too deep", "nowhere")


@ON_SQLITE
@pytest.mark.parametrize("how", UNSAFE)
async def test_an_unsafe_place_is_not_used_which_is_said_once(
    storage: SQLStorage, home: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unsafe(home, how, monkeypatch)
    with caplog.at_level(logging.INFO, "romancy.storage"):
        for number in range(3):
            async with storage.listen() as hints:
                await storage.publish_to_channel("orders", str(number))
                await heard(hints, "orders")  # in the same process
            await storage.wakeups._send([Hint("workflow_finished", "{}")])

    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "processes cannot wake each other up here" in caplog.text


@pytest.mark.parametrize("how", UNSAFE[:4])
def test_nothing_is_sent_where_others_could_hear_it(home: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unsafe(home, how, monkeypatch)
    with pytest.raises((NoMeetingError, NotADirectoryError)):
        Meeting("a database").peers()


def test_a_database_has_a_directory_that_only_its_owner_can_enter(home: Path) -> None:
    ear, name = Meeting("a database").bind()
    with ear:
        [directory] = home.iterdir()
        assert [path.stat().st_mode & 0o777 for path in (home, directory)] == [0o700, 0o700]
        assert [path.name for path in directory.iterdir()] == [name]


# Whoever sends.

HOSTILE: dict[str, list[bytes]] = {
    "empty": [b""],
    "no text": [bytes(range(256))],
    "no JSON": [b"[{"],
    "other JSON": [b"null", b"7", b"{}", b'[["workflow_resumable", "{}"]]', b'[{"topic": 1, "payload": 2}]'],
    "deep": [b"[" * 20_000],
    "huge": [b"[" + b" " * (LARGEST_DATAGRAM + 1000) + b"]"],
    "unknown topic": list(packed([Hint("catch_up", ""), Hint("drop_everything", "{}")])),
    "odd payload": list(packed([Hint("workflow_finished", payload) for payload in ("", "{", "null", "\\ud800")])),
    "long payload": [b'[{"topic": "workflow_finished", "payload": "' + b"x" * 9000 + b'"}]'],
}


@ON_SQLITE
@pytest.mark.parametrize("kind", HOSTILE)
async def test_what_is_not_ours_does_no_harm(
    harness: Harness, storage: SQLStorage, home: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = await harness.open()
    async with elsewhere.listen(["workflow_channel_message"]) as hints:
        send(sockets(home)[0], *HOSTILE[kind])
        await storage.publish_to_channel("orders", "{}")
        assert told(await next_hint(hints)).channel == "orders"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@ON_SQLITE
async def test_a_flood_is_read_in_small_doses_and_means_one_look_at_everything(
    harness: Harness, storage: SQLStorage, home: Path
) -> None:
    elsewhere = await harness.open()
    async with elsewhere.listen() as hints:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
            mouth.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:  # until the buffer is full
                    mouth.sendto(b'[{"topic": "workflow_finished", "payload": "{}"}]', str(sockets(home)[0]))
        await storage.publish_to_channel("lost", "{}")  # finds no room, and waits for nobody
        await storage.close()

        assert await next_hint(hints) is CATCH_UP
        speaker = await harness.open()
        await speaker.publish_to_channel("orders", "{}")
        await heard(hints, "orders")


def test_many_hints_are_packed_into_datagrams_of_bounded_size() -> None:
    hints = [Hint("workflow_finished", f'{{"instance_id": "{number:0250}"}}') for number in range(1000)]
    datagrams = list(packed(hints))
    assert max(map(len, datagrams)) <= LARGEST_DATAGRAM
    assert len(datagrams) < 20
    assert [hint for datagram in datagrams for hint in unpacked(datagram)] == hints


# Databases that are away, or alone.


@ON_SQLITE
async def test_a_database_that_cannot_say_who_it_is_is_asked_again(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("romancy.storage.notifications.datagrams._FIRST_PAUSE_SEC", 0.01)
    elsewhere: Any = await harness.open()
    identity, answers = elsewhere.wakeups._identity, [OSError("away"), OSError("away")]

    async def sometimes() -> str:
        if answers:
            raise answers.pop()
        return str(await identity())

    monkeypatch.setattr(elsewhere.wakeups, "_identity", sometimes)
    async with elsewhere.listen() as hints:
        assert await next_hint(hints) is CATCH_UP
        await storage.publish_to_channel("orders", "{}")
        await heard(hints, "orders")


async def test_a_database_in_memory_has_no_meeting(home: Path) -> None:
    async with open_storage(":memory:") as storage, storage.listen() as hints:
        await storage.initialize()
        await storage.publish_to_channel("orders", "{}")
        await heard(hints, "orders")
        assert not home.exists()
