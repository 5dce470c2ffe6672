"""Messages cross the border both ways, each once, whoever publishes and whoever waits."""

import asyncio
import functools
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from romancy.storage import ChannelMessage, ChannelMode, PostgresStorage, SQLStorage, WorkflowStatus
from tests.harness import Harness, history_of

from .neighbour import Edda

pytestmark = pytest.mark.databases("sqlite", "postgres", "mariadb")


class Receiver:
    """An instance of ours that receives the messages of a channel, one after the other."""

    def __init__(self, storage: SQLStorage, instance_id: str, channel: str) -> None:
        self.storage = storage
        self.instance_id = instance_id
        self.channel = channel
        self.receives = 0

    async def receive(self) -> None:
        """Take the next message, or wait for it."""
        lock = await self.storage.try_acquire_lock(self.instance_id, "worker", 30)
        assert lock is not None
        self.receives += 1
        await self.storage.register_channel_receive_and_release_lock(
            self.instance_id, self.channel, "worker", f"receive_{self.channel}:{self.receives}", lock=lock
        )

    async def received(self) -> list[Any]:
        """What it has got so far."""
        return [json.loads(str(event.event_data))["data"] for event in await history_of(self.storage, self.instance_id)]


async def receiver(ours: Harness, storage: SQLStorage, channel: str, mode: ChannelMode) -> Receiver:
    """A receiver that waits for its first message."""
    instance_id = await ours.instance(storage)
    await storage.subscribe_to_channel(instance_id, channel, mode)
    own = f"{channel}:{instance_id}" if mode is ChannelMode.DIRECT else channel
    made = Receiver(storage, instance_id, own)
    await made.receive()
    return made


async def publish(storage: SQLStorage, channel: str, *numbers: int) -> None:
    for number in numbers:
        await storage.publish_to_channel(channel, json.dumps({"n": number}))


async def deliver(storage: SQLStorage, channel: str) -> int:
    """Deliver to everybody who waits for the channel, as a publisher does; how many that were."""
    waiting = await storage.get_channel_subscribers_waiting(channel)
    results = [
        await storage.deliver_channel_message_with_lock(
            subscription.instance_id, channel, ChannelMessage(channel), "courier", 30
        )
        for subscription in waiting
    ]
    return len([result for result in results if result is not None])


async def poll(storage: SQLStorage) -> int:
    """Deliver to those of ours whom the poll finds, as a worker does; how many that were."""
    found = await storage.find_deliverable_subscriptions()
    results = [
        await storage.deliver_channel_message_with_lock(
            subscription.instance_id, subscription.channel, ChannelMessage(subscription.channel), "courier", 30
        )
        for subscription in found
    ]
    return len([result for result in results if result is not None])


def numbers(messages: list[Any]) -> list[int]:
    return [message["n"] for message in messages]


async def test_edda_receives_every_broadcast_message_of_ours_once_and_in_order(storage: SQLStorage, edda: Edda) -> None:
    await edda.ask("publish", channel="news", data={"n": -1})  # before anybody subscribes
    waiting = [await edda.start("receiver", channel="news", count=4) for _ in range(2)]
    await edda.ask("publish", channel="news", data={"n": 0})  # Edda delivers this one itself
    for instance_id in waiting:
        await edda.ask("until_waiting", instance_id=instance_id)

    await publish(storage, "news", 1, 2, 3)

    assert await deliver(storage, "news") == 2
    assert [numbers(await edda.result(instance_id)) for instance_id in waiting] == [[0, 1, 2, 3]] * 2
    assert await deliver(storage, "news") == 0


@pytest.mark.databases("sqlite", "postgres", "mariadb", "mysql")  # each has its own idea of a time's fraction
async def test_edda_receives_what_both_of_us_published_while_it_was_busy(storage: SQLStorage, edda: Edda) -> None:
    busy = await edda.start("receiver", channel="news", count=4, gate="gate")

    for number in (1, 3):
        await publish(storage, "news", number)
        await edda.ask("publish", channel="news", data={"n": number + 1})
    await publish(storage, "gate", 0)
    assert await deliver(storage, "gate") == 1

    assert numbers(await edda.result(busy)) == [1, 2, 3, 4]


