"""Migrations: run by any number of processes at once, resumed after a crash, undone, and shared with Edda."""

import asyncio
import contextlib
import os
import re
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import romancy
from romancy.storage import SQLStorage, open_storage
from romancy.storage.errors import SchemaError, StorageError, TransactionError, TransientStorageError
from romancy.storage.migrations import migrate, pending, render, render_pending, rollback, status
from romancy.storage.migrations.files import BASE, COLLATIONS, migrations, split
from romancy.storage.migrations.runner import _connection
from tests.conftest import Database

from .introspection import Schema, Table, indexes_of, schema_of

ROMANCY, INDEXES, STATES, CLAIMS, LISTING, SETBACKS = (f"2026111500000{number}" for number in range(1, 7))
TIES, HELD = "20261116000007", "20261118000008"
OURS = [ROMANCY, INDEXES, STATES, CLAIMS, LISTING, SETBACKS, TIES, HELD]
ALL = [BASE, *OURS]

servers_only = pytest.mark.databases("postgres", "mariadb", "mysql")


@pytest.fixture
async def storage(database: Database) -> AsyncIterator[SQLStorage]:
    """A storage on a database without tables."""
    async with open_storage(database.url) as opened:
        yield opened


@pytest.fixture
async def adopted(storage: SQLStorage) -> SQLStorage:
    """A storage on a database that Edda made and used."""
    await execute(storage, *edda_tables(storage), *EDDA_ROWS)
    return storage


def versions(listed: list[Any]) -> list[str]:
    return [migration.version for migration in listed]


async def execute(storage: SQLStorage, *statements: str) -> None:
    for statement in statements:
        await storage.conn().execute(statement)


async def expected_schema() -> Schema:
    """What every database is compared with."""
    async with open_storage("sqlite://:memory:") as reference:
        await migrate(reference.runner)
        return await schema_of(reference)


def without_outbox_sequence(schema: Schema) -> Schema:
    """SQLite numbers rows by itself, so only the servers have this column."""
    outbox = schema["outbox_events"]
    columns = {name: column for name, column in outbox.columns.items() if name != "sequence"}
    return schema | {"outbox_events": Table(columns, outbox.unique - {("sequence",)}, outbox.foreign_keys)}


def expected_indexes(storage: SQLStorage) -> set[str]:
    text = "".join(migration.up.text for migration in migrations(storage.runner.driver.driver_name()))
    made = set(re.findall(r"INDEX (?:CONCURRENTLY IF NOT EXISTS )?(romancy_\w+) (?:ON|\()", text))
    return made - set(re.findall(r"DROP INDEX (?:CONCURRENTLY IF EXISTS )?(romancy_\w+)", text))


async def assert_complete(storage: SQLStorage) -> None:
    assert await pending(storage.runner) == []
    assert without_outbox_sequence(await schema_of(storage)) == await expected_schema()
    assert expected_indexes(storage) <= await indexes_of(storage)


# Up.


async def test_an_empty_database_gets_the_same_schema_everywhere(storage: SQLStorage) -> None:
    assert versions(await migrate(storage.runner)) == ALL

    await assert_complete(storage)


async def test_what_was_applied_is_recorded_with_its_checksum_and_time(storage: SQLStorage) -> None:
    await migrate(storage.runner)

    known = migrations(storage.runner.driver.driver_name())
    recorded = await storage.conn().fetch_all("SELECT version, checksum FROM romancy_migrations ORDER BY version")
    assert [tuple(row) for row in recorded] == [(migration.version, migration.checksum) for migration in known]
    for entry in await status(storage.runner):
        assert entry.is_applied
        assert entry.applied_at is not None
        assert abs(entry.applied_at - datetime.now(UTC)) < timedelta(minutes=1)


