"""On tables that Edda made, with 32-bit ids, coarse times and the server's collation, everything works."""

import json
from datetime import timedelta

import pytest

from romancy.storage import (
    ChannelMessage,
    ChannelMode,
    ChannelWait,
    CompensationEntry,
    HistoryIterator,
    InstanceWait,
    ListInstancesOptions,
    OutboxEvent,
    SQLStorage,
    TimerSubscription,
    WorkflowStatus,
)
from tests.harness import Harness, history_of, step

pytestmark = [
    pytest.mark.databases("sqlite", "postgres", "mariadb"),
    pytest.mark.parametrize("neighbourhood", ["Edda's tables"], indirect=True),
]

LARGEST_ID = 2**63 - 1


async def test_an_instance_of_ours_can_do_all_it_does_elsewhere(storage: SQLStorage, ours: Harness) -> None:
    lock = await ours.locked(storage, input_data='{"customer": "café"}')
    order = lock.instance_id
    await storage.update_instance_activity(order, "charge:1", lock=lock)
    await storage.append_history(step(order), lock=lock)
    await storage.append_history_many(
        [step(order, "ship:1"), step(order, "ship:2", None, event_data_binary=b"\0")], lock=lock
    )
    async with storage.transaction():
        await storage.add_compensation(CompensationEntry(order, "charge:1", "refund", '{"n": 1}'), lock=lock)
        await storage.add_outbox_event(OutboxEvent("event-1", "order.paid", "shop", '{"n": 1}'), lock=lock)
        await storage.join_group(order, "customers", record=step(order, "join:1"))
    assert await storage.refresh_lock(order, lock.worker_id, 30, lock=lock)

    assert [entry.activity_name for entry in await storage.get_compensations(order)] == ["refund"]
    assert await storage.get_group_members("customers") == [order]
    assert len(await HistoryIterator(storage, order).collect()) == await storage.get_history_count(order) == 4
    assert not (await storage.get_history_paginated(order, LARGEST_ID)).events
    options = ListInstancesOptions(workflow_name_filter="ORD", input_filters={"customer": "café"})
    assert [instance.instance_id for instance in (await storage.list_instances(options)).instances] == [order]

    await storage.recur_instance(order, '{"round": 2}', lock=lock)
    assert len(await storage.get_archived_history(order)) == 4
    await storage.park(order, "too busy", lock=lock)
    assert await storage.find_resumable_workflows() == []
    await storage.unpark(order)
    assert [found.instance_id for found in await storage.find_resumable_workflows()] == [order]

    abandoned = await storage.try_acquire_lock(order, "worker-2", 30)
    assert abandoned is not None
    assert abandoned.token == lock.token + 1
    ours.advance(seconds=60)
    assert [freed.instance_id for freed in await storage.cleanup_stale_locks(30)] == [order]
    lock = await ours.locked(storage)
    await storage.cancel_instance(lock.instance_id, "changed my mind", compensate=True)
    await storage.update_instance_status(lock.instance_id, WorkflowStatus.FAILED, "no stock", lock=lock)
    await storage.update_instance_output(order, '{"total": 42}')
    ours.advance(seconds=60)
    assert await storage.delete_finished_instances(timedelta(seconds=30)) == 2


async def test_an_instance_of_ours_can_wait_for_all_it_waits_for_elsewhere(storage: SQLStorage, ours: Harness) -> None:
    awaited, lock = await ours.instance(storage), await ours.locked(storage)
    waiter = lock.instance_id

    async def again() -> None:
        nonlocal lock
        taken = await storage.try_acquire_lock(waiter, "worker-1", 30)
        assert taken is not None
        lock = taken

    await storage.subscribe_to_channel(waiter, "news", ChannelMode.BROADCAST, lock=lock)
    soon = await storage.current_time() + timedelta(minutes=1)
    timer = TimerSubscription(waiter, "nap", soon, "sleep:1")
    assert await storage.suspend(waiter, [timer, ChannelWait("news", "receive:1")], lock=lock) == []
    ours.advance(seconds=90)
    (due,) = await storage.find_expired_timers()
    assert await storage.fire_timer(due, worker_id="timekeeper")
    await storage.publish_to_channel("news", '{"n": 1}')
    await again()
    (received,) = await storage.suspend(waiter, [ChannelWait("news", "receive:1")], lock=lock)
    assert json.loads(str(received.event_data))["data"] == {"n": 1}

    past = await storage.current_time() + timedelta(minutes=1)
    await storage.suspend(waiter, [ChannelWait("news", "receive:2", past)], lock=lock)
    ours.advance(seconds=90)
    (expired,) = await storage.find_expired_channel_subscriptions()
    assert await storage.expire_channel_receive(expired)
    await again()
    await storage.suspend(waiter, [InstanceWait(awaited, "join:1")], lock=lock)
    await storage.update_instance_output(awaited, None)
    assert [found.instance_id for found in await storage.find_resumable_workflows()] == [waiter]

    assert [event.activity_id for event in await history_of(storage, waiter)] == [
        "sleep:1",
        "receive:1",
        "receive:2",
        "join:1",
    ]


async def test_channels_outbox_and_system_locks_work_as_elsewhere(storage: SQLStorage, ours: Harness) -> None:
    worker, rival = await ours.instance(storage), await ours.instance(storage)
    for instance_id in (worker, rival):
        await storage.subscribe_to_channel(instance_id, "jobs", ChannelMode.COMPETING)
    first, second = await storage.publish_many(
        [ChannelMessage("jobs", '{"n": 1}'), ChannelMessage("jobs", data_binary=b"\0")]
    )
    assert await storage.claim_channel_message(first, worker)
    assert not await storage.claim_channel_message(first, rival)
    assert not await storage.claim_channel_message(LARGEST_ID, rival)
    (left,) = await storage.get_pending_channel_messages_for_instance(rival, "jobs")
    assert (left.id, left.data_binary) == (second, b"\0")
    await storage.delete_channel_message(LARGEST_ID)
    assert await storage.get_pending_channel_messages("jobs", LARGEST_ID) == []
    await storage.subscribe_to_channel(worker, "news", ChannelMode.BROADCAST)
    news = await storage.publish_to_channel("news", "[1]")
    await storage.update_delivery_cursor(worker, "news", LARGEST_ID)
    assert await storage.get_delivery_cursor(worker, "news") == news
    ours.advance(seconds=60)
    assert await storage.cleanup_old_channel_messages(timedelta(seconds=30)) == 1

    for name in ("sent", "retried", "refused"):
        await storage.add_outbox_event(OutboxEvent(name, "order.paid", "shop", '{"n": 1}'))
    assert [event.event_id for event in await storage.get_pending_outbox_events()] == ["sent", "retried", "refused"]
    assert await storage.mark_outbox_event_sent("sent")
    assert await storage.increment_outbox_attempts("retried", error="no route")
    assert await storage.mark_outbox_event_failed("refused", error="bad event", invalid=True)
    ours.advance(seconds=60)
    assert [event.event_id for event in await storage.get_pending_outbox_events()] == ["retried"]
    assert await storage.cleanup_old_outbox_events(timedelta(seconds=30)) == 1

    assert await storage.try_acquire_system_lock("sweeper", "worker-1", 30)
    assert not await storage.try_acquire_system_lock("sweeper", "worker-2", 30)
    ours.advance(seconds=60)
    assert await storage.try_acquire_system_lock("sweeper", "worker-2", 30)
