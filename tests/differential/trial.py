"""A sequence of steps, run on the oracle and on a database side by side; every answer and the final tables compared."""

import asyncio
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any
from uuid import uuid4

import msgspec

from romancy.storage import (
    HistoryEvent,
    ListInstancesOptions,
    SQLStorage,
    StorageError,
    Work,
    WorkflowInstance,
)
from romancy.storage.sql.operation import OPERATIONS
from romancy.storage.sql.runners.server import ServerRunner
from tests.comparison import Comparison, Difference, read_tables
from tests.harness import Harness, assert_ties_are_known, empty

from .oracle import EPOCH, NEIGHBOUR, OURS, tables
from .steps import TICK, Advance, Call, Rehearsal, Step, Together, Transaction

ANSWERED_IDS = {
    "publish_to_channel": "messages",
    "publish_many": "messages",
    "publish_once": "messages",
    "publish_foreign": "messages",
    "reserve_foreign": "messages",
    "get_delivery_cursor": "messages",
}


class Client:
    """A storage, asked as the oracle is: all pages of a listing at once, and in the name of other frameworks."""

    def __init__(self, storage: SQLStorage) -> None:
        self.storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    async def list_instances(self, options: ListInstancesOptions, **kwargs: Any) -> list[WorkflowInstance]:
        found: list[WorkflowInstance] = []
        while True:
            options = msgspec.structs.replace(options, limit=2)
            page = await self.storage.list_instances(options, **kwargs)
            found += page.instances
            if not page.has_more:
                return found
            options = msgspec.structs.replace(options, page_token=page.next_page_token)

    async def get_history(self, instance_id: str) -> list[HistoryEvent]:
        found: list[HistoryEvent] = []
        while True:
            events, has_more = await self.storage.get_history_paginated(
                instance_id, (found[-1].id or 0) if found else 0, 2
            )
            found += events
            if not has_more:
                break
        replayed = await self.storage.get_history_to_replay(instance_id, 0, len(found) or 1)
        assert not replayed.has_more
        assert [each.id for each in replayed.events] == [each.id for each in found]
        return found

    async def look_for_work(self, soon_sec: float, **asked: Any) -> Work:
        """It may see messages that nobody waits for; the poll it sends us to decides."""
        work = await self.storage.look_for_work(soon_sec, **asked)
        messages = work.messages and bool(await self.storage.find_deliverable_subscriptions(**asked))
        return msgspec.structs.replace(work, messages=messages)

    async def publish_foreign(self, channel_name: str, data: str, reserved_id: int | None = None) -> int:
        columns, name = ["channel", "message_id", "data_type", "data", "published_at"], str(uuid4())
        values = [channel_name, name, "json", data, self.driver.encode_time(await self.storage.current_time())]
        if reserved_id is not None:
            columns, values = ["id", *columns], [reserved_id, *values]
        marks = ", ".join(self.driver.placeholder(number) for number in range(1, len(values) + 1))
        conn = self.storage.conn()
        await conn.execute(f"INSERT INTO channel_messages ({', '.join(columns)}) VALUES ({marks})", *values)
        return int(await conn.fetch_value("SELECT id FROM channel_messages WHERE message_id = :name", name=name))

    async def reserve_foreign(self) -> int:
        drawn = await self.publish_foreign("nowhere", "null")
        await self.storage.conn().execute("DELETE FROM channel_messages WHERE id = :drawn", drawn=drawn)
        return drawn

    @property
    def driver(self) -> Any:
        return self.storage.runner.driver


