"""Instances: created once, with all they are given, and finished for good."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from romancy.storage import (
    ChannelMode,
    InstanceExistsError,
    InstanceNotFoundError,
    InvalidStatusTransitionError,
    LockLostError,
    SQLStorage,
    TimerSubscription,
    WorkflowInstance,
    WorkflowNotCancellableError,
    WorkflowStatus,
)
from romancy.storage.models import CANCELLABLE, FINISHED, WAITING
from tests.harness import Harness, contents, history_of, step

LATER = datetime(2042, 1, 1, tzinfo=UTC)


async def stored(storage: SQLStorage, instance_id: str) -> WorkflowInstance:
    instance = await storage.get_instance(instance_id)
    assert instance is not None
    return instance


async def with_everything(harness: Harness, storage: SQLStorage) -> str:
    """A waiting instance that has a row in every table that an instance can have rows in."""
    lock = await harness.locked(storage)
    instance_id = lock.instance_id
    await storage.join_group(instance_id, "riders")
    await storage.subscribe_to_channel(instance_id, "news", ChannelMode.BROADCAST)
    await storage.update_delivery_cursor(instance_id, "news", await publish(storage, "news"))
    await storage.subscribe_to_channel(instance_id, "jobs", ChannelMode.COMPETING)
    await storage.claim_channel_message(await publish(storage, "jobs"), instance_id)
    await storage.register_timer_subscription(TimerSubscription(instance_id, "nap", LATER))
    await storage.register_channel_receive_and_release_lock(instance_id, "news", "worker-1", "receive:1", LATER)
    return instance_id


async def publish(storage: SQLStorage, channel: str) -> int:
    published = await storage.publish_to_channel(channel, "{}")
    assert isinstance(published, int)
    return published


# Creating and reading.


async def test_every_field_given_at_creation_is_stored(harness: Harness, storage: SQLStorage) -> None:
    parent = await harness.instance(storage)
    given = WorkflowInstance(
        instance_id="all-fields",
        workflow_name="fulfil",
        framework="python",
        status=WorkflowStatus.WAITING_FOR_EVENT,
        input_data='{"z": 1, "a": 9007199254740993}',
        output_data='{"so": "far"}',
        current_activity_id="pack:3",
        source_hash="c0ffee",
        owner_service="orders",
        continued_from=parent,
        locked_by="worker-1",
        locked_at=datetime(2024, 2, 29, 12, 0, 0, 123456, UTC),
        lock_timeout_seconds=77,
        lock_expires_at=datetime(2044, 2, 29, 12, 0, 0, 654321, UTC),
        lock_token=4,
        started_at=datetime(2024, 2, 28, 1, 2, 3, 4, UTC),
        updated_at=datetime(2024, 2, 28, 5, 6, 7, 8, UTC),
    )
    await storage.create_instance(given)

    # Being born locked is an acquisition, and each of them draws one token.
    assert await stored(storage, "all-fields") == msgspec.structs.replace(given, lock_token=5)


async def test_what_is_left_out_at_creation_has_sensible_values(harness: Harness, storage: SQLStorage) -> None:
    before = await storage.current_time()
    await storage.create_instance(WorkflowInstance(instance_id="plain", workflow_name="order"))

    instance = await stored(storage, "plain")
    assert (instance.status, instance.framework, instance.input_data) == (WorkflowStatus.RUNNING, "romancy-py", "{}")
    assert (instance.locked_by, instance.lock_expires_at, instance.lock_token) == (None, None, 0)
    assert instance.started_at is not None
    assert before <= instance.started_at <= await storage.current_time()


async def test_an_instance_belongs_to_the_framework_of_the_storage(harness: Harness) -> None:
    storage = await harness.open(framework="python")
    instance_id = await harness.instance(storage)
    assert (await stored(storage, instance_id)).framework == "python"


async def test_an_unknown_instance_is_none(storage: SQLStorage) -> None:
    assert await storage.get_instance("nobody") is None


async def test_an_instance_comes_with_its_definition(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, workflow_name="fulfil", source_hash="c0ffee")
    await harness.instance(storage, workflow_name="fulfil", source_hash="c0ffee")

    definitions = await storage.conn().fetch_all("SELECT workflow_name, source_hash FROM workflow_definitions")
    assert [tuple(row) for row in definitions] == [("fulfil", "c0ffee")]


async def test_an_instance_id_is_taken_once(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage, input_data='{"first": true}')
    before = await contents(storage)

    with pytest.raises(InstanceExistsError) as refused:
        await harness.instance(storage, instance_id=instance_id, workflow_name="another", locked_by="worker-2")

    assert refused.value.instance_id == instance_id
    assert await contents(storage) == before


async def test_an_instance_cannot_continue_an_unknown_one(harness: Harness, storage: SQLStorage) -> None:
    before = await contents(storage)
    with pytest.raises(InstanceNotFoundError):
        await harness.instance(storage, continued_from="nobody")
    assert await contents(storage) == before


async def test_a_time_without_a_zone_is_refused(harness: Harness, storage: SQLStorage) -> None:
    with pytest.raises(ValueError, match="zone"):
        await harness.instance(storage, started_at=datetime(2024, 1, 1))


async def test_times_come_back_in_utc_whatever_zone_they_were_given_in(harness: Harness, storage: SQLStorage) -> None:
    moment = datetime.fromisoformat("2024-07-01T08:00:00.000001+09:00")
    instance_id = await harness.instance(storage, started_at=moment)

    started_at = (await stored(storage, instance_id)).started_at
    assert started_at == moment
    assert started_at.tzinfo is UTC


async def test_an_instance_can_be_created_in_any_status(harness: Harness, storage: SQLStorage) -> None:
    for status in WorkflowStatus:
        instance_id = await harness.instance(storage, status=status)
        assert (await stored(storage, instance_id)).status is status


async def test_an_instance_can_be_born_with_a_lock_that_its_owner_has_dated(storage: SQLStorage) -> None:
    await storage.create_instance(WorkflowInstance("first", "fulfil"))  # its definition is known from here on
    now = await storage.current_time()
    dated = WorkflowInstance(
        "order", "fulfil", locked_by="worker-1", locked_at=now, lock_expires_at=now + timedelta(seconds=30)
    )
    lock = await storage.create_instance(dated)

    assert lock is not None
    order = await stored(storage, "order")
    assert (order.locked_by, order.locked_at, order.lock_expires_at) == ("worker-1", now, lock.expires_at)
    assert lock.expires_at == now + timedelta(seconds=30)
    assert (lock.token, order.lock_token) == (1, 1)
    await storage.append_history(step("order"), lock=lock)
    with pytest.raises(InstanceExistsError):
        await storage.create_instance(dated)


async def test_an_instance_born_locked_is_owned_at_once(harness: Harness, storage: SQLStorage) -> None:
    before = await storage.current_time()
    instance = WorkflowInstance(instance_id="mine", workflow_name="order", locked_by="worker-1")
    lock = await storage.create_instance(instance, lock_timeout_sec=30)

    assert lock is not None
    assert (lock.instance_id, lock.worker_id, lock.token) == ("mine", "worker-1", 1)
    assert timedelta(0) <= lock.expires_at - before - timedelta(seconds=30) < timedelta(seconds=5)
    assert await storage.try_acquire_lock("mine", "worker-2", 30) is None
    await storage.append_history(step("mine"), lock=lock)


async def test_the_instances_own_lock_timeout_beats_the_callers_at_birth(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage, lock_timeout_seconds=300)
    harness.advance(seconds=200)
    assert await storage.try_acquire_lock(lock.instance_id, "worker-2", 30) is None


async def test_the_database_has_the_only_clock(harness: Harness, storage: SQLStorage) -> None:
    first = await storage.current_time()
    harness.advance(seconds=3600)
    second = await storage.current_time()

    assert first.tzinfo is UTC
    assert abs(datetime.now(UTC) - first) < timedelta(seconds=10)
    assert timedelta(seconds=3600) <= second - first < timedelta(seconds=3610)


# Status.


async def test_a_running_instance_can_take_any_status_but_recurred(harness: Harness, storage: SQLStorage) -> None:
    for target in WorkflowStatus:
        if target is not WorkflowStatus.RECURRED:
            instance_id = await harness.instance(storage)
            await storage.update_instance_status(instance_id, target)
            assert (await stored(storage, instance_id)).status is target


@pytest.mark.parametrize("status", FINISHED)
async def test_no_status_update_brings_a_finished_instance_back(
    harness: Harness, storage: SQLStorage, status: WorkflowStatus
) -> None:
    instance_id = await harness.instance(storage)
    await storage.update_instance_status(instance_id, status)
    before = await contents(storage)

    for target in WorkflowStatus:
        with pytest.raises(InvalidStatusTransitionError) as refused:
            await storage.update_instance_status(instance_id, target, "late", output_data="{}")
        assert (refused.value.status, refused.value.target) == (status, target)

    assert await contents(storage) == before


@pytest.mark.parametrize("status", FINISHED)
async def test_a_finished_instance_is_written_by_nobody(
    harness: Harness, storage: SQLStorage, status: WorkflowStatus
) -> None:
    instance_id = await harness.instance(storage)
    await storage.update_instance_status(instance_id, status)
    before = await contents(storage)

    with pytest.raises(InvalidStatusTransitionError):
        await storage.update_instance_output(instance_id, '{"late": true}')
    with pytest.raises(InvalidStatusTransitionError):
        await storage.update_instance_activity(instance_id, "late:1")
    with pytest.raises(InvalidStatusTransitionError):
        await storage.park(instance_id, "late")
    with pytest.raises(WorkflowNotCancellableError):
        await storage.cancel_instance(instance_id, "late")
    assert await storage.try_acquire_lock(instance_id, "worker-1", 30) is None

    assert await contents(storage) == before


async def test_compensating_leads_only_to_an_end(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage, status=WorkflowStatus.COMPENSATING)
    for target in (WorkflowStatus.RUNNING, WorkflowStatus.COMPLETED):
        with pytest.raises(InvalidStatusTransitionError):
            await storage.update_instance_status(instance_id, target)
    with pytest.raises(InvalidStatusTransitionError):
        await storage.update_instance_output(instance_id, "{}")
    await storage.update_instance_status(instance_id, WorkflowStatus.FAILED)
    assert (await stored(storage, instance_id)).status is WorkflowStatus.FAILED


async def test_recurred_is_read_but_never_written(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    with pytest.raises(InvalidStatusTransitionError):
        await storage.update_instance_status(instance_id, WorkflowStatus.RECURRED)


async def test_a_status_that_does_not_exist_is_refused(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    with pytest.raises(ValueError, match="pending"):
        await storage.update_instance_status(instance_id, "pending")  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [WorkflowStatus.FAILED, WorkflowStatus.COMPENSATING])
async def test_an_error_message_becomes_history(harness: Harness, storage: SQLStorage, status: WorkflowStatus) -> None:
    instance_id = await harness.instance(storage)
    await storage.update_instance_status(instance_id, status, 'card "declined"\n')

    (event,) = await history_of(storage, instance_id)
    assert event.event_type == "WorkflowFailed"
    assert msgspec.json.decode(event.event_data or "")["error_message"] == 'card "declined"\n'


async def test_an_error_message_is_recorded_once(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.update_instance_status(instance_id, WorkflowStatus.COMPENSATING, "declined")
    await storage.update_instance_status(instance_id, WorkflowStatus.FAILED, "declined, and undone")

    (event,) = await history_of(storage, instance_id)
    assert msgspec.json.decode(event.event_data or "")["error_message"] == "declined"


async def test_without_an_error_message_nothing_is_recorded(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.update_instance_status(instance_id, WorkflowStatus.COMPENSATING)
    await storage.update_instance_status(instance_id, WorkflowStatus.FAILED)
    assert await history_of(storage, instance_id) == []


async def test_a_message_with_another_status_is_not_recorded(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.update_instance_status(instance_id, WorkflowStatus.WAITING_FOR_EVENT, "just so")
    assert await history_of(storage, instance_id) == []


async def test_output_can_be_stored_with_the_status(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.update_instance_status(instance_id, WorkflowStatus.FAILED, output_data='{"partial": 1}')
    assert (await stored(storage, instance_id)).output_data == '{"partial": 1}'


async def test_completing_stores_the_output_and_frees_the_lock(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.update_instance_output(lock.instance_id, '{"result": 42}', lock=lock)

    instance = await stored(storage, lock.instance_id)
    assert (instance.status, instance.output_data) == (WorkflowStatus.COMPLETED, '{"result": 42}')
    assert (instance.locked_by, instance.locked_at, instance.lock_expires_at) == (None, None, None)


async def test_the_current_activity_is_noted(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.update_instance_activity(instance_id, "pack:1")
    assert (await stored(storage, instance_id)).current_activity_id == "pack:1"


async def test_what_is_not_there_cannot_be_updated(storage: SQLStorage) -> None:
    with pytest.raises(InstanceNotFoundError):
        await storage.update_instance_status("nobody", WorkflowStatus.FAILED)
    with pytest.raises(InstanceNotFoundError):
        await storage.update_instance_activity("nobody", "pack:1")
    with pytest.raises(InstanceNotFoundError):
        await storage.update_instance_output("nobody", "{}")
    with pytest.raises(InstanceNotFoundError):
        await storage.park("nobody", "why not")


async def test_updates_are_dated_by_the_database(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    harness.advance(seconds=3600)
    before = await storage.current_time()
    await storage.update_instance_activity(instance_id, "pack:1")
    updated_at = (await stored(storage, instance_id)).updated_at
    assert updated_at is not None
    assert before <= updated_at <= await storage.current_time()


# Ending.

LEFTOVERS = (
    "workflow_timer_subscriptions",
    "romancy_channel_waits",
    "romancy_instance_waits",
    "channel_subscriptions",
    "channel_delivery_cursors",
    "channel_message_claims",
    "romancy_receipts",
    "workflow_group_memberships",
)


@pytest.mark.parametrize("ending", ["completed", "failed", "cancelled", "output", "cancel"])
async def test_finishing_removes_all_that_could_wake_or_count_the_instance(
    harness: Harness, storage: SQLStorage, ending: str
) -> None:
    instance_id = await with_everything(harness, storage)
    match ending:
        case "output":
            await storage.update_instance_output(instance_id, "{}")
        case "cancel":
            await storage.cancel_instance(instance_id, "changed my mind")
        case _:
            await storage.update_instance_status(instance_id, WorkflowStatus(ending))

    tables = await contents(storage)
    assert {table: tables[table] for table in LEFTOVERS if tables[table]} == {}


@pytest.mark.parametrize("status", CANCELLABLE)
async def test_what_has_not_finished_can_be_cancelled(
    harness: Harness, storage: SQLStorage, status: WorkflowStatus
) -> None:
    lock = await harness.locked(storage, status=status)
    await storage.cancel_instance(lock.instance_id, 'too "late"')

    instance = await stored(storage, lock.instance_id)
    assert (instance.status, instance.locked_by, instance.lock_expires_at) == (WorkflowStatus.CANCELLED, None, None)
    (event,) = await history_of(storage, lock.instance_id)
    assert event.event_type == "WorkflowCancelled"
    assert msgspec.json.decode(event.event_data or "") == {"reason": 'too "late"', "previous_status": status}


@pytest.mark.parametrize("status", [*FINISHED, WorkflowStatus.COMPENSATING])
async def test_what_has_finished_or_compensates_cannot_be_cancelled(
    harness: Harness, storage: SQLStorage, status: WorkflowStatus
) -> None:
    instance_id = await harness.instance(storage, status=status)
    before = await contents(storage)

    with pytest.raises(WorkflowNotCancellableError) as refused:
        await storage.cancel_instance(instance_id, "late")
    with pytest.raises(WorkflowNotCancellableError):
        await storage.cancel_instance(instance_id, "late", compensate=True)

    assert (refused.value.instance_id, refused.value.status) == (instance_id, status)
    assert await contents(storage) == before


async def asleep_in_the_middle_of_compensating(harness: Harness, storage: SQLStorage) -> str:
    lock = await harness.locked(storage, status=WorkflowStatus.COMPENSATING)
    later = await storage.current_time() + timedelta(hours=1)
    await storage.suspend(lock.instance_id, [TimerSubscription(lock.instance_id, "pause:1", later)], lock=lock)
    return lock.instance_id


@pytest.mark.parametrize("compensate", [False, True])
async def test_what_waits_in_the_middle_of_compensating_cannot_be_cancelled(
    harness: Harness, storage: SQLStorage, compensate: bool
) -> None:
    instance_id = await asleep_in_the_middle_of_compensating(harness, storage)
    before = await contents(storage)

    with pytest.raises(WorkflowNotCancellableError) as refused:
        await storage.cancel_instance(instance_id, "late", compensate=compensate)

    assert refused.value.status is WorkflowStatus.COMPENSATING
    assert await contents(storage) == before


@pytest.mark.parametrize("target", [WorkflowStatus.RUNNING, WorkflowStatus.COMPLETED, *WAITING])
async def test_what_waits_in_the_middle_of_compensating_does_not_go_back_to_work(
    harness: Harness, storage: SQLStorage, target: WorkflowStatus
) -> None:
    instance_id = await asleep_in_the_middle_of_compensating(harness, storage)
    before = await contents(storage)

    with pytest.raises(InvalidStatusTransitionError):
        await storage.update_instance_status(instance_id, target)
    with pytest.raises(InvalidStatusTransitionError):
        await storage.update_instance_output(instance_id, "1")

    assert await contents(storage) == before


async def test_what_does_not_exist_cannot_be_cancelled(storage: SQLStorage) -> None:
    with pytest.raises(WorkflowNotCancellableError) as refused:
        await storage.cancel_instance("nobody", "why not")
    assert refused.value.status is None


async def test_a_cancelled_holder_can_write_no_more(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.cancel_instance(lock.instance_id, "changed my mind")
    with pytest.raises(LockLostError):
        await storage.append_history(step(lock.instance_id), lock=lock)


async def test_cancelling_with_compensation_leaves_the_ending_to_the_holder(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await harness.locked(storage)
    await storage.cancel_instance(lock.instance_id, "changed my mind", compensate=True)

    assert (await stored(storage, lock.instance_id)).locked_by == "worker-1"
    refreshed = await storage.refresh_lock(lock.instance_id, "worker-1", 30, lock=lock)
    assert refreshed is not None
    assert refreshed.status is WorkflowStatus.COMPENSATING
    await storage.update_instance_status(lock.instance_id, WorkflowStatus.CANCELLED, lock=lock)

    assert (await stored(storage, lock.instance_id)).status is WorkflowStatus.CANCELLED
    assert [event.event_type for event in await history_of(storage, lock.instance_id)] == ["WorkflowCancelled"]


async def test_cancelling_with_compensation_makes_a_waiting_instance_runnable(
    harness: Harness, storage: SQLStorage
) -> None:
    instance_id = await with_everything(harness, storage)
    await storage.cancel_instance(instance_id, "changed my mind", compensate=True)

    tables = await contents(storage)
    assert tables["workflow_timer_subscriptions"] == tables["romancy_channel_waits"] == []
    assert [found.instance_id for found in await storage.find_resumable_workflows()] == [instance_id]
