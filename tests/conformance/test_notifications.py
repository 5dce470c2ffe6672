"""Hints: told after the commit, to every listener, never instead of the poll."""

import asyncio
import json

import pytest

from romancy.storage import ChannelMode, PostgresStorage, SQLStorage
from romancy.storage.notifications import CATCH_UP
from romancy.storage.sql.operation import Hint
from tests.harness import Harness


async def next_hint(hints: object, topic: str) -> Hint:
    async with asyncio.timeout(5):
        async for hint in hints:  # type: ignore[attr-defined]
            if hint.topic == topic:
                return hint  # type: ignore[no-any-return]
    raise AssertionError("a listener has no end")


async def test_a_publish_is_announced_to_listeners_of_the_same_storage(storage: SQLStorage) -> None:
    async with storage.listen() as hints:
        message_id = await storage.publish_to_channel("orders", "{}")
        hint = await next_hint(hints, "workflow_channel_message")

    told = json.loads(hint.payload)
    assert (told["channel"], told["ch"], told["channel_name"]) == ("orders", "orders", "orders")
    assert told["message_id"] == message_id


async def test_nothing_is_announced_before_the_transaction_commits(storage: SQLStorage) -> None:
    async with storage.listen() as hints:
        async with storage.transaction():
            await storage.publish_to_channel("orders", "{}")
            await asyncio.sleep(0.05)
            assert hints._waiting.empty()
        await next_hint(hints, "workflow_channel_message")


async def test_a_rolled_back_publish_is_never_announced(storage: SQLStorage) -> None:
    async with storage.listen() as hints:
        with pytest.raises(KeyError):
            async with storage.transaction():
                await storage.publish_to_channel("orders", "{}")
                raise KeyError
        await storage.publish_to_channel("other", "{}")
        hint = await next_hint(hints, "workflow_channel_message")

    assert json.loads(hint.payload)["channel"] == "other"


async def test_a_rolled_back_savepoint_takes_its_hints_along(storage: SQLStorage) -> None:
    async with storage.listen() as hints:
        async with storage.transaction():
            with pytest.raises(KeyError):
                async with storage.transaction():
                    await storage.publish_to_channel("orders", "{}")
                    raise KeyError
            await storage.publish_to_channel("other", "{}")
        hint = await next_hint(hints, "workflow_channel_message")

    assert json.loads(hint.payload)["channel"] == "other"


async def test_a_woken_instance_is_announced_as_resumable(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, "orders", ChannelMode.BROADCAST)
    await storage.register_channel_receive_and_release_lock(
        lock.instance_id, "orders", "worker-1", "receive:1", lock=lock
    )
    await storage.publish_to_channel("orders", "{}")
    [waiting] = await storage.get_channel_subscribers_waiting("orders")
    [message] = await storage.get_pending_channel_messages("orders")

    async with storage.listen() as hints:
        await storage.deliver_channel_message_with_lock(waiting.instance_id, "orders", message, "worker-2", 30)
        hint = await next_hint(hints, "workflow_resumable")

    assert json.loads(hint.payload)["instance_id"] == lock.instance_id


async def test_a_listener_that_falls_behind_is_told_to_look_at_everything(storage: SQLStorage) -> None:
    async with storage.listen() as hints:
        storage.runner.announce([Hint("workflow_resumable", str(number)) for number in range(10_001)])
        assert await anext(hints) is CATCH_UP


@pytest.mark.databases("postgres")
async def test_another_process_hears_it_through_notify(harness: Harness, storage: SQLStorage) -> None:
    elsewhere = await harness.open()
    async with elsewhere.listen(["workflow_channel_message"]) as hints:
        await storage.publish_to_channel("orders", "{}")
        hint = await next_hint(hints, "workflow_channel_message")

    assert json.loads(hint.payload)["channel"] == "orders"


@pytest.mark.databases("postgres")
async def test_notifications_can_be_switched_off(harness: Harness, storage: PostgresStorage) -> None:
    elsewhere = await harness.open()
    assert storage.is_notify_enabled()
    storage.set_notify_enabled(False)
    assert not storage.is_notify_enabled()
    async with elsewhere.listen() as hints:
        await storage.publish_to_channel("silent", "{}")
        storage.set_notify_enabled(True)
        await storage.publish_to_channel("loud", "{}")
        hint = await next_hint(hints, "workflow_channel_message")

    assert json.loads(hint.payload)["channel"] == "loud"


@pytest.mark.databases("postgres")
async def test_a_listener_whose_connection_broke_reconnects_and_asks_for_one_look_at_everything(
    harness: Harness, storage: SQLStorage
) -> None:
    elsewhere = await harness.open()
    async with elsewhere.listen() as hints:
        await storage.conn().execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        )
        await next_hint(hints, CATCH_UP.topic)
        await storage.publish_to_channel("orders", "{}")
        await next_hint(hints, "workflow_channel_message")
