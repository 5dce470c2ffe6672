"""A sequence of steps, run on the oracle and on a database side by side; every answer and the final tables compared.

Ids, message names and times differ between the two. They are compared by what they stand for: the first time that two
of them meet they are taken as each other's counterpart, and must stay so.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import msgspec

from romancy.storage import (
    Appended,
    HistoryEvent,
    ListInstancesOptions,
    SQLStorage,
    StorageError,
    WorkflowInstance,
)
from tests.harness import Harness, empty

from .oracle import EPOCH, FOREVER, NEIGHBOUR, OURS, tables
from .steps import TICK, Advance, Call, Rehearsal, Step, Together, Transaction

TABLES = {
    "definitions": "SELECT workflow_name, source_hash FROM workflow_definitions ORDER BY workflow_name, source_hash",
    "instances": """
        SELECT instance_id, workflow_name, source_hash, owner_service, framework, status, current_activity_id,
               continued_from, started_at, input_data, output_data, locked_by, locked_at, lock_timeout_seconds,
               lock_expires_at, lock_token, suspended_from, parked_until, parked_reason, runnable_since, finished_at
          FROM workflow_instances ORDER BY instance_id""",
    "history": """
        SELECT id, instance_id, activity_id, event_type, data_type, event_data, event_data_binary, created_at
          FROM workflow_history ORDER BY id""",
    "archive": """
        SELECT id, original_id, instance_id, activity_id, event_type, data_type, event_data, event_data_binary,
               created_at, archived_at
          FROM workflow_history_archive ORDER BY id""",
    "compensations": """
        SELECT id, instance_id, activity_id, activity_name, args, created_at FROM workflow_compensations ORDER BY id""",
    "timers": """
        SELECT id, instance_id, timer_id, expires_at, activity_id, created_at
          FROM workflow_timer_subscriptions ORDER BY id""",
    "channel_waits": "SELECT instance_id, channel, activity_id, timeout_at FROM romancy_channel_waits ORDER BY id",
    "instance_waits": "SELECT instance_id, activity_id, awaited_id FROM romancy_instance_waits ORDER BY id",
    "messages": """
        SELECT id, channel, message_id, data_type, data, data_binary, metadata, published_at, origin
          FROM channel_messages ORDER BY id""",
    "claims": """
        SELECT m.id AS message, k.instance_id
          FROM channel_message_claims k JOIN channel_messages m ON m.message_id = k.message_id ORDER BY m.id""",
    "subscriptions": """
        SELECT id, instance_id, channel, mode, activity_id, timeout_at, subscribed_at
          FROM channel_subscriptions ORDER BY id""",
    # It may stand in two places; the larger counts.
    "cursors": """
        SELECT instance_id, channel, MAX(reached) AS message FROM (
               SELECT instance_id, channel, cursor_message_id AS reached FROM channel_subscriptions
               UNION ALL SELECT instance_id, channel, last_delivered_id FROM channel_delivery_cursors) c
         WHERE reached > 0 GROUP BY instance_id, channel ORDER BY instance_id, channel""",
    "groups": "SELECT instance_id, group_name FROM workflow_group_memberships ORDER BY id",
    "outbox": """
        SELECT event_id, event_type, event_source, data_type, event_data, event_data_binary, content_type, created_at,
               published_at, status, retry_count, last_error, lease_owner, lease_until, next_attempt_at
          FROM outbox_events ORDER BY event_id""",
    "system_locks": "SELECT lock_name, locked_by, locked_at, lock_expires_at FROM system_locks ORDER BY lock_name",
}

IDS = {
    "HistoryEvent": "history",
    "Appended": "history",
    "ArchivedHistoryEvent": "archive",
    "CompensationEntry": "compensations",
    "TimerSubscription": "timers",
    "ChannelMessage": "messages",
    "ChannelSubscription": "subscriptions",
}
"""Of what a model's `id` is the id; in a table, of its rows."""
OTHER_IDS = {"original_id": "history", "cursor_message_id": "messages", "message": "messages"}
ANSWERED_IDS = {
    "publish_to_channel": "messages",
    "publish_many": "messages",
    "publish_foreign": "messages",
    "reserve_foreign": "messages",
    "get_delivery_cursor": "messages",
}
UNORDERED = ("find_deliverable_subscriptions",)
"""Oldest first, but messages of other frameworks are found by another look, and come last."""

_VARYING = re.compile(
    r"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})|(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00)"
)


class Difference(Exception):
    """The database answered or holds something else than the oracle."""


