"""Timers: a wait for a moment, fired once, only while the instance waits."""

import asyncio
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from romancy.storage import (
    InstanceNotFoundError,
    InvalidKeyError,
    InvalidStatusTransitionError,
    LockLostError,
    SQLStorage,
    TimerSubscription,
    WorkflowStatus,
)
from tests.conformance.arrange import Crash, another, crash_before_statement, lock_of, status_of
from tests.harness import Harness, contents, history_of

FREE = (None, None, None)


async def sleeper(
    harness: Harness, storage: SQLStorage, seconds: float = 10, *, activity_id: str | None = None, **fields: Any
) -> TimerSubscription:
    """A new instance that sleeps for so many seconds; its timer."""
    lock = await harness.locked(storage, **fields)
    expires_at = await storage.current_time() + timedelta(seconds=seconds)
    timer = TimerSubscription(
        instance_id=lock.instance_id, timer_id="sleep:1", expires_at=expires_at, activity_id=activity_id
    )
    await storage.register_timer_subscription_and_release_lock(timer, lock.instance_id, "worker-1", lock=lock)
    return timer


async def due(storage: SQLStorage, **options: Any) -> list[str]:
    return [timer.instance_id for timer in await storage.find_expired_timers(**options)]


async def test_a_sleeping_instance_waits_with_its_lock_free(harness: Harness, storage: SQLStorage) -> None:
    timer = await sleeper(harness, storage)

    assert await status_of(storage, timer.instance_id) == WorkflowStatus.WAITING_FOR_TIMER
    assert await lock_of(storage, timer.instance_id) == FREE
    assert await history_of(storage, timer.instance_id) == []


async def test_a_timer_is_found_when_it_is_due_and_not_before(harness: Harness, storage: SQLStorage) -> None:
    timer = await sleeper(harness, storage, 10, activity_id="nap:1")
    assert await storage.find_expired_timers() == []

    harness.advance(seconds=11)
    [found] = await storage.find_expired_timers()

    assert (found.instance_id, found.timer_id, found.activity_id) == (timer.instance_id, "sleep:1", "nap:1")
    assert found.expires_at == timer.expires_at
    assert found.id is not None
    assert found.created_at is not None


@pytest.mark.parametrize(("activity_id", "step"), [("nap:1", "nap:1"), (None, "sleep:1")])
async def test_a_fired_timer_is_recorded_and_wakes_the_instance(
    harness: Harness, storage: SQLStorage, activity_id: str | None, step: str
) -> None:
    timer = await sleeper(harness, storage, 10, activity_id=activity_id)
    harness.advance(seconds=11)

    assert await storage.fire_timer(timer, worker_id="worker-1")

    [event] = await history_of(storage, timer.instance_id)
    assert (event.event_type, event.activity_id) == ("TimerExpired", step)
    assert json.loads(event.event_data or "") == {
        "result": None,
        "timer_id": "sleep:1",
        "expires_at": timer.expires_at.isoformat(timespec="microseconds"),
    }
    assert await status_of(storage, timer.instance_id) == WorkflowStatus.RUNNING
    assert await lock_of(storage, timer.instance_id) == FREE
    assert await storage.find_expired_timers() == []
    assert [each.instance_id for each in await storage.find_resumable_workflows()] == [timer.instance_id]


async def test_rivals_fire_a_timer_once(harness: Harness, storage: SQLStorage) -> None:
    timer = await sleeper(harness, storage, 10)
    storages = [storage, await another(harness), await another(harness)]
    harness.advance(seconds=11)

    fired = await asyncio.gather(*(storages[n % 3].fire_timer(timer, worker_id=f"worker-{n}") for n in range(6)))

    assert sorted(fired) == [False] * 5 + [True]
    assert len(await history_of(storage, timer.instance_id)) == 1


async def test_a_timer_that_is_not_due_does_not_fire(harness: Harness, storage: SQLStorage) -> None:
    timer = await sleeper(harness, storage, 10)

    early = TimerSubscription(
        instance_id=timer.instance_id, timer_id="sleep:1", expires_at=timer.expires_at - timedelta(days=1)
    )
    for claimed in (timer, early):  # what the caller says does not count
        assert not await storage.fire_timer(claimed, worker_id="worker-1")

    assert await status_of(storage, timer.instance_id) == WorkflowStatus.WAITING_FOR_TIMER


