"""The services of a worker: one looks for all kinds of work, the others do it, each when it is told that there is some.

Who is told of too little finds it out from the lookout; who is told too much looks in vain.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from heapq import heappop, heappush, nsmallest
from typing import Any, TypeVar

from ..engine.clock import DatabaseClock
from ..storage import (
    ChannelMode,
    ChannelSubscription,
    InvalidKeyError,
    Lock,
    LockLostError,
    SQLStorage,
    StorageError,
    TimerSubscription,
    Work,
)
from ..storage.sql.checks import check_key
from .executor import Executor
from .settings import Settings

log = logging.getLogger("romancy")

T = TypeVar("T")

_AT_ONCE = 64
_BATCH = 100
_MOST_TOLD = 32
"""Of more channels at once we are not told one by one: a look at all of them is quicker."""
_MOST_KNOWN = 100_000
_FEW = 4
_MOST_REGULARS = 1000
_LONGEST_PAUSE_SEC = 10.0
_SHORTEST_ALARM_SEC = 0.001
_LONGEST_ALARM_SEC = 3600.0
_BUSY_PAUSES_SEC = (0.02, 0.05, 0.1, 0.2, 0.4)
"""After which a heartbeat asks again for locks whose rows were busy: one of them may be a cancelled instance's."""


async def for_each(items: Iterable[T], do: Callable[[T], Awaitable[object]]) -> None:
    """Do something with each, a bounded number at once; what fails keeps none of the others from being done."""
    gate = asyncio.Semaphore(_AT_ONCE)
    errors: list[Exception] = []

    async def one(item: T) -> None:
        async with gate:
            try:
                await do(item)
            except ExceptionGroup as several:
                errors.extend(several.exceptions)
            except Exception as error:
                errors.append(error)

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(one(item))
    if errors:
        raise ExceptionGroup("some of it failed", errors)