async def test_edda_receives_bytes_as_json_and_then_what_comes_behind_them(storage: SQLStorage, edda: Edda) -> None:
    waiting = await edda.start("receiver", channel="news", count=2)

    await storage.publish_to_channel("news", b"\0\xff")
    await publish(storage, "news", 2)
    assert await deliver(storage, "news") == 1

    assert await edda.result(waiting) == [{"data_base64": "AP8="}, {"n": 2}]


async def test_a_competing_message_goes_to_one_of_eddas_receivers_and_ours(
    storage: SQLStorage, edda: Edda, ours: Harness
) -> None:
    theirs = [await edda.start("receiver", channel="jobs", mode="competing") for _ in range(2)]
    our_receivers = [await receiver(ours, storage, "jobs", ChannelMode.COMPETING) for _ in range(2)]

    await publish(storage, "jobs", 1, 2, 3)
    assert await deliver(storage, "jobs") == 3
    await edda.ask("publish", channel="jobs", data={"n": 4})
    await poll(storage)

    received = [message for instance_id in theirs for message in await edda.result(instance_id)]
    for our_receiver in our_receivers:
        received += await our_receiver.received()
    assert sorted(numbers(received)) == [1, 2, 3, 4]
    assert await storage.get_pending_channel_messages("jobs") == []


class Interruption:
    """Have Edda take a message before a certain statement of our delivery; if we keep it out, it goes on waiting."""

    def __init__(self, statement: int, take: Callable[[], bool]) -> None:
        self.statement = statement
        self.statements = 0
        self.took: list[bool] = []
        self._thread = threading.Thread(target=lambda: self.took.append(take()))

    def __call__(self, point: str, operation: str) -> None:
        if point == "before statement" and operation == "deliver_channel_message_with_lock":
            self.statements += 1
            if self.statements == self.statement:
                self._thread.start()
                self._thread.join(0.1)

    async def end(self) -> bool:
        """Whether Edda got the message."""
        await asyncio.to_thread(self._thread.join)
        return self.took[0]


@pytest.mark.parametrize("neighbourhood", ["our tables"], indirect=True)
async def test_a_competing_message_that_edda_takes_while_we_deliver_it_goes_to_one_of_us(
    storage: SQLStorage, edda: Edda, ours: Harness
) -> None:
    outcomes = set()
    for statement in range(1, 100):
        channel = f"jobs-{statement}"
        our_receiver = await receiver(ours, storage, channel, ChannelMode.COMPETING)
        rival = await edda.start("receiver", channel=channel, mode="competing")
        await publish(storage, channel, 1)

        storage.runner.probe = interruption = Interruption(statement, functools.partial(edda.take, rival, channel))
        await storage.deliver_channel_message_with_lock(
            our_receiver.instance_id, channel, ChannelMessage(channel), "courier", 30
        )
        storage.runner.probe = None
        if interruption.statements < statement:
            break
        outcomes.add((len(await our_receiver.received()), int(await interruption.end())))

    # On SQLite we have the write lock from the first statement on, and are always first.
    assert outcomes == ({(1, 0)} if ours.name == "sqlite" else {(0, 1), (1, 0)})


async def test_a_direct_message_reaches_only_its_edda_instance(storage: SQLStorage, edda: Edda) -> None:
    addressee, bystander = [await edda.start("receiver", channel="inbox", mode="direct") for _ in range(2)]

    await publish(storage, f"inbox:{addressee}", 7)

    assert await deliver(storage, f"inbox:{addressee}") == 1
    assert numbers(await edda.result(addressee)) == [7]
    assert await edda.ask("status", instance_id=bystander) == "waiting_for_message"