async def test_a_compensating_instance_wakes_up_compensating(harness: Harness, storage: SQLStorage) -> None:
    timer = await sleeper(harness, storage, 10, status=WorkflowStatus.COMPENSATING)
    assert await status_of(storage, timer.instance_id) == WorkflowStatus.WAITING_FOR_TIMER
    harness.advance(seconds=11)

    assert await storage.fire_timer(timer, worker_id="worker-1")

    assert await status_of(storage, timer.instance_id) == WorkflowStatus.COMPENSATING


@pytest.mark.parametrize("end", ["cancelled", "cancelled, compensating", "completed", "failed", "deleted"])
async def test_a_timer_in_somebodys_hand_revives_nobody(harness: Harness, storage: SQLStorage, end: str) -> None:
    timer = await sleeper(harness, storage, 10)
    harness.advance(seconds=11)
    [in_hand] = await storage.find_expired_timers()
    if end.startswith("cancelled"):
        await storage.cancel_instance(timer.instance_id, "no more", compensate=end.endswith("compensating"))
    else:
        target = WorkflowStatus.FAILED if end == "failed" else WorkflowStatus.COMPLETED
        await storage.update_instance_status(timer.instance_id, target)
    if end == "deleted":
        harness.advance(seconds=1)
        await storage.delete_finished_instances(timedelta(0))
    before = await contents(storage)

    assert await due(storage) == []
    assert not await storage.fire_timer(in_hand, worker_id="worker-1")
    assert await storage.fire_and_claim(in_hand, "worker-1", 30) is None

    assert await contents(storage) == before


