"""Wake-ups by datagrams between the processes of one machine, for databases that have no NOTIFY.

All processes on a database meet in a directory that only their user can enter, named after what the database itself
says it is. Whoever listens has a socket there; whoever has something to say sends it to all sockets it finds. Sending
never waits: where a buffer is full, its owner will look anyway. A socket that nobody has open any more refuses, and is
removed. What comes in is only ever a reason to look.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import random
import re
import socket
import stat
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import msgspec

from ..sql.operation import Hint
from ..sql.runners.runner import BaseRunner
from .hints import CATCH_UP, LONGEST_PAYLOAD, TOPICS
from .wakeups import GAP_SEC, Wakeups

log = logging.getLogger("romancy.storage")

DIRECTORY_VARIABLE = "ROMANCY_WAKEUP_DIR"
"""Where processes meet that do not share a directory for temporary files."""
LARGEST_DATAGRAM = 32_768
_MOST_PEERS = 256
_MOST_SWEPT = 32
_MEETING = re.compile("[0-9a-f]{16}")
_READ_AT_ONCE = 10
"""As many as Linux queues for a socket: when they are all there, more may have been dropped."""
_SUFFIX = ".sock"
_LOOK_AFTER_SEC = 30.0
_FIRST_PAUSE_SEC = 1.0
_LONGEST_PAUSE_SEC = 30.0

Identity = Callable[[], Awaitable[str]]
"""Asks a database for words that are the same for everybody who uses it, and different for every other."""


class NoMeetingError(Exception):
    """Processes cannot meet on this machine; polls find everything without it."""


class Meeting:
    """The directory in which the sockets of one database's processes are."""

    def __init__(self, identity: str) -> None:
        if not hasattr(socket, "AF_UNIX") or not hasattr(os, "geteuid"):
            raise NoMeetingError("this system has no Unix sockets")
        given = os.environ.get(DIRECTORY_VARIABLE)
        self._home_is_given = bool(given)
        self._home = Path(given) if given else Path(tempfile.gettempdir()) / f"romancy-{os.geteuid()}"
        self.path = self._home / hashlib.sha256(identity.encode()).hexdigest()[:16]

    def bind(self) -> tuple[socket.socket, str]:
        """A socket in this directory, and its name."""
        for attempts_left in (2, 1, 0):
            try:
                self._make()
                return self._bound()
            except FileNotFoundError as error:  # whoever left last has just removed the directory
                if not attempts_left:
                    raise NoMeetingError(f"{self.path} vanishes: {error}") from error
            except OSError as error:
                self._tidy(self.path)
                raise NoMeetingError(f"there can be no socket in {self.path}: {error}") from error
        raise AssertionError("unreachable")

    def _bound(self) -> tuple[socket.socket, str]:
        ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            ear.setblocking(False)
            name = f"{os.getpid()}-{uuid4().hex[:8]}{_SUFFIX}"
            ear.bind(str(self.path / name))
        except BaseException:
            ear.close()
            raise
        _INHERITED.add(ear)
        return ear, name

    def _make(self) -> None:
        for directory in (self._home, self.path):
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            check_private(directory)

    def peers(self) -> list[str]:
        """The names of the sockets that are here; a bounded number of them."""
        try:
            check_private(self._home)
            check_private(self.path)
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if entry.name.endswith(_SUFFIX)]
        except FileNotFoundError:
            return []
        return names if len(names) <= _MOST_PEERS else random.sample(names, _MOST_PEERS)

    def send(self, mouth: socket.socket, name: str, datagrams: Iterable[bytes]) -> None:
        """Send to one socket without waiting; remove it when nobody has it open any more."""
        address = str(self.path / name)
        try:
            for datagram in datagrams:
                mouth.sendto(datagram, address)
        except ConnectionRefusedError:
            remove_socket(self.path / name)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ENOENT):
                log.debug("%s was not told: %s", name, error)

    def sweep(self) -> None:
        """Remove the sockets of processes that died, and what they left of meetings that nobody attends any more."""
        self._sweep(self.path)
        with suppress(OSError):
            others = [path for path in self._home.iterdir() if path != self.path and _MEETING.fullmatch(path.name)]
            for directory in random.sample(others, min(len(others), _MOST_SWEPT)):
                self._sweep(directory)
                self._tidy(directory)

    @staticmethod
    def _sweep(directory: Path) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.setblocking(False)
            for path in directory.glob(f"*{_SUFFIX}"):
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    remove_socket(path)
                except OSError:
                    continue

    def _tidy(self, directory: Path) -> None:
        """Remove the directories that we have made, if they are empty."""
        with suppress(OSError):
            directory.rmdir()
            if not self._home_is_given:
                self._home.rmdir()

    def leave(self, name: str) -> None:
        """Take our socket away, and with the last one the directory."""
        remove_socket(self.path / name)
        self._sweep(self.path)
        self._tidy(self.path)


def remove_socket(path: Path) -> None:
    """Remove a socket's file, and nothing else."""
    with suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()