async def test_we_receive_every_broadcast_message_of_eddas_once(storage: SQLStorage, edda: Edda, ours: Harness) -> None:
    await edda.ask("publish", channel="news", data={"n": 0})  # before anybody subscribes
    receivers = [await receiver(ours, storage, "news", ChannelMode.BROADCAST) for _ in range(2)]
    theirs = await edda.start("receiver", channel="news", count=3)

    for number in (1, 2):
        await edda.ask("publish", channel="news", data={"n": number})
        await edda.ask("until_waiting", instance_id=theirs)
    await publish(storage, "news", 3)
    await deliver(storage, "news")

    for our_receiver in receivers:
        while len(await our_receiver.received()) < 3:
            await our_receiver.receive()
        await our_receiver.receive()
    assert [numbers(await our_receiver.received()) for our_receiver in receivers] == [[1, 2, 3]] * 2
    assert numbers(await edda.result(theirs)) == [1, 2, 3]
    assert await poll(storage) == 0


async def test_a_message_that_edda_publishes_wakes_our_receiver(storage: SQLStorage, edda: Edda, ours: Harness) -> None:
    waiting = await receiver(ours, storage, "news", ChannelMode.BROADCAST)

    await edda.ask("publish", channel="news", data={"n": 1})

    assert await poll(storage) == 1
    assert await poll(storage) == 0
    assert numbers(await waiting.received()) == [1]
    assert [found.instance_id for found in await storage.find_resumable_workflows()] == [waiting.instance_id]


async def test_a_direct_message_of_eddas_reaches_our_instance(storage: SQLStorage, edda: Edda, ours: Harness) -> None:
    addressee = await receiver(ours, storage, "__direct__", ChannelMode.DIRECT)
    await receiver(ours, storage, "__direct__", ChannelMode.DIRECT)

    await edda.result(await edda.start("sender", target=addressee.instance_id, data={"n": 7}))

    assert await poll(storage) == 1
    assert numbers(await addressee.received()) == [7]


async def test_cloud_events_cross_both_ways(storage: SQLStorage, edda: Edda, ours: Harness) -> None:
    our_waiter = await receiver(ours, storage, "order.paid", ChannelMode.BROADCAST)
    edda_waiter = await edda.start("event_waiter", event_type="order.shipped")

    await edda.ask("cloudevent", type="order.paid", data={"n": 1})
    metadata = {"ce_type": "order.shipped", "ce_source": "our-shop", "ce_id": "e-1"}
    await storage.publish_to_channel("order.shipped", '{"n": 2}', json.dumps(metadata))

    assert await poll(storage) == 1
    assert numbers(await our_waiter.received()) == [1]
    assert await deliver(storage, "order.shipped") == 1
    assert await edda.result(edda_waiter) == {"type": "order.shipped", "source": "our-shop", "data": {"n": 2}}


async def test_our_lock_keeps_edda_from_delivering_and_the_message_is_not_lost(storage: SQLStorage, edda: Edda) -> None:
    instance_id = await edda.start("receiver", channel="news")
    lock = await storage.try_acquire_lock(instance_id, "worker", 30)
    assert lock is not None

    await edda.ask("publish", channel="news", data={"n": 1})
    assert await edda.ask("status", instance_id=instance_id) == WorkflowStatus.WAITING_FOR_MESSAGE

    await storage.release_lock(instance_id, "worker", lock=lock)
    assert await deliver(storage, "news") == 1
    assert numbers(await edda.result(instance_id)) == [1]


async def test_eddas_lock_keeps_us_from_delivering(storage: SQLStorage, edda: Edda) -> None:
    instance_id = await edda.start("receiver", channel="news")
    assert await edda.ask("lock", instance_id=instance_id, worker="another-edda")

    await publish(storage, "news", 1)

    assert await deliver(storage, "news") == 0
    assert await storage.get_history_count(instance_id) == 0


@pytest.mark.databases("postgres")
async def test_notifications_wake_edda_and_reach_us(storage: SQLStorage, edda: Edda) -> None:
    waiting = await edda.start("receiver", channel="news")
    await publish(storage, "news", 1)
    assert await deliver(storage, "news") == 1
    async with asyncio.timeout(10):  # Edda looks by itself only every half minute
        while await edda.ask("status", instance_id=waiting) != WorkflowStatus.COMPLETED:
            await asyncio.sleep(0.05)

    assert isinstance(storage, PostgresStorage)
    async with storage.listen(["workflow_channel_message"]) as hints, asyncio.timeout(10):
        await edda.ask("publish", channel="news", data={"n": 2})
        async for hint in hints:
            if '"news"' in hint.payload:
                break
