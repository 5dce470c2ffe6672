"""One of twenty rivals gets it, in one process and in four."""

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from romancy.storage import (
    ChannelMode,
    ChannelWait,
    OutboxEvent,
    SQLStorage,
    TimerSubscription,
    WorkflowStatus,
)
from tests.harness import Harness, history_of
from tests.rivals.conftest import RIVALS, Arena

PRIZES = 5
LOCKS = 30
"""With five, a lock that two processes can take at once went unnoticed now and then."""
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def winners(outcomes: list[Any]) -> Counter[str]:
    """How many rivals won each prize."""
    return Counter(prize for won in outcomes for prize in won)


async def test_one_rival_gets_an_instance_lock(arena: Arena, harness: Harness, storage: SQLStorage) -> None:
    prizes = [await harness.instance(storage) for _ in range(LOCKS)]

    outcomes = await arena.fight("acquire", prizes=prizes)

    assert winners(outcomes) == dict.fromkeys(prizes, 1)
    assert {token for won in outcomes for token in won.values()} == {1}


async def test_one_rival_takes_over_an_expired_lock(arena: Arena, harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage) for _ in range(LOCKS)]
    prizes = [lock.instance_id for lock in locks]
    harness.advance(seconds=31)

    outcomes = await arena.fight("acquire", prizes=prizes)

    assert winners(outcomes) == dict.fromkeys(prizes, 1)
    assert {token for won in outcomes for token in won.values()} == {locks[0].token + 1}


async def test_tokens_grow_by_exactly_one_per_acquisition(arena: Arena, harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)

    outcomes = await arena.fight("take_turns", instance_id=instance_id, turns=3)

    assert sorted(token for tokens in outcomes for token in tokens) == list(range(1, 3 * RIVALS + 1))
    assert all(tokens == sorted(tokens) for tokens in outcomes)


async def test_one_rival_fires_a_timer(arena: Arena, harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage) for _ in range(PRIZES)]
    expiry = await storage.current_time()
    for lock in locks:
        harness.advance(seconds=-1)
        await storage.suspend(lock.instance_id, [TimerSubscription(lock.instance_id, "nap", expiry)], lock=lock)
    harness.advance(seconds=60)

    outcomes = await arena.fight("fire", prizes=[lock.instance_id for lock in locks])

    assert winners(outcomes) == dict.fromkeys([lock.instance_id for lock in locks], 1)
    for lock in locks:
        assert [event.event_type for event in await history_of(storage, lock.instance_id)] == ["TimerExpired"]


async def test_each_competing_message_is_delivered_to_one_waiting_instance(
    arena: Arena, harness: Harness, storage: SQLStorage
) -> None:
    waiting = [await suspended_receiver(harness, storage, "jobs") for _ in range(2 * PRIZES)]
    for number in range(PRIZES):
        await storage.publish_to_channel("jobs", f"{number}")

    outcomes = await arena.fight("deliver", channel="jobs", waiting=waiting)
    served = winners(outcomes)
    while left := await storage.find_deliverable_subscriptions():  # rivals pass over what another one holds
        for subscription in left:
            outcomes += [await arena.fight("deliver", channel="jobs", waiting=[subscription.instance_id])]

    assert set(served.values()) == {1}
    received = [event.event_data for instance_id in waiting for event in await history_of(storage, instance_id)]
    assert len(received) == PRIZES
    assert len(set(received)) == PRIZES
    assert await storage.get_pending_channel_messages("jobs") == []


async def suspended_receiver(harness: Harness, storage: SQLStorage, channel: str) -> str:
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, channel, ChannelMode.COMPETING, lock=lock)
    await storage.suspend(lock.instance_id, [ChannelWait(channel, "receive:1")], lock=lock)
    return lock.instance_id


async def test_one_receiver_gets_a_competing_message(arena: Arena, harness: Harness, storage: SQLStorage) -> None:
    keeper = await harness.instance(storage)
    await storage.subscribe_to_channel(keeper, "jobs", ChannelMode.COMPETING)
    await storage.publish_to_channel("jobs", "1")

    outcomes = await arena.fight("receive", channel="jobs")

    assert Counter(outcomes) == {True: 1, False: RIVALS - 1}


async def test_one_rival_claims_a_message(arena: Arena, storage: SQLStorage) -> None:
    messages = [await storage.publish_to_channel(f"jobs-{number}", "1") for number in range(PRIZES)]

    outcomes = await arena.fight("claim", messages=messages)

    assert winners(outcomes) == dict.fromkeys(messages, 1)


async def test_one_rival_leases_an_outbox_event(arena: Arena, storage: SQLStorage) -> None:
    events = [f"event-{number}" for number in range(3 * PRIZES)]
    for event_id in events:
        await storage.add_outbox_event(OutboxEvent(event_id, "order.paid", "shop", event_data="{}"))

    outcomes = await arena.fight("lease", limit=2)

    assert winners(outcomes) == dict.fromkeys(events, 1)


