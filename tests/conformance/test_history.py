"""History: each step is recorded once, read in order, and moved to the archive whole."""

import asyncio
from datetime import UTC, datetime

import msgspec
import pytest

from romancy.storage import (
    Appended,
    ChannelMode,
    CompensationEntry,
    HistoryConflictError,
    HistoryEvent,
    HistoryEventType,
    HistoryIterator,
    HistoryIteratorOptions,
    HistoryPage,
    InstanceNotFoundError,
    Lock,
    LockLostError,
    OutboxEvent,
    SQLStorage,
    StorageError,
    TimerSubscription,
    WorkflowStatus,
)
from romancy.storage.sql import archive
from romancy.storage.sql.statement import NativeQuery, Want
from tests.harness import Harness, contents, history_of, step

LATER = datetime(2042, 1, 1, tzinfo=UTC)


async def with_steps(harness: Harness, storage: SQLStorage, count: int) -> str:
    instance_id = await harness.instance(storage)
    await storage.append_history_many([step(instance_id, f"step:{number}") for number in range(count)])
    return instance_id


# Appending.


async def test_a_recorded_step_comes_back_as_it_was_given(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    before = await storage.current_time()
    json_id, _ = await storage.append_history(step(instance_id, "charge:1", '{ "b":1,  "a": 1e400 }'))
    binary_id, _ = await storage.append_history(step(instance_id, "pdf:1", None, event_data_binary=b"\x00\xff"))
    bare_id, _ = await storage.append_history(step(instance_id, "noop:1", None, event_type="SomethingNew"))

    charge, pdf, noop = await history_of(storage, instance_id)
    assert [charge.id, pdf.id, noop.id] == [json_id, binary_id, bare_id]
    assert (charge.event_type, charge.event_data, charge.data_type) == (
        HistoryEventType.ACTIVITY_COMPLETED,
        '{ "b":1,  "a": 1e400 }',
        "json",
    )
    assert (pdf.event_data, pdf.event_data_binary, pdf.data_type) == (None, b"\x00\xff", "binary")
    assert (noop.event_type, noop.event_data, noop.event_data_binary) == ("SomethingNew", None, None)
    assert isinstance(charge.event_type, HistoryEventType)
    assert charge.created_at is not None
    assert before <= charge.created_at <= await storage.current_time()


async def test_what_is_given_its_time_keeps_it(harness: Harness, storage: SQLStorage) -> None:
    moment = datetime(2020, 2, 29, 1, 2, 3, 456789, UTC)
    lock = await harness.locked(storage)
    await storage.append_history(step(lock.instance_id, "a:1", created_at=moment))
    await storage.append_history(step(lock.instance_id, "b:1", created_at=moment), lock=lock)
    await storage.add_compensation(CompensationEntry(lock.instance_id, "a:1", "undo", created_at=moment))
    await storage.register_timer_subscription(
        TimerSubscription(lock.instance_id, "nap", expires_at=moment, created_at=moment)
    )
    await storage.update_instance_status(lock.instance_id, WorkflowStatus.WAITING_FOR_TIMER)

    assert [event.created_at for event in await history_of(storage, lock.instance_id)] == [moment, moment]
    assert [entry.created_at for entry in await storage.get_compensations(lock.instance_id)] == [moment]
    assert [timer.created_at for timer in await storage.find_expired_timers()] == [moment]


async def test_a_step_of_an_unknown_instance_is_refused(storage: SQLStorage) -> None:
    with pytest.raises(InstanceNotFoundError):
        await storage.append_history(step("nobody"))


async def test_without_a_lock_a_repeated_step_is_a_conflict(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    first = await storage.append_history(step(instance_id, data="1"))
    for data in ("1", "2"):
        with pytest.raises(HistoryConflictError) as conflict:
            await storage.append_history(step(instance_id, data=data))
        assert (conflict.value.recorded.id, conflict.value.recorded.event_data) == (first.id, "1")


async def test_the_same_acquisition_may_repeat_the_same_step(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    first = await storage.append_history(step(lock.instance_id), lock=lock)
    again = await storage.append_history(step(lock.instance_id), lock=lock)

    assert first == Appended(first.id, already_recorded=False)
    assert again == Appended(first.id, already_recorded=True)
    assert await storage.get_history_count(lock.instance_id) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"event_data": '{"result":1}'},  # the same JSON, but other bytes
        {"event_data": None},
        {"event_data": None, "event_data_binary": b'{"result": 1}'},
        {"event_type": "ActivityFailed"},
    ],
)
async def test_the_same_acquisition_may_not_record_a_step_differently(
    harness: Harness, storage: SQLStorage, other: dict[str, object]
) -> None:
    lock = await harness.locked(storage)
    await storage.append_history(step(lock.instance_id), lock=lock)
    with pytest.raises(HistoryConflictError) as conflict:
        await storage.append_history(step(lock.instance_id, **other), lock=lock)
    assert conflict.value.recorded.event_data == '{"result": 1}'


