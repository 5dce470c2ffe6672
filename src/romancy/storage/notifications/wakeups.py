"""Who hears of commits: listeners in this process at once, other processes a moment later and not too often."""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

from ..sql.ending import FINISHED_TOPIC
from ..sql.operation import Hint
from ..sql.runners.runner import BaseRunner
from .hints import CATCH_UP, TOPICS, digest

log = logging.getLogger("romancy.storage")

GAP_SEC = 0.005
"""The first hint goes out at once; what follows within this time goes together."""
_MANY = 4
_GAP_OF_MANY_SEC = 0.02
"""If that is so many instances that have finished, and nothing that anybody could begin with, it waits for more."""
_LONGEST_BACKLOG = 10_000
_SEND_DEADLINE_SEC = 5.0

Hear = Callable[[list[Hint]], None]


class Listener:
    """Hears what commits have made visible: of this storage, and of other processes where they can be heard."""

    def __init__(self, wakeups: Wakeups, topics: Iterable[str] = TOPICS) -> None:
        self._wakeups = wakeups
        self._topics = frozenset(topics)
        self._waiting: asyncio.Queue[Hint] = asyncio.Queue(_LONGEST_BACKLOG)

    async def __aenter__(self) -> Self:
        await self._wakeups.join(self._hear)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._wakeups.leave(self._hear)

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


class Wakeups(ABC):
    """The wake-ups of one storage. Receives only while somebody listens, and sends only when something was said."""

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner
        runner.listeners.append(self._announce)
        self.enabled = True
        """Whether commits of this storage are announced to other processes."""
        self._closed = False
        self._listeners: list[Hear] = []
        self._receiving: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._waiting: dict[Hint, None] = {}
        self._sending: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        """Set when something is waiting to be sent that should not wait."""
        self._failing = False

    @abstractmethod
    async def _receive(self, ready: asyncio.Event) -> None:
        """Pass on to `_hear` what other processes say, until cancelled; `ready` once that works, or cannot work now."""

    @abstractmethod
    async def _send(self, hints: list[Hint]) -> None:
        """Tell other processes."""

    # Listening.

    async def join(self, hear: Hear) -> None:
        """Call `hear` with every hint from now on."""
        self._listeners.append(hear)
        if not _is_alive(self._receiving):
            self._ready = asyncio.Event()
            self._receiving = asyncio.create_task(self._keep_receiving(self._ready), name="romancy wake-ups")
        try:
            await self._ready.wait()
        except BaseException:
            await self.leave(hear)
            raise

    async def _keep_receiving(self, ready: asyncio.Event) -> None:
        try:
            await self._receive(ready)
        except Exception:
            log.exception("wake-ups of other processes are not heard; polls find what they announce")
        finally:
            ready.set()

    async def leave(self, hear: Hear) -> None:
        """Hear no more."""
        self._listeners.remove(hear)
        if not self._listeners:
            await self._stop_receiving()

    async def _stop_receiving(self) -> None:
        receiving, self._receiving = self._receiving, None
        while receiving is not None and _is_alive(receiving):
            receiving.cancel()
            await asyncio.wait({receiving}, timeout=1.0)  # again, should somebody have swallowed it

    def _hear(self, hints: list[Hint]) -> None:
        """Tell everybody in this process."""
        for hear in self._listeners:
            hear(hints)

    # Telling.

    def _announce(self, hints: list[Hint]) -> None:
        """A commit of this storage has become visible."""
        self._hear(hints)
        if not self.enabled or self._closed:
            return
        if len(self._waiting) < _LONGEST_BACKLOG:
            self._waiting.update(dict.fromkeys(hints))
        if not _is_alive(self._sending):
            self._hurry = asyncio.Event()
            self._sending = asyncio.get_running_loop().create_task(self._send_all(self._hurry))
        elif any(hint.topic != FINISHED_TOPIC for hint in hints):
            self._hurry.set()

    async def _send_all(self, hurry: asyncio.Event) -> None:
        """Send all that is waiting, one thing after the other; what piles up meanwhile goes together."""
        while self._waiting:
            few, self._waiting = digest(self._waiting), {}
            hurry.clear()
            try:
                async with asyncio.timeout(_SEND_DEADLINE_SEC):
                    await self._send(few)
                self._failing = False
            except Exception as error:
                if not self._failing:  # said once per outage
                    log.warning("other processes cannot be told of work; their polls will find it: %s", error)
                self._failing = True
            await asyncio.sleep(GAP_SEC)
            if len(self._waiting) >= _MANY and not hurry.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_GAP_OF_MANY_SEC):
                        await hurry.wait()

    async def close(self) -> None:
        """Send what is waiting, then be silent and deaf."""
        self._closed = True
        if os.getpid() != self._runner.pid:
            return  # the tasks and sockets are our parent's
        if self._sending is not None and _is_alive(self._sending):
            self._hurry.set()
            await asyncio.wait({self._sending}, timeout=_SEND_DEADLINE_SEC)
        await self._stop_receiving()


class InProcessWakeups(Wakeups):
    """For a database that no other process can see."""

    async def _receive(self, ready: asyncio.Event) -> None:
        ready.set()

    async def _send(self, hints: list[Hint]) -> None:
        """Nobody to tell."""


def _is_alive(task: asyncio.Task[None] | None) -> bool:
    """Whether a task is at it; one of an event loop that has ended is not."""
    return task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop()
