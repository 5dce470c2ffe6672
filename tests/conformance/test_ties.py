"""Ties: what other tables know of an instance goes with it, and one of which they know nothing ends without a look."""

from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from romancy.storage import (
    ChannelMode,
    ChannelWait,
    InstanceWait,
    Lock,
    SQLStorage,
    TimerSubscription,
    WorkflowStatus,
)
from romancy.storage.sql.ending import TIED
from tests.harness import Harness, assert_ties_are_known, history_of

Tie = Callable[[SQLStorage, Lock], Awaitable[object]]


async def a_timer(storage: SQLStorage, lock: Lock) -> None:
    later = await storage.current_time() + timedelta(hours=1)
    await storage.register_timer_subscription(TimerSubscription(lock.instance_id, "nap", later), lock=lock)


async def a_claim(storage: SQLStorage, lock: Lock) -> None:
    message_id = await storage.publish_to_channel("jobs", "1")
    assert isinstance(message_id, int)
    assert await storage.claim_channel_message(message_id, lock.instance_id)


async def a_cursor(storage: SQLStorage, lock: Lock) -> None:
    message_id = await storage.publish_to_channel("news", "1")
    assert isinstance(message_id, int)
    await storage.update_delivery_cursor(lock.instance_id, "news", message_id)


async def a_receipt(storage: SQLStorage, lock: Lock) -> None:
    await storage.conn().execute(
        "INSERT INTO channel_messages (channel, message_id, data_type, data, published_at)"
        f" VALUES ('news', 'theirs', 'json', '1', {storage.runner.driver.now()})"
    )
    await storage.subscribe_to_channel(lock.instance_id, "news", ChannelMode.BROADCAST, lock=lock)


TIES: dict[str, Tie] = {
    "timer": a_timer,
    "claim": a_claim,
    "cursor": a_cursor,
    "receipt": a_receipt,
    "group": lambda storage, lock: storage.join_group(lock.instance_id, "open", lock=lock),
    "broadcast": lambda storage, lock: storage.subscribe_to_channel(
        lock.instance_id, "news", ChannelMode.BROADCAST, lock=lock
    ),
    "direct": lambda storage, lock: storage.subscribe_to_channel(lock.instance_id, "me", ChannelMode.DIRECT, lock=lock),
}


async def rows_of(storage: SQLStorage, instance_id: str) -> dict[str, int]:
    """In how many rows other tables know the instance."""
    counts = {
        table: int(
            await storage.conn().fetch_value(
                f"SELECT COUNT(*) FROM {table} WHERE instance_id = :instance_id", instance_id=instance_id
            )
        )
        for table in TIED
    }
    return {table: count for table, count in counts.items() if count}


@pytest.mark.parametrize("tie", TIES)
async def test_what_was_tied_to_an_instance_goes_with_it(harness: Harness, storage: SQLStorage, tie: str) -> None:
    lock = await harness.locked(storage)
    await TIES[tie](storage, lock)
    assert await rows_of(storage, lock.instance_id)
    await assert_ties_are_known(storage)

    await storage.update_instance_output(lock.instance_id, "1", lock=lock)

    assert await rows_of(storage, lock.instance_id) == {}


async def test_a_wait_is_a_tie_on_both_ends(harness: Harness, storage: SQLStorage) -> None:
    parent, child = await harness.locked(storage), await harness.locked(storage)
    later = await storage.current_time() + timedelta(hours=1)
    await storage.subscribe_to_channel(parent.instance_id, "news", ChannelMode.BROADCAST, lock=parent)
    waits = [
        TimerSubscription(parent.instance_id, "nap", later),
        ChannelWait("news", "receive:1"),
        InstanceWait(child.instance_id, "child:1"),
    ]
    await storage.suspend(parent.instance_id, waits, lock=parent)
    await assert_ties_are_known(storage)

    await storage.update_instance_output(child.instance_id, "1", lock=child)

    assert [event.activity_id for event in await history_of(storage, parent.instance_id)] == ["child:1"]
    woken = await storage.try_acquire_lock(parent.instance_id, "worker-1", 60)
    assert woken is not None
    await storage.update_instance_output(parent.instance_id, "1", lock=woken)
    assert await rows_of(storage, parent.instance_id) == {}


async def test_an_instance_without_ties_is_completed_with_one_statement(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    points: list[str] = []
    storage.runner.probe = lambda point, name: points.append(point)

    await storage.update_instance_output(lock.instance_id, '{"result": 1}', lock=lock)

    assert points == ["before statement", "after commit"]
    instance = await storage.get_instance(lock.instance_id)
    assert instance is not None
    assert (instance.status, instance.output_data, instance.locked_by) == (
        WorkflowStatus.COMPLETED,
        '{"result": 1}',
        None,
    )


async def test_what_another_framework_has_created_may_have_ties(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.conn().execute(
        "INSERT INTO workflow_instances (instance_id, workflow_name, source_hash, owner_service, input_data)"
        " SELECT 'theirs', workflow_name, source_hash, owner_service, '{}'"
        f" FROM workflow_instances WHERE instance_id = '{lock.instance_id}'"
    )

    await harness.instance(storage, instance_id="for them", framework="python")

    for instance_id, has_ties in (("theirs", True), ("for them", True), (lock.instance_id, False)):
        found = await storage.conn().fetch_value(
            "SELECT has_ties FROM workflow_instances WHERE instance_id = :instance_id", instance_id=instance_id
        )
        assert bool(found) == has_ties
