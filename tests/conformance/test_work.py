"""One look says which polls would find something: everything that a worker could do, in a single statement."""

from datetime import timedelta

import pytest

from romancy.storage import (
    ChannelMode,
    ChannelWait,
    OutboxEvent,
    SQLStorage,
    TimerSubscription,
    Work,
    WorkflowStatus,
)
from tests.harness import Harness
from tests.plans.looking import statements_sent

NOTHING = (False, None, None, False, False)


def seen(work: Work) -> tuple[object, ...]:
    """All but the time."""
    return (work.runnable, work.next_timer, work.next_timeout, work.messages, work.events)


async def test_an_empty_database_has_no_work_and_says_so_in_one_statement(storage: SQLStorage) -> None:
    with statements_sent() as statements:
        work = await storage.look_for_work()
    assert seen(work) == NOTHING
    assert abs(work.now - await storage.current_time()) < timedelta(seconds=5)
    assert len(statements) == 1


@pytest.mark.parametrize("status", [WorkflowStatus.RUNNING, WorkflowStatus.COMPENSATING])
async def test_an_instance_that_can_be_picked_up_is_work(
    harness: Harness, storage: SQLStorage, status: WorkflowStatus
) -> None:
    lock = await harness.locked(storage, status=status)
    assert not (await storage.look_for_work()).runnable
    await storage.release_lock(lock.instance_id, lock.worker_id, lock=lock)
    assert (await storage.look_for_work()).runnable


async def test_a_lock_that_expires_makes_work(harness: Harness, storage: SQLStorage) -> None:
    await harness.locked(storage)
    assert not (await storage.look_for_work()).runnable
    harness.advance(seconds=31)
    assert (await storage.look_for_work()).runnable


async def test_a_parked_instance_is_no_work_until_its_time_has_come(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    until = await storage.current_time() + timedelta(seconds=60)
    await storage.park(lock.instance_id, "odd", until=until, lock=lock)
    assert not (await storage.look_for_work()).runnable
    harness.advance(seconds=61)
    assert (await storage.look_for_work()).runnable


async def test_the_next_timer_is_told_when_it_is_soon_or_late(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    due = await storage.current_time() + timedelta(seconds=60)
    timers = [TimerSubscription(lock.instance_id, f"timer:{n}", due + timedelta(seconds=n)) for n in range(3)]
    await storage.suspend(lock.instance_id, timers, lock=lock)

    assert seen(await storage.look_for_work(soon_sec=30)) == NOTHING
    assert (await storage.look_for_work(soon_sec=90)).next_timer == due
    harness.advance(seconds=90)
    assert (await storage.look_for_work()).next_timer == due


async def test_the_next_timeout_of_a_wait_is_told_when_it_is_soon_or_late(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, "orders", ChannelMode.BROADCAST)
    due = await storage.current_time() + timedelta(seconds=60)
    await storage.suspend(lock.instance_id, [ChannelWait("orders", "receive:1", timeout_at=due)], lock=lock)

    assert seen(await storage.look_for_work(soon_sec=30)) == NOTHING
    assert (await storage.look_for_work(soon_sec=90)).next_timeout == due
    harness.advance(seconds=90)
    assert (await storage.look_for_work()).next_timeout == due


async def test_a_message_is_work_until_a_poll_has_seen_that_nobody_waits_for_it(storage: SQLStorage) -> None:
    await storage.publish_to_channel("orders", "{}")
    assert (await storage.look_for_work()).messages
    await storage.find_deliverable_subscriptions()
    assert not (await storage.look_for_work()).messages


async def test_an_event_is_work_until_somebody_sends_it(harness: Harness, storage: SQLStorage) -> None:
    await storage.add_outbox_event(OutboxEvent("event-1", "ordered", "shop"))
    assert (await storage.look_for_work()).events
    await storage.get_pending_outbox_events(lease_sec=60)
    assert not (await storage.look_for_work()).events
    harness.advance(seconds=61)
    assert (await storage.look_for_work()).events
    await storage.mark_outbox_event_sent("event-1")
    assert not (await storage.look_for_work()).events


async def test_what_is_not_ours_is_no_work(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, workflow_name="order", owner_service="north")
    assert (await storage.look_for_work(workflow_names=["order"], owner_service="north")).runnable
    assert not (await storage.look_for_work(workflow_names=["refund"])).runnable
    assert not (await storage.look_for_work(workflow_names=[])).runnable
    assert not (await storage.look_for_work(owner_service="south")).runnable
    stranger = await harness.open(framework="go")
    assert not (await stranger.look_for_work()).runnable