async def test_only_the_base_is_recorded_where_other_frameworks_look(storage: SQLStorage) -> None:
    await migrate(storage.runner)

    assert await storage.conn().fetch_value("SELECT MIN(version) FROM schema_migrations") == BASE
    assert await storage.conn().fetch_value("SELECT COUNT(*) FROM schema_migrations") == 1
    assert await storage.conn().fetch_value("SELECT version FROM schema_version") == 1


async def test_the_second_time_nothing_is_left_to_do(storage: SQLStorage) -> None:
    await migrate(storage.runner)

    assert await migrate(storage.runner) == []


async def test_an_up_to_date_schema_is_found_so_without_waiting_for_anybody(
    database: Database, storage: SQLStorage
) -> None:
    await migrate(storage.runner)

    async with open_storage(database.url) as other, _connection(other.runner, 5.0).alone(), asyncio.timeout(2):
        assert await migrate(storage.runner) == []


async def test_an_in_memory_database_is_migrated_too() -> None:
    async with open_storage("sqlite://:memory:") as storage:
        assert versions(await migrate(storage.runner)) == ALL
        assert await migrate(storage.runner) == []


async def test_a_schema_cannot_be_changed_inside_a_transaction(storage: SQLStorage) -> None:
    async with storage.transaction():
        with pytest.raises(TransactionError):
            await rollback(storage.runner)


async def test_keys_are_compared_byte_for_byte(storage: SQLStorage) -> None:
    await migrate(storage.runner)

    channels = ["a", "A", "á", "a ", "ａ"]
    await execute(storage, *(f"INSERT INTO romancy_channels (channel) VALUES ('{channel}')" for channel in channels))

    found = await storage.conn().fetch_all("SELECT channel FROM romancy_channels ORDER BY channel")
    assert [row[0] for row in found] == sorted(channels, key=str.encode)


async def test_times_that_another_framework_leaves_out_are_utc(storage: SQLStorage) -> None:
    await migrate(storage.runner)
    elsewhere = {"postgres": "SET TIME ZONE 'Asia/Tokyo'", "mysql": "SET time_zone = '+09:00'"}
    decode = storage.runner.driver.decode_time
    assert decode is not None

    async with storage.transaction():
        if statement := elsewhere.get(storage.runner.driver.driver_name()):
            await execute(storage, statement)
        await execute(storage, EDDA_ROWS[0])
        created_at = decode(await storage.conn().fetch_value("SELECT created_at FROM workflow_definitions"))

    assert abs(created_at - datetime.now(UTC)) < timedelta(minutes=1)


# Many processes.

_PROCESS = """
import asyncio, os, signal, sys
from romancy.storage import open_storage
from romancy.storage.migrations import migrate

async def main(url, die_at):
    async with open_storage(url) as storage:
        statements = 0
        def probe(point, name):
            nonlocal statements
            statements += 1
            if statements == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        storage.runner.probe = probe
        print("ready", flush=True)
        sys.stdin.readline()
        print(len(await migrate(storage.runner)))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


async def start_process(url: str, *, die_at: int = 0) -> asyncio.subprocess.Process:
    """A process that imports everything, says so, and migrates when it is told."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", _PROCESS, url, str(die_at)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(romancy.__path__[0]).parent)},
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def test_of_twenty_processes_one_migrates_and_all_start(database: Database, storage: SQLStorage) -> None:
    processes = await asyncio.gather(*(start_process(database.url) for _ in range(20)))

    answers = await asyncio.gather(*(process.communicate(b"go\n") for process in processes))

    assert sorted(int(output) for output, _ in answers) == [0] * 19 + [len(ALL)]
    await assert_complete(storage)


async def test_a_killed_process_keeps_nobody_out(database: Database, storage: SQLStorage) -> None:
    process = await start_process(database.url, die_at=30)
    await process.communicate(b"go\n")
    assert process.returncode == -signal.SIGKILL

    async with asyncio.timeout(20):
        await migrate(storage.runner)

    await assert_complete(storage)


