"""Wake-ups: what became visible, told to whoever listens. Always hints: a poll finds everything that a hint announces.

Listeners in the same process hear of every commit of their storage. On PostgreSQL hints also travel as NOTIFY, one
statement for all that piled up while the last one was under way, sent after the commit: inside a writing transaction
NOTIFY would take a lock that all committers of the database share.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .sql.operation import Hint
from .sql.runners.runner import BaseRunner
from .sql.statement import NativeQuery, Want

if TYPE_CHECKING:
    import asyncpg

    from .sql.runners.postgres import PostgresRunner

log = logging.getLogger("romancy.storage")

CATCH_UP = Hint("catch_up", "")
"""Hints may have been missed: look once at everything."""

TOPICS = (
    "workflow_resumable",
    "workflow_channel_message",
    "workflow_outbox_pending",
    "workflow_timer_expired",
    "workflow_finished",
)
_LONGEST_BACKLOG = 10_000
_SEND_DEADLINE_SEC = 5.0
_RECONNECT_SEC = 1.0
_NOTIFY = "SELECT pg_notify(topic, payload) FROM unnest($1::text[], $2::text[]) AS hint (topic, payload)"


class Listener:
    """Hears what commits of this storage have made visible, in this process."""

    def __init__(self, runner: BaseRunner, topics: Iterable[str] = TOPICS) -> None:
        self._runner = runner
        self._topics = frozenset(topics)
        self._waiting: asyncio.Queue[Hint] = asyncio.Queue(_LONGEST_BACKLOG)

    async def __aenter__(self) -> Self:
        self._runner.listeners.append(self._hear)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.listeners.remove(self._hear)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Hint:
        return await self._waiting.get()

    def _hear(self, hints: list[Hint]) -> None:
        for hint in hints:
            if hint.topic not in self._topics and hint is not CATCH_UP:
                continue
            if self._waiting.full():
                # A slow listener looks at everything once instead of being told each of ten thousand things.
                while not self._waiting.empty():
                    self._waiting.get_nowait()
                hint = CATCH_UP
            self._waiting.put_nowait(hint)


class PostgresListener(Listener):
    """Hears also what other processes announce, on a connection of its own that is made again when it breaks."""

    def __init__(self, runner: PostgresRunner, topics: Iterable[str] = TOPICS) -> None:
        super().__init__(runner, topics)
        self._postgres = runner
        self._connection: asyncpg.Connection[Any] | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._connect()
        self._task = asyncio.create_task(self._stay_connected())
        return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._connection is not None:
            self._connection.terminate()

    async def _connect(self) -> None:
        connection = await self._postgres.connect_raw()
        self._closed = asyncio.Event()
        try:
            connection.add_termination_listener(self._on_termination)
            for topic in sorted(self._topics):
                await connection.add_listener(topic, self._on_notify)
        except BaseException:
            connection.terminate()
            raise
        self._connection = connection

    async def _stay_connected(self) -> None:
        while True:
            await self._closed.wait()
            await asyncio.sleep(_RECONNECT_SEC * random.uniform(0.5, 1.5))
            try:
                await self._connect()
            except Exception as error:
                log.warning("cannot listen for notifications yet: %s", error)
            else:
                self._hear([CATCH_UP])

    def _on_termination(self, connection: Any) -> None:
        self._closed.set()

    def _on_notify(self, connection: Any, pid: int, topic: str, payload: Any) -> None:
        self._hear([Hint(topic, str(payload))])


class PostgresNotifier:
    """Sends hints as NOTIFY: one statement at a time, with all that is waiting, each thing once."""

    def __init__(self, runner: PostgresRunner) -> None:
        self._runner = runner
        self._waiting: dict[Hint, None] = {}
        self._sending: asyncio.Task[None] | None = None
        self.enabled = True

    def __call__(self, hints: list[Hint]) -> None:
        if not self.enabled:
            return
        if len(self._waiting) < _LONGEST_BACKLOG:
            self._waiting.update(dict.fromkeys(hints))
        if not self._is_sending():
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = list(self._waiting), {}
            try:
                topics, payloads = [hint.topic for hint in batch], [hint.payload for hint in batch]
                async with asyncio.timeout(_SEND_DEADLINE_SEC), self._runner.pool.connection() as connection:
                    await connection.execute(NativeQuery(_NOTIFY, [topics, payloads], Want.COUNT))
            except Exception as error:
                log.warning("%d notifications were not sent; polls will find what they announce: %s", len(batch), error)

    async def finish(self) -> None:
        """Wait for what is being sent."""
        if self._sending is not None and self._is_sending():
            await asyncio.wait({self._sending}, timeout=_SEND_DEADLINE_SEC)

    def _is_sending(self) -> bool:
        """Whether a task is at it; one of an event loop that has ended, or of our parent's, is not."""
        return (
            self._sending is not None
            and not self._sending.done()
            and self._sending.get_loop() is asyncio.get_running_loop()
        )
