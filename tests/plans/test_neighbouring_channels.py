"""A channel's messages are found without those of others, and a few of them without the rest, whatever is known.

What a database knows of its tables may be missing, or be from the time when a channel was busy that is quiet now.
"""

import pytest

from romancy.storage import ChannelMessage, ChannelMode, ChannelWait, SQLStorage
from tests.harness import Harness
from tests.numbers import joined, numbers

from .asking import Ask
from .test_plans import looks

FEW, MANY = 1000, 20_000

pytestmark = pytest.mark.parametrize("mode", [ChannelMode.BROADCAST, ChannelMode.COMPETING])


@pytest.fixture
async def asks(harness: Harness, storage: SQLStorage, mode: ChannelMode) -> list[Ask]:
    """All that looks for messages of a channel, on behalf of one that waits for it and of one that comes to it."""
    lock = await harness.locked(storage)
    waiting, another = lock.instance_id, await harness.instance(storage)
    await storage.subscribe_to_channel(waiting, "news", mode)
    await storage.suspend(waiting, [ChannelWait("news", "receive:1")], lock=lock)
    return [
        lambda storage: storage.get_pending_channel_messages("news", limit=10),
        lambda storage: storage.get_pending_channel_messages_for_instance(waiting, "news", limit=10),
        lambda storage: storage.deliver_channel_message_with_lock(
            waiting, "news", ChannelMessage("news"), "worker", 60
        ),
        lambda storage: storage.find_deliverable_subscriptions(),
        lambda storage: storage.subscribe_to_channel(another, "news", mode),
        lambda storage: storage.update_delivery_cursor(waiting, "news", 2**40),
    ]


async def publish(storage: SQLStorage, channel: str, messages: int) -> None:
    name = joined(storage.runner.driver, f"'{channel}-'", "n")
    await storage.conn().execute(
        "INSERT INTO channel_messages (channel, message_id, data_type, data, published_at, origin)"
        f" SELECT '{channel}', {name}, 'json', '1', '2026-01-01 00:00:00.000000', 'romancy-py'"
        f" FROM {numbers(messages)} ORDER BY n"
    )
    await storage.publish_to_channel(channel, "1")


async def claim_all(storage: SQLStorage, channel: str, instance_id: str) -> None:
    await storage.conn().execute(
        "INSERT INTO channel_message_claims (message_id, instance_id, claimed_at)"
        f" SELECT message_id, '{instance_id}', published_at FROM channel_messages WHERE channel = '{channel}'"
    )


async def analyze(storage: SQLStorage) -> None:
    mysql = storage.runner.driver.driver_name() == "mysql"
    for table in ("channel_messages", "channel_message_claims", "workflow_instances"):
        await storage.conn().execute(f"ANALYZE {'TABLE' if mysql else ''} {table}")


async def assert_little_is_read(storage: SQLStorage, asks: list[Ask]) -> None:
    for ask in asks:
        for name, look in (await looks(storage, ask)).items():
            assert look.read < 150, f"{name} reads {look.read}:\n{look.plan}"


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("claimed", [False, True])
async def test_the_next_messages_are_found_without_the_rest(
    harness: Harness, storage: SQLStorage, asks: list[Ask], claimed: bool, analyzed: bool
) -> None:
    await publish(storage, "other", MANY)
    await publish(storage, "news", MANY)
    if claimed:
        await claim_all(storage, "other", await harness.instance(storage))
    if analyzed:
        await analyze(storage)
    await assert_little_is_read(storage, asks)


async def test_a_channel_that_was_busy_once_is_found_to_be_empty_without_reading_others(
    storage: SQLStorage, asks: list[Ask]
) -> None:
    await publish(storage, "news", FEW)
    await storage.publish_to_channel("other", "1")
    await analyze(storage)
    await storage.conn().execute("DELETE FROM channel_messages")
    await publish(storage, "other", MANY)
    await assert_little_is_read(storage, asks)
