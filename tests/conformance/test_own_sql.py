"""The user's own SQL: in the same transaction as the library's, with the same errors on every database."""

import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from romancy.storage import DatabaseError, Executor, SchemaError, SQLStorage, StorageError, TransactionError
from tests.harness import Harness

TABLES = {
    "sqlite": "CREATE TABLE users_accounts (name TEXT PRIMARY KEY, balance BIGINT, photo BLOB)",
    "postgres": "CREATE TABLE users_accounts (name TEXT PRIMARY KEY, balance BIGINT, photo BYTEA)",
    "mysql": "CREATE TABLE users_accounts (name VARCHAR(100) PRIMARY KEY, balance BIGINT, photo LONGBLOB)",
}


@pytest.fixture
async def conn(harness: Harness, storage: SQLStorage) -> AsyncIterator[Executor]:
    """An executor on a database with a table of the user's own."""
    conn = storage.conn()
    await conn.execute(TABLES[storage.runner.driver.driver_name()])
    await conn.execute("INSERT INTO users_accounts (name, balance) VALUES ('ann', 10), ('bob', 20)")
    yield conn
    janitor = await harness.open()
    await janitor.conn().execute("DROP TABLE users_accounts")


def placeholders(storage: SQLStorage, count: int) -> list[str]:
    return [storage.runner.driver.placeholder(number) for number in range(1, count + 1)]


async def test_rows_know_their_columns_by_number_and_name(conn: Executor) -> None:
    rows = await conn.fetch_all("SELECT name, balance AS money FROM users_accounts ORDER BY name")
    assert [tuple(row) for row in rows] == [("ann", 10), ("bob", 20)]
    row = await conn.fetch_one("SELECT name, balance AS money FROM users_accounts WHERE name = 'bob'")
    assert row is not None
    assert (row[0], row["money"], row[-1], len(row), list(row)) == ("bob", 20, 20, 2, ["bob", 20])
    with pytest.raises(KeyError):
        row["age"]
    with pytest.raises(IndexError):
        row[2]


async def test_nothing_found_is_none(conn: Executor) -> None:
    nobody = "SELECT name FROM users_accounts WHERE name = 'nobody'"
    assert await conn.fetch_one(nobody) is None
    assert await conn.fetch_value(nobody) is None
    assert await conn.fetch_all(nobody) == []


async def test_a_write_says_how_many_rows_it_touched(conn: Executor) -> None:
    assert await conn.execute("UPDATE users_accounts SET balance = balance + 1") == 2
    assert await conn.execute("DELETE FROM users_accounts WHERE name = 'nobody'") == 0
    assert await conn.fetch_value("SELECT SUM(balance) FROM users_accounts") == 32


async def test_texts_come_back_as_they_were_given(conn: Executor, storage: SQLStorage) -> None:
    first, second = placeholders(storage, 2)
    chance = random.Random(7)
    signs = "\\'\"`\n\r\t\b\x1a%;-é😀sn0"
    texts = ["".join(chance.choices(signs, k=chance.randint(1, 12))) + str(at) for at in range(200)]
    for at, text in enumerate(texts):
        await conn.execute(f"INSERT INTO users_accounts (name, balance) VALUES ({first}, {second})", text, at)
    rows = await conn.fetch_all("SELECT name, balance FROM users_accounts WHERE name NOT IN ('ann', 'bob')")
    assert {row[0]: row[1] for row in rows} == {text: at for at, text in enumerate(texts)}


async def test_positional_arguments_use_the_databases_placeholders(conn: Executor, storage: SQLStorage) -> None:
    first, second = placeholders(storage, 2)
    added = await conn.execute(f"INSERT INTO users_accounts (name, balance) VALUES ({first}, {second})", "cid", 30)
    assert added == 1
    (only,) = placeholders(storage, 1)
    assert await conn.fetch_value(f"SELECT balance FROM users_accounts WHERE name = {only}", "cid") == 30


async def test_named_arguments_are_the_same_everywhere(conn: Executor) -> None:
    found = await conn.fetch_all(
        "SELECT name FROM users_accounts WHERE name LIKE '%n%' AND name = :name AND balance < :most AND name = :name",
        name="ann",
        most=15,
    )
    assert [row["name"] for row in found] == ["ann"]


HOSTILE = [
    "it's",
    'say "hi"',
    "back\\slash",
    "100%",
    "%s %(name)s",
    ":name ?",
    "$1",
    "; DROP TABLE users_accounts",
    "😀",
]


async def test_values_are_never_part_of_the_statement(conn: Executor, storage: SQLStorage) -> None:
    (only,) = placeholders(storage, 1)
    for name in HOSTILE:
        await conn.execute(
            "INSERT INTO users_accounts (name, photo) VALUES (:name, :photo)", name=name, photo=b"\0'\xff"
        )
        row = await conn.fetch_one(f"SELECT name, photo, balance FROM users_accounts WHERE name = {only}", name)
        assert row is not None
        assert tuple(row) == (name, b"\0'\xff", None)


