"""PostgreSQL: the machine's own, else out of the machine's own Debian suite."""

import signal
from pathlib import Path
from typing import Any

import asyncpg

from .packages import fetch
from .server import MAX_CONNECTIONS, Server, database_of

# Survives a crash of the server, not one of the machine.
FAST = {"fsync": "off", "full_page_writes": "off"}


class Postgres(Server):
    name = "postgres"
    title = "PostgreSQL"
    end_signal = signal.SIGQUIT  # After SIGKILL its shared memory would stay allocated for ever.
    stop_signal = signal.SIGINT

    programs: Path

    def find_programs(self) -> None:
        installed = Path("/usr/lib/postgresql").glob("*/bin/postgres")
        found = sorted(installed, key=lambda program: int(program.parent.parent.name))
        if not found:
            usr = fetch(
                "postgresql",
                packages=["postgresql"],
                programs=["lib/postgresql/*/bin/postgres", "lib/postgresql/*/bin/initdb"],
            )
            found = list(usr.glob("lib/postgresql/*/bin/postgres"))
        self.programs = found[-1].parent

    def initialise(self) -> None:
        password_file = self.write_file("password", self.password)
        self.run_to_end(
            self.programs / "initdb",
            f"--pgdata={self.data}",
            "--username=romancy",
            "--auth=password",
            f"--pwfile={password_file}",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
            "--no-sync",
        )
        self.url = f"postgresql://romancy:{self.password}@127.0.0.1:{self.port}/postgres"

    def command(self) -> list[str | Path]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": MAX_CONNECTIONS,
            "jit": "off",
        }
        if not self.durable:
            settings |= FAST
        return [self.programs / "postgres", "-D", self.data, *(f"--{key}={value}" for key, value in settings.items())]

    async def execute(self, statement: str) -> Any:
        connection = await asyncpg.connect(self.url)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    async def read_version(self) -> str:
        return str(await self.execute("SHOW server_version")).split()[0]

    async def drop_database(self, url: str) -> None:
        await self.execute(f"DROP DATABASE {database_of(url)} WITH (FORCE)")
