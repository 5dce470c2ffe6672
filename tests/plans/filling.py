"""A database with a long past: finished instances by the hundred thousand, and a few hundred that are under way.

Every table that a poll or a page looks at is much larger than what it has to find.
"""

from typing import NamedTuple

from romancy.storage import SQLStorage
from tests.numbers import joined, numbers

DUE = 30
"""Of each kind: timers, timeouts, messages, locks that have expired, leases that have ended."""
AUDITS = 60
"""Instances of a workflow that was run long ago, and only then."""
_AT_ONCE = 20_000
"""Rows per transaction."""


class Size(NamedTuple):
    """How much there is. However much is over, what is due is as much."""

    finished: int
    steps: int
    """Recorded for each finished instance."""
    received: int
    """Messages that were received, most of them on one channel."""
    published: int
    """Events that have left the outbox; a few hundred have not."""
    running: int
    """Runnable instances; as many are locked, and as many parked."""
    waiting: int
    """Sleeping instances; as many wait in a receive, each on a channel of its own."""

    @property
    def customers(self) -> int:
        """As many as give each a page of instances."""
        return self.finished // 60

    @property
    def unfinished(self) -> int:
        return 3 * self.running + 2 * self.waiting


LARGE = Size(finished=100_000, steps=1, received=30_000, published=50_000, running=300, waiting=3000)
SMALL = Size(finished=1000, steps=1, received=300, published=500, running=300, waiting=300)