async def test_a_percent_sign_is_only_a_percent_sign(conn: Executor) -> None:
    assert await conn.fetch_value("SELECT COUNT(*) FROM users_accounts WHERE name LIKE '%n%'") == 1
    assert await conn.fetch_value("SELECT '100%'") == "100%"


async def test_ones_own_sql_joins_the_transaction(conn: Executor, harness: Harness, storage: SQLStorage) -> None:
    with pytest.raises(RuntimeError):
        async with storage.transaction() as inside:
            await inside.execute("UPDATE users_accounts SET balance = 0")
            await harness.instance(storage, instance_id="undone")
            assert await inside.fetch_value("SELECT SUM(balance) FROM users_accounts") == 0
            raise RuntimeError
    assert await conn.fetch_value("SELECT SUM(balance) FROM users_accounts") == 30

    async with storage.transaction():
        await storage.conn().execute("UPDATE users_accounts SET balance = 1")
        instance_id = await harness.instance(storage)
        assert await conn.fetch_value("SELECT COUNT(*) FROM workflow_instances") == 1
    assert await conn.fetch_value("SELECT SUM(balance) FROM users_accounts") == 2
    assert await storage.get_instance(instance_id) is not None


async def test_outside_a_transaction_it_is_one_of_its_own(conn: Executor, harness: Harness) -> None:
    await conn.execute("UPDATE users_accounts SET balance = 5")
    witness = await harness.open()
    assert await witness.conn().fetch_value("SELECT SUM(balance) FROM users_accounts") == 10


async def test_a_refused_statement_is_a_database_error_with_the_drivers_as_its_cause(conn: Executor) -> None:
    with pytest.raises(DatabaseError) as refused:
        await conn.execute("THIS IS NOT SQL")
    assert refused.value.__cause__ is not None
    with pytest.raises(StorageError) as duplicate:
        await conn.execute("INSERT INTO users_accounts (name) VALUES ('ann')")
    assert duplicate.value.__cause__ is not None
    with pytest.raises(SchemaError):
        await conn.fetch_all("SELECT * FROM nowhere")


async def test_a_wrong_number_of_arguments_is_refused(conn: Executor, storage: SQLStorage) -> None:
    (only,) = placeholders(storage, 1)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        (f"SELECT name FROM users_accounts WHERE name = {only}", ("ann", "bob")),
        (f"SELECT name FROM users_accounts WHERE name = {only}", ()),
    ]
    for query, arguments in calls:
        with pytest.raises(DatabaseError):
            await conn.fetch_all(query, *arguments)
    with pytest.raises(TypeError, match="both"):
        await conn.fetch_all("SELECT :name", "ann", name="ann")


@pytest.mark.parametrize(
    "statement",
    ["ROLLBACK", "commit;", "  BEGIN", "SAVEPOINT mine", "START TRANSACTION", "END;", "/* so */ -- what\nCOMMIT"],
)
async def test_own_sql_cannot_end_or_open_a_transaction(storage: SQLStorage, statement: str) -> None:
    with pytest.raises(TransactionError, match=r"storage\.transaction\(\)"):
        await storage.conn().execute(statement)


async def test_braces_in_own_sql_are_plain_text(storage: SQLStorage) -> None:
    assert await storage.conn().fetch_value("SELECT CASE WHEN :one = 1 THEN '{now}' END", one=1) == "{now}"


async def test_a_parameter_of_own_sql_may_be_named_like_a_time_and_be_text(storage: SQLStorage) -> None:
    assert await storage.conn().fetch_value("SELECT CASE WHEN :made_at = 'x' THEN 1 END", made_at="x") == 1


async def test_a_time_given_to_own_sql_compares_with_the_stored_ones(harness: Harness, storage: SQLStorage) -> None:
    started_at = datetime(2024, 2, 29, 12, 30, 0, 123456, tzinfo=UTC)
    instance_id = await harness.instance(storage, started_at=started_at)
    query = "SELECT instance_id FROM workflow_instances WHERE started_at = :moment"
    assert await storage.conn().fetch_value(query, moment=started_at) == instance_id


async def test_a_parameter_without_a_value_is_named(storage: SQLStorage) -> None:
    with pytest.raises(TypeError, match="item"):
        await storage.conn().fetch_all("SELECT 1 WHERE :pieces = :item", pieces=1)


@pytest.mark.databases("mariadb", "mysql")
async def test_texts_are_safe_though_the_user_has_changed_how_they_are_quoted(harness: Harness) -> None:
    storage = await harness.open(pool_size=1)
    await storage.conn().execute("SET SESSION sql_mode = CONCAT(@@sql_mode, ',NO_BACKSLASH_ESCAPES')")
    assert "NO_BACKSLASH_ESCAPES" in await storage.conn().fetch_value("SELECT @@sql_mode")
    for text in ("it's", "\\", "\\' OR 1 = 1 -- ", "'; SELECT 1; --", "a\\nb"):
        assert await storage.conn().fetch_value("SELECT %s", text) == text