async def test_inside_a_transaction_a_repeated_step_is_always_a_conflict(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.append_history(step(lock.instance_id), lock=lock)
    async with storage.transaction():
        with pytest.raises(HistoryConflictError):
            await storage.append_history(step(lock.instance_id), lock=lock)
        (outcome,) = await storage.append_history_many([step(lock.instance_id)], lock=lock)
        assert isinstance(outcome, HistoryConflictError)


@pytest.mark.parametrize("fenced", [False, True])
async def test_a_step_is_recorded_if_what_stood_in_its_place_is_gone_before_it_is_looked_at(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    lock = await harness.locked(storage)
    await storage.append_history(step(lock.instance_id, data='"rival"'))
    look = storage._why_not_appended

    async def look_too_late(event: HistoryEvent, lock: Lock | None) -> HistoryEvent | None:
        await NativeQuery[int]("DELETE FROM workflow_history", (), Want.COUNT)
        return await look(event, lock)

    monkeypatch.setattr(storage, "_why_not_appended", look_too_late)
    appended = await storage.append_history(step(lock.instance_id, data='"ours"'), lock=lock if fenced else None)

    assert not appended.already_recorded
    assert [event.event_data for event in await history_of(storage, lock.instance_id)] == ['"ours"']


async def test_more_steps_than_a_transaction_should_hold_are_refused(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    with pytest.raises(ValueError, match="100,000 events at once, not 100,001"):
        await storage.append_history_many([step(lock.instance_id)] * 100_001, lock=lock)
    assert await history_of(storage, lock.instance_id) == []


async def test_the_loser_of_an_append_race_commits_nothing(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    rival = await harness.open()
    outcomes: list[str] = []

    async def run(runner: SQLStorage, name: str) -> None:
        try:
            async with runner.transaction():
                await runner.add_outbox_event(OutboxEvent(name, "made", "test"))
                await runner.append_history(step(lock.instance_id), lock=lock)
        except StorageError as error:
            outcomes.append(type(error).__name__)

    await asyncio.gather(run(storage, "one"), run(rival, "two"))

    assert outcomes in (["HistoryConflictError"], ["TransientStorageError"])
    assert len((await contents(storage))["outbox_events"]) == 1
    assert await storage.get_history_count(lock.instance_id) == 1


async def test_of_many_rivals_one_records_the_step(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    outcomes = await asyncio.gather(
        *(storage.append_history(step(instance_id, data=str(number))) for number in range(10)), return_exceptions=True
    )
    winners = [outcome for outcome in outcomes if isinstance(outcome, Appended)]
    conflicts = [outcome for outcome in outcomes if isinstance(outcome, HistoryConflictError)]
    assert (len(winners), len(conflicts)) == (1, 9)
    assert {conflict.recorded.id for conflict in conflicts} == {winners[0].id}


async def test_the_same_step_of_another_instance_is_another_step(harness: Harness, storage: SQLStorage) -> None:
    for _ in range(2):
        await storage.append_history(step(await harness.instance(storage)))


# Many at once.


async def test_many_steps_are_answered_one_by_one(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    instance_id = lock.instance_id
    recorded, _ = await storage.append_history(step(instance_id, "old:1"), lock=lock)

    outcomes = await storage.append_history_many(
        [
            step(instance_id, "new:1"),
            step(instance_id, "old:1"),
            step(instance_id, "old:1", '"another"'),
            step(instance_id, "new:2"),
            step(instance_id, "new:1"),
        ],
        lock=lock,
    )

    first, same, different, second, again = outcomes
    assert isinstance(first, Appended)
    assert isinstance(second, Appended)
    assert not first.already_recorded
    assert first.id < second.id
    assert same == Appended(recorded, already_recorded=True)
    assert isinstance(different, HistoryConflictError)
    assert again == Appended(first.id, already_recorded=True)
    assert [event.activity_id for event in await history_of(storage, instance_id)] == ["old:1", "new:1", "new:2"]


async def test_many_steps_may_be_of_many_instances(harness: Harness, storage: SQLStorage) -> None:
    one, two = await harness.instance(storage), await harness.instance(storage)
    outcomes = await storage.append_history_many([step(one), step("nobody"), step(two)])
    assert [type(outcome) for outcome in outcomes] == [Appended, InstanceNotFoundError, Appended]
    assert await storage.get_history_count(one) == await storage.get_history_count(two) == 1


async def test_many_steps_with_a_lost_lock_are_none(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    harness.advance(seconds=31)
    with pytest.raises(LockLostError):
        await storage.append_history_many([step(lock.instance_id, f"step:{n}") for n in range(3)], lock=lock)
    assert await history_of(storage, lock.instance_id) == []


async def test_one_bad_step_among_many_stops_all(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    with pytest.raises(ValueError, match="JSON"):
        await storage.append_history_many([step(instance_id, "a:1"), step(instance_id, "b:1", "{")])
    assert await history_of(storage, instance_id) == []


async def test_no_steps_are_no_work(storage: SQLStorage) -> None:
    assert await storage.append_history_many([]) == []


# Reading.


async def test_history_is_read_in_pages_by_id(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await with_steps(harness, storage, 5)
    other = await with_steps(harness, storage, 1)

    first, more = await storage.get_history_paginated(instance_id, 0, 3)
    assert ([event.activity_id for event in first], more) == (["step:0", "step:1", "step:2"], True)
    rest = await storage.get_history_paginated(instance_id, first[-1].id or 0, 3)
    assert isinstance(rest, HistoryPage)
    assert ([event.activity_id for event in rest.events], rest.has_more) == (["step:3", "step:4"], False)
    assert await storage.get_history_paginated(instance_id, 2**63 - 1) == ([], False)
    assert await storage.get_history_paginated("nobody") == ([], False)
    assert await storage.get_history_count(instance_id) == 5
    assert await storage.get_history_count(other) == 1
    assert await storage.get_history_count("nobody") == 0


async def test_a_page_for_replay_lacks_only_the_times_of_completed_steps(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await with_steps(harness, storage, 2)
    await storage.append_history(step(instance_id, "sleep:1", event_type="TimerExpired"))
    await storage.append_history(step(instance_id, "call:1#1", event_type="ActivityFailed"))
    whole = await storage.get_history_paginated(instance_id)
    replayed = await storage.get_history_to_replay(instance_id)
    assert all(event.created_at is not None for event in whole.events)
    assert [event.created_at is None for event in replayed.events] == [True, True, False, False]
    assert replayed.events == [
        msgspec.structs.replace(event, created_at=None) if event.event_type == "ActivityCompleted" else event
        for event in whole.events
    ]
    first = await storage.get_history_to_replay(instance_id, 0, 1)
    assert (first.events, first.has_more) == (replayed.events[:1], True)
    assert await storage.get_history_to_replay(instance_id, first.events[0].id or 0, 9) == (
        replayed.events[1:],
        False,
    )


async def test_one_step_can_be_looked_up(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await with_steps(harness, storage, 2)
    assert await storage.get_history_event(instance_id, "step:1") == (await history_of(storage, instance_id))[1]
    assert await storage.get_history_event(instance_id, "step:2") is None
    assert await storage.get_history_event("nobody", "step:1") is None


async def test_a_page_that_ends_with_the_last_step_has_no_more(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await with_steps(harness, storage, 4)
    assert (await storage.get_history_paginated(instance_id, 0, 4)).has_more is False


async def test_a_page_of_history_is_bounded(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await with_steps(harness, storage, 101)
    assert len((await storage.get_history_paginated(instance_id)).events) == 100
    assert len((await storage.get_history_paginated(instance_id, 0, 0)).events) == 100
    with pytest.raises(ValueError, match="negative"):
        await storage.get_history_paginated(instance_id, 0, -1)


class CountingPages:
    """A storage that counts how often it is asked for a page."""

    def __init__(self, storage: SQLStorage) -> None:
        self._storage = storage
        self.asked = 0

    async def get_history_paginated(self, instance_id: str, after_id: int = 0, limit: int = 100) -> HistoryPage:
        self.asked += 1
        return await self._storage.get_history_paginated(instance_id, after_id, limit)


def iterator(pages: CountingPages, instance_id: str, batch_size: int) -> HistoryIterator:
    return HistoryIterator(pages, instance_id, HistoryIteratorOptions(batch_size=batch_size))  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "queries"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
async def test_iterating_asks_for_no_page_that_is_known_to_be_empty(
    harness: Harness, storage: SQLStorage, steps: int, queries: int
) -> None:
    instance_id = await with_steps(harness, storage, steps)
    pages = CountingPages(storage)
    seen = [event.activity_id async for event in iterator(pages, instance_id, 2)]
    assert seen == [f"step:{number}" for number in range(steps)]
    assert pages.asked == queries


async def test_an_iterator_can_be_collected_half_way_and_closed(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await with_steps(harness, storage, 5)
    pages = CountingPages(storage)
    events = iterator(pages, instance_id, 2)
    assert (await anext(events)).activity_id == "step:0"
    assert [event.activity_id for event in await events.collect()] == [f"step:{number}" for number in range(1, 5)]
    assert await events.collect() == []

    closed = iterator(pages, instance_id, 2)
    await anext(closed)
    await closed.aclose()
    asked = pages.asked
    assert await closed.collect() == []
    assert pages.asked == asked


async def test_an_iterator_reads_a_thousand_at_a_time_unless_told(harness: Harness, storage: SQLStorage) -> None:
    assert HistoryIteratorOptions().batch_size == 1000
    instance_id = await with_steps(harness, storage, 3)
    assert len(await HistoryIterator(storage, instance_id).collect()) == 3
    with pytest.raises(ValueError, match="batch_size"):
        HistoryIterator(storage, instance_id, HistoryIteratorOptions(batch_size=-1))


# The archive.


async def test_archiving_moves_steps_with_their_ids_and_times(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    instance_id = lock.instance_id
    await storage.append_history(step(instance_id, "charge:1", '{"n": 9007199254740993}'), lock=lock)
    await storage.append_history(step(instance_id, "pdf:1", None, event_data_binary=b"\x00\xff"), lock=lock)
    before = await history_of(storage, instance_id)
    harness.advance(seconds=20)

    assert await storage.archive_history(instance_id, lock=lock) == 2

    assert await history_of(storage, instance_id) == []
    archived = await storage.get_archived_history(instance_id)
    assert [
        HistoryEvent(
            instance_id=event.instance_id,
            activity_id=event.activity_id,
            event_type=event.event_type,
            id=event.original_id,
            event_data=event.event_data,
            event_data_binary=event.event_data_binary,
            created_at=event.original_created_at,
        )
        for event in archived
    ] == before
    assert all(event.archived_at > event.original_created_at for event in archived)


async def test_the_archive_keeps_round_after_round_in_order(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "_PAGE", 2)
    instance_id = await harness.instance(storage)
    for round_number in range(3):
        await storage.append_history_many([step(instance_id, f"step:{n}", str(round_number)) for n in range(2)])
        await storage.archive_history(instance_id)

    archived = await storage.get_archived_history(instance_id)
    assert [(event.event_data, event.activity_id) for event in archived] == [
        (str(round_number), f"step:{n}") for round_number in range(3) for n in range(2)
    ]


async def test_archiving_nothing_is_fine_but_nobody_is_not(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    assert await storage.archive_history(instance_id) == 0
    assert await storage.get_archived_history(instance_id) == []
    assert await storage.get_archived_history("nobody") == []
    with pytest.raises(InstanceNotFoundError):
        await storage.archive_history("nobody")


async def test_an_archived_step_can_be_recorded_anew(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.append_history(step(instance_id))
    await storage.archive_history(instance_id)
    assert (await storage.append_history(step(instance_id))).already_recorded is False


async def test_cleaning_up_removes_all_that_an_instance_waits_for_or_belongs_to(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await harness.locked(storage)
    instance_id = lock.instance_id
    await storage.join_group(instance_id, "riders")
    await storage.subscribe_to_channel(instance_id, "news", ChannelMode.BROADCAST)
    published = await storage.publish_to_channel("news", "{}")
    assert isinstance(published, int)
    await storage.update_delivery_cursor(instance_id, "news", published)
    await storage.suspend(instance_id, [TimerSubscription(instance_id, "nap", LATER)], lock=lock)

    await storage.cleanup_instance_subscriptions(instance_id)
    await storage.cleanup_instance_subscriptions("nobody")

    tables = await contents(storage)
    for table in (
        "workflow_timer_subscriptions",
        "channel_subscriptions",
        "channel_delivery_cursors",
        "workflow_group_memberships",
    ):
        assert tables[table] == []
    # Nothing is left that could wake it: it runs again instead of waiting for ever.
    assert [found.instance_id for found in await storage.find_resumable_workflows()] == [instance_id]


async def test_a_later_acquisition_may_not_repeat_a_step(harness: Harness, storage: SQLStorage) -> None:
    first = await harness.locked(storage)
    await storage.append_history(step(first.instance_id), lock=first)
    await storage.release_lock(first.instance_id, "worker-1", lock=first)
    second = await storage.try_acquire_lock(first.instance_id, "worker-1", 30)
    with pytest.raises(HistoryConflictError):
        await storage.append_history(step(first.instance_id), lock=second)
