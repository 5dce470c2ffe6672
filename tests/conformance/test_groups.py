"""Groups: named sets of instances."""

import asyncio

import pytest

from romancy.storage import (
    InstanceNotFoundError,
    InvalidKeyError,
    InvalidStatusTransitionError,
    SQLStorage,
    WorkflowStatus,
)
from tests.conformance.arrange import another
from tests.conformance.neighbours import neighbour, row
from tests.harness import Harness


async def test_members_are_listed_in_the_order_they_joined(harness: Harness, storage: SQLStorage) -> None:
    first, second, third = [await harness.instance(storage) for _ in range(3)]
    for instance_id in (second, third, first):
        await storage.join_group(instance_id, "riders")
    await storage.join_group(first, "walkers")

    assert await storage.get_group_members("riders") == [second, third, first]
    assert await storage.get_group_members("walkers") == [first]
    assert await storage.get_group_members("nobody") == []


async def test_joining_twice_is_joining_once(harness: Harness, storage: SQLStorage) -> None:
    first, second = await harness.instance(storage), await harness.instance(storage)
    await storage.join_group(first, "riders")
    await storage.join_group(second, "riders")

    await storage.join_group(first, "riders")

    assert await storage.get_group_members("riders") == [first, second]


async def test_rivals_join_once(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    storages = [storage, await another(harness)]

    await asyncio.gather(*(storages[n % 2].join_group(instance_id, "riders") for n in range(6)))

    assert await storage.get_group_members("riders") == [instance_id]


async def test_leaving_can_be_repeated_and_ends_one_membership(harness: Harness, storage: SQLStorage) -> None:
    first, second = await harness.instance(storage), await harness.instance(storage)
    for name in ("riders", "walkers"):
        await storage.join_group(first, name)
        await storage.join_group(second, name)

    for _ in range(2):
        await storage.leave_group(first, "riders")
    await storage.leave_group("nobody", "riders")

    assert await storage.get_group_members("riders") == [second]
    assert await storage.get_group_members("walkers") == [first, second]


async def test_whoever_joins_again_comes_last(harness: Harness, storage: SQLStorage) -> None:
    first, second = await harness.instance(storage), await harness.instance(storage)
    await storage.join_group(first, "riders")
    await storage.join_group(second, "riders")

    await storage.leave_group(first, "riders")
    await storage.join_group(first, "riders")

    assert await storage.get_group_members("riders") == [second, first]


async def test_all_groups_can_be_left_at_once(harness: Harness, storage: SQLStorage) -> None:
    first, second = await harness.instance(storage), await harness.instance(storage)
    for name in ("riders", "walkers"):
        await storage.join_group(first, name)
        await storage.join_group(second, name)

    for _ in range(2):
        await storage.leave_all_groups(first)
    await storage.leave_all_groups("nobody")

    assert await storage.get_group_members("riders") == [second]
    assert await storage.get_group_members("walkers") == [second]


async def test_a_finished_instance_is_no_member(harness: Harness, storage: SQLStorage) -> None:
    ended, cancelled, running = [await harness.instance(storage) for _ in range(3)]
    for instance_id in (ended, cancelled, running):
        await storage.join_group(instance_id, "riders")

    await storage.update_instance_output(ended, None)
    await storage.cancel_instance(cancelled, "no more")

    assert await storage.get_group_members("riders") == [running]
    with pytest.raises(InvalidStatusTransitionError):
        await storage.join_group(ended, "riders")


async def test_the_membership_that_another_framework_forgot_to_end_does_not_count(storage: SQLStorage) -> None:
    for instance_id, status in [("e1", "completed"), ("e2", "running")]:
        await neighbour(storage, instance_id, status=status)
        await storage.conn().execute(
            "INSERT INTO workflow_group_memberships (instance_id, group_name) VALUES (:id, 'riders')", id=instance_id
        )

    assert await storage.get_group_members("riders") == ["e2"]


async def test_what_is_not_there_cannot_join(storage: SQLStorage) -> None:
    with pytest.raises(InstanceNotFoundError):
        await storage.join_group("nobody", "riders")


@pytest.mark.parametrize("name", ["", "x" * 256, "a\0"])
async def test_a_group_needs_a_proper_name(harness: Harness, storage: SQLStorage, name: str) -> None:
    instance_id = await harness.instance(storage)

    for attempt in (
        storage.join_group(instance_id, name),
        storage.leave_group(instance_id, name),
        storage.get_group_members(name),
    ):
        with pytest.raises(InvalidKeyError):
            await attempt


async def test_group_names_are_compared_byte_for_byte(harness: Harness, storage: SQLStorage) -> None:
    names = ["riders", "Riders", "riders ", "rîders", "ri\u0302ders", "%"]
    members = {name: await harness.instance(storage) for name in names}
    for name, instance_id in members.items():
        await storage.join_group(instance_id, name)

    assert {name: await storage.get_group_members(name) for name in names} == {
        name: [instance_id] for name, instance_id in members.items()
    }


async def test_a_large_group_comes_back_whole(harness: Harness, storage: SQLStorage) -> None:
    definition = await harness.instance(storage)
    names = [f"rider-{n:04}" for n in range(1003)]
    async with storage.transaction():
        for name in names:
            await storage.conn().execute(
                "INSERT INTO workflow_instances"
                " (instance_id, workflow_name, source_hash, owner_service, framework, status, input_data)"
                " SELECT :name, workflow_name, source_hash, '', framework, :status, '{}'"
                " FROM workflow_instances WHERE instance_id = :definition",
                name=name,
                status=WorkflowStatus.RUNNING.value,
                definition=definition,
            )
            await storage.conn().execute(
                "INSERT INTO workflow_group_memberships (instance_id, group_name) VALUES (:name, 'riders')", name=name
            )

    assert await storage.get_group_members("riders") == names


async def test_a_rolled_back_join_is_none(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)

    with pytest.raises(KeyError):
        async with storage.transaction():
            await storage.join_group(instance_id, "riders")
            raise KeyError

    assert await row(storage, "SELECT COUNT(*) FROM workflow_group_memberships") == (0,)
