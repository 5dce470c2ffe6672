"""Wake-ups by NOTIFY: one statement for all that piled up while the last one was under way, sent after the commit.

Inside a writing transaction NOTIFY would take a lock that all committers of the database share. Whoever listens has a
connection for it, and also sends on that one: so its own hints are told from those of others.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any

from ..sql.operation import Hint
from ..sql.statement import NativeQuery, Want
from .hints import CATCH_UP, LONGEST_PAYLOAD, TOPICS
from .wakeups import Wakeups

if TYPE_CHECKING:
    import asyncpg

    from ..sql.runners.postgres import PostgresRunner

log = logging.getLogger("romancy.storage")

_FIRST_PAUSE_SEC = 1.0
_LONGEST_PAUSE_SEC = 30.0
_SIGN_OF_LIFE_SEC = 60.0
"""How often to ask a silent connection whether it is there: a router in between may have forgotten it."""
_ANSWER_SEC = 10.0
_NOTIFY = "SELECT pg_notify(topic, payload) FROM unnest($1::text[], $2::text[]) AS hint (topic, payload)"


class PostgresWakeups(Wakeups):
    """Hears and tells all processes on a PostgreSQL database."""

    def __init__(self, runner: PostgresRunner, direct: PostgresRunner | None = None) -> None:
        super().__init__(runner)
        self._postgres = runner
        self._direct = direct or runner
        """Who connects us to the server itself: a pooler swallows notifications."""
        self._ear: asyncpg.Connection[Any] | None = None
        self._ears_pid = 0
        self._speaking = asyncio.Lock()
        self._broken = asyncio.Event()

    async def _receive(self, ready: asyncio.Event) -> None:
        failures = 0
        while True:
            try:
                await self._listen()
            except Exception as error:
                if not failures:  # said once per outage
                    log.warning("cannot listen for notifications yet; until then only polls find work: %s", error)
                failures += 1
                ready.set()
            else:
                failures = 0
                if ready.is_set():
                    self._hear([CATCH_UP])  # who knows what was said meanwhile
                ready.set()
                await self._until_it_breaks()
            pause = min(_FIRST_PAUSE_SEC * 2.0 ** min(failures, 10), _LONGEST_PAUSE_SEC)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _listen(self) -> None:
        connection = await self._direct.connect_raw()
        self._speaking, self._broken = asyncio.Lock(), asyncio.Event()
        try:
            connection.add_termination_listener(self._on_termination)
            for topic in TOPICS:
                await connection.add_listener(topic, self._on_notify)
        except BaseException:
            connection.terminate()
            raise
        self._ear, self._ears_pid = connection, connection.get_server_pid()

    async def _until_it_breaks(self) -> None:
        ear = self._ear
        assert ear is not None, "just opened"
        try:
            while not self._broken.is_set():
                try:
                    async with asyncio.timeout(_SIGN_OF_LIFE_SEC):
                        await self._broken.wait()
                except TimeoutError:
                    async with asyncio.timeout(_ANSWER_SEC), self._speaking:
                        await ear.execute("SELECT 1")
        except Exception as error:
            log.info("the connection that listens is gone: %s", error)
        finally:
            self._ear = None
            ear.terminate()

    def _on_termination(self, connection: Any) -> None:
        self._broken.set()

    def _on_notify(self, connection: asyncpg.Connection[Any], pid: int, topic: str, payload: object) -> None:
        # What we have said ourselves our listeners have heard already.
        if pid != self._ears_pid and len(text := str(payload)) <= LONGEST_PAYLOAD:
            self._hear([Hint(topic, text)])

    async def _send(self, hints: list[Hint]) -> None:
        topics, payloads = [hint.topic for hint in hints], [hint.payload for hint in hints]
        ear = self._ear
        if ear is not None and not ear.is_closed():
            try:
                async with self._speaking:
                    await ear.execute(_NOTIFY, topics, payloads)
                return
            except Exception:
                if not ear.is_closed():
                    raise  # else nobody listens here any more; what was to be said is said all the same
        async with self._postgres.pool.connection() as connection:
            await connection.execute(NativeQuery(_NOTIFY, [topics, payloads], Want.COUNT))
