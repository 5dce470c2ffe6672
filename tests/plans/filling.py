"""A database with a long past: finished instances by the hundred thousand, and a few hundred that are under way.

Every table that a poll or a page looks at is much larger than what it has to find.
"""

from romancy.storage import SQLStorage
from tests.numbers import joined, numbers

FINISHED = 100_000
MESSAGES = 30_000
"""Received ones, most of them on one channel."""
PUBLISHED = 50_000
"""Events that have left the outbox; a few hundred have not."""

RUNNING = 300
"""Runnable instances; as many are locked, and as many parked."""
WAITING = 3000
"""Sleeping instances; as many wait in a receive, each on a channel of its own."""
DUE = 30
"""Of each kind: timers, timeouts, messages, locks that have expired, leases that have ended."""


class Filler:
    """Fills a migrated database, with statements that make many rows each."""

    def __init__(self, storage: SQLStorage, *, small: bool = False) -> None:
        """A SMALL one has a hundredth of what is over, a tenth of what waits, and as much that is due."""
        self._finished = FINISHED // 100 if small else FINISHED
        self._received = MESSAGES // 100 if small else MESSAGES
        self._published = PUBLISHED // 100 if small else PUBLISHED
        self._waiting = WAITING // 10 if small else WAITING
        self._storage = storage
        self._driver = storage.runner.driver

    async def fill(self) -> None:
        async with self._storage.transaction(deadline_sec=300) as conn:
            if self._driver.driver_name() == "mysql":
                await conn.execute("SET foreign_key_checks = 0, unique_checks = 0")  # five times as fast
            await self._insert(1, "workflow_definitions", workflow_name="'order'", source_hash="''", source_code="''")
            await self._finished_instances()
            await self._running_instances()
            await self._waiting_instances()
            await self._messages()
            await self._outbox()
            if self._driver.driver_name() == "mysql":
                await conn.execute("SET foreign_key_checks = 1, unique_checks = 1")
        await self._analyze()

    async def _insert(self, count: int, table: str, **columns: str) -> None:
        """Make `count` rows, in which `n` runs from 1 to `count`."""
        await self._storage.conn().execute(f"""
            INSERT INTO {table} ({", ".join(columns)})
            SELECT {", ".join(columns.values())} FROM {numbers(count)} ORDER BY n""")

    def _ago(self, seconds: str) -> str:
        return self._driver.seconds_after(self._driver.now(), f"-({seconds})")

    def _due(self) -> str:
        """A moment that has come for the first few rows only."""
        return self._ago(f"CASE WHEN n <= {DUE} THEN n ELSE -3600 - n END")

    def _name(self, prefix: str, number: str = "n") -> str:
        """Names that sort as they were made: appending to an index is fast."""
        return joined(self._driver, f"'{prefix}-'", f"(1000000 + {number})")

    # Instances.

    async def _finished_instances(self) -> None:
        await self._instances(
            self._finished,
            "finished",
            framework="CASE n % 10 WHEN 5 THEN 'python' ELSE 'romancy-py' END",
            status="CASE n % 20 WHEN 0 THEN 'failed' WHEN 1 THEN 'cancelled' ELSE 'completed' END",
            started_at=self._ago("2000000 - n"),
            finished_at=self._ago("1900000 - n"),
        )
        await self._insert(
            self._finished // 5,
            "workflow_history",
            instance_id=self._name("finished"),
            activity_id="'charge:1'",
            event_type="'ActivityCompleted'",
            event_data="'{}'",
        )

    async def _running_instances(self) -> None:
        held = {"locked_by": "'worker'", "locked_at": self._ago("60"), "lock_token": "1"}
        await self._instances(RUNNING, "runnable", status="CASE n % 10 WHEN 0 THEN 'compensating' ELSE 'running' END")
        await self._instances(RUNNING, "locked", status="'running'", lock_expires_at=self._due(), **held)
        await self._instances(RUNNING, "parked", status="'running'", parked_until=self._due())

    async def _waiting_instances(self) -> None:
        await self._instances(self._waiting, "sleeping", status="'waiting_for_timer'")
        await self._insert(
            self._waiting,
            "workflow_timer_subscriptions",
            instance_id=self._name("sleeping"),
            timer_id="'sleep:1'",
            expires_at=self._due(),
        )
        await self._instances(self._waiting, "receiving", status="'waiting_for_message'")
        receiver = {"instance_id": self._name("receiving"), "channel": self._name("channel")}
        await self._insert(
            self._waiting,
            "channel_subscriptions",
            **receiver,
            mode="'broadcast'",
            cursor_message_id=str(self._received),
        )
        await self._insert(
            self._waiting, "romancy_channel_waits", **receiver, activity_id="'receive:1'", timeout_at=self._due()
        )

    async def _instances(self, count: int, kind: str, **columns: str) -> None:
        always = {
            "instance_id": self._name(kind),
            "workflow_name": "'order'",
            "source_hash": "''",
            "owner_service": "''",
            "input_data": "'{}'",
            "framework": "'romancy-py'",
            "started_at": self._ago("10000 - n"),
            "runnable_since": self._ago("10000 - n"),
        }
        await self._insert(count, "workflow_instances", **always | columns)

    # Messages and events.

    async def _messages(self) -> None:
        """Old ones that all have received, most of them on the first channel; new ones for the first few waiters."""
        message = {"data_type": "'json'", "data": "'{}'", "origin": "'romancy-py'"}
        channel = self._name("channel", f"CASE WHEN n % 3 = 0 THEN n % {self._waiting} + 1 ELSE 1 END")
        await self._insert(
            self._received,
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
            self._waiting,
            "romancy_channels",
            channel=self._name("channel"),
            unsettled_since=f"CASE WHEN n <= {DUE} THEN {self._driver.now()} END",
        )

    async def _outbox(self) -> None:
        event = {"event_type": "'paid'", "event_source": "'orders'", "event_data": "'{}'"}
        for status, count, more in (
            ("published", self._published, {"published_at": self._ago("90000 - n")}),
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

    async def _analyze(self) -> None:
        """What the database would have done by itself before long."""
        conn = self._storage.conn()
        if self._driver.driver_name() != "mysql":
            await conn.execute("ANALYZE")
            return
        tables = "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
        for (table,) in await conn.fetch_all(tables):
            await conn.fetch_all(f"ANALYZE TABLE {table}")
