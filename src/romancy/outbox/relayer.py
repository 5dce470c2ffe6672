"""The relayer: at least once to the outside, in order of creation, with growing pauses for what fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

from ..errors import RomancyError
from ..storage import OutboxEvent, SQLStorage
from ..worker.services import Service, for_each

log = logging.getLogger("romancy")

_TIDY_SEC = 60.0

Publisher = Callable[[OutboxEvent], Awaitable[object]]
"""Sends one event to the outside; raises when that failed, InvalidEventError when trying again is no use."""


class InvalidEventError(RomancyError):
    """Raised by a publisher: the receiver will never accept this event."""


class Relayer(Service):
    """Leases pending events, publishes them, and marks what became of each."""

    def __init__(
        self,
        storage: SQLStorage,
        publish: Publisher,
        *,
        batch: int = 100,
        lease_sec: float = 60.0,
        max_attempts: int = 20,
        keep: timedelta | None = timedelta(days=7),
        poll_sec: float | None = 1.0,
    ) -> None:
        super().__init__(poll_sec)
        self._storage = storage
        self._publish = publish
        self._batch = batch
        self._lease_sec = lease_sec
        self._max_attempts = max_attempts
        self._keep = keep
        self._tidy_at = 0.0

    async def look(self) -> bool:
        events = await self._storage.get_pending_outbox_events(self._batch, lease_sec=self._lease_sec)
        await for_each(events, self._relay)
        if not events and self._keep is not None and time.monotonic() >= self._tidy_at:
            self._tidy_at = time.monotonic() + _TIDY_SEC
            await self._storage.cleanup_old_outbox_events(self._keep)
        return len(events) == self._batch

    async def _relay(self, event: OutboxEvent) -> None:
        """Publish one event outside any transaction; its errors are its own and hold nobody up."""
        owner = self._storage.relayer_id  # its failure counts only while the event is still ours to send
        try:
            await self._publish(event)
        except InvalidEventError as error:
            log.error("event %s is invalid: %s", event.event_id, error)
            await self._storage.mark_outbox_event_failed(event.event_id, error=str(error), invalid=True, owner=owner)
        except Exception as error:
            log.warning("event %s was not sent (attempt %d): %s", event.event_id, event.retry_count + 1, error)
            if event.retry_count + 1 >= self._max_attempts:
                await self._storage.mark_outbox_event_failed(event.event_id, error=repr(error), owner=owner)
            else:
                await self._storage.increment_outbox_attempts(event.event_id, error=repr(error), owner=owner)
        else:
            await self._storage.mark_outbox_event_sent(event.event_id)
