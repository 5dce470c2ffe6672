"""Other operations of a running workflow, by one caller and by many: for information."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

from romancy.storage import ChannelMessage, ChannelMode, OutboxEvent, SQLStorage, WorkflowInstance

from .appends import EVENT_DATA, EVENT_TYPE, locked_instance
from .databases import Database
from .measuring import Contender, Size, Table, per_second, take_turns

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


OPERATIONS: dict[str, Prepare] = {
    "create and lock": _create,
    "acquire": _acquire,
    "complete and release": _complete,
    "publish": _publish,
    "publish and deliver": _publish_and_deliver,
    "add to the outbox": _add_to_outbox,
}


async def measure(databases: Sequence[Database], size: Size) -> None:
    """Print how many of each operation one caller and many callers do per second."""
    many = f"{size.callers} callers"
    table = Table("Other operations: rate", operation=20, database=10, one_caller=12, **{many: 12}, ratio=20)
    names = count(1)
    for title, prepare in OPERATIONS.items():
        for database in databases:
            async with database.open() as storage:
                one = _Callers(storage, prepare, names, 1)
                all_at_once = _Callers(storage, prepare, names, size.callers)
                contenders = [
                    Contender(one.work, size.single, one.prepare),
                    Contender(all_at_once.work, size.callers * size.each, all_at_once.prepare),
                ]
                single, shared = await take_turns(size.rounds, contenders)
            table.row(title, database.title, per_second(single), per_second(shared), str(single.divided_by(shared)))


class _Callers:
    """Some callers, each doing one operation after the other."""

    def __init__(self, storage: SQLStorage, prepare: Prepare, names: count[int], callers: int) -> None:
        self._storage = storage
        self._prepare = prepare
        self._names = names
        self._callers = callers
        self._ready: list[Act] = []

    async def prepare(self, operations: int) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_made(self._prepare(self._storage, f"operation-{next(self._names)}")))
                for _ in range(operations)
            ]
        self._ready = [task.result() for task in tasks]

    async def work(self, operations: int) -> None:
        async with asyncio.TaskGroup() as group:
            for caller in range(self._callers):
                group.create_task(self._one_by_one(self._ready[caller :: self._callers]))

    async def _one_by_one(self, acts: Sequence[Act]) -> None:
        for act in acts:
            await act()


async def _made(act: Awaitable[Act]) -> Act:
    return await act