async def test_one_rival_gets_a_system_lock(arena: Arena, storage: SQLStorage) -> None:
    prizes = [f"leader-{number}" for number in range(PRIZES)]

    outcomes = await arena.fight("lead", prizes=prizes)

    assert winners(outcomes) == dict.fromkeys(prizes, 1)


async def test_one_rival_takes_over_an_expired_system_lock(arena: Arena, harness: Harness, storage: SQLStorage) -> None:
    prizes = [f"leader-{number}" for number in range(PRIZES)]
    for name in prizes:
        await storage.try_acquire_system_lock(name, "somebody", 30)
    harness.advance(seconds=31)

    outcomes = await arena.fight("lead", prizes=prizes)

    assert winners(outcomes) == dict.fromkeys(prizes, 1)


async def test_one_rival_creates_an_instance(arena: Arena, storage: SQLStorage) -> None:
    prizes = [f"order-{number}" for number in range(PRIZES)]

    outcomes = await arena.fight("create", prizes=prizes)

    for instance_id in prizes:
        answers = Counter(answer[instance_id] for answer in outcomes)
        assert answers == {"made": 1, "InstanceExistsError": RIVALS - 1}


async def test_one_rival_records_a_step(arena: Arena, harness: Harness, storage: SQLStorage) -> None:
    prizes = [await harness.instance(storage) for _ in range(PRIZES)]

    outcomes = await arena.fight("record", prizes=prizes)

    for instance_id in prizes:
        answers = Counter(answer[instance_id] for answer in outcomes)
        assert answers == {"recorded": 1, "HistoryConflictError": RIVALS - 1}
        assert len(await history_of(storage, instance_id)) == 1


async def test_a_channel_that_rivals_subscribe_to_in_two_modes_gets_one(arena: Arena, storage: SQLStorage) -> None:
    channels = [f"news-{number}" for number in range(PRIZES)]

    outcomes = await arena.fight("subscribe", channels=channels)

    for channel in channels:
        answers = Counter(answer[channel] for answer in outcomes)
        mode = await storage.get_channel_mode(channel)
        assert answers == {str(mode): RIVALS // 2, "ChannelModeConflictError": RIVALS // 2}


async def test_each_stale_lock_is_reported_once(arena: Arena, harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage) for _ in range(4 * PRIZES)]
    harness.advance(seconds=31)

    outcomes = await arena.fight("clean_up", limit=3)

    assert winners(outcomes) == dict.fromkeys([lock.instance_id for lock in locks], 1)


async def test_messages_become_visible_in_the_order_of_their_ids(arena: Arena, storage: SQLStorage) -> None:
    fight = asyncio.create_task(arena.fight("publish", channel="news", messages=5))
    seen: list[int] = []
    while not fight.done() or len(seen) < 5 * RIVALS:
        found = await storage.get_pending_channel_messages("news", 0, 1000)
        ids = [message.id for message in found if message.id is not None]
        assert ids[: len(seen)] == seen, "a smaller id appeared after a larger one was seen"
        seen = ids
        await asyncio.sleep(0)
        if fight.done():
            await fight

    outcomes = await fight
    assert sorted(message_id for ids in outcomes for message_id in ids) == seen


async def test_an_instance_ends_once_whoever_wakes_or_ends_it(
    arena: Arena, harness: Harness, storage: SQLStorage
) -> None:
    prizes = [await sleeping_receiver(harness, storage) for _ in range(PRIZES)]

    outcomes = await arena.fight("end", prizes=prizes)

    for instance_id in prizes:
        answers = Counter(answer[instance_id] for answer in outcomes)
        instance = await storage.get_instance(instance_id)
        history = Counter(event.event_type for event in await history_of(storage, instance_id))
        assert instance is not None
        assert instance.status in (WorkflowStatus.COMPLETED, WorkflowStatus.CANCELLED, WorkflowStatus.FAILED)
        assert set(history.values()) <= {1}
        assert answers.keys() <= {
            "ended",
            "woken",
            "nothing",
            "InvalidStatusTransitionError",
            "WorkflowNotCancellableError",
        }


async def sleeping_receiver(harness: Harness, storage: SQLStorage) -> str:
    """An instance that waits for a timer that is due by now, and for a message that is there by now."""
    lock = await harness.locked(storage)
    instance_id = lock.instance_id
    await storage.subscribe_to_channel(instance_id, instance_id, ChannelMode.BROADCAST, lock=lock)
    nap = TimerSubscription(instance_id, "nap", await storage.current_time())
    harness.advance(seconds=-10)
    await storage.suspend(instance_id, [nap, ChannelWait(instance_id, "receive:1")], lock=lock)
    harness.advance(seconds=10)
    await storage.publish_to_channel(instance_id, "1")
    return instance_id
