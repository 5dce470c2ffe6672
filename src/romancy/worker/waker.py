"""The waker: what it wakes it also runs, at once, as long as there is room here that nobody else waits for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..storage import ChannelMessage, ChannelSubscription, SQLStorage, TimerSubscription, Woken
from .executor import Executor
from .services import Resumer
from .settings import Settings

_PATIENCE_SEC = 0.5
"""So long a timer waits for a place here. Then it fires without one, and others may run what it wakes."""


class Waker:
    """Delivers messages and fires timers."""

    def __init__(
        self,
        storage: SQLStorage,
        executor: Executor,
        resumer: Resumer,
        worker_id: str,
        names: Sequence[str],
        owner: str | None,
        settings: Settings,
    ) -> None:
        self._storage = storage
        self._executor = executor
        self._resumer = resumer
        self._worker_id = worker_id
        self._names = names
        """Workflows without a limit of their own: the others are claimed by the resumer, which counts them."""
        self._owner = owner
        self._lock_timeout_sec = settings.lock_timeout_sec
        self._queue: deque[asyncio.Future[None]] = deque()
        """Timers that wait for a place."""
        self._patient = True
        """Whether places become free quickly enough to wait for one."""

    def room_made(self) -> None:
        """An instance has come to rest."""
        self._patient = True
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(None)
                return

    async def deliver(self, subscription: ChannelSubscription) -> bool:
        """Give a waiting instance the oldest message of the channel; False if there was none, or nobody to take it."""
        with self._place() as kept:
            if not kept:
                delivered = await self._storage.deliver_channel_message_with_lock(
                    subscription.instance_id,
                    subscription.channel,
                    ChannelMessage(channel=subscription.channel),
                    self._worker_id,
                    self._lock_timeout_sec,
                )
                return delivered is not None
            woken = await self._storage.deliver_and_claim(
                subscription,
                self._worker_id,
                self._lock_timeout_sec,
                workflow_names=self._names,
                owner_service=self._owner,
            )
        self._run(woken)
        return woken is not None

    async def fire(self, timer: TimerSubscription) -> None:
        """Fire a timer, if it is due."""
        if self._patient and not self._has_room():
            await self._wait_for_room()
        with self._place() as kept:
            if not kept:
                await self._storage.fire_timer(timer, worker_id=self._worker_id)
                return
            woken = await self._storage.fire_and_claim(
                timer,
                self._worker_id,
                self._lock_timeout_sec,
                workflow_names=self._names,
                owner_service=self._owner,
            )
        self._run(woken)

    @contextmanager
    def _place(self) -> Iterator[bool]:
        """Keep a place for one instance; False if there is none, or if others have waited longer for it."""
        if not self._has_room() or self._resumer.has_backlog:
            yield False
            return
        with self._executor.reserve(1, self._names[0]):
            yield True

    def _has_room(self) -> bool:
        return bool(self._names) and self._executor.room_for(self._names[0]) > 0

    async def _wait_for_room(self) -> None:
        """Wait a moment for a place: to wake an instance first and to claim it later is twice the work."""
        try:
            async with asyncio.timeout(_PATIENCE_SEC):
                while self._names and not self._resumer.has_backlog and not self._has_room():
                    place = asyncio.get_running_loop().create_future()
                    self._queue.append(place)
                    await place
        except TimeoutError:
            self._patient = False

    def _run(self, woken: Woken | None) -> None:
        if woken is not None and woken.lock is not None:
            self._executor.start(woken.instance, woken.lock, woken=woken)
