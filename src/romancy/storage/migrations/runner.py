"""Bring a schema up to date, or back: one process at a time, and everybody may start at once.

What has run is recorded in ``romancy_migrations`` with a checksum of its file. Only the base, the tables that other
frameworks share, is also recorded in ``schema_migrations``, where those look; whatever else stands there is theirs.
A database that has the base from another framework is adopted: its tables stay as they are and only gain what we add.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from ..errors import SchemaError, StorageError, TransactionError
from ..sql.operation import Call, Traits
from ..sql.runners.runner import BaseRunner
from ..sql.statement import NativeQuery, Want
from .connection import MigrationConnection
from .files import BASE, COLLATIONS, Migration, ledger, migrations

log = logging.getLogger("romancy.storage")

_RECORDED = "SELECT version, checksum, applied_at FROM romancy_migrations ORDER BY version"
_BASE_APPLIED = f"SELECT version FROM schema_migrations WHERE version = '{BASE}'"

# On an adopted database our tables get the collation of the instances that are there: foreign keys demand it on MySQL,
# and on PostgreSQL no index serves a join of two collations.
_COLLATION = {
    "postgres": """
        SELECT quote_ident(nspname) || '.' || quote_ident(collname) FROM pg_attribute
        JOIN pg_collation ON pg_collation.oid = attcollation
        JOIN pg_namespace ON pg_namespace.oid = collnamespace
        WHERE attrelid = to_regclass('workflow_instances') AND attname = 'instance_id'""",
    "mysql": """
        SELECT COLLATION_NAME FROM information_schema.COLUMNS
        WHERE TABLE_SCHEMA = DATABASE() AND (
            TABLE_NAME = 'workflow_instances' AND COLUMN_NAME = 'instance_id'
            OR TABLE_NAME = 'workflow_definitions' AND COLUMN_NAME = 'workflow_name')
        ORDER BY TABLE_NAME DESC LIMIT 1""",
}


class MigrationStatus(NamedTuple):
    """Whether a migration has been applied; since when is not known of a base that another framework made."""

    migration: Migration
    is_applied: bool
    applied_at: datetime | None = None


async def migrate(runner: BaseRunner, *, wait_sec: float = 600.0) -> list[Migration]:
    """Apply what is pending and say what that was; one cheap read when nothing is.

    Any number of processes may call this at once: one works, the others wait for it, `wait_sec` at most.
    """
    if not await _is_behind(runner):
        return []
    async with alone(runner, wait_sec) as connection:
        if not await _is_behind(runner):
            return []  # somebody else did it while we waited
        await connection.check_adoptable()
        await connection.retried(partial(_create_ledger, connection))
        return [
            migration
            for migration in await pending(runner)
            if await connection.retried(partial(_apply, connection, migration))
        ]


async def rollback(runner: BaseRunner, steps: int = 1, *, wait_sec: float = 600.0) -> list[Migration]:
    """Undo the newest migrations and say which; the shared tables stay, whoever made them."""
    if steps < 0:
        raise ValueError(f"cannot go {steps} steps back")
    async with alone(runner, wait_sec) as connection:
        applied = [migration for migration, is_applied, _ in await status(runner) if is_applied]
        newest_first = [migration for migration in reversed(applied) if not migration.is_base][:steps]
        for migration in newest_first:
            await connection.retried(partial(_undo, connection, migration))
        return newest_first


async def status(runner: BaseRunner) -> list[MigrationStatus]:
    """Every migration this code knows, oldest first; SchemaError when the database knows others."""
    recorded = await _recorded(runner)
    base_is_there = bool(await read(runner, _BASE_APPLIED))
    return [
        MigrationStatus(
            migration,
            is_applied=base_is_there if migration.is_base else migration.version in recorded,
            applied_at=recorded.get(migration.version),
        )
        for migration in _known(runner)
    ]


async def pending(runner: BaseRunner) -> list[Migration]:
    """What `migrate` would apply."""
    return [migration for migration, is_applied, _ in await status(runner) if not is_applied]


def render(kind: str, *, only: Sequence[Migration] | None = None, collation: str | None = None) -> str:
    """The SQL of all migrations, or `only` of these, for an empty database of a kind in `COLLATIONS`.

    Run by hand, it leaves what `migrate` would leave, with the records of it.
    """
    collation = collation or COLLATIONS[kind]
    parts = [ledger(kind).filled_in(collation)]
    for migration in migrations(kind) if only is None else only:
        records = "\n".join(f"{record};" for record in migration.records)
        body = f"{migration.up.filled_in(collation)}\n\n{records}"
        if migration.up.in_transaction and kind in ("sqlite", "postgres"):
            body = f"BEGIN;\n\n{body}\n\nCOMMIT;"
        parts.append(f"-- {migration}\n\n{body}")
    return "\n\n".join(parts) + "\n"


async def render_pending(runner: BaseRunner) -> str:
    """The SQL that `migrate` would run on this database; empty when it is up to date."""
    only = await pending(runner)
    return render(_kind(runner), only=only, collation=await _collation(runner)) if only else ""


# One step each, in a transaction where the database has one.


async def _create_ledger(connection: MigrationConnection) -> None:
    async with connection.step():
        for statement in ledger(_kind(connection.runner)).statements(await _collation(connection.runner)):
            await connection.execute(statement)


async def _apply(connection: MigrationConnection, migration: Migration) -> bool:
    async with connection.step(in_transaction=migration.up.in_transaction, shared=migration.is_base):
        if migration.is_base and await read(connection.runner, _BASE_APPLIED):
            return False  # another framework was quicker
        log.info("applying migration %s", migration)
        for statement in [*migration.up.statements(await _collation(connection.runner)), *migration.records]:
            await connection.execute(statement)
    return True


async def _undo(connection: MigrationConnection, migration: Migration) -> None:
    async with connection.step(in_transaction=migration.down.in_transaction):
        log.info("undoing migration %s", migration)
        for statement in [*migration.down.statements(await _collation(connection.runner)), migration.forgotten]:
            await connection.execute(statement)


@asynccontextmanager
async def alone(runner: BaseRunner, wait_sec: float) -> AsyncIterator[MigrationConnection]:
    if runner.transactions.active():
        raise TransactionError("the schema cannot be changed inside a transaction")
    connection = _connection(runner, wait_sec)
    try:
        async with connection.alone():
            yield connection
    except StorageError:
        raise
    except Exception as error:
        raise connection.translate(error) from error


def _connection(runner: BaseRunner, wait_sec: float) -> MigrationConnection:
    # Imported here, because only the client library of the database at hand needs to be installed.
    match runner.driver.driver_name():
        case "sqlite":
            from .on_sqlite import SQLiteMigrationConnection

            return SQLiteMigrationConnection(runner, wait_sec)
        case "postgres":
            from .on_postgres import PostgresMigrationConnection

            return PostgresMigrationConnection(runner, wait_sec)
        case _:
            from .on_mysql import MySQLMigrationConnection

            return MySQLMigrationConnection(runner, wait_sec)


# What is there, read through the storage's own connections: quick when nothing is pending.


async def _is_behind(runner: BaseRunner) -> bool:
    recorded = await _recorded(runner)
    return not all(migration.version in recorded for migration in _known(runner) if not migration.is_base)


async def _recorded(runner: BaseRunner) -> dict[str, datetime]:
    """When each of our migrations was applied; SchemaError when one of them is not ours as we know it."""
    known = {migration.version: migration for migration in _known(runner)}
    rows = await read(runner, _RECORDED)
    unknown = [version for version, _, _ in rows if version not in known]
    if unknown:
        raise SchemaError(
            f"a newer romancy has migrated this database ({', '.join(unknown)} is unknown here): upgrade this one"
        )
    for version, checksum, _ in rows:
        if checksum != known[version].checksum:
            raise SchemaError(
                f"migration {known[version]} is not the one that was applied to this database: its file has the"
                f" checksum {known[version].checksum[:12]}…, applied was {checksum[:12]}…"
            )
    decode = runner.driver.decode_time or (lambda moment: moment)
    return {version: decode(applied_at) for version, _, applied_at in rows}


async def _collation(runner: BaseRunner) -> str:
    query = _COLLATION.get(runner.driver.driver_name())
    found = await read(runner, query) if query else ()
    return str(found[0][0]) if found else COLLATIONS[_kind(runner)]


async def read(runner: BaseRunner, query: str) -> Sequence[Sequence[Any]]:
    """Some rows; none when their table is not there yet."""

    async def read(_: None) -> Sequence[Sequence[Any]]:
        return await NativeQuery[Sequence[Sequence[Any]]](query, (), Want.ALL)

    try:
        return await runner.run(Call(read, None, (), {}, Traits(reads=True)))
    except SchemaError:
        return ()


def _known(runner: BaseRunner) -> Sequence[Migration]:
    return migrations(runner.driver.driver_name())


def _kind(runner: BaseRunner) -> str:
    return "mariadb" if getattr(runner.driver, "is_mariadb", False) else runner.driver.driver_name()