@servers_only
async def test_who_waits_too_long_for_another_process_is_told_to_come_again(
    database: Database, storage: SQLStorage
) -> None:
    async with open_storage(database.url) as other, _connection(other.runner, 5.0).alone():
        with pytest.raises(TransientStorageError, match="another process has been migrating"):
            await migrate(storage.runner, wait_sec=0.1)


# Crashes.


class Crash(BaseException):
    """The end of the process, as far as the code under test can tell."""


def crash_before(statement: int) -> Callable[[str, str], None]:
    """A probe that lets some statements of a migration through, and no more."""
    seen = Counter[str]()

    def probe(point: str, name: str) -> None:
        seen[name] += 1
        if seen["migrate"] == statement:
            raise Crash

    return probe


async def migrate_crashing_at_every_statement(storage: SQLStorage) -> int:
    """Migrate, dying between every two statements that there are; how often that was."""
    deaths = Counter[int]()
    while behind := len(await pending(storage.runner)):
        deaths[behind] += 1
        storage.runner.probe = crash_before(deaths[behind])
        with contextlib.suppress(Crash):
            await migrate(storage.runner)
        storage.runner.probe = None
    return deaths.total()


async def test_a_crash_between_any_two_statements_is_made_good_by_the_next_run(storage: SQLStorage) -> None:
    known = migrations(storage.runner.driver.driver_name())

    deaths = await migrate_crashing_at_every_statement(storage)

    assert deaths > sum(len(migration.up.statements("C")) for migration in known)
    await assert_complete(storage)


async def test_undoing_survives_crashes_too(storage: SQLStorage) -> None:
    await migrate(storage.runner)

    deaths = 0
    while [entry for entry in await status(storage.runner) if entry.is_applied and not entry.migration.is_base]:
        deaths += 1
        storage.runner.probe = crash_before(deaths)
        with contextlib.suppress(Crash):
            await rollback(storage.runner)
        storage.runner.probe = None

    assert versions(await migrate(storage.runner)) == OURS
    await assert_complete(storage)


@pytest.mark.databases("mariadb", "mysql")
async def test_where_nothing_can_be_undone_what_is_there_is_left_alone(adopted: SQLStorage) -> None:
    await execute(
        adopted,
        "ALTER TABLE workflow_instances ADD COLUMN lock_token BIGINT NOT NULL DEFAULT 7",
        "ALTER TABLE workflow_instances ADD INDEX romancy_instances_newest (framework, started_at, instance_id)",
    )

    await migrate(adopted.runner)

    assert await adopted.conn().fetch_value("SELECT MAX(lock_token) FROM workflow_instances") == 7
    await assert_complete(adopted)


@servers_only
async def test_a_transaction_in_the_way_is_waited_for_and_left_alone(adopted: SQLStorage) -> None:
    async with raw_connection(adopted) as run:
        await run("BEGIN")
        await run("UPDATE workflow_instances SET owner_service = 'busy'")
        ours = asyncio.create_task(migrate(adopted.runner))
        await asyncio.sleep(1.5)
        assert not ours.done()
        await run("COMMIT")

    assert versions(await ours) == OURS
    assert await adopted.conn().fetch_value("SELECT MIN(owner_service) FROM workflow_instances") == "busy"
    await assert_complete(adopted)


@pytest.mark.databases("postgres")
async def test_a_half_built_index_is_built_again(adopted: SQLStorage) -> None:
    await migrate(adopted.runner)
    await rollback(adopted.runner, steps=len(OURS) - 1)
    half_built = "CREATE UNIQUE INDEX CONCURRENTLY romancy_instances_newest ON workflow_instances (framework)"
    with pytest.raises(StorageError):
        await execute(adopted, half_built)  # two instances have the same framework
    assert await adopted.conn().fetch_value("SELECT COUNT(*) FROM pg_index WHERE NOT indisvalid") == 1

    assert versions(await migrate(adopted.runner)) == OURS[1:]

    definition = "SELECT indexdef FROM pg_indexes WHERE indexname = 'romancy_instances_newest'"
    assert "started_at" in await adopted.conn().fetch_value(definition)
    assert await adopted.conn().fetch_value("SELECT COUNT(*) FROM pg_index WHERE NOT indisvalid") == 0