class Comparison:
    """What stands for what."""

    def __init__(self, start: datetime) -> None:
        self.start = start
        self.known: dict[tuple[str, str, Any], Any] = {}

    def check(self, expected: Any, actual: Any, kind: str = "", where: str = "answer") -> None:
        """Raise Difference unless the two are the same, but for what may differ."""
        if isinstance(expected, datetime) and isinstance(actual, datetime):
            same = _half_ticks(expected, EPOCH) == _half_ticks(actual, self.start)
        elif isinstance(expected, StorageError) and type(expected) is type(actual):
            self.check(vars(expected), vars(actual), where=where)
            same = True
        elif isinstance(expected, msgspec.Struct | Appended) and type(expected) is type(actual):
            names = expected.__struct_fields__ if isinstance(expected, msgspec.Struct) else expected._fields
            left, right = ({name: getattr(side, name) for name in names} for side in (expected, actual))
            self.check(left, right, IDS.get(type(expected).__name__, ""), where)
            same = True
        elif isinstance(expected, dict) and isinstance(actual, dict):
            same = expected.keys() >= actual.keys()
            for name in actual if same else ():
                if name != "updated_at":
                    self.check(expected[name], actual[name], self._kind(name, kind), f"{where}.{name}")
        elif isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
            same = len(expected) == len(actual)
            for number, pair in enumerate(zip(expected, actual, strict=True) if same else ()):
                self.check(*pair, kind, f"{where}[{number}]")
        elif kind and expected and actual:
            same = self._counterparts(kind, expected, actual)
        elif isinstance(expected, str) and isinstance(actual, str):
            same = self._same_text(str(expected), str(actual))
        else:
            same = bool(expected == actual)
        if not same:
            raise Difference(f"{where}: expected {expected!r}, got {actual!r}")

    @staticmethod
    def _kind(name: str, kind: str) -> str:
        if name in TABLES:
            return name
        return kind if name == "id" else OTHER_IDS.get(name, "")

    def _counterparts(self, kind: str, expected: Any, actual: Any) -> bool:
        if ("expected", kind, expected) not in self.known and ("actual", kind, actual) not in self.known:
            self.known["expected", kind, expected] = actual
            self.known["actual", kind, actual] = expected
        return bool(self.known.get(("expected", kind, expected)) == actual)

    def _same_text(self, expected: str, actual: str) -> bool:
        """The same text, but for names of messages and times in it."""
        pieces, other = _VARYING.split(expected), _VARYING.split(actual)
        if len(pieces) != len(other) or pieces[::3] != other[::3]:
            return False
        for name, other_name in zip(pieces[1::3], other[1::3], strict=True):
            if (name or other_name) and not self._counterparts("message name", name, other_name):
                return False
        for moment, other_moment in zip(pieces[2::3], other[2::3], strict=True):
            if moment and other_moment:
                self.check(datetime.fromisoformat(moment), datetime.fromisoformat(other_moment))
        return True


def _half_ticks(moment: datetime, start: datetime) -> int:
    if moment == FOREVER:
        return -1
    return (moment - start + timedelta(milliseconds=1)) // (TICK / 2)


class Client:
    """A storage, asked as the oracle is: all pages of a listing at once, and in the name of other frameworks."""

    def __init__(self, storage: SQLStorage) -> None:
        self.storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    async def list_instances(self, options: ListInstancesOptions, *, payloads: bool) -> list[WorkflowInstance]:
        found: list[WorkflowInstance] = []
        while True:
            options = msgspec.structs.replace(options, limit=2)
            page = await self.storage.list_instances(options, payloads=payloads)
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
                return found

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
        self.comparison = Comparison(start)

    def moment(self, side: int, halves: int) -> datetime:
        return super().moment(side, halves) + (self.start - EPOCH if side else timedelta(0))

    async def run(self, steps: list[Step]) -> None:
        for step in steps:
            await self._run_step(step)
        self.comparison.check(tables(self.oracle), await self._tables(), where="tables")

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
        """Start all before any has its answer: on one connection they are run in turn."""
        arguments = [self.arguments(call) for call in calls]
        with self._a_millisecond_each():
            asked = [self._ask(call, given) for call, (_, given) in zip(calls, arguments, strict=True)]
            answers = await asyncio.gather(*asked)
        for call, (given, _), answer in zip(calls, arguments, answers, strict=True):
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
        answers = (expected, actual)
        if call.name in UNORDERED and isinstance(actual, list):
            answers = (sorted(expected, key=_position), sorted(actual, key=_position))
        try:
            self.comparison.check(*answers, ANSWERED_IDS.get(call.name, ""))
        except Difference as difference:
            raise Difference(f"{call}\n  {difference}") from None
        if not isinstance(actual, StorageError):
            self.handles.note(call.name, expected, actual)

    async def _tables(self) -> dict[str, list[dict[str, Any]]]:
        client = self.clients[OURS]
        decode = client.driver.decode_time
        found: dict[str, list[dict[str, Any]]] = {}
        for table, query in TABLES.items():
            rows: list[Any] = await client.storage.conn().fetch_all(query)
            found[table] = [
                {
                    name: decode(value) if value is not None and name.endswith(("_at", "_until", "_since")) else value
                    for name, value in zip(row.columns, row, strict=True)
                }
                for row in rows
            ]
        return found


class _RollBack(Exception):
    """Leaves a transaction block without its changes."""


async def _answer(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except StorageError as error:
        return error


def _position(subscription: Any) -> tuple[str, str]:
    return subscription.instance_id, subscription.activity_id


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
