"""Finding what can run, setting aside what should not, starting over, and forgetting what is over."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from romancy.storage import (
    ChannelMode,
    CompensationEntry,
    InvalidStatusTransitionError,
    LockLostError,
    OutboxEvent,
    SQLStorage,
    TimerSubscription,
    WorkflowStatus,
)
from romancy.storage.models import FINISHED, WAITING
from tests.harness import Harness, contents, history_of, step

LATER = datetime(2042, 1, 1, tzinfo=UTC)


async def resumable(storage: SQLStorage, limit: int = 0, **filters: object) -> list[str]:
    found = await storage.find_resumable_workflows(limit, **filters)  # type: ignore[arg-type]
    return [workflow.instance_id for workflow in found]


# Finding what can run.


async def test_what_runs_or_compensates_without_a_live_lock_can_be_resumed(
    harness: Harness, storage: SQLStorage
) -> None:
    free = await harness.instance(storage)
    compensating = await harness.instance(storage, status=WorkflowStatus.COMPENSATING)
    expired = (await harness.locked(storage)).instance_id
    harness.advance(seconds=31)
    await harness.locked(storage)
    for status in (*FINISHED, *WAITING, WorkflowStatus.RECURRED):
        await harness.instance(storage, status=status)

    assert sorted(await resumable(storage)) == sorted([free, compensating, expired])


async def test_a_lock_of_nobody_is_free(harness: Harness, storage: SQLStorage) -> None:
    """Romancy for Go writes an empty name where others write NULL."""
    lock = await harness.locked(storage)
    await storage.conn().execute("UPDATE workflow_instances SET locked_by = ''")
    assert await resumable(storage) == [lock.instance_id]
    instance = await storage.get_instance(lock.instance_id)
    assert instance is not None
    assert instance.locked_by is None
    assert await storage.try_acquire_lock(lock.instance_id, "worker-2", 30) is not None


async def test_a_resumable_workflow_comes_with_its_name(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage, workflow_name="fulfil")
    (found,) = await storage.find_resumable_workflows()
    assert (found.instance_id, found.workflow_name) == (instance_id, "fulfil")


async def test_whoever_could_run_for_longest_comes_first(harness: Harness, storage: SQLStorage) -> None:
    first = await harness.instance(storage)
    harness.advance(seconds=1)
    second = await harness.instance(storage, started_at=datetime(2001, 1, 1, tzinfo=UTC))
    harness.advance(seconds=1)
    lock = await storage.try_acquire_lock(first, "worker-1", 30)
    await storage.release_lock(first, "worker-1", lock=lock)

    assert await resumable(storage) == [second, first]


async def test_a_hundred_foreign_rows_do_not_starve_ours(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        for number in range(100):
            await harness.instance(storage, framework="go", instance_id=f"go-{number}")
            await harness.instance(storage, workflow_name="unknown", instance_id=f"unknown-{number}")
    harness.advance(seconds=1)
    ours = await harness.instance(storage, workflow_name="order", owner_service="shop")

    assert await resumable(storage, 10, workflow_names=["order", "refund"]) == [ours]
    assert await resumable(storage, 10, owner_service="shop") == [ours]
    assert await resumable(storage, 10, workflow_names=["order", "refund"], owner_service="shop") == [ours]


async def test_no_workflow_names_at_all_find_nothing(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage)
    assert await resumable(storage, workflow_names=[]) == []


async def test_names_in_a_filter_are_compared_byte_for_byte(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, workflow_name="order")
    assert await resumable(storage, workflow_names=["Order", "order ", "örder", "%", "it's", "\0", "\ud800"]) == []
    assert await resumable(storage, owner_service="\0") == []


async def test_the_poll_is_bounded(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        for _ in range(101):
            await harness.instance(storage)
    assert len(await resumable(storage, 7)) == 7
    assert len(await resumable(storage, 0)) == 100


# Claiming it.


async def test_claiming_takes_the_locks_of_what_can_run(harness: Harness, storage: SQLStorage) -> None:
    free = await harness.instance(storage, input_data='{"n": 1}')
    expired = await harness.locked(storage, status=WorkflowStatus.COMPENSATING, lock_timeout_seconds=60)
    harness.advance(seconds=61)
    await harness.locked(storage)
    await harness.instance(storage, status=WorkflowStatus.WAITING_FOR_EVENT)
    await storage.park(await harness.instance(storage), "unknown version")

    claims = await storage.claim_resumable_workflows("worker-2", 30)

    found = {instance.instance_id: (instance, lock) for instance, lock in claims}
    assert sorted(found) == sorted([free, expired.instance_id])
    instance, lock = found[free]
    assert (instance.input_data, lock.token, lock.worker_id) == ('{"n": 1}', 1, "worker-2")
    stolen = found[expired.instance_id][1]
    assert (stolen.token, stolen.status) == (2, WorkflowStatus.COMPENSATING)
    for _, lock in claims:
        await storage.append_history(step(lock.instance_id), lock=lock)
    harness.advance(seconds=31)
    assert free in await resumable(storage)
    assert expired.instance_id not in await resumable(storage), "its lock lasts as long as the instance says"


async def test_what_two_workers_claim_never_overlaps(harness: Harness, storage: SQLStorage) -> None:
    instances = [await harness.instance(storage) for _ in range(12)]
    rival = await harness.open()
    claims = await asyncio.gather(
        *(runner.claim_resumable_workflows(f"worker-{n}", 30, 3) for n, runner in enumerate([storage, rival] * 4))
    )
    claimed = [lock.instance_id for batch in claims for _, lock in batch]
    while more := await storage.claim_resumable_workflows("worker-9", 30, 5):
        claimed += [lock.instance_id for _, lock in more]
    assert sorted(claimed) == sorted(instances)
    assert all(len(batch) <= 3 for batch in claims)


async def test_a_claim_sees_only_what_it_was_asked_for(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, framework="go")
    await harness.instance(storage, workflow_name="refund")
    await harness.instance(storage, owner_service="billing")
    ours = await harness.instance(storage, owner_service="shop")
    claims = await storage.claim_resumable_workflows("w", 30, 1, workflow_names=["order"], owner_service="shop")
    assert [lock.instance_id for _, lock in claims] == [ours]


# Parking.


async def test_a_parked_instance_is_left_alone_until_its_time(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    until = await storage.current_time() + timedelta(minutes=10)
    await storage.park(lock.instance_id, "waiting for the new release", until=until, lock=lock)

    instance = await storage.get_instance(lock.instance_id)
    assert instance is not None
    assert (instance.status, instance.parked_reason) == (WorkflowStatus.RUNNING, "waiting for the new release")
    assert (instance.parked_until, instance.locked_by) == (until, None)
    assert await resumable(storage) == []
    harness.advance(seconds=601)
    assert await resumable(storage) == [lock.instance_id]


async def test_parking_without_an_end_lasts_until_unpark(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.park(instance_id, "unknown version")
    harness.advance(seconds=20 * 365 * 86400)
    assert await resumable(storage) == []

    assert await storage.unpark(instance_id) is True
    assert await resumable(storage) == [instance_id]
    instance = await storage.get_instance(instance_id)
    assert instance is not None
    assert (instance.parked_until, instance.parked_reason) == (None, None)


async def test_unparking_what_is_not_parked_changes_nothing(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    before = await contents(storage)
    assert await storage.unpark(instance_id) is False
    assert await storage.unpark("nobody") is False
    assert await contents(storage) == before


async def test_a_parked_instance_can_be_cancelled(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.park(instance_id, "unknown version")
    await storage.cancel_instance(instance_id, "enough")
    instance = await storage.get_instance(instance_id)
    assert instance is not None
    assert (instance.status, instance.parked_until) == (WorkflowStatus.CANCELLED, None)


async def test_cancelling_with_compensation_unparks(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.park(instance_id, "unknown version")
    await storage.cancel_instance(instance_id, "enough", compensate=True)
    assert await resumable(storage) == [instance_id]


async def test_a_parked_timer_waits_for_its_time(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    due = await storage.current_time() + timedelta(seconds=1)
    await storage.suspend(lock.instance_id, [TimerSubscription(lock.instance_id, "nap", due)], lock=lock)
    await storage.park(lock.instance_id, "unknown version")
    harness.advance(seconds=2)
    assert await storage.find_expired_timers() == []
    await storage.unpark(lock.instance_id)
    assert len(await storage.find_expired_timers()) == 1


# Starting over.


async def test_recurring_starts_the_same_instance_over(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage, input_data='{"round": 1}', current_activity_id="pack:1")
    instance_id = lock.instance_id
    await storage.append_history(step(instance_id, "charge:1"), lock=lock)
    await storage.add_compensation(CompensationEntry(instance_id, "charge:1", "refund"), lock=lock)
    await storage.register_timer_subscription(TimerSubscription(instance_id, "nap", LATER), lock=lock)
    await storage.subscribe_to_channel(instance_id, "news", ChannelMode.BROADCAST)
    await storage.join_group(instance_id, "riders")

    await storage.recur_instance(instance_id, '{"round": 2}', lock=lock)

    instance = await storage.get_instance(instance_id)
    assert instance is not None
    assert (instance.status, instance.input_data) == (WorkflowStatus.RUNNING, '{"round": 2}')
    assert instance.current_activity_id is None
    assert await history_of(storage, instance_id) == []
    assert [event.activity_id for event in await storage.get_archived_history(instance_id)] == ["charge:1"]
    assert await storage.get_compensations(instance_id) == []
    assert (await contents(storage))["workflow_timer_subscriptions"] == []
    assert await storage.get_channel_subscription(instance_id, "news") is not None
    assert await storage.get_group_members("riders") == [instance_id]


async def test_a_recurred_run_goes_on_under_the_same_lock(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    for number in range(3):
        await storage.append_history(step(lock.instance_id, data=str(number)), lock=lock)
        await storage.recur_instance(lock.instance_id, "{}", lock=lock)

    archived = await storage.get_archived_history(lock.instance_id)
    assert [event.event_data for event in archived] == ["0", "1", "2"]


@pytest.mark.parametrize("status", [WorkflowStatus.COMPENSATING, WorkflowStatus.WAITING_FOR_EVENT])
async def test_only_a_running_instance_recurs(harness: Harness, storage: SQLStorage, status: WorkflowStatus) -> None:
    lock = await harness.locked(storage, status=status)
    with pytest.raises(InvalidStatusTransitionError):
        await storage.recur_instance(lock.instance_id, "{}", lock=lock)


async def test_a_finished_instance_does_not_recur(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.update_instance_output(lock.instance_id, "{}", lock=lock)
    with pytest.raises(LockLostError):
        await storage.recur_instance(lock.instance_id, "{}", lock=lock)


# Retention.


async def finished(harness: Harness, storage: SQLStorage, **fields: object) -> str:
    instance_id = await harness.instance(storage, **fields)
    await storage.update_instance_status(instance_id, WorkflowStatus.COMPLETED)
    return instance_id


async def test_deleting_takes_all_rows_of_the_instance_along(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.append_history(step(lock.instance_id, "round-1"), lock=lock)
    await storage.archive_history(lock.instance_id, lock=lock)
    await storage.append_history(step(lock.instance_id, "round-2"), lock=lock)
    await storage.add_compensation(CompensationEntry(lock.instance_id, "round-2", "undo"), lock=lock)
    await storage.add_outbox_event(OutboxEvent("event-1", "made", "test"))
    await storage.update_instance_output(lock.instance_id, "{}", lock=lock)
    harness.advance(seconds=61)

    assert await storage.delete_finished_instances(timedelta(minutes=1)) == 1

    tables = await contents(storage)
    assert {table for table, rows in tables.items() if rows} == {"workflow_definitions", "outbox_events"}


async def test_deleting_starts_with_the_oldest_and_is_bounded(harness: Harness, storage: SQLStorage) -> None:
    instance_ids = []
    for _ in range(5):
        instance_ids.append(await finished(harness, storage))
        harness.advance(seconds=1)
    harness.advance(seconds=60)

    assert await storage.delete_finished_instances(timedelta(minutes=1), 2) == 2
    assert [await storage.get_instance(instance_id) is None for instance_id in instance_ids] == [True] * 2 + [False] * 3
    assert await storage.delete_finished_instances(timedelta(minutes=1), 2) == 2
    assert await storage.delete_finished_instances(timedelta(minutes=1), 2) == 1
    assert await storage.delete_finished_instances(timedelta(minutes=1), 2) == 0


async def test_age_counts_from_the_end_not_from_the_start(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    harness.advance(seconds=3600)
    await storage.update_instance_status(instance_id, WorkflowStatus.FAILED)
    assert await storage.delete_finished_instances(timedelta(minutes=1)) == 0
    harness.advance(seconds=61)
    assert await storage.delete_finished_instances(timedelta(minutes=1)) == 1


async def test_what_has_not_finished_or_is_not_ours_is_never_deleted(harness: Harness, storage: SQLStorage) -> None:
    await finished(harness, storage, framework="python")
    for status in WorkflowStatus:
        if status not in FINISHED:
            await harness.instance(storage, status=status)
    harness.advance(seconds=86400)
    before = await contents(storage)

    assert await storage.delete_finished_instances(timedelta(0)) == 0
    assert await contents(storage) == before


async def test_what_continues_a_deleted_instance_stays(harness: Harness, storage: SQLStorage) -> None:
    first = await finished(harness, storage)
    second = await harness.instance(storage, continued_from=first)
    harness.advance(seconds=61)

    assert await storage.delete_finished_instances(timedelta(minutes=1)) == 1
    instance = await storage.get_instance(second)
    assert instance is not None
    assert instance.continued_from is None


async def test_an_instance_created_as_finished_ages_too(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, status=WorkflowStatus.COMPLETED)
    harness.advance(seconds=61)
    assert await storage.delete_finished_instances(timedelta(minutes=1)) == 1
