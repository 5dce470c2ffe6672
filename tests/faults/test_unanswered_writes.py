"""Writes whose answers nobody looks at are sent with what follows, and share the fate of their transaction."""

import asyncio

import pytest
from asyncmy import errors as my

from romancy.storage import ChannelSubscription, SQLStorage, Woken
from romancy.storage.sql.runners.mysql import MySQLConnection
from romancy.storage.sql.statement import sql
from tests.conformance.arrange import BROADCAST, another, publish, waiter
from tests.faults.test_interruptions import flushing
from tests.harness import Harness, history_of

count_up = sql("UPDATE romancy_marks SET value = value + 1 WHERE name = 'counted'")


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each message to the server begins, or ends if it is a COMMIT."""
    sent: list[str] = []
    ask, control = MySQLConnection._ask, MySQLConnection.control

    async def note_and_ask(connection: MySQLConnection, message: str) -> None:
        sent.append(message.split()[0])
        await ask(connection, message)

    async def note_and_control(connection: MySQLConnection, statement: str) -> None:
        sent.append(statement)
        await control(connection, statement)

    monkeypatch.setattr(MySQLConnection, "_ask", note_and_ask)
    monkeypatch.setattr(MySQLConnection, "control", note_and_control)
    return sent


async def counted(storage: SQLStorage) -> int:
    return int(await storage.conn().fetch_value("SELECT value FROM romancy_marks WHERE name = 'counted'"))


@pytest.fixture
async def _mark(storage: SQLStorage) -> None:
    await storage.conn().execute("INSERT INTO romancy_marks (name, value) VALUES ('counted', 0)")


async def deliver(storage: SQLStorage, instance_id: str) -> Woken | None:
    return await storage.deliver_and_claim(ChannelSubscription(instance_id, "orders", BROADCAST), "worker-2", 30)


@pytest.mark.databases("mariadb", "mysql")
async def test_a_delivery_is_three_looks_one_record_and_one_message_for_the_rest(
    harness: Harness, storage: SQLStorage, messages: list[str]
) -> None:
    instance_id = await waiter(harness, storage)
    for number in range(2):  # the first one has to add a cursor
        await publish(storage)
        messages.clear()
        woken = await deliver(storage, instance_id)
        assert woken is not None
        if number == 0:
            assert woken.lock is not None
            await storage.register_channel_receive_and_release_lock(
                instance_id, "orders", "worker-2", "receive:2", lock=woken.lock
            )
    assert messages == ["SELECT", "SELECT", "SELECT", "INSERT", "COMMIT"]
    assert [event.activity_id for event in await history_of(storage, instance_id)] == ["receive:1", "receive:2"]
    assert (await storage.get_delivery_cursor(instance_id, "orders")) > 0
    assert await storage.get_channel_subscribers_waiting("orders") == []


async def test_a_delivery_that_has_to_wait_for_a_row_happens_once(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await waiter(harness, storage)
    await publish(storage)
    other = await another(harness)
    async with asyncio.TaskGroup() as group, other.transaction():
        await other.conn().execute("UPDATE channel_subscriptions SET timeout_at = NULL")
        delivery = group.create_task(deliver(storage, instance_id))
        await asyncio.sleep(1.5)  # longer than a flush waits for a row
        assert not delivery.done()
    woken = delivery.result()
    assert woken is not None
    assert woken.lock is not None
    assert [event.id for event in await history_of(storage, instance_id)] == [woken.event.id]
    assert (await storage.get_instance(instance_id)).lock_token == woken.lock.token  # type: ignore[union-attr]
    assert await deliver(storage, instance_id) is None


@pytest.mark.databases("mariadb", "mysql")
@pytest.mark.usefixtures("_mark")
async def test_what_has_waited_is_written_before_what_follows_and_by_a_commit(
    storage: SQLStorage, messages: list[str]
) -> None:
    async with flushing(storage) as connection:
        messages.clear()
        await connection.begin()
        assert await connection.execute(count_up.later()) is None
        assert messages == []
        assert await connection.execute(count_up.run()) == 1
        await connection.execute(count_up.later())
        await connection.commit()
        await connection.begin()
        await connection.execute(count_up.later())
        await connection.commit()
        assert messages == ["UPDATE", "COMMIT", "COMMIT"]
        assert not connection.in_transaction
    assert await counted(storage) == 4


@pytest.mark.databases("mariadb", "mysql")
@pytest.mark.usefixtures("_mark")
async def test_what_has_waited_in_vain_is_forgotten(storage: SQLStorage) -> None:
    async with flushing(storage) as connection:
        await connection.begin()
        await connection.execute(count_up.later())
        await connection.rollback()
        await connection.begin()
        await connection.execute(count_up.run())
        await connection.commit()
    assert await counted(storage) == 1


@pytest.mark.databases("mariadb", "mysql")
@pytest.mark.usefixtures("_mark")
async def test_a_write_that_has_waited_and_is_refused_keeps_the_commit_from_happening(storage: SQLStorage) -> None:
    impossible = sql("UPDATE romancy_marks SET value = NULL WHERE name = 'counted'")
    async with flushing(storage) as connection:
        await connection.begin()
        await connection.execute(count_up.run())
        await connection.execute(impossible.later())
        with pytest.raises(my.MySQLError):
            await connection.commit()
        assert connection.in_transaction
        await connection.rollback()
    assert await counted(storage) == 0


@pytest.mark.databases("mariadb")
@pytest.mark.usefixtures("_mark")
async def test_an_interruption_of_such_a_commit_leaves_its_outcome_unknown(storage: SQLStorage) -> None:
    interruption = sql("SIGNAL SQLSTATE '70100' SET MYSQL_ERRNO = 1317")
    async with flushing(storage) as connection:
        await connection.begin()
        await connection.execute(count_up.run())
        await connection.execute(interruption.later())
        with pytest.raises(my.InternalError, match="perhaps after its COMMIT"):
            await connection.commit()
        await connection.rollback()


@pytest.mark.databases("mariadb", "mysql")
@pytest.mark.usefixtures("_mark")
async def test_outside_of_a_transaction_nothing_waits(storage: SQLStorage) -> None:
    async with flushing(storage) as connection:
        await connection.execute(count_up.later())
        assert await counted(storage) == 1