# Down.


async def test_down_and_up_again_gives_the_same_schema(storage: SQLStorage) -> None:
    await migrate(storage.runner)

    assert versions(await rollback(storage.runner)) == [HELD]
    assert versions(await rollback(storage.runner, steps=9)) == OURS[-2::-1]
    assert versions(await migrate(storage.runner)) == OURS

    await assert_complete(storage)


@pytest.mark.databases("sqlite", "mariadb", "mysql")  # PostgreSQL is never told which index to use
async def test_an_index_that_an_older_schema_lacks_is_a_schema_error(storage: SQLStorage) -> None:
    await migrate(storage.runner)
    await rollback(storage.runner)

    with pytest.raises(SchemaError, match="romancy migrate"):
        await storage.cleanup_stale_locks(60)


async def test_down_stops_at_the_base_and_keeps_the_shared_rows(storage: SQLStorage) -> None:
    await migrate(storage.runner)
    await execute(storage, *EDDA_ROWS)

    await rollback(storage.runner, steps=100)

    assert await rollback(storage.runner) == []
    assert versions(await pending(storage.runner)) == OURS
    assert await storage.conn().fetch_value("SELECT COUNT(*) FROM workflow_instances") == 2
    assert {name for name in await schema_of(storage) if name.startswith("romancy")} == {"romancy_migrations"}


async def test_a_database_without_tables_has_nothing_to_undo(storage: SQLStorage) -> None:
    assert await rollback(storage.runner) == []


# What the code does not know.


async def test_a_newer_schema_is_refused(storage: SQLStorage) -> None:
    await migrate(storage.runner)
    await execute(storage, "INSERT INTO romancy_migrations (version, checksum) VALUES ('20991231000000', 'x')")

    with pytest.raises(SchemaError, match=r"20991231000000.*upgrade"):
        await migrate(storage.runner)
    with pytest.raises(SchemaError, match="20991231000000"):
        await rollback(storage.runner)


async def test_an_applied_migration_that_changed_is_refused(storage: SQLStorage) -> None:
    await migrate(storage.runner)
    await execute(storage, f"UPDATE romancy_migrations SET checksum = 'other' WHERE version = '{ROMANCY}'")

    with pytest.raises(SchemaError, match=f"{ROMANCY}_romancy is not the one that was applied"):
        await migrate(storage.runner)


async def test_versions_of_other_frameworks_are_ignored(storage: SQLStorage) -> None:
    await execute(
        storage,
        "CREATE TABLE schema_migrations (version VARCHAR(255) PRIMARY KEY)",
        "INSERT INTO schema_migrations (version) VALUES ('20240101000000'), ('20990101000000')",
    )

    assert versions(await migrate(storage.runner)) == ALL
    assert await migrate(storage.runner) == []
    assert await storage.conn().fetch_value("SELECT COUNT(*) FROM schema_migrations") == 3


# Printing.


def test_every_kind_of_database_has_the_same_migrations() -> None:
    for kind in COLLATIONS:
        assert [str(migration) for migration in migrations(kind)] == [
            f"{BASE}_base",
            f"{ROMANCY}_romancy",
            f"{INDEXES}_indexes",
            f"{STATES}_states",
            f"{CLAIMS}_claims_and_receipts",
            f"{LISTING}_listing",
            f"{SETBACKS}_setbacks",
            f"{TIES}_ties",
            f"{HELD}_held",
        ]


def test_there_are_no_migrations_for_an_unknown_database() -> None:
    with pytest.raises(ValueError, match="oracle"):
        migrations("oracle")


async def test_the_printed_sql_run_by_hand_does_the_same(database: Database, storage: SQLStorage) -> None:
    await run_by_hand(storage, render(database.name))

    await assert_complete(storage)
    assert await migrate(storage.runner) == []