class Trial(Rehearsal):
    """Steps played on the oracle and on a database."""

    def __init__(self, harness: Harness, clients: dict[str, Client], start: datetime) -> None:
        super().__init__()
        self.harness = harness
        self.clients = clients
        self.start = start
        self.comparison = Comparison(EPOCH, start, TICK / 2)

    def moment(self, side: int, halves: int) -> datetime:
        return super().moment(side, halves) + (self.start - EPOCH if side else timedelta(0))

    async def run(self, steps: list[Step]) -> None:
        for step in steps:
            await self._run_step(step)
        self.comparison.check(tables(self.oracle), await read_tables(self.clients[OURS].storage), where="tables")
        await assert_ties_are_known(self.clients[OURS].storage)

    async def _run_step(self, step: Step) -> None:
        match step:
            case Advance(ticks):
                self.advance(ticks)
                self.harness.advance(ticks * TICK.total_seconds())
            case Transaction():
                await self._run_transaction(step)
            case Together(calls):
                await self._run_together(calls)
            case Call():
                arguments = self.arguments(step)
                self._compare(step, arguments[0], await self._ask(step, arguments[1]))
        if self.harness.name == "sqlite":
            await asyncio.sleep(0.0011)  # its clock has milliseconds: let what comes next be later

    async def _run_transaction(self, step: Transaction) -> None:
        known = dict(self.comparison.known)
        with self.transaction(commit=step.commit):
            try:
                async with self.clients[OURS].storage.transaction():
                    for inner in step.steps:
                        await self._run_step(inner)
                    if not step.commit:
                        raise _RollBack
            except _RollBack:
                self.comparison.known = known  # SQLite gives out ids again that were rolled back

    async def _run_together(self, calls: tuple[Call, ...]) -> None:
        """Start all before any has its answer: those that have to do with each other are run in turn."""
        arguments = [self.arguments(call) for call in calls]
        asked = zip(calls, arguments, strict=True)
        for _, company in groupby(asked, lambda asking: self._way_of(asking[0])):
            await self._run_company(list(company))

    def _way_of(self, call: Call) -> str:
        """Who goes another way may overtake: a tied instance is completed in two attempts; some share flushes."""
        if call.name == "update_instance_output":
            return "twice"
        return "in flushes" if self.harness.name != "sqlite" and shares_flushes(call) else "alone"

    async def _run_company(self, company: list[tuple[Call, tuple[Any, Any]]]) -> None:
        with self._a_millisecond_each():
            answers = await asyncio.gather(*(self._ask(call, given) for call, (_, given) in company))
        for (call, (given, _)), answer in zip(company, answers, strict=True):
            self._compare(call, given, answer)

    @contextmanager
    def _a_millisecond_each(self) -> Iterator[None]:
        runner = self.clients[OURS].storage.runner
        if self.harness.name == "sqlite":
            runner.probe = lambda point, name: time.sleep(0.0011)
        yield
        runner.probe = None

    def _ask(self, call: Call, arguments: Any) -> Awaitable[Any]:
        args, kwargs = arguments
        return _answer(getattr(self.clients[call.by], call.name)(*args, **kwargs))

    def _compare(self, call: Call, arguments: Any, actual: Any) -> None:
        expected = self.ask_oracle(call, arguments)
        try:
            self.comparison.check(expected, actual, ANSWERED_IDS.get(call.name, ""))
        except Difference as difference:
            raise Difference(f"{call}\n  {difference}") from None
        if not isinstance(actual, StorageError):
            self.handles.note(call.name, expected, actual)


def shares_flushes(call: Call) -> bool:
    """Whether a call goes through the flusher."""
    behind = {
        "append_history": "_append",
        "create_instance": "_create_instance",
        "mark_outbox_event_sent": "_mark_sent",
    }
    traits = OPERATIONS.get(behind.get(call.name, call.name))
    return traits is not None and traits.touches is not None


class _RollBack(Exception):
    """Leaves a transaction block without its changes."""


async def _answer(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except StorageError as error:
        return error


class Laboratory:
    """A database on which one trial after the other is made."""

    def __init__(self, harness: Harness, clients: dict[str, Client]) -> None:
        self.harness = harness
        self.clients = clients

    @classmethod
    async def open(cls, harness: Harness) -> "Laboratory":
        # One connection, so that what is asked together is done in turn; and no waiting for the disk.
        options: dict[str, Any] = {"synchronous": "OFF"} if harness.name == "sqlite" else {"pool_size": 1}
        clients = {name: Client(await harness.open(framework=name, **options)) for name in (OURS, NEIGHBOUR)}
        for client in clients.values():
            runner = client.storage.runner
            if isinstance(runner, ServerRunner):
                runner.flusher.lanes = 1
                runner._pool_for = lambda _, own=runner.pool: own  # type: ignore[method-assign,misc]
        return cls(harness, clients)

    async def difference(self, steps: list[Step]) -> Difference | None:
        """How the database differs from the oracle after, or during, these steps; None if it does not."""
        storage = self.clients[OURS].storage
        await empty(storage)
        try:
            await Trial(self.harness, self.clients, await storage.current_time()).run(steps)
        except Difference as difference:
            return difference
        return None

    async def shrunk(self, steps: list[Step], trials: int = 200) -> list[Step]:
        """Steps without which the sequence would not fail; as few as can be found with so many trials."""
        size = len(steps) // 2
        while size and trials > 0:
            position = 0
            while position < len(steps) and trials > 0:
                without = steps[:position] + steps[position + size :]
                trials -= 1
                if await self.difference(without) is None:
                    position += size
                else:
                    steps = without
            size //= 2
        return steps
