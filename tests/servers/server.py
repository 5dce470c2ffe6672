"""One database server, and what every kind of it has in common.

A server is either *ours*, a throw-away process on a free loopback port, or *given*, somebody's server that an
environment variable names. Both answer for their URL and version and create and drop databases; only ours can be
stopped, killed and started again.
"""

import asyncio
import contextlib
import os
import pwd
import random
import secrets
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit, urlunsplit

MAX_CONNECTIONS = 300
START_TIMEOUT_SECONDS = 120
STOP_TIMEOUT_SECONDS = 60

# The servers see none of our environment: no PGPORT, no LANG, no MYSQL_HOME shall change what they do.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


class ServerError(Exception):
    """A server cannot be started, or did not do what was asked; the message says why."""


class Server(ABC):
    name: ClassVar[str]
    title: ClassVar[str]
    end_signal: ClassVar[signal.Signals]
    """Ends the process at once and leaves nothing behind outside its directory."""
    stop_signal: ClassVar[signal.Signals]
    """Lets it finish its files first, but not wait for its clients."""

    url: str
    version: str = ""

    @classmethod
    def variable(cls) -> str:
        """The environment variable that names a given server."""
        return f"ROMANCY_TEST_{cls.name.upper()}_URL"

    def __init__(self, directory: Path, *, durable: bool = False) -> None:
        """Our own server, to be started; its files will be in DIRECTORY.

        Committed data survives `kill()` in any case. Only a DURABLE server also waits for the disk, as in production.
        For tests that do not cut the power this changes nothing but their speed.
        """
        self.durable = durable
        self.directory: Path | None = directory
        self.data = directory / "data"
        self.log = directory / "log"
        self.pid_file = directory.with_suffix(".pid")
        self.port = _free_port()
        self.password = secrets.token_hex(8)
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def given(cls, url: str) -> Self:
        server = cls.__new__(cls)
        server.directory = None
        server.process = None
        server.url = url
        return server

    @property
    def ours(self) -> bool:
        return self.directory is not None

    # What is different in each kind of server

    @abstractmethod
    def find_programs(self) -> None:
        """Look for the programs on this machine, or fetch them (FetchError)."""

    @abstractmethod
    def initialise(self) -> None:
        """Create the data directory."""

    @abstractmethod
    def command(self) -> list[str | Path]:
        """The command that runs the server in the foreground."""

    @abstractmethod
    async def execute(self, statement: str) -> Any:
        """Run STATEMENT in the server's default database; return the first value of its result."""

    @abstractmethod
    async def read_version(self) -> str: ...

    @abstractmethod
    async def drop_database(self, url: str) -> None:
        """Drop the database at URL, throwing out whoever is still connected to it."""

    # Life and death

    async def start(self) -> None:
        """Start the server and wait until it answers; the first time, find its programs and create its data."""
        if self.ours:
            await asyncio.to_thread(self._prepare)
            self._spawn()
        await self._wait_until_it_answers()
        self.version = await self.read_version()

    async def stop(self) -> None:
        """Shut down in good order."""
        await self._end(self.stop_signal)

    async def kill(self) -> None:
        """Crash: no process of the server gets to do anything more."""
        await self._end(signal.SIGKILL)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def _prepare(self) -> None:
        assert self.directory is not None
        if self.data.exists():
            return
        self.find_programs()
        self.directory.mkdir()
        _give_to_nobody(self.directory)
        self.initialise()

    def _spawn(self) -> None:
        if self.process is not None:
            raise ServerError(f"{self.title} has been started already")
        self.process = self._launch(self.command(), at_end=self.end_signal)

    async def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            try:
                await self.execute("SELECT 1")
                return
            except Exception as error:
                # Each driver has its own words for "not yet"; only the deadline tells it from "never".
                if self.process is None:
                    raise ServerError(f"{self.title} as named by {self.variable()} does not answer: {error}") from error
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise ServerError(f"{self.title} does not start: {error}\n{self._end_of_log()}") from error
            await asyncio.sleep(0.05)

    async def _end(self, how: signal.Signals) -> None:
        if not self.ours:
            raise ServerError(f"{self.title} is not ours to stop: {self.variable()} names it")
        if self.process is None:
            return
        children = _children(self.process.pid) if how == signal.SIGKILL else []
        self.process.send_signal(how)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, how)
        try:
            await asyncio.to_thread(self.process.wait, STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"{self.title} does not stop\n{self._end_of_log()}") from error
        self.process = None
        self.pid_file.unlink()

    def write_file(self, name: str, text: str) -> Path:
        """Write a file for the server, and only for it, to read."""
        path = self.data.with_name(name)
        path.touch(mode=0o600)
        path.write_text(text)
        _give_to_nobody(path)
        return path

    def run_to_end(self, *command: str | Path) -> None:
        """Run a program of the server that ends by itself, such as the one that creates the data directory."""
        # It may always end by itself: initdb, interrupted half-way, leaves shared memory behind.
        process = self._launch(command, at_end=0)
        if process.wait() != 0:
            raise ServerError(f"{self.title} cannot be set up: {command[0]} failed\n{self._end_of_log()}")
        self.pid_file.unlink()

    def _launch(self, command: Sequence[str | Path], *, at_end: int) -> subprocess.Popen[bytes]:
        """Start a program, which the keeper will send the signal AT_END and wait for when our own process has ended."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **_as_nobody()
            )
        self.pid_file.write_text(f"{int(at_end)} {process.pid}\n")
        return process

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    # Databases

    async def create_database(self, name: str | None = None, **options: str) -> str:
        """Create a database and return its URL.

        The OPTIONS are those of the server's own CREATE DATABASE: template="…" copies a database on PostgreSQL,
        collate="…" is for MariaDB and MySQL.
        """
        name = name or f"romancy_{secrets.token_hex(6)}"
        await self.execute(" ".join([f"CREATE DATABASE {name}", *(f"{key} = '{options[key]}'" for key in options)]))
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))


def database_of(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


def _as_nobody() -> dict[str, Any]:
    """How to start a server's process: never as root, which PostgreSQL refuses and no test needs."""
    options: dict[str, Any] = {"cwd": "/", "env": ENVIRONMENT}
    if os.getuid() == 0:
        options |= {"user": _nobody().pw_uid, "group": _nobody().pw_gid, "extra_groups": []}
    return options


def _give_to_nobody(path: Path) -> None:
    if os.getuid() == 0:
        os.chown(path, _nobody().pw_uid, _nobody().pw_gid)


def _nobody() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


def _free_port() -> int:
    # Below the range from which outgoing connections get theirs, so that none of those can take it while we start.
    for port in random.sample(range(15000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError("no free port found")


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
