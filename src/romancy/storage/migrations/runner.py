"""Bring a schema up to date, or back: one process at a time, and everybody may start at once.

What has run is recorded in ``romancy_migrations`` with a checksum of its file. Only the base, the tables that other
frameworks share, is also recorded in ``schema_migrations``, where those look; whatever else stands there is theirs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, NamedTuple

from ..errors import SchemaError, StorageError, TransactionError
from ..sql.operation import Call, Traits
from ..sql.runners.runner import BaseRunner
from ..sql.statement import NativeQuery, Want
from .connection import MigrationConnection
from .files import BASE, Migration, ledger, migrations

_ATTEMPTS = 20
_LONGEST_PAUSE_SEC = 1.0

_APPLIED = "SELECT version, checksum, applied_at FROM romancy_migrations"
_BASE_APPLIED = f"SELECT version FROM schema_migrations WHERE version = '{BASE}'"


class Applied(NamedTuple):
    """A row of ``romancy_migrations``."""

    version: str
    checksum: str
    applied_at: Any


async def migrate(runner: BaseRunner, *, wait_sec: float = 600.0) -> list[Migration]:
    """Apply what is pending and say what that was; one cheap read when nothing is.

    Any number of processes may call this at once: one works, the others wait for it, `wait_sec` at most.
    """
    _outside_a_transaction(runner)
    known = migrations(runner.driver.driver_name())
    applied = await _applied(runner)
    _check(known, applied)
    if all(migration.version in applied for migration in known if not migration.is_base):
        return []
    async with _alone(runner, wait_sec) as connection:
        await connection.check_adoptable()
        await _retrying(connection, lambda: _create_ledger(connection))
        done = []
        for migration in await _pending(connection, known):
            if await _retrying(connection, lambda migration=migration: _up(connection, migration)):
                done.append(migration)
        return done


async def rollback(runner: BaseRunner, steps: int = 1, *, wait_sec: float = 600.0) -> list[Migration]:
    """Undo the newest migrations and say which; the shared tables stay, whoever made them."""
    _outside_a_transaction(runner)
    known = migrations(runner.driver.driver_name())
    if not await _applied(runner):
        return []
    async with _alone(runner, wait_sec) as connection:
        recorded = await _recorded(connection)
        _check(known, recorded)
        applied = [migration for migration in known if migration.version in recorded and not migration.is_base]
        undone = applied[::-1][:steps]
        for migration in undone:
            await _retrying(connection, lambda migration=migration: _down(connection, migration))
        return undone


async def pending(runner: BaseRunner) -> list[Migration]:
    """What `migrate` would apply."""
    known = migrations(runner.driver.driver_name())
    applied = await _applied(runner)
    _check(known, applied)
    base = bool(await _read(runner, _BASE_APPLIED))
    return [migration for migration in known if not (base if migration.is_base else migration.version in applied)]


# Steps, each in a transaction where the database has one.


async def _create_ledger(connection: MigrationConnection) -> None:
    async with connection.step(in_transaction=True):
        for statement in ledger(connection.kind).statements(await connection.collation()):
            await connection.execute(statement)


async def _up(connection: MigrationConnection, migration: Migration) -> bool:
    async with connection.step(in_transaction=migration.up.in_transaction, shared=migration.is_base):
        if migration.is_base and await connection.rows(_BASE_APPLIED):
            return False  # Edda was quicker
        for statement in migration.up.statements(await connection.collation()):
            await connection.execute(statement)
        for statement in _record(migration):
            await connection.execute(statement)
    return True


async def _down(connection: MigrationConnection, migration: Migration) -> None:
    async with connection.step(in_transaction=migration.down.in_transaction):
        for statement in migration.down.statements(await connection.collation()):
            await connection.execute(statement)
        await connection.execute(f"DELETE FROM romancy_migrations WHERE version = '{migration.version}'")


def _record(migration: Migration) -> list[str]:
    version = f"'{migration.version}'"
    ours = (
        f"INSERT INTO romancy_migrations (version, checksum) SELECT {version}, '{migration.checksum}'"
        f" WHERE NOT EXISTS (SELECT 1 FROM romancy_migrations WHERE version = {version})"
    )
    theirs = (
        f"INSERT INTO schema_migrations (version) SELECT {version}"
        f" WHERE NOT EXISTS (SELECT 1 FROM schema_migrations WHERE version = {version})"
    )
    return [ours, theirs] if migration.is_base else [ours]


async def _retrying(connection: MigrationConnection, step: Any) -> Any:
    """Run a step again while the database asks for that; it leaves nothing behind that a repetition would mind."""
    pause = 0.1
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return await step()
        except StorageError:
            raise
        except Exception as error:
            if attempt == _ATTEMPTS or not connection.worth_retrying(error):
                raise
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(2 * pause, _LONGEST_PAUSE_SEC)
    raise AssertionError("unreachable")


@asynccontextmanager
async def _alone(runner: BaseRunner, wait_sec: float) -> AsyncIterator[MigrationConnection]:
    connection = _connection(runner, wait_sec)
    try:
        async with connection.alone():
            yield connection
    except StorageError:
        raise
    except Exception as error:
        raise connection.translate(error) from error


def _connection(runner: BaseRunner, wait_sec: float) -> MigrationConnection:
    match runner.driver.driver_name():
        case "sqlite":
            from .on_sqlite import SQLiteMigrationConnection

            return SQLiteMigrationConnection(runner, wait_sec=wait_sec)
        case "postgres":
            from .on_postgres import PostgresMigrationConnection

            return PostgresMigrationConnection(runner, wait_sec=wait_sec)
        case _:
            from .on_mysql import MySQLMigrationConnection

            return MySQLMigrationConnection(runner, wait_sec=wait_sec)


# What has been applied.


async def _applied(runner: BaseRunner) -> dict[str, Applied]:
    return _by_version(await _read(runner, _APPLIED))


async def _recorded(connection: MigrationConnection) -> dict[str, Applied]:
    return _by_version(await connection.rows(_APPLIED))


def _by_version(rows: Sequence[Sequence[Any]]) -> dict[str, Applied]:
    return {row[0]: Applied(*row) for row in rows}


async def _pending(connection: MigrationConnection, known: Sequence[Migration]) -> list[Migration]:
    recorded = await _recorded(connection)
    _check(known, recorded)
    base = bool(await connection.rows(_BASE_APPLIED))
    return [migration for migration in known if not (base if migration.is_base else migration.version in recorded)]


def _check(known: Sequence[Migration], applied: Mapping[str, Applied]) -> None:
    """SchemaError when the database knows migrations that this code does not, or other ones of the same name."""
    by_version = {migration.version: migration for migration in known}
    unknown = sorted(applied.keys() - by_version.keys())
    if unknown:
        raise SchemaError(
            f"the database has migrations that this version of romancy does not know: {', '.join(unknown)};"
            " upgrade romancy here too"
        )
    for version, record in sorted(applied.items()):
        if record.checksum != by_version[version].checksum:
            raise SchemaError(
                f"migration {by_version[version]} is not the one that was applied to this database:"
                f" its checksum is {by_version[version].checksum[:12]}, recorded is {record.checksum[:12]}"
            )


async def _read(runner: BaseRunner, query: str) -> Sequence[Sequence[Any]]:
    """Read through the storage's own connections; nothing when the table is not there yet."""

    async def migrate(_: None) -> Sequence[Sequence[Any]]:
        return await NativeQuery[Sequence[Sequence[Any]]](query, (), Want.ALL)

    try:
        return await runner.run(Call(migrate, None, (), {}, Traits(reads=True)))
    except SchemaError:
        return []


def _outside_a_transaction(runner: BaseRunner) -> None:
    if runner.transactions.active():
        raise TransactionError("the schema cannot be changed inside a transaction")
