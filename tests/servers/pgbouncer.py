"""PgBouncer before a PostgreSQL server: the machine's own, else out of the machine's own Debian suite."""

import shutil
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from .packages import fetch
from .server import Server

CONFIGURATION = """\
[databases]
* = host={host} port={port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {pool_size}
max_client_conn = 200
"""


class PgBouncer(Server):
    name = "pgbouncer"
    title = "PgBouncer"
    end_signal = signal.SIGKILL
    stop_signal = signal.SIGINT

    program: str | Path

    def __init__(self, directory: Path, server: Server, *, mode: str) -> None:
        super().__init__(directory)
        self._server = server
        self._mode = mode

    def find_programs(self) -> None:
        installed = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")
        self.program = installed or fetch("pgbouncer", packages=["pgbouncer"], programs=["sbin/pgbouncer"]) / (
            "sbin/pgbouncer"
        )

    def initialise(self) -> None:
        self.data.mkdir()
        server = urlsplit(self._server.url)
        self.configuration = self.write_file(
            "pgbouncer.ini",
            CONFIGURATION.format(
                host=server.hostname,
                port=server.port,
                user=server.username,
                password=server.password,
                listen_port=self.port,
                mode=self._mode,
                pool_size=5 if self._mode == "transaction" else 80,  # a session keeps its connection
            ),
        )
        self.url = self.before(self._server.url)

    def before(self, url: str) -> str:
        """The same database as at URL, reached through this pooler."""
        parts = urlsplit(url)
        return urlunsplit(parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{self.port}"))

    def command(self) -> list[str | Path]:
        return [self.program, self.configuration]

    async def execute(self, statement: str) -> Any:
        connection = await asyncpg.connect(self.url, statement_cache_size=0)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    async def read_version(self) -> str:
        return "of this machine"

    async def drop_database(self, url: str) -> None:
        await self._server.drop_database(url)