async def test_a_running_instance_is_not_woken(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    timer = TimerSubscription(instance_id=instance_id, timer_id="t", expires_at=await storage.current_time())
    await storage.register_timer_subscription(timer)
    before = await contents(storage)

    assert await due(storage) == []
    assert not await storage.fire_timer(timer, worker_id="worker-1")

    assert await contents(storage) == before


async def test_an_instance_that_somebody_else_holds_is_not_woken(harness: Harness, storage: SQLStorage) -> None:
    timer = await sleeper(harness, storage, 10)
    harness.advance(seconds=11)
    await storage.try_acquire_lock(timer.instance_id, "worker-2", 30)

    assert not await storage.fire_timer(timer, worker_id="worker-1")

    harness.advance(seconds=31)
    assert await due(storage) == [timer.instance_id]
    assert await storage.fire_timer(timer, worker_id="worker-1")


async def test_a_crash_anywhere_while_firing_leaves_the_timer_as_it_was(harness: Harness, storage: SQLStorage) -> None:
    timer = await sleeper(harness, storage, 10)
    harness.advance(seconds=11)
    before = await contents(storage)

    for statement in range(50):
        storage.runner.probe = crash_before_statement(statement, "fire_timer")
        try:
            fired = await storage.fire_timer(timer, worker_id="worker-1")
            break
        except Crash:
            storage.runner.probe = None
            assert await contents(storage) == before
    else:
        raise AssertionError("it never came through")

    assert fired
    assert statement > 3
    assert len(await history_of(storage, timer.instance_id)) == 1


async def test_registering_again_keeps_the_first_expiry(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    first = await storage.current_time() + timedelta(seconds=10)

    def timer(delay: float) -> TimerSubscription:
        moment = first + timedelta(seconds=delay)
        return TimerSubscription(instance_id=lock.instance_id, timer_id="sleep:1", expires_at=moment)

    for delay in (0, -9, 3600):
        await storage.register_timer_subscription(timer(delay), lock=lock)
    await storage.register_timer_subscription_and_release_lock(timer(-9), lock.instance_id, "worker-1", lock=lock)

    assert await due(storage) == []
    harness.advance(seconds=11)
    [found] = await storage.find_expired_timers()
    assert found.expires_at == first


async def test_a_timer_that_is_due_already_is_recorded_at_once(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    timer = TimerSubscription(
        instance_id=lock.instance_id, timer_id="sleep:1", expires_at=await storage.current_time() - timedelta(days=1)
    )

    event = await storage.register_timer_subscription_and_release_lock(timer, lock.instance_id, "worker-1", lock=lock)

    assert event is not None
    assert [event] == await history_of(storage, lock.instance_id)
    assert await status_of(storage, lock.instance_id) == WorkflowStatus.RUNNING
    assert await lock_of(storage, lock.instance_id) == FREE


async def test_a_step_that_has_slept_does_not_sleep_again(harness: Harness, storage: SQLStorage) -> None:
    timer = await sleeper(harness, storage, 10)
    harness.advance(seconds=11)
    await storage.fire_timer(timer, worker_id="worker-1")
    lock = await storage.try_acquire_lock(timer.instance_id, "worker-1", 30)
    later = TimerSubscription(
        instance_id=timer.instance_id, timer_id="sleep:1", expires_at=timer.expires_at + timedelta(days=1)
    )

    event = await storage.register_timer_subscription_and_release_lock(later, timer.instance_id, "worker-1", lock=lock)

    assert [event] == await history_of(storage, timer.instance_id)
    assert await status_of(storage, timer.instance_id) == WorkflowStatus.RUNNING


async def test_only_the_owner_of_the_lock_can_put_an_instance_to_sleep(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    timer = TimerSubscription(instance_id=lock.instance_id, timer_id="t", expires_at=lock.expires_at)
    harness.advance(seconds=31)
    before = await contents(storage)

    with pytest.raises(LockLostError):
        await storage.register_timer_subscription(timer, lock=lock)
    with pytest.raises(LockLostError):
        await storage.register_timer_subscription_and_release_lock(timer, lock.instance_id, "worker-1", lock=lock)
    with pytest.raises(LockLostError):
        await storage.register_timer_subscription_and_release_lock(timer, lock.instance_id, "worker-1")

    assert await contents(storage) == before


async def test_only_an_unfinished_instance_can_have_timers(harness: Harness, storage: SQLStorage) -> None:
    finished = await harness.instance(storage, status=WorkflowStatus.COMPLETED)
    moment = await storage.current_time()

    with pytest.raises(InvalidStatusTransitionError):
        await storage.register_timer_subscription(
            TimerSubscription(instance_id=finished, timer_id="t", expires_at=moment)
        )
    with pytest.raises(InstanceNotFoundError):
        await storage.register_timer_subscription(
            TimerSubscription(instance_id="nobody", timer_id="t", expires_at=moment)
        )


@pytest.mark.parametrize(
    "fields", [{"timer_id": ""}, {"timer_id": "x" * 256}, {"activity_id": ""}, {"instance_id": "a\0"}]
)
async def test_a_timer_needs_proper_keys(harness: Harness, storage: SQLStorage, fields: dict[str, Any]) -> None:
    instance_id = await harness.instance(storage)
    moment = await storage.current_time()
    given: dict[str, Any] = {"instance_id": instance_id, "timer_id": "t", "expires_at": moment, **fields}
    timer = TimerSubscription(**given)

    with pytest.raises(InvalidKeyError):
        await storage.register_timer_subscription(timer)
    with pytest.raises(InvalidKeyError):
        await storage.fire_timer(timer, worker_id="worker-1")


async def test_a_timer_needs_a_moment_that_knows_its_zone(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)

    with pytest.raises(ValueError, match="zone"):
        await storage.register_timer_subscription(
            TimerSubscription(instance_id=instance_id, timer_id="t", expires_at=datetime(2030, 1, 1))
        )


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2100, 2, 28, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(2038, 1, 19, 3, 14, 8, tzinfo=UTC),
        datetime(2030, 7, 1, 12, 0, 0, 1, tzinfo=timezone(timedelta(hours=9))),
    ],
)
async def test_far_moments_are_kept_exactly_and_do_not_fire_early(
    harness: Harness, storage: SQLStorage, moment: datetime
) -> None:
    lock = await harness.locked(storage)
    timer = TimerSubscription(instance_id=lock.instance_id, timer_id="t", expires_at=moment)

    assert await storage.suspend(lock.instance_id, [timer], lock=lock) == []
    assert await due(storage) == []

    harness.advance(seconds=(moment - await storage.current_time()).total_seconds() + 1)
    [found] = await storage.find_expired_timers()
    assert found.expires_at == moment


async def test_timers_are_found_oldest_first_up_to_the_limit(harness: Harness, storage: SQLStorage) -> None:
    timers = [await sleeper(harness, storage, seconds) for seconds in (3, 1, 2)]
    harness.advance(seconds=10)

    assert await due(storage, limit=2) == [timers[1].instance_id, timers[2].instance_id]
    assert len(await due(storage, limit=0)) == 3
    with pytest.raises(ValueError, match="limit"):
        await storage.find_expired_timers(-1)


async def test_timers_are_found_for_the_workflows_and_services_asked_for(harness: Harness, storage: SQLStorage) -> None:
    for _ in range(3):
        await sleeper(harness, await harness.open(framework="elsewhere"), 1, workflow_name="mine")
    theirs = await sleeper(harness, storage, 2, workflow_name="theirs", owner_service="there")
    parked = await sleeper(harness, storage, 3, workflow_name="mine")
    mine = await sleeper(harness, storage, 4, workflow_name="mine", owner_service="here")
    await storage.park(parked.instance_id, "later")
    harness.advance(seconds=10)

    assert await due(storage, limit=1, workflow_names=["mine"]) == [mine.instance_id]
    assert await due(storage, limit=1, owner_service="here") == [mine.instance_id]
    assert await due(storage, workflow_names=[]) == []
    assert await due(storage) == [theirs.instance_id, mine.instance_id]
    await storage.unpark(parked.instance_id)
    assert await due(storage, workflow_names=["mine"]) == [parked.instance_id, mine.instance_id]


async def test_a_removed_timer_does_not_fire(harness: Harness, storage: SQLStorage) -> None:
    timer = await sleeper(harness, storage, 10)
    harness.advance(seconds=11)

    for _ in range(2):
        await storage.remove_timer_subscription(timer.instance_id, "sleep:1")

    assert await due(storage) == []
    assert not await storage.fire_timer(timer, worker_id="worker-1")
    assert await history_of(storage, timer.instance_id) == []


@pytest.mark.parametrize("suspended_from", [WorkflowStatus.RUNNING, WorkflowStatus.COMPENSATING])
async def test_removing_the_last_thing_it_waits_for_lets_an_instance_run_again(
    harness: Harness, storage: SQLStorage, suspended_from: WorkflowStatus
) -> None:
    lock = await harness.locked(storage, status=suspended_from)
    later = await storage.current_time() + timedelta(hours=1)
    timers = [TimerSubscription(lock.instance_id, name, later) for name in ("sleep:1", "sleep:2")]
    await storage.suspend(lock.instance_id, timers, lock=lock)

    await storage.remove_timer_subscription(lock.instance_id, "sleep:1")
    assert await storage.find_resumable_workflows() == []
    await storage.remove_timer_subscription(lock.instance_id, "sleep:2")

    assert [found.instance_id for found in await storage.find_resumable_workflows()] == [lock.instance_id]
    instance = await storage.get_instance(lock.instance_id)
    assert instance is not None
    assert instance.status == suspended_from


async def test_each_timer_of_an_instance_fires_by_itself(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    now = await storage.current_time()
    timers = [
        TimerSubscription(instance_id=lock.instance_id, timer_id=name, expires_at=now + timedelta(seconds=seconds))
        for name, seconds in [("T", 20), ("t", 10), ("t ", 30)]
    ]
    assert await storage.suspend(lock.instance_id, timers, lock=lock) == []

    harness.advance(seconds=11)
    [found] = await storage.find_expired_timers()
    assert await storage.fire_timer(found, worker_id="worker-1")

    assert [event.activity_id for event in await history_of(storage, lock.instance_id)] == ["t"]
    harness.advance(seconds=100)
    assert await due(storage) == []  # it runs; the others stay for when it waits again
    again = await storage.try_acquire_lock(lock.instance_id, "worker-1", 30)
    assert again is not None
    events = await storage.suspend(lock.instance_id, timers, lock=again)
    assert [event.activity_id for event in events] == ["T", "t", "t "]