async def test_what_is_pending_is_printed_for_the_database_at_hand(adopted: SQLStorage) -> None:
    text = await render_pending(adopted.runner)

    assert f"-- {ROMANCY}_romancy" in text
    assert f"{BASE}_base" not in text
    await run_by_hand(adopted, text)
    assert await render_pending(adopted.runner) == ""


async def run_by_hand(storage: SQLStorage, text: str) -> None:
    """Run SQL on one connection, statement by statement, as the database's own shell would."""
    runner: Any = storage.runner
    if runner.driver.driver_name() == "sqlite":
        with contextlib.closing(sqlite3.connect(runner.path)) as shell:
            shell.executescript(text)
        return
    async with raw_connection(storage) as run:
        for statement in split(text):
            await run(statement)


@contextlib.asynccontextmanager
async def raw_connection(storage: SQLStorage) -> AsyncIterator[Callable[[str], Awaitable[Any]]]:
    """A function that runs SQL on a session of its own, on a server."""
    runner: Any = storage.runner
    connection = await runner.connect_raw()
    if runner.driver.driver_name() == "postgres":
        yield connection.execute
        await connection.close()
    else:
        yield connection.query
        await connection.ensure_closed()


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("SELECT 1; SELECT 2", ["SELECT 1", "SELECT 2"]),
        ("SELECT ';'; SELECT 'it''s;'", ["SELECT ';'", "SELECT 'it''s;'"]),
        ('SELECT ";" FROM `a;b`;', ['SELECT ";" FROM `a;b`']),
        ("SELECT 1; -- not; this\nSELECT 2 /* nor; this */;", ["SELECT 1", "SELECT 2"]),
        ("SELECT 1 -- one\n, 2;", ["SELECT 1  \n, 2"]),
        ("SELECT '-- text', 4 / 2 - -1;", ["SELECT '-- text', 4 / 2 - -1"]),
        ("DO $$ BEGIN; END $$; SELECT $a$ $$;' $a$;", ["DO $$ BEGIN; END $$", "SELECT $a$ $$;' $a$"]),
        (" ;; -- nothing\n;", []),
        (
            "CREATE TRIGGER t AFTER INSERT ON a BEGIN SELECT 1; SELECT 'END;'; END; SELECT 2",
            ["CREATE TRIGGER t AFTER INSERT ON a BEGIN SELECT 1; SELECT 'END;'; END", "SELECT 2"],
        ),
    ],
)
def test_sql_is_cut_at_the_semicolons_between_statements(text: str, statements: list[str]) -> None:
    assert split(text) == statements


# Beside Edda.


def edda_tables(storage: SQLStorage) -> list[str]:
    """The shared tables in the form that Edda gives them: 32-bit ids, its time types, the database's own collation."""
    kind = storage.runner.driver.driver_name()
    text = migrations(kind)[0].up.text
    changes = {
        "sqlite": [(r"strftime\([^)]*\)", "datetime('now')")],
        "postgres": [
            (r"BIGINT GENERATED BY DEFAULT AS IDENTITY", "SERIAL"),
            (r"BIGINT", "INTEGER"),
            (r"VARCHAR\(\d+\) COLLATE \{collation\}", "TEXT"),
            (r"TIMESTAMP\(6\)", "TIMESTAMP"),
            (r"timezone\('UTC', clock_timestamp\(\)\)", "NOW()"),
        ],
        "mysql": [
            (r"BIGINT", "INT"),
            (r"ENGINE=InnoDB COLLATE=\{collation\}", ""),
            (r"DATETIME\(6\) NOT NULL", "TIMESTAMP NOT NULL"),
            (r"DATETIME\(6\)", "TIMESTAMP NULL"),
            (r"\(UTC_TIMESTAMP\(6\)\)", "CURRENT_TIMESTAMP"),
        ],
    }
    for pattern, replacement in changes[kind]:
        text = re.sub(pattern, replacement, text)
    return [
        "CREATE TABLE IF NOT EXISTS schema_migrations (version VARCHAR(255) PRIMARY KEY)",
        *split(text),
        f"INSERT INTO schema_migrations (version) VALUES ('{BASE}')",
        "CREATE INDEX idx_instances_status ON workflow_instances (status)",
        "CREATE INDEX idx_history_archive_instance ON workflow_history_archive (instance_id)",
    ]


