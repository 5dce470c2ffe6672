"""A caller is cancelled at every step of its way: the outcome is all or nothing, and known when it is told."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from romancy.storage import (
    ChannelMode,
    ChannelSubscription,
    ChannelWait,
    OutboxEvent,
    SQLStorage,
    TimerSubscription,
    WorkflowInstance,
    WorkflowStatus,
)
from romancy.storage.sql.operation import Touches
from tests.faults.leaks import assert_nothing_is_held
from tests.harness import Harness, expect_company, history_of, step


def steps() -> Iterator[int]:
    """After how many turns of the event loop to cancel: each of the first, then ever fewer."""
    number = 0
    while True:
        yield number
        number += 1 + number // 8


async def cancelled_after(
    steps: int, work: Awaitable[object], *, twice: bool = False, begun: asyncio.Event | None = None
) -> bool:
    """Cancel the work so many turns of the loop after it has begun; whether it was told to be cancelled."""
    task = asyncio.ensure_future(work)
    if begun is not None:
        await begun.wait()
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    if twice:
        await asyncio.sleep(0)
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


class Case:
    """Something to be cancelled: `arrange` what it needs, `act`, and see whether all of it `happened` or nothing."""

    def __init__(self, harness: Harness, storage: SQLStorage) -> None:
        self.harness = harness
        self.storage = storage

    async def arrange(self) -> None: ...

    async def act(self) -> object:
        raise NotImplementedError

    async def happened(self) -> bool:
        raise NotImplementedError


class CreateLocked(Case):
    async def arrange(self) -> None:
        self.id = self.harness.new_id()

    async def act(self) -> object:
        return await self.storage.create_instance(WorkflowInstance(self.id, "order", locked_by="w"), lock_timeout_sec=9)

    async def happened(self) -> bool:
        instance = await self.storage.get_instance(self.id)
        assert instance is None or instance.locked_by is None, "the lock of a cancelled caller is given back"
        return instance is not None


class AcquireLock(Case):
    async def arrange(self) -> None:
        self.id = await self.harness.instance(self.storage)

    async def act(self) -> object:
        return await self.storage.try_acquire_lock(self.id, "w", 60)

    async def happened(self) -> bool:
        instance = await self.storage.get_instance(self.id)
        assert instance is not None
        assert instance.locked_by is None, "the lock of a cancelled caller is given back"
        return instance.lock_token == 1


class ClaimInstances(Case):
    async def arrange(self) -> None:
        self.name = self.harness.new_id("workflow")
        self.ids = [await self.harness.instance(self.storage, workflow_name=self.name) for _ in range(3)]

    async def act(self) -> object:
        return await self.storage.claim_resumable_workflows("w", 60, workflow_names=[self.name])

    async def happened(self) -> bool:
        found = await self.storage.find_resumable_workflows(workflow_names=[self.name])
        assert sorted(instance.instance_id for instance in found) == sorted(self.ids)
        instances = [await self.storage.get_instance(instance_id) for instance_id in self.ids]
        tokens = {instance.lock_token for instance in instances if instance is not None}
        assert len(tokens) == 1
        return tokens == {1}


class DeliverAndClaim(Case):
    async def arrange(self) -> None:
        self.channel = self.harness.new_id("channel")
        lock = await self.harness.locked(self.storage)
        self.id = lock.instance_id
        await self.storage.subscribe_to_channel(self.id, self.channel, ChannelMode.BROADCAST)
        await self.storage.suspend(self.id, [ChannelWait(self.channel, "receive:1")], lock=lock)
        await self.storage.publish_to_channel(self.channel, "1")

    async def act(self) -> object:
        waiting = ChannelSubscription(self.id, self.channel, ChannelMode.BROADCAST)
        return await self.storage.deliver_and_claim(waiting, "w", 60)

    async def happened(self) -> bool:
        instance = await self.storage.get_instance(self.id)
        assert instance is not None
        assert instance.locked_by is None, "the lock of a cancelled caller is given back"
        delivered = len(await history_of(self.storage, self.id)) == 1
        assert (instance.lock_token, instance.status) == (
            (2, WorkflowStatus.RUNNING) if delivered else (1, WorkflowStatus.WAITING_FOR_MESSAGE)
        )
        return delivered


class FireAndClaim(Case):
    async def arrange(self) -> None:
        lock = await self.harness.locked(self.storage)
        self.timer = TimerSubscription(lock.instance_id, "nap", lock.expires_at)
        await self.storage.suspend(lock.instance_id, [self.timer], lock=lock)
        self.harness.advance(60)

    async def act(self) -> object:
        return await self.storage.fire_and_claim(self.timer, "w", 60)

    async def happened(self) -> bool:
        instance = await self.storage.get_instance(self.timer.instance_id)
        assert instance is not None
        assert instance.locked_by is None, "the lock of a cancelled caller is given back"
        fired = len(await history_of(self.storage, self.timer.instance_id)) == 1
        assert (instance.lock_token, instance.status) == (
            (2, WorkflowStatus.RUNNING) if fired else (1, WorkflowStatus.WAITING_FOR_TIMER)
        )
        return fired


class TakeSystemLock(Case):
    async def arrange(self) -> None:
        self.name = self.harness.new_id("lock")

    async def act(self) -> object:
        return await self.storage.try_acquire_system_lock(self.name, "w", 60)

    async def happened(self) -> bool:
        assert await self.storage.try_acquire_system_lock(self.name, "another", 60)
        return True


class LeaseOutboxEvent(Case):
    async def arrange(self) -> None:
        self.id = self.harness.new_id("event")
        await self.storage.add_outbox_event(OutboxEvent(self.id, "paid", "shop", event_data="{}"))

    async def act(self) -> object:
        return await self.storage.get_pending_outbox_events(lease_sec=60)

    async def happened(self) -> bool:
        leased = await self.storage.get_pending_outbox_events(owner="another")
        assert [event.event_id for event in leased] == [self.id]
        return await self.storage.mark_outbox_event_sent(self.id)


class Append(Case):
    async def arrange(self) -> None:
        self.lock = await self.harness.locked(self.storage)

    async def act(self) -> object:
        return await self.storage.append_history(step(self.lock.instance_id), lock=self.lock)

    async def happened(self) -> bool:
        return len(await history_of(self.storage, self.lock.instance_id)) == 1


class Complete(Case):
    async def arrange(self) -> None:
        self.lock = await self.harness.locked(self.storage)
        await self.storage.join_group(self.lock.instance_id, "all")

    async def act(self) -> object:
        return await self.storage.update_instance_output(self.lock.instance_id, '"done"', lock=self.lock)

    async def happened(self) -> bool:
        instance = await self.storage.get_instance(self.lock.instance_id)
        assert instance is not None
        done = (instance.status, instance.output_data, instance.locked_by) == (WorkflowStatus.COMPLETED, '"done"', None)
        assert done or instance.locked_by == self.lock.worker_id
        assert (self.lock.instance_id in await self.storage.get_group_members("all")) is not done
        return done


class Suspend(Case):
    async def arrange(self) -> None:
        self.lock = await self.harness.locked(self.storage)

    async def act(self) -> object:
        timer = TimerSubscription(self.lock.instance_id, "nap", self.lock.expires_at)
        return await self.storage.suspend(self.lock.instance_id, [timer], lock=self.lock)

    async def happened(self) -> bool:
        instance = await self.storage.get_instance(self.lock.instance_id)
        assert instance is not None
        waits = instance.status == WorkflowStatus.WAITING_FOR_TIMER
        assert (instance.locked_by is None) is waits
        return waits


class Publish(Case):
    async def arrange(self) -> None:
        self.channel = self.harness.new_id("channel")

    async def act(self) -> object:
        return await self.storage.publish_to_channel(self.channel, "1")

    async def happened(self) -> bool:
        return len(await self.storage.get_pending_channel_messages(self.channel)) == 1


class Transact(Case):
    """Three operations in a transaction, with a callback after its commit."""

    async def arrange(self) -> None:
        self.lock = await self.harness.locked(self.storage)
        self.channel = self.harness.new_id("channel")
        self.called_back = 0

    async def act(self) -> object:
        async def call_back() -> None:
            await asyncio.sleep(0)
            self.called_back += 1

        async with self.storage.transaction():
            self.storage.register_post_commit_callback(call_back)
            await self.storage.append_history(step(self.lock.instance_id), lock=self.lock)
            await self.storage.publish_to_channel(self.channel, "1", lock=self.lock)
            async with self.storage.transaction():
                await self.storage.subscribe_to_channel(self.lock.instance_id, self.channel, ChannelMode.BROADCAST)
        return None

    async def happened(self) -> bool:
        traces = [
            len(await history_of(self.storage, self.lock.instance_id)),
            len(await self.storage.get_pending_channel_messages(self.channel)),
            int(await self.storage.get_channel_mode(self.channel) is not None),
            self.called_back,
        ]
        assert traces in ([0, 0, 0, 0], [1, 1, 1, 1])
        return traces[0] == 1


class Read(Case):
    async def act(self) -> object:
        return await self.storage.list_instances()

    async def happened(self) -> bool:
        return True


CASES = [
    CreateLocked,
    AcquireLock,
    ClaimInstances,
    DeliverAndClaim,
    FireAndClaim,
    TakeSystemLock,
    LeaseOutboxEvent,
    Append,
    Complete,
    Suspend,
    Publish,
    Transact,
    Read,
]


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
async def test_a_cancelled_caller_leaves_all_or_nothing(
    harness: Harness, storage: SQLStorage, kind: Callable[[Harness, SQLStorage], Case]
) -> None:
    cancelled = 0
    for number in steps():
        case = kind(harness, storage)
        await case.arrange()
        expect_company(storage)
        if not await cancelled_after(number, case.act(), twice=number % 3 == 2):
            break
        await case.happened()
        cancelled += 1

    assert cancelled > 1
    await assert_nothing_is_held(storage)
    await harness.locked(storage)  # the storage still works


@pytest.mark.databases("postgres", "mariadb", "mysql")
@pytest.mark.parametrize(
    "kind", [CreateLocked, AcquireLock, Append, Suspend, Publish, Read], ids=lambda kind: kind.__name__
)
async def test_a_soloist_who_is_cancelled_leaves_all_or_nothing(
    harness: Harness, storage: SQLStorage, kind: Callable[[Harness, SQLStorage], Case]
) -> None:
    async def play(case: Case, begun: asyncio.Event) -> object:
        lock = await harness.locked(storage)
        for number in range(2):  # the first time it may still wait for company
            await storage.append_history(step(lock.instance_id, f"charge:{number}"), lock=lock)
        assert storage.runner.flusher.plays_solo(Touches())  # type: ignore[attr-defined]
        begun.set()
        return await case.act()

    cancelled = 0
    for number in steps():
        case = kind(harness, storage)
        await case.arrange()
        begun = asyncio.Event()
        if not await cancelled_after(number, play(case, begun), twice=number % 3 == 2, begun=begun):
            break
        assert await case.happened(), "what was sent was done"
        cancelled += 1

    assert cancelled > 1
    await assert_nothing_is_held(storage)
    await harness.locked(storage)  # the storage still works


@pytest.mark.parametrize("kind", [Append, Publish, Transact], ids=lambda kind: kind.__name__)
async def test_the_outcome_is_known_when_the_caller_is_told(
    harness: Harness, storage: SQLStorage, kind: Callable[[Harness, SQLStorage], Case]
) -> None:
    told: list[tuple[Case, bool]] = []
    for number in (0, 1, 2, 3, 5, 8, 13, 21, 34):
        case = kind(harness, storage)
        await case.arrange()
        expect_company(storage)
        await cancelled_after(number, case.act())
        told.append((case, await case.happened()))

    await asyncio.sleep(0.05)

    assert [await case.happened() for case, _ in told] == [outcome for _, outcome in told]


async def test_others_are_not_disturbed_by_a_cancelled_caller(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage) for _ in range(20)]
    writing = [asyncio.create_task(write_steps(storage, lock.instance_id)) for lock in locks]

    for number in range(15):
        for task in writing[::2]:
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*writing[::2], return_exceptions=True)
        writing[::2] = [asyncio.create_task(write_steps(storage, harness.new_id())) for _ in writing[::2]]
    for task in writing[::2]:
        task.cancel()

    assert await asyncio.gather(*writing[1::2]) == [10] * 10
    await asyncio.gather(*writing[::2], return_exceptions=True)
    await assert_nothing_is_held(storage)


async def write_steps(storage: SQLStorage, instance_id: str) -> int:
    if await storage.get_instance(instance_id) is None:
        await storage.create_instance(WorkflowInstance(instance_id, "order"))
    for number in range(10):
        await storage.append_history(step(instance_id, f"step:{number}"))
    return len(await history_of(storage, instance_id))


async def test_a_caller_that_runs_into_its_timeout_is_told_so(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    other = await harness.open()

    async with other.transaction():
        await other.update_instance_activity(instance_id, "charge:1")
        waiting = asyncio.create_task(impatient(storage, instance_id))
        await asyncio.sleep(0.15)
    with pytest.raises(TimeoutError):
        await waiting

    await assert_nothing_is_held(storage)
    assert (await storage.get_instance(instance_id)) is not None


async def impatient(storage: SQLStorage, instance_id: str) -> None:
    async with asyncio.timeout(0.05):
        await storage.update_instance_activity(instance_id, "charge:2")


async def test_a_cancelled_renewal_keeps_the_system_lock(storage: SQLStorage) -> None:
    assert await storage.try_acquire_system_lock("leader", "w", 60)

    for number in steps():
        if not await cancelled_after(number, storage.try_acquire_system_lock("leader", "w", 60)):
            break
        assert not await storage.try_acquire_system_lock("leader", "another", 60)


async def test_a_caller_cancelled_while_it_stands_in_line_leaves_the_line(harness: Harness) -> None:
    storage = await harness.open() if harness.name == "sqlite" else await harness.open(pool_size=3)
    instances = [await harness.instance(storage) for _ in range(6)]
    holder = await harness.open()

    async with holder.transaction():
        for instance_id in instances:
            await holder.update_instance_activity(instance_id, "held")
        held_up = [
            asyncio.create_task(storage.update_instance_activity(instance_id, "next")) for instance_id in instances
        ]
        await asyncio.sleep(0.05)
        for task in held_up:
            task.cancel()
    answers = await asyncio.gather(*held_up, return_exceptions=True)

    assert {type(answer) for answer in answers} == {asyncio.CancelledError}
    await assert_nothing_is_held(storage)
