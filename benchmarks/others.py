"""The same workflow in other libraries: on the same server, with the same settings, taking turns with ours.

Each runs in a process of its own, as ours does, the others with an environment of their own that is made when it is
first needed. While it is not its turn a process is stopped, so that its polling disturbs nobody.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tests.servers.packages import FetchError, cache_directory, only_one_process

from .bare import STEPS, HandWritten
from .databases import Place
from .measuring import Contender, Report, Result, Size, Target, per_second, take_turns
from .workflows import AT_ONCE, CONNECTIONS, define_bare

_PEERS = Path(__file__).with_name("peers")
_PATIENCE_SEC = 120.0
_BY_HAND = 3.0
_OURS = 6.0
"""So many times as many workflows: a quarter of a second beside seconds of the others would be a matter of luck."""


@dataclass(frozen=True)
class Peer:
    """A library that can be asked for workflows."""

    title: str
    requirements: tuple[str, ...]
    script: str
    schemes: dict[str, str]
    """How its URLs begin, on the databases that it can use."""
    least: float | None
    """How many times as fast ours has to be, if that was said."""
    share: float = 1.0
    """Of the workflows of a round, how many it runs: a slow one need not hold up the others."""
    arguments: tuple[str, ...] = ()
    """What its script is told besides the URL."""


OURS = Peer("ours", (), "with_romancy.py", {"postgres": "postgresql", "sqlite": "sqlite"}, None, _OURS)
_ABSURD = ("absurd-sdk==0.5.1", "absurdctl==0.5.1")
PEERS = (
    Peer("absurd", _ABSURD, "with_absurd.py", {"postgres": "postgresql"}, 12, 0.3, ("1",)),
    Peer("absurd, 8 workers", _ABSURD, "with_absurd.py", {"postgres": "postgresql"}, None, 0.5, ("8",)),
    Peer("DBOS", ("dbos==3.3.0",), "with_dbos.py", {"postgres": "postgresql+psycopg", "sqlite": "sqlite"}, 25, 0.2),
    Peer(
        "Edda",
        ("edda-framework[postgresql]==0.16.2",),
        "with_edda.py",
        {"postgres": "postgresql+asyncpg", "sqlite": "sqlite"},
        50,
        0.2,
    ),
)


async def measure(places: Sequence[Place], size: Size, report: Report) -> None:
    """How many times as many workflows per second as the others, many at once."""
    report.section(f"A workflow of {STEPS} durable steps, {AT_ONCE} at once, beside other libraries")
    for place in places:
        peers = [peer for peer in PEERS if place.name in peer.schemes]
        if not peers:
            continue
        async with AsyncExitStack() as stack:
            running: list[tuple[Peer, Process]] = []
            for peer in peers:
                try:
                    running.append((peer, await stack.enter_async_context(_started(peer, place))))
                except (FetchError, PeerError) as error:
                    report.note(f"{peer.title} on {place.title} is not measured: {error}")
            ours = await stack.enter_async_context(_started(OURS, place))
            await _compare(place, ours, running, size, report)


async def _compare(
    place: Place, ours: Process, running: Sequence[tuple[Peer, Process]], size: Size, report: Report
) -> None:
    async with place.database() as database:
        async with database.open() as storage:
            await define_bare(storage)
        by_hand = HandWritten(place.name, database.url, CONNECTIONS)
        await by_hand.connect()
        our_turn = Contender(ours.run, _workflows(OURS, size))
        others = [
            Contender(by_hand.run, int(_BY_HAND * size.workflows)),
            *(Contender(process.run, _workflows(peer, size)) for peer, process in running),
        ]
        try:
            # Ours before each of them: what disturbs one turn may be over ten seconds later.
            turns = await take_turns(size.rounds, [each for other in others for each in (our_turn, other)])
        finally:
            await by_hand.close()
    if ours.failure is not None:
        raise PeerError(f"ours has failed: {ours.failure}")
    (our_seconds, hand), *theirs = zip(turns[::2], turns[1::2], strict=True)
    report.add(
        Result(
            "a hand-written loop",
            place.title,
            hand.divided_by(our_seconds),
            beside=per_second(hand),
            ours=per_second(our_seconds),
        )
    )
    for (peer, process), (our_seconds, seconds) in zip(running, theirs, strict=True):
        if process.failure is not None:
            report.note(f"{peer.title} on {place.title} has failed: {process.failure}")
            continue
        report.add(
            Result(
                peer.title,
                place.title,
                seconds.divided_by(our_seconds),
                beside=per_second(seconds),
                ours=per_second(our_seconds),
                target=None if peer.least is None else Target(least=peer.least),
            )
        )


def _workflows(peer: Peer, size: Size) -> int:
    """How many in a round; fewer than are to run at once would measure something else."""
    return max(AT_ONCE, int(size.workflows * peer.share))


class PeerError(Exception):
    """A peer's process did not do what it was asked for."""


class Process:
    """A peer's process, stopped while it is not its turn."""

    def __init__(self, process: asyncio.subprocess.Process, log: Callable[[], str]) -> None:
        self._process = process
        self._log = log
        self.failure: str | None = None
        """Why it has given up; the others go on without it."""

    async def run(self, workflows: int) -> float:
        """Have it run so many workflows; the seconds that it took."""
        if self.failure is not None:
            return math.inf
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{workflows} {AT_ONCE}\n".encode())
        try:
            seconds = float(await self.answer())
        except (PeerError, TimeoutError) as error:
            self.failure = str(error) or "no answer in time"
            await self.end()
            return math.inf
        self._process.send_signal(signal.SIGSTOP)
        return seconds

    async def answer(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(_PATIENCE_SEC):
            line = await self._process.stdout.readline()
        if not line:
            raise PeerError(f"its process has ended: {self._log()}")
        return line.decode().strip()

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def _started(peer: Peer, place: Place) -> AsyncIterator[Process]:
    python = await asyncio.to_thread(environment, peer)
    async with place.database(migrated=False) as database:
        rest = database.url.partition("://")[2]
        url = f"{peer.schemes[place.name]}://{rest}"
        with tempfile.TemporaryFile("w+") as log:
            process = await asyncio.create_subprocess_exec(
                python,
                _PEERS / peer.script,
                url,
                *peer.arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
            started = Process(process, lambda: _last_line(log))
            try:
                if await started.answer() != "ready":
                    raise PeerError("it does not start")
                process.send_signal(signal.SIGSTOP)
                yield started
            finally:
                await started.end()


def _last_line(log: TextIO) -> str:
    log.seek(0)
    lines = [line for line in log.read().splitlines() if "Error" in line]
    return lines[-1][:200] if lines else "without a word"


def environment(peer: Peer) -> Path:
    """The Python that has this library; FetchError says why it cannot be had."""
    if not peer.requirements:
        return Path(sys.executable)
    cache = cache_directory()
    name = f"{peer.requirements[0].replace('==', '-')}-bench-{sys.implementation.cache_tag}"
    home = cache / name
    with only_one_process(cache / f"{name}.lock"):
        if not (home / "bin" / "python").exists():
            partial = cache / f"{name}.partial"
            _install(partial, peer)
            shutil.rmtree(home, ignore_errors=True)
            partial.rename(home)
    return home / "bin" / "python"


def _install(directory: Path, peer: Peer) -> None:
    # Debian's python3 comes without ensurepip: our own pip can serve the new environment as well.
    venv.create(directory, clear=True, symlinks=True, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python"), "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", "--quiet", *peer.requirements], capture_output=True, text=True)
    if done.returncode != 0:
        raise FetchError(f"it cannot be installed: {done.stderr.strip().splitlines()[-1]}")