EDDA_ROWS = [
    "INSERT INTO workflow_definitions (workflow_name, source_hash, source_code) VALUES ('order', 'h', 'def order()')",
    *(
        "INSERT INTO workflow_instances (instance_id, workflow_name, source_hash, owner_service, input_data)"
        f" VALUES ('order-{number}', 'order', 'h', 'shop', '{{\"n\": 1}}')"
        for number in (1, 2)
    ),
    "INSERT INTO workflow_history (instance_id, activity_id, event_type, event_data)"
    " VALUES ('order-1', 'charge:1', 'ActivityCompleted', '{}')",
    "INSERT INTO workflow_timer_subscriptions (instance_id, timer_id, expires_at, activity_id)"
    " VALUES ('order-1', 'sleep:1', '2031-05-01 12:00:00', 'sleep:1')",
    "INSERT INTO channel_messages (channel, message_id, data_type, data) VALUES ('news', 'm-1', 'json', '{}')",
    "INSERT INTO channel_subscriptions (instance_id, channel, mode) VALUES ('order-2', 'news', 'broadcast')",
    *(
        "INSERT INTO outbox_events (event_id, event_type, event_source, event_data)"
        f" VALUES ('event-{number}', 'paid', 'shop', '{{}}')"
        for number in (1, 2)
    ),
]


async def shared_rows(storage: SQLStorage, schema: Schema) -> dict[str, list[tuple[Any, ...]]]:
    """All rows, in the columns of this schema."""
    rows = {}
    for table, shape in schema.items():
        found = await storage.conn().fetch_all(f"SELECT {', '.join(shape.columns)} FROM {table} ORDER BY 1")
        rows[table] = [tuple(row) for row in found]
    return rows


async def test_a_database_that_edda_made_only_gains(adopted: SQLStorage) -> None:
    before, rows = await schema_of(adopted), await shared_rows(adopted, await schema_of(adopted))

    assert versions(await migrate(adopted.runner)) == OURS

    after = await schema_of(adopted)
    for table, shape in before.items():
        assert shape.columns.items() <= after[table].columns.items()
        assert shape.unique <= after[table].unique
        assert shape.foreign_keys == after[table].foreign_keys
    assert await shared_rows(adopted, before) == rows
    await assert_complete(adopted)


async def test_what_is_added_to_a_shared_table_needs_no_value(adopted: SQLStorage) -> None:
    before = await schema_of(adopted)
    await migrate(adopted.runner)

    await execute(adopted, *(re.sub(r"'(order|m|event)-", r"'\1-later-", row) for row in EDDA_ROWS[1:]))

    added = {
        (table, column): nullable
        for table, shape in (await schema_of(adopted)).items()
        for column, (_, nullable) in shape.columns.items()
        if table in before and column not in before[table].columns
    }
    assert {key for key, nullable in added.items() if not nullable} <= {
        ("workflow_instances", "lock_token"),
        ("workflow_instances", "has_ties"),
        ("outbox_events", "sequence"),
    }


async def test_our_tables_can_be_joined_with_those_that_edda_made(adopted: SQLStorage) -> None:
    await migrate(adopted.runner)
    await execute(
        adopted,
        "INSERT INTO romancy_channels (channel) VALUES ('news')",
        "INSERT INTO romancy_channel_waits (instance_id, channel, activity_id) VALUES ('order-2', 'news', 'r:1')",
    )

    joined = await adopted.conn().fetch_all("""
        SELECT i.instance_id, m.message_id FROM romancy_channel_waits w
          JOIN workflow_instances i ON i.instance_id = w.instance_id
          JOIN romancy_channels c ON c.channel = w.channel
          JOIN channel_messages m ON m.channel = c.channel""")

    assert [tuple(row) for row in joined] == [("order-2", "m-1")]


