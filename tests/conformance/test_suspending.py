"""Suspending: an instance waits for several things at once; what happens first wakes it, once."""

import asyncio
import json
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
from msgspec.structs import replace

from romancy.storage import (
    ChannelWait,
    HistoryEvent,
    InstanceNotFoundError,
    InstanceWait,
    InvalidKeyError,
    InvalidStatusTransitionError,
    Lock,
    LockLostError,
    NotSubscribedError,
    SQLStorage,
    TimerSubscription,
    WorkflowStatus,
)
from romancy.storage.models import Wait
from tests.conformance.arrange import (
    BROADCAST,
    COMPETING,
    Crash,
    another,
    crash_before_statement,
    data_pending,
    deliver,
    found,
    is_blocked,
    lock_of,
    publish,
    received,
    status_of,
    subscriber,
)
from tests.conformance.neighbours import row
from tests.harness import Harness, contents, history_of, step

FREE = (None, None, None)


async def timer(storage: SQLStorage, instance_id: str, seconds: float = 10, name: str = "sleep:1") -> TimerSubscription:
    moment = await storage.current_time() + timedelta(seconds=seconds)
    return TimerSubscription(instance_id=instance_id, timer_id=name, expires_at=moment)


async def three_waits(harness: Harness, storage: SQLStorage, **fields: Any) -> tuple[Lock, list[Wait], str]:
    """An instance that is about to wait for a timer, a message and another instance; its waits, the other's id."""
    lock = await subscriber(harness, storage, **fields)
    child = await harness.instance(storage)
    waits: list[Wait] = [
        await timer(storage, lock.instance_id),
        ChannelWait("orders", "receive:1"),
        InstanceWait(child, "child:1"),
    ]
    return lock, waits, child


async def happen(harness: Harness, storage: SQLStorage, what: str, instance_id: str, child: str) -> None:
    """Let one of the three things happen that the instance waits for."""
    if what == "timer":
        harness.advance(seconds=11)
        for due in await storage.find_expired_timers():
            await storage.fire_timer(due, worker_id="worker-1")
    elif what == "message":
        await publish(storage)
        await deliver(storage, instance_id)
    else:
        await storage.update_instance_output(child, "1")


def steps(events: list[HistoryEvent]) -> list[tuple[str, str]]:
    return [(event.activity_id, str(event.event_type)) for event in events]


RECORDED = {
    "timer": ("sleep:1", "TimerExpired"),
    "message": ("receive:1", "ChannelMessageReceived"),
    "instance": ("child:1", "InstanceFinished"),
}
WAITS_LEFT = """
    SELECT (SELECT COUNT(*) FROM workflow_timer_subscriptions), (SELECT COUNT(*) FROM romancy_channel_waits),
           (SELECT COUNT(*) FROM romancy_instance_waits)"""


# Waiting.


async def test_an_instance_can_wait_for_several_things_at_once(harness: Harness, storage: SQLStorage) -> None:
    lock, waits, _ = await three_waits(harness, storage)

    assert await storage.suspend(lock.instance_id, waits, lock=lock) == []

    assert await status_of(storage, lock.instance_id) == WorkflowStatus.WAITING_FOR_MESSAGE
    assert await lock_of(storage, lock.instance_id) == FREE
    assert await row(storage, WAITS_LEFT) == (1, 1, 1)