class Service(ABC):
    """Looks for work when woken, and every `poll_sec` if there is one; a database outage is logged and waited out."""

    def __init__(self, poll_sec: float | None = None, longest_pause_sec: float = _LONGEST_PAUSE_SEC) -> None:
        self._poll_sec = poll_sec
        self._longest_pause_sec = longest_pause_sec
        """After a failed look."""
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Look now."""
        self._woken.set()

    async def run(self) -> None:
        trouble_sec = 0.0
        while True:
            self._woken.clear()
            try:
                again = await self.look()
                trouble_sec = 0.0
                if not again:
                    await self._rest(self._poll_sec)
            except* Exception as trouble:
                trouble_sec = min(max(1.0, 2 * trouble_sec), self._longest_pause_sec)
                log.warning("%s waits %.1f s: %s", type(self).__name__, trouble_sec, trouble.exceptions[0])
            if trouble_sec:
                await self._rest(trouble_sec)

    async def _rest(self, pause: float | None) -> None:
        try:
            # Never shorter than asked for: many idle processes are gentle to the database.
            async with asyncio.timeout(None if pause is None else pause * random.uniform(1.0, 1.2)):
                await self._woken.wait()
        except TimeoutError:
            return

    @abstractmethod
    async def look(self) -> bool:
        """Do what there is to do; True to look again at once."""


class Lookout(Service):
    """Asks the database what there is to do, all in one statement, and wakes whoever does it."""

    def __init__(
        self,
        storage: SQLStorage,
        names: Sequence[str],
        owner: str | None,
        poll_sec: float,
        on_work: Callable[[Work], None],
    ) -> None:
        super().__init__(poll_sec)
        self._storage = storage
        self._soon_sec = 2 * poll_sec
        self._ours: dict[str, Any] = {"workflow_names": names, "owner_service": owner}
        self._on_work = on_work

    async def look(self) -> bool:
        self._on_work(await self._storage.look_for_work(self._soon_sec, **self._ours))
        return False


class Resumer(Service):
    """Claims what can be run, as much as there is room for."""

    def __init__(
        self,
        storage: SQLStorage,
        executor: Executor,
        worker_id: str,
        shares: Sequence[Sequence[str]],
        owner: str | None,
        settings: Settings,
    ) -> None:
        super().__init__()
        self._storage = storage
        self._executor = executor
        self._worker_id = worker_id
        self._shares = deque(shares)
        """Names that are claimed together: those with a limit of their own alone, all others at once."""
        self._owner = owner
        self._settings = settings
        self._lacked_room = False
        self._backlogs: set[str] = set()

    def room_made(self) -> None:
        """An instance has come to rest: look again if there may be one that had no room."""
        if self._lacked_room:
            self.wake()

    @property
    def has_backlog(self) -> bool:
        """Whether instances may be waiting for room."""
        return self._lacked_room or bool(self._backlogs)

    async def look(self) -> bool:
        self._shares.rotate(1)  # each comes first in its turn: none takes all the room for ever
        self._lacked_room = False
        return any([await self._claim(names) for names in self._shares])

    async def _claim(self, names: Sequence[str]) -> bool:
        """Start what can be run of these workflows; True if there may be more."""
        share = names[0]
        room = self._executor.room_for(share)
        if room <= 0:
            self._lacked_room = True
            return False
        # Without a backlog, half of the room is left to instances that are started meanwhile: they need no claim.
        wanted = min(room if share in self._backlogs else (room + 1) // 2, _BATCH)
        with self._executor.reserve(wanted, share):
            claims = await self._storage.claim_resumable_workflows(
                self._worker_id,
                self._settings.lock_timeout_sec,
                wanted,
                workflow_names=names,
                owner_service=self._owner,
            )
        for instance, lock in claims:
            self._executor.start(instance, lock)
        if len(claims) < wanted:
            self._backlogs.discard(share)
            return False
        self._backlogs.add(share)
        return True


class Heart(Service):
    """Keeps our locks alive, and tells runs that theirs is lost or that they were cancelled."""

    def __init__(self, storage: SQLStorage, executor: Executor, settings: Settings) -> None:
        # Not gentle after a failure: what was tried too late is lost.
        super().__init__(settings.heartbeat_sec, longest_pause_sec=settings.heartbeat_sec)
        self._storage = storage
        self._executor = executor
        self._heartbeat_sec = settings.heartbeat_sec
        self._lock_timeout_sec = settings.lock_timeout_sec
        self._answered_at = time.monotonic()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            await super().run()

    async def _listen(self) -> None:
        """Notice when nobody answers for longer than locks last; a look may be stuck meanwhile."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(self._heartbeat_sec)
            late_sec = time.monotonic() - began - self._heartbeat_sec
            if late_sec > self._lock_timeout_sec / 2:
                log.warning(
                    "the event loop stood still for %.1f s: locks run out meanwhile, and others repeat what runs here;"
                    " write functions that block as plain ones (def), which run in threads",
                    late_sec,
                )
            if time.monotonic() - self._answered_at > self._lock_timeout_sec:
                self._executor.lost_touch()

    async def look(self) -> bool:
        began = time.monotonic()
        # A lock that is new can wait for the next time; most instances have ended by then, and nobody was disturbed.
        busy = await self._beat(self._executor.locks_to_renew(self._heartbeat_sec))
        self._answered_at = began
        for pause_sec in _BUSY_PAUSES_SEC:
            if not busy or self._woken.is_set() or pause_sec > self._heartbeat_sec:
                break
            await self._rest(pause_sec)
            busy = await self._beat(busy)
        return self._woken.is_set()

    async def _beat(self, locks: list[Lock]) -> list[Lock]:
        """Renew locks; those whose rows somebody was just writing, so that nothing was heard of them."""
        busy: list[Lock] = []
        if not locks:
            return busy
        asked_at = time.monotonic()
        for lock, answer in zip(locks, await self._storage.refresh_locks(locks, self._lock_timeout_sec), strict=True):
            if isinstance(answer, LockLostError):
                self._executor.lost(lock)
            elif answer is None:
                busy.append(lock)
            else:
                self._executor.heard(answer, asked_at)
        return busy


