"""A statement that the database refuses, inside and outside a transaction: the same on every database."""

import asyncio

import pytest

from romancy.storage import DatabaseError, LockLostError, SQLStorage, StorageError
from tests.faults.leaks import assert_nothing_is_held
from tests.harness import Harness, history_of, step

INSERT = "INSERT INTO system_locks (lock_name, locked_by) VALUES (:name, 'w')"


async def locks(storage: SQLStorage) -> list[str]:
    rows = await storage.conn().fetch_all("SELECT lock_name FROM system_locks ORDER BY lock_name")
    return [row[0] for row in rows]


async def test_a_duplicate_key_in_the_users_own_sql_is_refused_at_once(storage: SQLStorage) -> None:
    await storage.conn().execute(INSERT, name="a")
    begun = asyncio.get_running_loop().time()

    with pytest.raises(DatabaseError):
        await storage.conn().execute(INSERT, name="a")

    assert asyncio.get_running_loop().time() - begun < 0.5, "nobody will let it through, however often it is tried"


@pytest.mark.parametrize("arguments", [(), ("a", "b", "c")], ids=["too few", "too many"])
async def test_a_wrong_number_of_arguments_is_refused_and_harms_nobody(
    harness: Harness, storage: SQLStorage, arguments: tuple[str, ...]
) -> None:
    mark = storage.runner.driver.placeholder
    statement = f"SELECT * FROM system_locks WHERE lock_name = {mark(1)} OR lock_name = {mark(2)}"

    with pytest.raises(DatabaseError):
        await storage.conn().fetch_all(statement, *arguments or ("a",))

    await harness.instance(storage)
    await assert_nothing_is_held(storage)


async def test_after_a_refused_statement_a_transaction_can_only_end(storage: SQLStorage) -> None:
    await storage.conn().execute(INSERT, name="taken")

    with pytest.raises(DatabaseError):
        async with storage.transaction() as conn:
            await conn.execute(INSERT, name="mine")
            with pytest.raises(DatabaseError):
                await conn.execute(INSERT, name="taken")
            await conn.execute(INSERT, name="later")

    assert await locks(storage) == ["taken"]
    await assert_nothing_is_held(storage)


async def test_a_refused_statement_cannot_be_overlooked_at_the_commit(storage: SQLStorage) -> None:
    await storage.conn().execute(INSERT, name="taken")

    with pytest.raises(DatabaseError):
        async with storage.transaction() as conn:
            await conn.execute(INSERT, name="mine")
            with pytest.raises(DatabaseError):
                await conn.execute(INSERT, name="taken")

    assert await locks(storage) == ["taken"]
    assert not storage.in_transaction()


async def test_going_back_to_a_savepoint_heals_a_transaction(storage: SQLStorage) -> None:
    await storage.conn().execute(INSERT, name="taken")

    async with storage.transaction() as conn:
        await conn.execute(INSERT, name="before")
        with pytest.raises(DatabaseError):
            async with storage.transaction():
                await conn.execute(INSERT, name="inside")
                await conn.execute(INSERT, name="taken")
        await conn.execute(INSERT, name="after")

    assert await locks(storage) == ["after", "before", "taken"]


async def test_a_savepoint_with_a_refused_statement_cannot_be_kept(storage: SQLStorage) -> None:
    await storage.conn().execute(INSERT, name="taken")

    async with storage.transaction() as conn:
        with pytest.raises(DatabaseError):
            async with storage.transaction():
                await conn.execute(INSERT, name="inside")
                with pytest.raises(DatabaseError):
                    await conn.execute(INSERT, name="taken")
        await conn.execute(INSERT, name="after")

    assert await locks(storage) == ["after", "taken"]


async def test_an_operation_that_refuses_by_itself_leaves_its_transaction_usable(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await harness.locked(storage)
    await storage.release_lock(lock.instance_id, lock.worker_id)

    async with storage.transaction():
        await storage.append_history(step(lock.instance_id))
        with pytest.raises(LockLostError):
            await storage.publish_to_channel("news", "1", lock=lock)
        await storage.append_history(step(lock.instance_id, "charge:2"))

    assert len(await history_of(storage, lock.instance_id)) == 2
    assert await storage.get_pending_channel_messages("news") == []


@pytest.mark.databases("mariadb", "mysql")
async def test_a_statement_that_commits_by_itself_is_not_overlooked(storage: SQLStorage) -> None:
    """CREATE TABLE ends a transaction on MySQL: what follows would no longer be part of it."""
    with pytest.raises(DatabaseError, match="ended the transaction"):
        async with storage.transaction() as conn:
            await conn.execute("CREATE TABLE users_own (id INT)")
            await conn.execute(INSERT, name="later")

    assert await locks(storage) == []
    await storage.conn().execute("DROP TABLE users_own")
    await assert_nothing_is_held(storage)


async def test_a_deadlock_inside_a_transaction_is_the_callers_to_repeat(harness: Harness, storage: SQLStorage) -> None:
    first, second = await harness.instance(storage), await harness.instance(storage)
    other = await harness.open()
    met = asyncio.Barrier(2)

    async def cross(using: SQLStorage, one: str, two: str) -> str:
        try:
            async with using.transaction():
                await using.update_instance_activity(one, "crossing")
                if harness.name != "sqlite":  # there the second transaction has not even begun
                    await met.wait()
                await using.update_instance_activity(two, "crossing")
        except StorageError as error:
            return type(error).__name__
        return "done"

    outcomes = await asyncio.gather(cross(storage, first, second), cross(other, second, first))

    assert sorted(outcomes) in (["TransientStorageError", "done"], ["done", "done"])
    await assert_nothing_is_held(storage)
    await assert_nothing_is_held(other)
