"""Real database servers for tests and benchmarks, on a machine that has none.

    async with Servers(["postgres", "mysql"]) as servers:
        url = await servers["postgres"].create_database()

Each server is taken from the first place that has it: the URL in `ROMANCY_TEST_POSTGRES_URL`, `…_MARIADB_URL` or
`…_MYSQL_URL`; programs installed on this machine (`postgres.py`, `mysql.py`); Debian packages fetched into a cache
(`packages.py`). It runs on a free loopback port, as `nobody` if we are root, and ends with the process that started it.

`python -m tests.servers` keeps a set of servers running and prints those variables, for many quick test runs.
"""

import asyncio
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

from .mysql import MariaDB, MySQL
from .packages import FetchError
from .postgres import Postgres
from .server import Server, ServerError

__all__ = ["KINDS", "Server", "ServerError", "Servers"]

KINDS: dict[str, type[Server]] = {kind.name: kind for kind in (Postgres, MariaDB, MySQL)}

# Waits until its input ends, which happens however our process ends, kill -9 included. Then it sends every process
# that is left the signal noted for it, waits for them, and removes their files.
KEEPER = """
read -r _
for file in "$1"/*.pid; do
    read -r signal pid < "$file" && kill -s "$signal" "$pid"
done
for file in "$1"/*.pid; do
    read -r signal pid < "$file" || continue
    for _ in $(seq 200); do
        kill -s 0 "$pid" || break
        sleep 0.1
    done
done
rm -rf "$1"
"""


class Servers(Mapping[str, Server]):
    """The servers NAMES, started together and ended together."""

    def __init__(self, names: Iterable[str] = tuple(KINDS), *, durable: bool = False, private: bool = False) -> None:
        """DURABLE servers wait for the disk as in production. PRIVATE ones are ours whatever the environment names."""
        self.missing: dict[str, str] = {}
        """Servers that are left out, and why. Only MySQL may be: Debian's unstable suite comes and goes."""
        self._servers: dict[str, Server] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="romancy-servers-"))
        self._directory.chmod(0o755)
        self._keeper = subprocess.Popen(
            ["sh", "-c", KEEPER, "romancy-test-servers", self._directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for name in names:
            kind = KINDS[name]
            given = None if private else os.environ.get(kind.variable())
            self._servers[name] = kind.given(given) if given else kind(self._directory / name, durable=durable)

    async def start(self) -> None:
        """Start all servers at once; ServerError if one of them cannot be had, unless it may be `missing`."""
        outcomes = await asyncio.gather(*(server.start() for server in self.values()), return_exceptions=True)
        for server, outcome in zip(list(self.values()), outcomes, strict=True):
            if isinstance(outcome, FetchError) and isinstance(server, MySQL):
                self.missing[server.name] = str(outcome)
                del self._servers[server.name]
            elif isinstance(outcome, FetchError):
                raise ServerError(f"{server.title} cannot be had: {outcome}") from outcome
            elif isinstance(outcome, BaseException):
                raise outcome

    def close(self) -> None:
        """End our servers at once and remove their files."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        for server in self.values():
            if server.process is not None:
                server.process.wait()
        self._keeper.wait()

    async def __aenter__(self) -> Self:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            await self.start()
            on_failure.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Server:
        return self._servers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._servers)

    def __len__(self) -> int:
        return len(self._servers)
