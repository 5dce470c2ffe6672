"""What comes in more than once is published once."""

import asyncio
from datetime import timedelta

import pytest

from romancy.storage import InvalidJSONError, SQLStorage, TransientStorageError
from tests.conformance.arrange import is_blocked
from tests.harness import Harness, contents

DAY = timedelta(days=1)


async def published(storage: SQLStorage, channel: str = "orders") -> list[str | None]:
    return [message.data for message in await storage.get_pending_channel_messages(channel)]


async def test_a_key_is_published_once_whatever_comes_with_it(storage: SQLStorage) -> None:
    first = await storage.publish_once("k1", "orders", "1", '{"try": 1}')
    assert await storage.publish_once("k1", "orders", "1", '{"try": 2}') is None
    assert await storage.publish_once("k1", "others", b"else") is None
    other = await storage.publish_once("K1", "orders", b"bytes")

    messages = await storage.get_pending_channel_messages("orders")
    assert [(message.id, message.data, message.data_binary, message.metadata) for message in messages] == [
        (first, "1", None, '{"try": 1}'),
        (other, None, b"bytes", None),
    ]
    assert await published(storage, "others") == []


async def test_a_key_that_was_rolled_back_was_not_seen(storage: SQLStorage) -> None:
    with pytest.raises(ZeroDivisionError):
        async with storage.transaction():
            assert await storage.publish_once("k1", "orders", "1") is not None
            assert await storage.publish_once("k1", "orders", "1") is None
            raise ZeroDivisionError

    assert await storage.publish_once("k1", "orders", "2") is not None
    assert await published(storage) == ["2"]


async def test_a_refused_message_leaves_its_key_unseen(storage: SQLStorage) -> None:
    before = await contents(storage)
    with pytest.raises(InvalidJSONError):
        await storage.publish_once("k1", "orders", "{")
    assert await contents(storage) == before


async def test_of_many_at_once_one_is_published(harness: Harness, storage: SQLStorage) -> None:
    storages = [storage, await harness.open(), await harness.open()]
    keys = [f"k{n % 4}" for n in range(60)]

    ids = await asyncio.gather(
        *(storages[n % 3].publish_once(key, f"channel-{n % 2}", f'"{key}"') for n, key in enumerate(keys))
    )

    assert len([message_id for message_id in ids if message_id is not None]) == 4
    everything = await published(storage, "channel-0") + await published(storage, "channel-1")
    assert sorted(everything) == ['"k0"', '"k1"', '"k2"', '"k3"']


@pytest.mark.databases("postgres", "mariadb", "mysql")
@pytest.mark.parametrize("commits", [True, False])
async def test_a_rival_waits_to_see_whether_the_first_one_commits(
    harness: Harness, storage: SQLStorage, commits: bool
) -> None:
    rival = await harness.open()
    await storage.begin_transaction()
    await storage.publish_once("k1", "orders", "1")

    waiting = asyncio.create_task(rival.publish_once("k1", "orders", "2"))
    assert await is_blocked(waiting)
    await (storage.commit_transaction() if commits else storage.rollback_transaction())

    assert (await waiting is None) == commits
    assert await published(storage) == ["1" if commits else "2"]


async def test_two_transactions_with_the_same_keys_in_another_order_do_not_lose_one(
    harness: Harness, storage: SQLStorage
) -> None:
    """They may wait for each other; then one is told to try again, and finds what the other has done."""

    async def both(own: SQLStorage, *keys: str) -> None:
        while True:
            try:
                async with own.transaction():
                    for key in keys:
                        await own.publish_once(key, "orders", f'"{key}"')
                        await asyncio.sleep(0.05)
                return
            except TransientStorageError:
                continue

    await asyncio.gather(both(storage, "a", "b"), both(await harness.open(), "b", "a"))

    assert sorted(await published(storage)) == ['"a"', '"b"']


async def test_old_keys_are_forgotten_in_batches_oldest_first(harness: Harness, storage: SQLStorage) -> None:
    for key in ("k1", "k2", "k3"):
        await storage.publish_once(key, "orders", "1")
        harness.advance(seconds=60)
    harness.advance(seconds=DAY.total_seconds())
    await storage.publish_once("new", "orders", "1")

    assert await storage.cleanup_seen_events(DAY, limit=2) == 2
    assert await storage.publish_once("k3", "orders", "1") is None
    assert await storage.publish_once("k1", "orders", "1") is not None
    assert await storage.cleanup_seen_events(DAY) == 1
    assert await storage.cleanup_seen_events(DAY) == 0
    assert await storage.publish_once("new", "orders", "1") is None