class Filler:
    """Fills a migrated database, with statements that make many rows each."""

    def __init__(self, storage: SQLStorage, size: Size) -> None:
        self._size = size
        self._storage = storage
        self._driver = storage.runner.driver

    async def fill(self) -> None:
        for name in ("order", "invoice", "refund", "audit"):
            await self._insert(1, "workflow_definitions", workflow_name=f"'{name}'", source_hash="''", source_code="''")
        await self._finished_instances()
        await self._running_instances()
        await self._waiting_instances()
        await self._messages()
        await self._outbox()
        await self.analyze()

    async def _insert(self, count: int, table: str, **columns: str) -> None:
        """Make a row for each `n` from 1 to `count`."""
        await self._insert_each(1, count, table, **columns)

    async def _insert_each(self, each: int, count: int, table: str, **columns: str) -> None:
        """Make `each` rows, in which `k` counts, for each `n` from 1 to `count`."""
        steps = " UNION ALL ".join(f"SELECT {k} AS k" for k in range(1, each + 1))
        for done in range(0, count, _AT_ONCE):
            source = (
                f"(SELECT n + {done} AS n FROM {numbers(min(_AT_ONCE, count - done))}) ns CROSS JOIN ({steps}) steps"
            )
            async with self._storage.transaction(deadline_sec=600) as conn:
                for unchecked in self._unchecked("0"):
                    await conn.execute(unchecked)
                await conn.execute(
                    f"INSERT INTO {table} ({', '.join(columns)})"
                    f" SELECT {', '.join(columns.values())} FROM {source} ORDER BY n, k"
                )
                for checked in self._unchecked("1"):
                    await conn.execute(checked)

    def _unchecked(self, value: str) -> list[str]:
        """Five times as fast on MySQL."""
        mysql = self._driver.driver_name() == "mysql"
        return [f"SET foreign_key_checks = {value}, unique_checks = {value}"] if mysql else []

    def _ago(self, seconds: str) -> str:
        return self._driver.seconds_after(self._driver.now(), f"-({seconds})")

    def _due(self) -> str:
        """A moment that has come for the first few rows only."""
        return self._ago(f"CASE WHEN n <= {DUE} THEN n ELSE -3600 - n END")

    def _name(self, prefix: str, number: str = "n") -> str:
        """Names that sort as they were made: appending to an index is fast."""
        return joined(self._driver, f"'{prefix}-'", f"(10000000 + {number})")

    def _id(self, kind: str) -> str:
        return self._name(f"i-{kind}")

    # Instances.

    async def _finished_instances(self) -> None:
        await self._instances(
            self._size.finished,
            "finished",
            framework="CASE n % 10 WHEN 5 THEN 'python' ELSE 'romancy-py' END",
            workflow_name=f"CASE WHEN n <= {AUDITS} THEN 'audit' WHEN n % 100 = 0 THEN 'refund'"
            " WHEN n % 10 = 1 THEN 'invoice' ELSE 'order' END",
            status="CASE n % 20 WHEN 0 THEN 'failed' WHEN 1 THEN 'cancelled' ELSE 'completed' END",
            started_at=self._ago("20000000 - n"),
            finished_at=self._ago("19000000 - n"),
        )
        await self._insert_each(
            self._size.steps,
            self._size.finished,
            "workflow_history",
            instance_id=self._id("finished"),
            activity_id=joined(self._driver, "'charge:'", "k"),
            event_type="'ActivityCompleted'",
            event_data="'{}'",
        )

    async def _running_instances(self) -> None:
        held = {"locked_by": "'worker'", "locked_at": self._ago("60"), "lock_token": "1"}
        running = self._size.running
        await self._instances(running, "runnable", status="CASE n % 10 WHEN 0 THEN 'compensating' ELSE 'running' END")
        await self._instances(running, "locked", status="'running'", lock_expires_at=self._due(), **held)
        await self._instances(running, "parked", status="'running'", parked_until=self._due())

    async def _waiting_instances(self) -> None:
        await self._instances(self._size.waiting, "sleeping", status="'waiting_for_timer'")
        await self._insert(
            self._size.waiting,
            "workflow_timer_subscriptions",
            instance_id=self._id("sleeping"),
            timer_id="'sleep:1'",
            expires_at=self._due(),
        )
        await self._instances(self._size.waiting, "receiving", status="'waiting_for_message'")
        receiver = {"instance_id": self._id("receiving"), "channel": self._name("channel")}
        await self._insert(
            self._size.waiting,
            "channel_subscriptions",
            **receiver,
            mode="'broadcast'",
            cursor_message_id=str(self._size.received),
        )
        await self._insert(
            self._size.waiting, "romancy_channel_waits", **receiver, activity_id="'receive:1'", timeout_at=self._due()
        )

    async def _instances(self, count: int, kind: str, **columns: str) -> None:
        always = {
            "instance_id": self._id(kind),
            "workflow_name": "'order'",
            "source_hash": "''",
            "owner_service": "''",
            "input_data": self._input(),
            "framework": "'romancy-py'",
            "started_at": self._ago("10000 - n"),
            "runnable_since": self._ago("10000 - n"),
        }
        await self._insert(count, "workflow_instances", **always | columns)

    def _input(self) -> str:
        customer = ("""'{"customer": "c-'""", f"n % {self._size.customers}")
        return joined(self._driver, *customer, """'", "order": {"number": '""", "n", "'}}'")

    # Messages and events.

    async def _messages(self) -> None:
        """Old ones that all have received, most of them on the first channel; new ones for the first few waiters."""
        message = {"data_type": "'json'", "data": "'{}'", "origin": "'romancy-py'"}
        channel = self._name("channel", f"CASE WHEN n % 3 = 0 THEN n % {self._size.waiting} + 1 ELSE 1 END")
        await self._insert(
            self._size.received,
            "channel_messages",
            channel=channel,
            message_id=self._name("old"),
            published_at=self._ago("100000 - n"),
            **message,
        )
        await self._insert(
            DUE, "channel_messages", channel=self._name("channel"), message_id=self._name("new"), **message
        )
        await self._insert(
            self._size.waiting,
            "romancy_channels",
            channel=self._name("channel"),
            unsettled_since=f"CASE WHEN n <= {DUE} THEN {self._driver.now()} END",
        )

    async def _outbox(self) -> None:
        event = {"event_type": "'paid'", "event_source": "'orders'", "event_data": "'{}'"}
        for status, count, more in (
            ("published", self._size.published, {"published_at": self._ago("90000 - n")}),
            ("failed", 1000, {}),
            ("pending", 300, {}),
            ("processing", 300, {"lease_until": self._due()}),
        ):
            await self._insert(
                count,
                "outbox_events",
                event_id=self._name(status),
                status=f"'{status}'",
                created_at=self._ago("100000 - n"),
                **event,
                **more,
            )

    async def analyze(self) -> None:
        """What the database would have done by itself before long."""
        conn = self._storage.conn()
        if self._driver.driver_name() != "mysql":
            await conn.execute("ANALYZE")
            return
        tables = "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
        for (table,) in await conn.fetch_all(tables):
            await conn.fetch_all(f"ANALYZE TABLE {table}")
