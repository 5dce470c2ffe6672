"""Compensations: a stack of what to undo, one entry per step."""

import asyncio
from datetime import timedelta

import pytest

from romancy.storage import (
    CompensationEntry,
    InstanceNotFoundError,
    InvalidJSONError,
    InvalidKeyError,
    PayloadTooLargeError,
    SQLStorage,
)
from tests.conformance.arrange import another
from tests.harness import Harness


async def push(storage: SQLStorage, instance_id: str, *activity_ids: str) -> None:
    for activity_id in activity_ids:
        await storage.add_compensation(CompensationEntry(instance_id, activity_id, f"undo {activity_id}"))


async def stack(storage: SQLStorage, instance_id: str) -> list[str]:
    return [entry.activity_id for entry in await storage.get_compensations(instance_id)]


async def test_what_was_done_last_is_undone_first(harness: Harness, storage: SQLStorage) -> None:
    instance_id, other = await harness.instance(storage), await harness.instance(storage)

    await push(storage, instance_id, "c:1", "a:1", "b:1")
    await push(storage, other, "x:1")

    assert await stack(storage, instance_id) == ["b:1", "a:1", "c:1"]
    assert await stack(storage, other) == ["x:1"]
    assert await stack(storage, "nobody") == []


async def test_the_order_is_that_of_insertion_whatever_the_clocks_say(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    now = await storage.current_time()
    for n, name in enumerate(["first", "second", "third"]):
        entry = CompensationEntry(instance_id, name, "undo", created_at=now - timedelta(hours=n))
        await storage.add_compensation(entry)

    assert await stack(storage, instance_id) == ["third", "second", "first"]


async def test_a_compensation_is_kept_as_it_was_given(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    args = '{"b": 9007199254740993,"a": "Grüße"}'

    await storage.add_compensation(CompensationEntry(instance_id, "charge:1", "refund", args))

    [entry] = await storage.get_compensations(instance_id)
    assert (entry.instance_id, entry.activity_id, entry.activity_name) == (instance_id, "charge:1", "refund")
    assert entry.args == args
    assert entry.id is not None
    assert entry.created_at is not None
    assert abs(entry.created_at - await storage.current_time()) < timedelta(minutes=1)


async def test_a_step_is_compensated_once(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await push(storage, instance_id, "charge:1", "ship:1")

    await storage.add_compensation(CompensationEntry(instance_id, "charge:1", "refund again"))
    await push(storage, instance_id, "Charge:1", "charge:1 ")

    entries = await storage.get_compensations(instance_id)
    assert [entry.activity_id for entry in entries] == ["charge:1 ", "Charge:1", "ship:1", "charge:1"]
    assert entries[-1].activity_name == "undo charge:1"


async def test_rivals_push_a_step_once(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    storages = [storage, await another(harness)]

    await asyncio.gather(*(push(storages[n % 2], instance_id, "charge:1") for n in range(6)))

    assert await stack(storage, instance_id) == ["charge:1"]


async def test_what_another_framework_repeated_is_returned_as_it_stands(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    for _ in range(2):
        await storage.conn().execute(
            "INSERT INTO workflow_compensations (instance_id, activity_id, activity_name, args)"
            " VALUES (:id, 'charge:1', 'refund', '{}')",
            id=instance_id,
        )

    assert await stack(storage, instance_id) == ["charge:1", "charge:1"]


async def test_a_long_stack_comes_back_whole(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    names = [f"step:{n}" for n in range(1003)]
    async with storage.transaction():
        for name in names:
            await storage.conn().execute(
                "INSERT INTO workflow_compensations (instance_id, activity_id, activity_name, args)"
                " VALUES (:id, :name, 'undo', '{}')",
                id=instance_id,
                name=name,
            )

    assert await stack(storage, instance_id) == names[::-1]


async def test_what_is_no_compensation_is_refused(harness: Harness) -> None:
    storage = await harness.open(max_payload_bytes=100)
    instance_id = await harness.instance(storage)

    for entry, error in (
        (CompensationEntry("nobody", "charge:1", "refund"), InstanceNotFoundError),
        (CompensationEntry(instance_id, "", "refund"), InvalidKeyError),
        (CompensationEntry(instance_id, "charge:1", "x" * 256), InvalidKeyError),
        (CompensationEntry(instance_id, "charge:1", "refund", "{"), InvalidJSONError),
        (CompensationEntry(instance_id, "charge:1", "refund", '"' + "x" * 100 + '"'), PayloadTooLargeError),
    ):
        with pytest.raises(error):
            await storage.add_compensation(entry)

    assert await stack(storage, instance_id) == []


async def test_a_compensation_of_a_rolled_back_transaction_is_not_there(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)

    with pytest.raises(KeyError):
        async with storage.transaction():
            await push(storage, instance_id, "charge:1")
            raise KeyError

    assert await stack(storage, instance_id) == []