async def test_awaited_steps_are_told_in_the_order_of_their_bytes(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    child = await harness.instance(storage)
    waits = [
        InstanceWait(child, "b"),
        ChannelWait("orders", "é"),
        await timer(storage, lock.instance_id, name="B"),
        await timer(storage, lock.instance_id, name="a "),
        InstanceWait(child, "a"),
    ]
    await storage.suspend(lock.instance_id, waits, lock=lock)

    assert await storage.get_awaited_steps(lock.instance_id) == ["B", "a", "a ", "b", "é"]


async def test_waits_are_told_as_they_were_registered_in_the_order_of_their_steps(
    harness: Harness, storage: SQLStorage
) -> None:
    lock, [sleep, message, child], _ = await three_waits(harness, storage)
    assert isinstance(sleep, TimerSubscription)
    until = await storage.current_time() + timedelta(hours=1)
    late = ChannelWait("orders", "receive:2", timeout_at=until)
    renamed = TimerSubscription(lock.instance_id, "z", sleep.expires_at, activity_id="charge:1")
    await storage.suspend(lock.instance_id, [sleep, late, message, child, renamed], lock=lock)

    waits = await storage.get_waits(lock.instance_id)

    assert [registered(wait) for wait in waits] == [renamed, child, message, late, sleep]
    assert await storage.get_waits("nobody") == []


def registered(wait: Wait) -> Wait:
    """A wait without what only its row has."""
    return replace(wait, id=None, created_at=None) if isinstance(wait, TimerSubscription) else wait


@pytest.mark.parametrize(
    ("position", "status"),
    [
        (0, WorkflowStatus.WAITING_FOR_TIMER),
        (1, WorkflowStatus.WAITING_FOR_MESSAGE),
        (2, WorkflowStatus.WAITING_FOR_EVENT),
    ],
)
async def test_the_status_tells_what_is_waited_for(
    harness: Harness, storage: SQLStorage, position: int, status: WorkflowStatus
) -> None:
    lock, waits, _ = await three_waits(harness, storage)

    assert await storage.suspend(lock.instance_id, [waits[position]], lock=lock) == []

    assert await status_of(storage, lock.instance_id) == status


@pytest.mark.parametrize("suspended_from", [WorkflowStatus.RUNNING, WorkflowStatus.COMPENSATING])
@pytest.mark.parametrize("first", ["timer", "message", "instance"])
async def test_what_happens_first_wakes_the_instance_and_the_other_waits_stay(
    harness: Harness, storage: SQLStorage, first: str, suspended_from: WorkflowStatus
) -> None:
    lock, waits, child = await three_waits(harness, storage, status=suspended_from)
    await storage.suspend(lock.instance_id, waits, lock=lock)

    await happen(harness, storage, first, lock.instance_id, child)

    assert steps(await history_of(storage, lock.instance_id)) == [RECORDED[first]]
    assert await status_of(storage, lock.instance_id) == suspended_from
    assert await lock_of(storage, lock.instance_id) == FREE
    left = await row(storage, WAITS_LEFT)
    assert left == tuple(int(what != first) for what in ("timer", "message", "instance"))


@pytest.mark.parametrize(("first", "second"), list(permutations(["timer", "message", "instance"], 2)))
async def test_what_happens_while_the_instance_runs_is_due_at_its_next_suspend(
    harness: Harness, storage: SQLStorage, first: str, second: str
) -> None:
    lock, waits, child = await three_waits(harness, storage)
    await storage.suspend(lock.instance_id, waits, lock=lock)
    await happen(harness, storage, first, lock.instance_id, child)

    await happen(harness, storage, second, lock.instance_id, child)
    assert steps(await history_of(storage, lock.instance_id)) == [RECORDED[first]]

    again = await storage.try_acquire_lock(lock.instance_id, "worker-1", 30)
    assert again is not None
    rest = [wait for wait, what in zip(waits, RECORDED, strict=True) if what != first]
    assert steps(await storage.suspend(lock.instance_id, rest, lock=again)) == [RECORDED[second]]


@pytest.mark.parametrize("second", ["timer", "message"])
async def test_a_wait_that_stayed_wakes_the_instance_when_it_waits_for_something_else(
    harness: Harness, storage: SQLStorage, second: str
) -> None:
    lock, waits, child = await three_waits(harness, storage)
    await storage.suspend(lock.instance_id, waits, lock=lock)
    await happen(harness, storage, "instance", lock.instance_id, child)
    again = await storage.try_acquire_lock(lock.instance_id, "worker-1", 30)
    assert again is not None
    await storage.suspend(lock.instance_id, [await timer(storage, lock.instance_id, 86400, "long")], lock=again)

    await happen(harness, storage, second, lock.instance_id, child)

    assert steps(await history_of(storage, lock.instance_id)) == [RECORDED["instance"], RECORDED[second]]
    assert await status_of(storage, lock.instance_id) == WorkflowStatus.RUNNING


async def test_waits_on_two_channels_are_served_each_by_its_own(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage, "b")
    await storage.subscribe_to_channel(lock.instance_id, "a", COMPETING)
    waits = [ChannelWait("b", "receive-b"), ChannelWait("a", "receive-a")]
    await storage.suspend(lock.instance_id, waits, lock=lock)

    await publish(storage, "1", "a")

    [subscription] = await storage.find_deliverable_subscriptions()
    assert (subscription.channel, subscription.activity_id) == ("a", "receive-a")
    assert await deliver(storage, lock.instance_id, "b") is None
    assert await deliver(storage, lock.instance_id, "a") is not None
    assert await row(storage, WAITS_LEFT) == (0, 1, 0)


# What is due already.


async def test_what_is_due_already_is_recorded_and_returned_and_nothing_is_waited_for(
    harness: Harness, storage: SQLStorage
) -> None:
    lock, waits, child = await three_waits(harness, storage)
    other = await harness.instance(storage)
    await publish(storage, '{"n": 1}')
    await storage.update_instance_output(child, "1")
    overdue = await timer(storage, lock.instance_id, -1, "overdue")

    events = await storage.suspend(
        lock.instance_id, [waits[2], InstanceWait(other, "other:1"), waits[0], waits[1], overdue], lock=lock
    )

    assert steps(events) == [RECORDED["instance"], RECORDED["message"], ("overdue", "TimerExpired")]
    assert sorted(events, key=lambda event: event.id or 0) == await history_of(storage, lock.instance_id)
    assert await received(storage, lock.instance_id) == [{"n": 1}]
    assert await row(storage, WAITS_LEFT) == (0, 0, 0)
    assert await status_of(storage, lock.instance_id) == WorkflowStatus.RUNNING
    await storage.update_instance_activity(lock.instance_id, "next:1", lock=lock)  # the lock is still ours


async def test_one_message_is_taken_and_only_if_nothing_else_is_due(harness: Harness, storage: SQLStorage) -> None:
    lock, waits, child = await three_waits(harness, storage)
    await storage.subscribe_to_channel(lock.instance_id, "second", BROADCAST)
    await publish(storage, '{"n": 1}')
    await storage.publish_to_channel("second", "2")
    await storage.update_instance_output(child, "1")
    waits.append(ChannelWait("second", "receive_second:1"))

    async def due() -> list[str]:
        events = await storage.suspend(lock.instance_id, waits, lock=lock, one_message=True)
        left = {event.activity_id for event in events}
        waits[:] = [wait for wait in waits if isinstance(wait, TimerSubscription) or wait.activity_id not in left]
        return [event.activity_id for event in events]

    assert [await due(), await due(), await due()] == [
        [RECORDED["instance"][0]],
        [RECORDED["message"][0]],
        ["receive_second:1"],
    ]
    assert await due() == []
    assert await status_of(storage, lock.instance_id) == WorkflowStatus.WAITING_FOR_TIMER


@pytest.mark.parametrize("keep_lock", [False, True])
async def test_a_run_that_was_cancelled_meanwhile_receives_nothing_any_more(
    harness: Harness, storage: SQLStorage, keep_lock: bool
) -> None:
    lock, waits, _ = await three_waits(harness, storage)
    await publish(storage)
    await storage.cancel_instance(lock.instance_id, "enough", compensate=True)
    before = await contents(storage)

    with pytest.raises(InvalidStatusTransitionError):
        await storage.suspend(lock.instance_id, waits, lock=lock, keep_lock=keep_lock, only_running=True)

    assert await contents(storage) == before


async def test_steps_that_have_happened_are_returned_as_they_stand(harness: Harness, storage: SQLStorage) -> None:
    lock, waits, child = await three_waits(harness, storage)
    for what, (activity_id, _) in RECORDED.items():
        await storage.append_history(step(lock.instance_id, activity_id, json.dumps(what)), lock=lock)
    await publish(storage)
    await storage.update_instance_output(child, "1")

    events = await storage.suspend(lock.instance_id, waits, lock=lock)

    assert [event.event_data for event in events] == ['"timer"', '"message"', '"instance"']
    assert await data_pending(storage, lock.instance_id) == [1]


async def test_a_timeout_that_has_passed_is_due_unless_there_is_a_message(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await subscriber(harness, storage)
    await storage.subscribe_to_channel(lock.instance_id, "quiet", COMPETING)
    past = await storage.current_time() - timedelta(seconds=1)
    await publish(storage)

    events = await storage.suspend(
        lock.instance_id, [ChannelWait("orders", "receive:1", past), ChannelWait("quiet", "receive:2", past)], lock=lock
    )

    assert steps(events) == [("receive:1", "ChannelMessageReceived"), ("receive:2", "MessageTimeout")]
    told = json.loads(events[1].event_data or "")
    assert (told["channel"], told["timeout_at"]) == ("quiet", past.isoformat(timespec="microseconds"))


async def test_a_wait_with_a_timeout_expires(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    timeout_at = await storage.current_time() + timedelta(seconds=10)
    await storage.suspend(lock.instance_id, [ChannelWait("orders", "receive:1", timeout_at)], lock=lock)
    harness.advance(seconds=11)

    [expired] = await storage.find_expired_channel_subscriptions()
    assert await storage.expire_channel_receive(expired)

    assert steps(await history_of(storage, lock.instance_id)) == [("receive:1", "MessageTimeout")]


async def test_suspending_again_keeps_the_first_expiry_and_the_first_timeout(
    harness: Harness, storage: SQLStorage
) -> None:
    lock, _, child = await three_waits(harness, storage)
    now = await storage.current_time()

    async def suspend(lock: Lock, seconds: int) -> None:
        moment = now + timedelta(seconds=seconds)
        await storage.suspend(
            lock.instance_id,
            [
                TimerSubscription(instance_id=lock.instance_id, timer_id="sleep:1", expires_at=moment),
                ChannelWait("orders", "receive:1", moment),
                InstanceWait(child, "child:1"),
            ],
            lock=lock,
        )

    await suspend(lock, 10)
    await storage.update_instance_output(child, None)
    again = await storage.try_acquire_lock(lock.instance_id, "worker-1", 30)
    assert again is not None
    child = await harness.instance(storage)
    await suspend(again, 3600)
    harness.advance(seconds=11)

    assert len(await storage.find_expired_timers()) == 1
    assert len(await storage.find_expired_channel_subscriptions()) == 1


async def test_keeping_the_lock_only_asks_what_is_due(harness: Harness, storage: SQLStorage) -> None:
    lock, waits, _ = await three_waits(harness, storage)
    before = await contents(storage)

    assert await storage.suspend(lock.instance_id, waits, lock=lock, keep_lock=True) == []
    after = await contents(storage)
    assert {table for table in after if after[table] != before[table]} <= {"romancy_channels"}

    await publish(storage)
    events = await storage.suspend(lock.instance_id, waits, lock=lock, keep_lock=True)
    assert steps(events) == [RECORDED["message"]]
    await storage.update_instance_activity(lock.instance_id, "next:1", lock=lock)


# Waiting for another instance.


ENDINGS = pytest.mark.parametrize(
    ("end", "status"),
    [
        ("output", "completed"),
        ("completed", "completed"),
        ("failed", "failed"),
        ("cancelled", "cancelled"),
        ("cancel", "cancelled"),
    ],
)


async def finish(storage: SQLStorage, instance_id: str, end: str) -> None:
    if end == "output":
        await storage.update_instance_output(instance_id, "1")
    elif end == "cancel":
        await storage.cancel_instance(instance_id, "no more")
    else:
        await storage.update_instance_status(instance_id, WorkflowStatus(end))


@ENDINGS
async def test_however_the_other_instance_ends_the_waiter_is_told(
    harness: Harness, storage: SQLStorage, end: str, status: str
) -> None:
    child = await harness.instance(storage)
    waiters = [await harness.locked(storage) for _ in range(2)]
    for lock in waiters:
        await storage.suspend(lock.instance_id, [InstanceWait(child, "child:1")], lock=lock)

    await finish(storage, child, end)

    for lock in waiters:
        [event] = await history_of(storage, lock.instance_id)
        assert (event.event_type, event.activity_id) == ("InstanceFinished", "child:1")
        assert json.loads(event.event_data or "") == {"instance_id": child, "status": status}
        assert await status_of(storage, lock.instance_id) == WorkflowStatus.RUNNING
    assert await row(storage, WAITS_LEFT) == (0, 0, 0)


@ENDINGS
async def test_an_instance_that_has_ended_is_not_waited_for(
    harness: Harness, storage: SQLStorage, end: str, status: str
) -> None:
    child = await harness.instance(storage)
    await finish(storage, child, end)
    lock = await harness.locked(storage)

    [event] = await storage.suspend(lock.instance_id, [InstanceWait(child, "child:1")], lock=lock)

    assert json.loads(event.event_data or "") == {"instance_id": child, "status": status}
    assert await status_of(storage, lock.instance_id) == WorkflowStatus.RUNNING


async def test_an_instance_that_is_being_compensated_has_not_ended(harness: Harness, storage: SQLStorage) -> None:
    child = await harness.instance(storage)
    lock = await harness.locked(storage)
    await storage.suspend(lock.instance_id, [InstanceWait(child, "child:1")], lock=lock)

    await storage.cancel_instance(child, "no more", compensate=True)

    assert await status_of(storage, lock.instance_id) == WorkflowStatus.WAITING_FOR_EVENT


async def test_an_instance_that_is_just_ending_is_waited_for_no_longer(harness: Harness, storage: SQLStorage) -> None:
    child = await harness.instance(storage)
    lock = await harness.locked(storage)
    other = await another(harness)
    async with other.transaction():
        await other.update_instance_output(child, "1")
        suspending = asyncio.create_task(storage.suspend(lock.instance_id, [InstanceWait(child, "child:1")], lock=lock))
        assert await is_blocked(suspending)

    assert steps(await suspending) == [RECORDED["instance"]]


async def test_a_waiter_that_is_just_suspending_is_woken(harness: Harness, storage: SQLStorage) -> None:
    child = await harness.instance(storage)
    lock = await harness.locked(storage)
    other = await another(harness)
    async with storage.transaction():
        assert await storage.suspend(lock.instance_id, [InstanceWait(child, "child:1")], lock=lock) == []
        ending = asyncio.create_task(other.update_instance_output(child, "1"))
        assert await is_blocked(ending)
    await ending

    assert steps(await history_of(storage, lock.instance_id)) == [RECORDED["instance"]]
    assert await status_of(storage, lock.instance_id) == WorkflowStatus.RUNNING


async def test_two_instances_cannot_wait_for_each_other_and_miss_the_end(harness: Harness, storage: SQLStorage) -> None:
    one, two = await harness.locked(storage), await harness.locked(storage)
    rival = await another(harness)

    await asyncio.gather(
        storage.suspend(one.instance_id, [InstanceWait(two.instance_id, "two")], lock=one),
        rival.suspend(two.instance_id, [InstanceWait(one.instance_id, "one")], lock=two),
    )
    await storage.cancel_instance(one.instance_id, "enough")

    assert steps(await history_of(storage, two.instance_id)) == [("one", "InstanceFinished")]


async def test_a_waiter_that_somebody_holds_keeps_its_lock_when_it_is_told(
    harness: Harness, storage: SQLStorage
) -> None:
    child = await harness.instance(storage)
    lock = await harness.locked(storage)
    await storage.suspend(lock.instance_id, [InstanceWait(child, "child:1")], lock=lock)
    holder = await storage.try_acquire_lock(lock.instance_id, "worker-2", 30)

    await storage.update_instance_output(child, "1")

    assert await status_of(storage, lock.instance_id) == WorkflowStatus.RUNNING
    await storage.update_instance_activity(lock.instance_id, "next:1", lock=holder)


async def test_a_waiter_that_was_cancelled_is_not_revived(harness: Harness, storage: SQLStorage) -> None:
    child = await harness.instance(storage)
    lock = await harness.locked(storage)
    await storage.suspend(lock.instance_id, [InstanceWait(child, "child:1")], lock=lock)
    await storage.cancel_instance(lock.instance_id, "no more")

    await storage.update_instance_output(child, "1")

    assert await status_of(storage, lock.instance_id) == WorkflowStatus.CANCELLED
    assert steps(await history_of(storage, lock.instance_id)) == [("workflow_cancelled", "WorkflowCancelled")]


# What is refused.


async def test_a_lost_lock_suspends_nothing(harness: Harness, storage: SQLStorage) -> None:
    lock, waits, _ = await three_waits(harness, storage)
    harness.advance(seconds=31)
    await storage.try_acquire_lock(lock.instance_id, "worker-2", 30)
    before = await contents(storage)

    with pytest.raises(LockLostError):
        await storage.suspend(lock.instance_id, waits, lock=lock)

    assert await contents(storage) == before


async def test_what_cannot_be_waited_for_leaves_everything_as_it_was(harness: Harness, storage: SQLStorage) -> None:
    lock = await subscriber(harness, storage)
    overdue = await timer(storage, lock.instance_id, -1)
    foreign = await timer(storage, "somebody-else")
    before = await contents(storage)

    refused: list[tuple[list[Wait], type[Exception]]] = [
        ([], ValueError),
        ([overdue, InstanceWait("nobody", "child:1")], InstanceNotFoundError),
        ([overdue, ChannelWait("unheard", "receive:1")], NotSubscribedError),
        ([overdue, foreign], ValueError),
        ([overdue, ChannelWait("", "receive:1")], InvalidKeyError),
        ([overdue, ChannelWait("orders", "")], InvalidKeyError),
        ([overdue, InstanceWait("x" * 256, "child:1")], InvalidKeyError),
    ]
    for waiting, error in refused:
        with pytest.raises(error):
            await storage.suspend(lock.instance_id, waiting, lock=lock)

    assert await contents(storage) == before


async def test_an_instance_that_waits_cannot_be_suspended(harness: Harness, storage: SQLStorage) -> None:
    lock, waits, _ = await three_waits(harness, storage)
    await storage.suspend(lock.instance_id, waits, lock=lock)
    again = await storage.try_acquire_lock(lock.instance_id, "worker-1", 30)
    assert again is not None

    with pytest.raises(InvalidStatusTransitionError):
        await storage.suspend(lock.instance_id, waits, lock=again)


@pytest.mark.parametrize("due", [False, True])
async def test_a_crash_anywhere_while_suspending_leaves_the_instance_running(
    harness: Harness, storage: SQLStorage, due: bool
) -> None:
    lock, waits, child = await three_waits(harness, storage)
    if due:
        await publish(storage)
        await storage.update_instance_output(child, "1")
    before = await contents(storage)

    for statement in range(100):
        storage.runner.probe = crash_before_statement(statement, "suspend")
        try:
            events = await storage.suspend(lock.instance_id, waits, lock=lock)
            break
        except Crash:
            storage.runner.probe = None
            assert await contents(storage) == before
    else:
        raise AssertionError("it never came through")

    assert len(events) == (2 if due else 0)
    assert statement > 8
    assert await found(storage) == []
