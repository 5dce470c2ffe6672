"""Events on their way out."""

from datetime import timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from romancy.storage import (
    HistoryEvent,
    Lock,
    OutboxEvent,
    OutboxEventExistsError,
    OutboxStatus,
)

from .memory import EPOCH, OPEN_OUTBOX, Event, Memory


class Outbox(Memory):
    """Implements `OutboxManager`."""

    def add_outbox_event(
        self, event: OutboxEvent, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record)
        if recorded is not None:
            return recorded
        if event.event_id in self.outbox:
            raise OutboxEventExistsError(event.event_id)
        data = "null" if event.event_data is None and event.event_data_binary is None else event.event_data
        fields = {**msgspec.structs.asdict(event), "event_data": data, "created_at": event.created_at or self.now}
        self.outbox[event.event_id] = Event(**fields)
        return None

    def get_pending_outbox_events(
        self, limit: int = 100, *, lease_sec: float = 60.0, owner: str | None = None
    ) -> list[OutboxEvent]:
        due = sorted(self._due_events(), key=lambda event: event.created_at or EPOCH)[:limit]
        for event in due:
            self.outbox[event.event_id] = replace(
                event, status=OutboxStatus.PROCESSING, lease_owner=owner, lease_until=self._in(lease_sec)
            )
        return [replace(event.shown, status=OutboxStatus.PROCESSING) for event in due]

    def _due_events(self) -> list[Event]:
        return [
            event
            for event in self.outbox.values()
            if (event.status == "pending" and (event.next_attempt_at is None or self.is_past(event.next_attempt_at)))
            or (event.status == "processing" and self.is_past(event.lease_until))
        ]

    def mark_outbox_event_sent(self, event_id: str) -> bool:
        event = self.outbox.get(event_id)
        if event is None or event.status == "published":
            return False
        self._settle(event_id, status=OutboxStatus.PUBLISHED, published_at=self.now)
        return True

    def mark_outbox_event_failed(
        self, event_id: str, *, error: str = "", invalid: bool = False, owner: str | None = None
    ) -> bool:
        event = self.outbox.get(event_id)
        if event is None or not self._may_fail(event, owner):
            return False
        status = OutboxStatus.INVALID if invalid else OutboxStatus.FAILED
        self._settle(event_id, status=status, last_error=error or event.last_error)
        return True

    def increment_outbox_attempts(self, event_id: str, *, error: str = "", owner: str | None = None) -> bool:
        event = self.outbox.get(event_id)
        if event is None or not self._may_fail(event, owner):
            return False
        self._settle(
            event_id,
            status=OutboxStatus.PENDING,
            retry_count=event.retry_count + 1,
            last_error=error or event.last_error,
            next_attempt_at=self._in(min(2.0**event.retry_count, 300)),
        )
        return True

    def cleanup_old_outbox_events(self, older_than: timedelta, *, limit: int = 1000) -> int:
        old = [
            event
            for event in self.outbox.values()
            if event.status == "published" and (event.published_at or EPOCH) < self.now - older_than
        ]
        old = sorted(old, key=lambda event: event.published_at or EPOCH)[:limit]
        for event in old:
            del self.outbox[event.event_id]
        return len(old)

    def _may_fail(self, event: Event, owner: str | None) -> bool:
        """It is on its way, and not in the hands of another relayer than the one who says so."""
        anothers = owner is not None and event.lease_owner not in (None, owner) and not self.is_past(event.lease_until)
        return event.status in OPEN_OUTBOX and not anothers

    def _settle(self, event_id: str, **changes: Any) -> None:
        self.outbox[event_id] = replace(self.outbox[event_id], lease_owner=None, lease_until=None, **changes)
