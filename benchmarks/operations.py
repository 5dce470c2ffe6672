"""What else a worker writes: many callers at once, beside the same operation by one caller, one commit at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import NamedTuple

from romancy.storage import ChannelMessage, ChannelMode, OutboxEvent, SQLStorage, WorkflowInstance
from tests.harness import empty

from .appends import locked_instance
from .bare import EVENT_DATA, EVENT_TYPE
from .databases import Database, Place
from .measuring import Contender, Report, Result, Series, Size, Target, per_second, take_turns

MANY = Target(least=2.5)

Act = Callable[[], Awaitable[object]]
"""One operation, on rows of its own."""
Prepare = Callable[[SQLStorage, str], Awaitable[Act]]
"""Make one operation ready, on rows that carry a name of their own."""


async def _create(storage: SQLStorage, name: str) -> Act:
    return lambda: locked_instance(storage, name)


async def _acquire(storage: SQLStorage, name: str) -> Act:
    await storage.create_instance(WorkflowInstance(name, "benchmark"))
    return lambda: storage.try_acquire_lock(name, "worker", 3600)


async def _complete(storage: SQLStorage, name: str) -> Act:
    lock = await locked_instance(storage, name)
    return lambda: storage.update_instance_output(name, EVENT_DATA, lock=lock)


async def _publish(storage: SQLStorage, name: str) -> Act:
    return lambda: storage.publish_to_channel(name, EVENT_DATA)


async def _publish_to_one(storage: SQLStorage, name: str) -> Act:
    return lambda: storage.publish_to_channel("everybody's", EVENT_DATA)


async def _claim(storage: SQLStorage, name: str) -> Act:
    await storage.create_instance(WorkflowInstance(name, "benchmark"))

    async def act() -> None:
        (_,) = await storage.claim_resumable_workflows("worker", 3600, 1, workflow_names=["benchmark"])

    return act


async def _lease(storage: SQLStorage, name: str) -> Act:
    await storage.add_outbox_event(OutboxEvent(name, EVENT_TYPE, "benchmark", event_data=EVENT_DATA))

    async def act() -> None:
        (_,) = await storage.get_pending_outbox_events(1, lease_sec=3600)

    return act


async def _publish_and_deliver(storage: SQLStorage, name: str) -> Act:
    lock = await locked_instance(storage, name)
    await storage.subscribe_to_channel(name, name, ChannelMode.BROADCAST, lock=lock)
    await storage.register_channel_receive_and_release_lock(name, name, "worker", "receive:1", lock=lock)

    async def act() -> None:
        await storage.publish_to_channel(name, EVENT_DATA)
        message = ChannelMessage(name)
        delivered = await storage.deliver_channel_message_with_lock(name, name, message, "courier", 30)
        assert delivered is not None

    return act


async def _add_to_outbox(storage: SQLStorage, name: str) -> Act:
    return lambda: storage.add_outbox_event(OutboxEvent(name, EVENT_TYPE, "benchmark", event_data=EVENT_DATA))


class Operation(NamedTuple):
    """An operation, and how to see in the tables that so many were done."""

    prepare: Prepare
    table: str
    where: str
    target: Target | None = MANY


OPERATIONS = {
    "create and lock": Operation(_create, "workflow_instances", "locked_by = 'worker'"),
    "acquire": Operation(_acquire, "workflow_instances", "locked_by = 'worker'"),
    "complete and release": Operation(_complete, "workflow_instances", "status = 'completed' AND locked_by IS NULL"),
    "publish": Operation(_publish, "channel_messages", "1 = 1"),
    "publish to one channel": Operation(_publish_to_one, "channel_messages", "1 = 1"),
    "claim one": Operation(_claim, "workflow_instances", "locked_by = 'worker'"),
    "lease one of the outbox": Operation(_lease, "outbox_events", "status = 'processing'"),
    "add to the outbox": Operation(_add_to_outbox, "outbox_events", "status = 'pending'", None),
    "publish and deliver": Operation(_publish_and_deliver, "workflow_history", "1 = 1", None),
}


async def measure(places: Sequence[Place], size: Size, report: Report) -> None:
    """How much more many callers do together than one caller alone."""
    report.section(f"{size.callers} callers at once, beside the same operation one commit at a time")
    for place in places:
        async with place.database() as database:
            for title, operation in OPERATIONS.items():
                one, many = await _measure(database, size, operation)
                report.add(
                    Result(
                        title,
                        place.title,
                        one.divided_by(many),
                        beside=f"{per_second(one)} one by one",
                        ours=per_second(many),
                        target=operation.target,
                    )
                )


async def _measure(database: Database, size: Size, operation: Operation) -> tuple[Series, Series]:
    names = count(1)
    async with database.open() as storage:
        one = _Callers(storage, operation.prepare, names, 1)
        all_at_once = _Callers(storage, operation.prepare, names, size.callers)
        contenders = [
            Contender(one.work, size.single, one.prepare),
            Contender(all_at_once.work, size.callers * size.each, all_at_once.prepare),
        ]
        single, shared = await take_turns(size.rounds, contenders)
    done = (size.rounds + 1) * (size.single + size.callers * size.each)
    assert await database.count(operation.table, operation.where) == done
    async with database.open() as storage:
        await empty(storage, deadline_sec=600)
    return single, shared


class _Callers:
    """Some callers, each doing one operation after the other."""

    def __init__(self, storage: SQLStorage, prepare: Prepare, names: count[int], callers: int) -> None:
        self._storage = storage
        self._prepare = prepare
        self._names = names
        self._callers = callers
        self._ready: list[Act] = []

    async def prepare(self, operations: int) -> None:
        self._ready = []
        async with asyncio.TaskGroup() as group:
            for _ in range(operations):
                group.create_task(self._make(f"operation-{next(self._names)}"))

    async def _make(self, name: str) -> None:
        self._ready.append(await self._prepare(self._storage, name))

    async def work(self, operations: int) -> None:
        async with asyncio.TaskGroup() as group:
            for caller in range(self._callers):
                group.create_task(self._one_by_one(self._ready[caller :: self._callers]))

    async def _one_by_one(self, acts: Sequence[Act]) -> None:
        for act in acts:
            await act()
