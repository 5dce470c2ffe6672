"""One step, one write: what a step does and its history event are written together, once."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from romancy.storage import (
    CompensationEntry,
    HistoryEvent,
    InstanceNotFoundError,
    InvalidJSONError,
    Lock,
    LockLostError,
    OutboxEvent,
    SQLStorage,
)
from tests.conformance.arrange import BROADCAST, Crash, another, crash_before_statement
from tests.harness import Harness, contents, history_of, step

Effect = Callable[[SQLStorage, str, Lock | None, HistoryEvent | None], Awaitable[object]]

EFFECTS: dict[str, Effect] = {
    "publish_to_channel": lambda s, _, lock, record: s.publish_to_channel("orders", "{}", lock=lock, record=record),
    "subscribe_to_channel": lambda s, i, lock, record: s.subscribe_to_channel(
        i, "invoices", BROADCAST, lock=lock, record=record
    ),
    "unsubscribe_from_channel": lambda s, i, lock, record: s.unsubscribe_from_channel(
        i, "orders", lock=lock, record=record
    ),
    "join_group": lambda s, i, lock, record: s.join_group(i, "walkers", lock=lock, record=record),
    "leave_group": lambda s, i, lock, record: s.leave_group(i, "riders", lock=lock, record=record),
    "add_outbox_event": lambda s, _, lock, record: s.add_outbox_event(
        OutboxEvent("e1", "order.paid", "/orders"), lock=lock, record=record
    ),
    "add_compensation": lambda s, i, lock, record: s.add_compensation(
        CompensationEntry(i, "charge:1", "refund"), lock=lock, record=record
    ),
    "set_instance_state": lambda s, i, lock, record: s.set_instance_state(i, "1", lock=lock, record=record),
}
every_effect = pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS.keys())


async def ready(harness: Harness, storage: SQLStorage) -> Lock:
    """A locked instance for which each of the effects would change something."""
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, "orders", BROADCAST)
    await storage.join_group(lock.instance_id, "riders")
    return lock


def without_history(tables: dict[str, list[str]]) -> dict[str, list[str]]:
    return {table: rows for table, rows in tables.items() if table != "workflow_history"}


@every_effect
@pytest.mark.parametrize("fenced", [True, False])
async def test_a_step_is_recorded_with_its_effect(
    harness: Harness, storage: SQLStorage, effect: Effect, fenced: bool
) -> None:
    lock = await ready(harness, storage)
    before = await contents(storage)
    record = step(lock.instance_id, "effect:1", '{"b": 9007199254740993,"a": 1}')

    outcome = await effect(storage, lock.instance_id, lock if fenced else None, record)

    assert not isinstance(outcome, HistoryEvent)
    [event] = await history_of(storage, lock.instance_id)
    assert (event.activity_id, event.event_type, event.event_data) == (
        "effect:1",
        "ActivityCompleted",
        '{"b": 9007199254740993,"a": 1}',
    )
    assert without_history(await contents(storage)) != without_history(before)


@every_effect
async def test_a_step_that_is_recorded_has_no_second_effect(
    harness: Harness, storage: SQLStorage, effect: Effect
) -> None:
    lock = await ready(harness, storage)
    await storage.append_history(step(lock.instance_id, "effect:1", '"first"'), lock=lock)
    before = await contents(storage)

    outcome = await effect(storage, lock.instance_id, lock, step(lock.instance_id, "effect:1", '"second"'))

    assert [outcome] == await history_of(storage, lock.instance_id)
    assert isinstance(outcome, HistoryEvent)
    assert outcome.event_data == '"first"'
    assert await contents(storage) == before


@every_effect
async def test_a_crash_anywhere_leaves_neither_the_step_nor_its_effect(
    harness: Harness, storage: SQLStorage, effect: Effect, request: pytest.FixtureRequest
) -> None:
    lock = await ready(harness, storage)
    before = await contents(storage)
    name = request.node.callspec.id.split("-", 1)[1]

    for statement in range(50):
        storage.runner.probe = crash_before_statement(statement, name)
        try:
            await effect(storage, lock.instance_id, lock, step(lock.instance_id, "effect:1"))
            break
        except Crash:
            storage.runner.probe = None
            assert await contents(storage) == before
    else:
        raise AssertionError("it never came through")

    assert statement > 1
    assert len(await history_of(storage, lock.instance_id)) == 1


@every_effect
async def test_whoever_lost_the_lock_records_nothing(harness: Harness, storage: SQLStorage, effect: Effect) -> None:
    lock = await ready(harness, storage)
    harness.advance(seconds=31)
    await storage.try_acquire_lock(lock.instance_id, "worker-2", 30)
    before = await contents(storage)

    with pytest.raises(LockLostError):
        await effect(storage, lock.instance_id, lock, step(lock.instance_id, "effect:1"))

    assert await contents(storage) == before


@every_effect
async def test_a_record_that_cannot_be_written_prevents_the_effect(
    harness: Harness, storage: SQLStorage, effect: Effect
) -> None:
    lock = await ready(harness, storage)
    before = await contents(storage)

    with pytest.raises(InvalidJSONError):
        await effect(storage, lock.instance_id, lock, step(lock.instance_id, "effect:1", "{"))
    with pytest.raises(InstanceNotFoundError):
        await effect(storage, lock.instance_id, None, step("nobody", "effect:1"))

    assert await contents(storage) == before


async def test_rivals_have_one_effect(harness: Harness, storage: SQLStorage) -> None:
    lock = await ready(harness, storage)
    storages = [storage, await another(harness)]

    outcomes = await asyncio.gather(
        *(
            storages[n % 2].publish_to_channel("orders", str(n), record=step(lock.instance_id, "publish:1", str(n)))
            for n in range(6)
        )
    )

    [message] = await storage.get_pending_channel_messages("orders")
    [event] = await history_of(storage, lock.instance_id)
    assert message.data == event.event_data
    assert sorted(isinstance(outcome, HistoryEvent) for outcome in outcomes) == [False] + [True] * 5


async def test_in_a_rolled_back_transaction_neither_step_nor_effect_happened(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await ready(harness, storage)
    before = await contents(storage)

    with pytest.raises(KeyError):
        async with storage.transaction():
            for n, effect in enumerate(EFFECTS.values()):
                await effect(storage, lock.instance_id, lock, step(lock.instance_id, f"effect:{n}"))
            raise KeyError

    assert await contents(storage) == before
