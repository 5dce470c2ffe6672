"""The next message of a channel is found at once, however many its readers have behind them and before them."""

from romancy.storage import ChannelMessage, ChannelMode, ChannelWait, SQLStorage
from tests.harness import Harness
from tests.numbers import joined, numbers

from .looking import Look
from .test_plans import looks


async def test_a_message_is_found_at_once_between_many_that_were_received_and_many_that_were_not(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, "news", ChannelMode.BROADCAST)
    await storage.suspend(lock.instance_id, [ChannelWait("news", "receive:1")], lock=lock)
    few = await delivery(storage, lock.instance_id, 10)
    many = await delivery(storage, lock.instance_id, 3000)

    assert many.keys() == few.keys()
    for name, look in many.items():
        assert look.read <= 2 * few[name].read + 100, f"{name} reads {look.read}, not {few[name].read}:\n{look.plan}"


async def delivery(storage: SQLStorage, instance_id: str, messages: int) -> dict[str, Look]:
    """What the database does to deliver the next message to one that has received half of so many more."""
    conn = storage.conn()
    name = joined(storage.runner.driver, "'m-'", "n")
    async with storage.transaction(deadline_sec=60):
        before = int(await conn.fetch_value("SELECT COUNT(*) FROM channel_messages"))
        await conn.execute(
            "INSERT INTO channel_messages (channel, message_id, data_type, data, published_at, origin)"
            f" SELECT 'news', {name}, 'json', '1', '2026-01-01 00:00:00.000000', 'romancy-py'"
            f" FROM {numbers(messages)} WHERE n > {before}"
        )
        await conn.execute(
            "UPDATE channel_subscriptions SET cursor_message_id = (SELECT MAX(id) FROM channel_messages) - :left",
            left=messages // 2,
        )
    if storage.runner.driver.driver_name() == "mysql":
        await conn.execute("ANALYZE TABLE channel_messages")
    return await looks(
        storage,
        lambda storage: storage.deliver_channel_message_with_lock(
            instance_id, "news", ChannelMessage("news"), "worker", 60
        ),
    )
