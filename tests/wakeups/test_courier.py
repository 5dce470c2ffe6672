"""The courier: serves the channels it is told of at once, and all of them when there is a reason."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from romancy.storage import (
    ChannelMessage,
    ChannelMode,
    ChannelSubscription,
    ChannelWait,
    SQLStorage,
    StorageUnavailableError,
)
from romancy.worker.services import Courier
from tests.engine.test_messages import until
from tests.harness import Harness, history_of
from tests.plans.looking import statements_sent


async def receiver(harness: Harness, storage: SQLStorage, channel: str) -> str:
    """An instance that waits for a message."""
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, channel, ChannelMode.BROADCAST)
    await storage.suspend(lock.instance_id, [ChannelWait(channel, "receive:1")], lock=lock)
    return lock.instance_id


def courier_of(storage: SQLStorage) -> Courier:
    """A courier that delivers and leaves it to others to run what it wakes."""

    async def deliver(subscription: ChannelSubscription) -> bool:
        message = ChannelMessage(subscription.channel)
        return bool(
            await storage.deliver_channel_message_with_lock(
                subscription.instance_id, subscription.channel, message, "courier", 30
            )
        )

    return Courier(storage, ["order"], None, deliver)


@asynccontextmanager
async def at_work(storage: SQLStorage) -> AsyncIterator[Courier]:
    """A courier whose first look at everything is over."""
    courier = courier_of(storage)
    await courier.look()
    working = asyncio.create_task(courier.run())
    await asyncio.sleep(0)
    yield courier
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working


async def received(storage: SQLStorage, instance_id: str) -> bool:
    return len(await history_of(storage, instance_id)) == 1


async def test_a_channel_it_is_told_of_is_served_without_a_look_at_the_others(
    harness: Harness, storage: SQLStorage
) -> None:
    async with at_work(storage) as courier:
        told, untold = await receiver(harness, storage, "told"), await receiver(harness, storage, "untold")
        await storage.publish_to_channel("told", "1")
        await storage.publish_to_channel("untold", "1")
        with statements_sent() as statements:
            courier.tell("told")
            await until(lambda: received(storage, told))
        assert not await received(storage, untold)
        assert "Delivery._anything_new" not in {statement.name for statement in statements}
        courier.wake()
        await until(lambda: received(storage, untold))


async def test_odd_names_and_too_many_names_mean_a_look_at_everything(harness: Harness, storage: SQLStorage) -> None:
    async with at_work(storage) as courier:
        for number, names in enumerate([[""], ["x" * 256], ["nul\0"], [f"nobody's {n}" for n in range(33)]]):
            waiting = await receiver(harness, storage, f"channel-{number}")
            await storage.publish_to_channel(f"channel-{number}", "1")
            for name in names:
                courier.tell(name)
            await until(lambda waiting=waiting: received(storage, waiting))


async def test_what_it_could_not_do_it_does_when_the_database_is_back(harness: Harness, storage: SQLStorage) -> None:
    courier = courier_of(storage)
    await courier.look()
    waiting = await receiver(harness, storage, "orders")
    await storage.publish_to_channel("orders", "1")
    working = storage.get_channel_subscribers_waiting

    async def away(*args: object, **kwargs: object) -> None:
        raise StorageUnavailableError("away")

    storage.get_channel_subscribers_waiting = away  # type: ignore[method-assign, assignment]
    courier.tell("orders")
    with suppress(ExceptionGroup):
        await courier.look()
    storage.get_channel_subscribers_waiting = working  # type: ignore[method-assign]
    await courier.look()
    assert await received(storage, waiting)


async def test_who_waited_the_last_time_need_not_wait_again_and_others_are_found(
    harness: Harness, storage: SQLStorage
) -> None:
    async with at_work(storage) as courier:
        regular = await receiver(harness, storage, "news")
        gone = await receiver(harness, storage, "news")
        await storage.publish_to_channel("news", "1")
        courier.tell("news")
        for instance_id in (regular, gone):
            await until(lambda instance_id=instance_id: received(storage, instance_id))
        lock = await storage.try_acquire_lock(regular, "worker-1", 30)
        assert lock is not None
        await storage.suspend(regular, [ChannelWait("news", "receive:2")], lock=lock)
        await storage.cancel_instance(gone, "enough")
        newcomer = await receiver(harness, storage, "news")
        await storage.publish_to_channel("news", "2")
        courier.tell("news")
        await until(lambda: received(storage, newcomer))
        assert len(await history_of(storage, regular)) == 2
        assert [event.event_type for event in await history_of(storage, gone)][1:] == ["WorkflowCancelled"]


async def test_a_message_reaches_a_regular_though_the_search_for_others_takes_its_time(
    harness: Harness, storage: SQLStorage
) -> None:
    async with at_work(storage) as courier:
        regular = await receiver(harness, storage, "news")
        await storage.publish_to_channel("news", "1")
        courier.tell("news")
        await until(lambda: received(storage, regular))
        lock = await storage.try_acquire_lock(regular, "worker-1", 30)
        assert lock is not None
        await storage.suspend(regular, [ChannelWait("news", "receive:2")], lock=lock)
        found, searching = asyncio.Event(), storage.get_channel_subscribers_waiting

        async def search(*args: Any, **kwargs: Any) -> Any:
            await found.wait()
            return await searching(*args, **kwargs)

        storage.get_channel_subscribers_waiting = search  # type: ignore[method-assign, assignment]
        await storage.publish_to_channel("news", "2")
        courier.tell("news")

        async def received_again() -> bool:
            return len(await history_of(storage, regular)) == 2

        await until(received_again)
        found.set()
