"""MariaDB and MySQL, which differ in where they come from and in how they create their data directory."""

import contextlib
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import asyncmy
import asyncmy.errors

from .packages import fetch
from .server import MAX_CONNECTIONS, Server, database_of

# Survives a crash of the server, not one of the machine.
FAST = [
    "--innodb-flush-log-at-trx-commit=2",
    "--innodb-flush-method=nosync",
    "--innodb-doublewrite=OFF",
]

# Run at every start. Nobody but us may enter: the port is open to everyone on this machine.
ACCOUNTS = """\
CREATE USER IF NOT EXISTS romancy@'%' IDENTIFIED BY '{password}';
GRANT ALL ON *.* TO romancy@'%' WITH GRANT OPTION;
DROP USER IF EXISTS root@localhost;
"""


class _MySQLFamily(Server):
    end_signal = signal.SIGKILL
    stop_signal = signal.SIGTERM

    processlist: ClassVar[str]
    program: Path

    @property
    def usr(self) -> Path:
        return self.program.parent.parent

    def initialise(self) -> None:
        self.accounts = self.write_file("accounts.sql", ACCOUNTS.format(password=self.password))
        self.url = f"mysql://romancy:{self.password}@127.0.0.1:{self.port}/mysql"

    def command(self) -> list[str | Path]:
        return [
            self.program,
            *self.locations(),
            f"--init-file={self.accounts}",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            "--socket=socket",
            "--pid-file=pid",
            "--skip-name-resolve",
            "--character-set-server=utf8mb4",
            f"--max-connections={MAX_CONNECTIONS}",
            # MariaDB's default, but not MySQL's. Nobody replicates these, and commits wait for the redo log as it is.
            "--skip-log-bin",
            *([] if self.durable else FAST),
        ]

    def locations(self) -> list[str | Path]:
        return [
            "--no-defaults",
            f"--datadir={self.data}",
            f"--tmpdir={self.data.parent}",  # In /tmp, any server that starts removes the temporary tables of all.
            f"--basedir={self.usr}",
            f"--lc-messages-dir={self.usr}/share/mysql",
            f"--character-sets-dir={self.usr}/share/mysql/charsets",
            f"--plugin-dir={self.usr}/lib/mysql/plugin",
        ]

    async def execute(self, statement: str) -> Any:
        url = urlsplit(self.url)
        connection = await asyncmy.connect(
            host=url.hostname,
            port=url.port or 3306,
            user=unquote(url.username or ""),
            password=unquote(url.password or ""),
            autocommit=True,
        )
        try:
            async with connection.cursor() as cursor:
                await cursor.execute(statement)
                row = await cursor.fetchone()
                return row[0] if row else None
        finally:
            await connection.ensure_closed()

    async def read_version(self) -> str:
        match = re.match(r"[\d.]+", await self.execute("SELECT VERSION()"))
        assert match is not None
        return match[0]

    async def drop_database(self, url: str) -> None:
        name = database_of(url)
        # DROP would wait for the locks of a connection that was left in a transaction.
        listing = await self.execute(f"SELECT GROUP_CONCAT(id) FROM {self.processlist} WHERE db = '{name}'")
        for connection in listing.split(",") if listing else ():
            with contextlib.suppress(asyncmy.errors.OperationalError):  # It may have ended by itself.
                await self.execute(f"KILL {connection}")
        await self.execute(f"DROP DATABASE {name}")


class MariaDB(_MySQLFamily):
    name = "mariadb"
    title = "MariaDB"
    processlist = "information_schema.processlist"

    def find_programs(self) -> None:
        self.program = _installed("mariadbd") or (
            fetch(
                "mariadb",
                packages=["mariadb-server-core", "mariadb-client-core"],
                programs=["sbin/mariadbd", "bin/my_print_defaults", "bin/resolveip"],
            )
            / "sbin/mariadbd"
        )

    def initialise(self) -> None:
        super().initialise()
        self.run_to_end(
            self.usr / "bin/mariadb-install-db",
            "--no-defaults",
            f"--basedir={self.usr}",
            f"--datadir={self.data}",
            f"--tmpdir={self.data.parent}",
            "--auth-root-authentication-method=socket",
            "--skip-test-db",
            "--innodb-flush-method=nosync",
        )


class MySQL(_MySQLFamily):
    name = "mysql"
    title = "MySQL"
    processlist = "performance_schema.processlist"

    def find_programs(self) -> None:
        """Debian has MySQL only in its unstable suite."""
        self.program = _installed("mysqld") or (
            fetch("mysql", packages=["mysql-server-core"], programs=["sbin/mysqld"], suite="sid") / "sbin/mysqld"
        )

    def initialise(self) -> None:
        super().initialise()
        self.run_to_end(self.program, *self.locations(), "--initialize-insecure", "--innodb-flush-method=nosync")

    def command(self) -> list[str | Path]:
        return [*super().command(), "--mysqlx=OFF", "--secure-file-priv=NULL"]


def _installed(name: str) -> Path | None:
    found = shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin")
    if found is None:
        return None
    # MariaDB's packages call their server mysqld, too.
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    return Path(found) if name == "mariadbd" or "MariaDB" not in version else None