class Timekeeper(Service):
    """Fires due timers and timeouts, waking up for those it knows of."""

    def __init__(
        self,
        storage: SQLStorage,
        clock: DatabaseClock,
        names: Sequence[str],
        owner: str | None,
        fire: Callable[[TimerSubscription], Awaitable[object]],
    ) -> None:
        super().__init__()
        self._storage = storage
        self._clock = clock
        self._fire = fire
        self._ours: dict[str, Any] = {"workflow_names": names, "owner_service": owner}
        self._known: list[datetime] = []
        """A heap of moments at which something will be due."""
        self._alarm: asyncio.TimerHandle | None = None

    def note(self, due: datetime) -> None:
        """Something will be due: do not oversleep it."""
        heappush(self._known, due)
        if len(self._known) > _MOST_KNOWN:  # the lookout tells of the others when it is time
            self._known = nsmallest(_MOST_KNOWN // 2, self._known)
        if self._known[0] is due:
            self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._known:
            wait = (self._known[0] - self._clock.now()).total_seconds()
            wait = min(max(_SHORTEST_ALARM_SEC, wait), _LONGEST_ALARM_SEC)
            self._alarm = asyncio.get_running_loop().call_later(wait, self.wake)

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._known.clear()
            self._set_alarm()

    async def look(self) -> bool:
        now = self._clock.now()  # a little behind the database's own, which thus finds due what we forget here
        while self._known and self._known[0] <= now:
            heappop(self._known)
        self._set_alarm()
        timers = await self._storage.find_expired_timers(_BATCH * 5, **self._ours)
        await for_each(timers, self._fire)
        late = await self._storage.find_expired_channel_subscriptions(_BATCH, **self._ours)
        await for_each(late, self._storage.expire_channel_receive)
        return len(timers) == _BATCH * 5 or len(late) == _BATCH


class Courier(Service):
    """Delivers messages to those who wait for them: on channels it is told of at once, on all when it is woken."""

    def __init__(
        self,
        storage: SQLStorage,
        names: Sequence[str],
        owner: str | None,
        deliver: Callable[[ChannelSubscription], Awaitable[bool]],
    ) -> None:
        super().__init__()
        self._storage = storage
        self._ours: dict[str, Any] = {"workflow_names": names, "owner_service": owner}
        self._deliver = deliver
        self._told: set[str] = set()
        self._regulars: OrderedDict[str, list[ChannelSubscription]] = OrderedDict()
        """Who waited for a channel the last time, where those were few."""
        self._everywhere = True

    def wake(self) -> None:
        """Look at all channels."""
        self._everywhere = True
        super().wake()

    def tell(self, channel: str) -> None:
        """A message was published on this channel, says somebody; of too many, or of none, we look for ourselves."""
        try:
            if len(self._told) < _MOST_TOLD:
                self._told.add(check_key("channel", channel))
            else:
                self._everywhere = True
        except InvalidKeyError:
            self._everywhere = True
        super().wake()

    async def look(self) -> bool:
        told, self._told = self._told, set()
        everywhere, self._everywhere = self._everywhere, False
        try:
            await for_each(told, self._serve)
            if everywhere:
                await self._serve_all()
        except BaseException:
            self._everywhere = True
            raise
        return self._everywhere

    async def _serve(self, channel: str) -> None:
        """Deliver to all who wait for the channel; to those who did the last time without asking first."""
        served: dict[str, ChannelSubscription] = {}

        async def serve(regular: ChannelSubscription) -> None:
            with suppress(StorageError):  # the search finds it again, if it waits
                if await self._deliver(regular):
                    served[regular.instance_id] = regular

        await for_each(self._regulars.pop(channel, ()), serve)  # not beside the search, which would take their time
        found = await self._storage.get_channel_subscribers_waiting(channel, limit=_BATCH)
        # Who was served and waits again has looked for itself: it would have taken what was there.
        others = [subscription for subscription in found if subscription.instance_id not in served]
        await for_each(others, self._deliver)
        self._remember(channel, [*served.values(), *others])
        self._everywhere |= len(found) == _BATCH

    def _remember(self, channel: str, receivers: list[ChannelSubscription]) -> None:
        """Note who may wait again. Not where they compete: there whoever has waited longest comes first."""
        if 0 < len(receivers) <= _FEW and all(receiver.mode is ChannelMode.BROADCAST for receiver in receivers):
            self._regulars[channel] = receivers
        while len(self._regulars) > _MOST_REGULARS:
            self._regulars.popitem(last=False)

    async def _serve_all(self) -> None:
        found = await self._storage.find_deliverable_subscriptions(_BATCH, **self._ours)
        await for_each(found, self._deliver)
        self._everywhere |= len(found) == _BATCH