def check_private(directory: Path) -> None:
    """NoMeetingError unless the directory is ours and closed to everybody else; FileNotFoundError without one."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NoMeetingError(f"{directory} is no directory")
    if found.st_uid != os.geteuid():
        raise NoMeetingError(f"{directory} belongs to somebody else")
    if found.st_mode & 0o077:
        raise NoMeetingError(f"{directory} is open to others")


class DatagramWakeups(Wakeups):
    """Hears and tells the processes of this machine and user that use the same database."""

    def __init__(self, runner: BaseRunner, identity: Identity) -> None:
        super().__init__(runner)
        self._identity = identity
        self._meeting: Meeting | None = None
        self._nowhere = False
        self._name = ""
        """Our own socket's."""

    async def _receive(self, ready: asyncio.Event) -> None:
        failures = 0
        while not (self._nowhere or self._closed):
            try:
                meeting = await self._where()
                ear, name = meeting.bind()
            except NoMeetingError as error:
                self._give_up(error)
                return
            except Exception as error:
                if not failures:
                    log.info("cannot listen for wake-ups yet: %s", error)
                failures += 1
                ready.set()
                pause = min(_FIRST_PAUSE_SEC * 2.0 ** min(failures, 10), _LONGEST_PAUSE_SEC)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                continue
            failures = 0
            if ready.is_set():
                self._hear([CATCH_UP])  # who knows what was said meanwhile
            await self._listen(meeting, ear, name, ready)

    async def _listen(self, meeting: Meeting, ear: socket.socket, name: str, ready: asyncio.Event) -> None:
        """Hear what comes in until our socket's file is gone, as when somebody tidies up."""
        self._name = name
        reader = _Reader(ear, self._hear)
        try:
            meeting.sweep()
            ready.set()
            while (meeting.path / name).exists():  # noqa: ASYNC110 (nobody tells us when a file goes)
                await asyncio.sleep(_LOOK_AFTER_SEC)
        finally:
            self._name = ""
            reader.close()
            ear.close()
            meeting.leave(name)

    async def _send(self, hints: list[Hint]) -> None:
        if self._nowhere:
            return
        try:
            meeting = await self._where()
            others = [name for name in meeting.peers() if name != self._name]
        except NoMeetingError as error:
            self._give_up(error)
            return
        if not others:
            return
        datagrams = list(packed(hints))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
            mouth.setblocking(False)
            for name in others:
                meeting.send(mouth, name, datagrams)

    async def _where(self) -> Meeting:
        if self._meeting is None:
            self._meeting = Meeting(await self._identity())
        return self._meeting

    def _give_up(self, error: NoMeetingError) -> None:
        if not self._nowhere:
            log.info("processes cannot wake each other up here, only polls find what others leave: %s", error)
        self._nowhere = True


class _Reader:
    """Reads a socket when something is there, a bounded number of datagrams at a time and not all the time."""

    def __init__(self, ear: socket.socket, hear: Callable[[list[Hint]], None]) -> None:
        self._ear = ear
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._resume()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._ear, self._read)

    def _read(self) -> None:
        # Whoever sends without end gets no more of our time than this.
        self._loop.remove_reader(self._ear)
        self._pause = self._loop.call_later(GAP_SEC, self._resume)
        heard = self._hints()
        if heard:
            self._hear(heard)

    def _hints(self) -> list[Hint]:
        heard: dict[Hint, None] = {}
        for _ in range(_READ_AT_ONCE):
            try:
                datagram = self._ear.recv(
                    LARGEST_DATAGRAM
                )  # the rest of a larger one is cut off, and it makes no sense
            except OSError:
                return list(heard)
            heard.update(dict.fromkeys(unpacked(datagram)))
        return [CATCH_UP]

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._ear)


def packed(hints: Iterable[Hint]) -> Iterator[bytes]:
    """Hints as datagrams of bounded size."""
    waiting: list[bytes] = []
    size = 2
    for hint in hints:
        encoded = msgspec.json.encode(hint)
        if waiting and size + len(encoded) + 1 > LARGEST_DATAGRAM:
            yield b"[" + b",".join(waiting) + b"]"
            waiting, size = [], 2
        if len(hint.payload) <= LONGEST_PAYLOAD:
            waiting.append(encoded)
            size += len(encoded) + 1
    if waiting:
        yield b"[" + b",".join(waiting) + b"]"


def unpacked(datagram: bytes) -> list[Hint]:
    """The hints in a datagram, whoever sent it; nothing of one that is not ours."""
    try:
        hints = msgspec.json.decode(datagram, type=list[Hint])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    return [hint for hint in hints if hint.topic in TOPICS and len(hint.payload) <= LONGEST_PAYLOAD]


_INHERITED: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _let_go_of_inherited() -> None:
    """A forked child must not keep its parent's sockets open: they would look alive after the parent's death."""
    for ear in list(_INHERITED):
        ear.close()
    _INHERITED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_of_inherited)