async def test_a_database_that_edda_made_is_given_back_as_it_was(adopted: SQLStorage) -> None:
    before, indexes = await schema_of(adopted), await indexes_of(adopted)
    rows = await shared_rows(adopted, before)
    await migrate(adopted.runner)

    await rollback(adopted.runner, steps=100)

    after = await schema_of(adopted)
    assert {table: after[table] for table in after if table != "romancy_migrations"} == before
    assert {name for name in await indexes_of(adopted) if not name.startswith("romancy_migrations")} == indexes
    assert await shared_rows(adopted, before) == rows


async def test_tables_that_nobody_recorded_are_completed(storage: SQLStorage) -> None:
    """Edda died half-way where nothing can be rolled back."""
    made = [statement for statement in edda_tables(storage) if "CREATE TABLE" in statement]
    await execute(storage, *made[:4])

    assert versions(await migrate(storage.runner)) == ALL

    await assert_complete(storage)


_EDDA_LOCK = {
    "postgres": ("SELECT pg_advisory_lock(20251217000000)", "SELECT pg_advisory_unlock(20251217000000)"),
    "mysql": ("SELECT GET_LOCK('edda_migration', 60)", "SELECT RELEASE_LOCK('edda_migration')"),
}


@contextlib.asynccontextmanager
async def edda_migrating(storage: SQLStorage) -> AsyncIterator[Callable[[str], Awaitable[Any]]]:
    """A session that holds Edda's own lock."""
    lock, unlock = _EDDA_LOCK[storage.runner.driver.driver_name()]
    async with raw_connection(storage) as run:
        await run(lock)
        yield run
        await run(unlock)


@servers_only
async def test_the_shared_tables_are_made_when_edda_is_done_with_them(storage: SQLStorage) -> None:
    async with edda_migrating(storage) as run:
        ours = asyncio.create_task(migrate(storage.runner))
        await asyncio.sleep(0.3)
        assert not ours.done()
        for statement in edda_tables(storage):
            await run(statement)

    assert versions(await ours) == OURS
    await assert_complete(storage)


@servers_only
async def test_edda_is_not_waited_for_when_its_tables_are_there(adopted: SQLStorage) -> None:
    async with edda_migrating(adopted), asyncio.timeout(20):
        assert versions(await migrate(adopted.runner)) == OURS


@servers_only
async def test_who_waits_too_long_for_edda_is_told_to_come_again(storage: SQLStorage) -> None:
    async with edda_migrating(storage):
        with pytest.raises(TransientStorageError, match="Edda has been migrating"):
            await migrate(storage.runner, wait_sec=0.1)


@pytest.fixture
def server_in_tokyo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("romancy.storage.migrations.on_mysql.MySQLMigrationConnection.server_zone", "'+09:00'")


@pytest.mark.databases("mariadb", "mysql")
@pytest.mark.usefixtures("server_in_tokyo")
async def test_times_that_edda_wrote_in_another_zone_are_refused(adopted: SQLStorage) -> None:
    with pytest.raises(SchemaError, match=r"time zone is \+09:00, and \w+ holds times that another framework wrote"):
        await migrate(adopted.runner)

    assert versions(await pending(adopted.runner)) == OURS


@pytest.mark.databases("mariadb", "mysql")
@pytest.mark.usefixtures("server_in_tokyo")
@pytest.mark.parametrize("made_by_edda", [True, False])
async def test_the_servers_zone_does_not_matter_while_nobody_has_written_times(
    storage: SQLStorage, made_by_edda: bool
) -> None:
    if made_by_edda:
        await execute(storage, *edda_tables(storage))

    await migrate(storage.runner)

    await assert_complete(storage)
