"""The outbox: events leave after the transaction that caused them, leased to one relayer at a time."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import msgspec

from ..errors import OutboxEventExistsError
from ..models import HistoryEvent, Lock, OutboxEvent, OutboxStatus
from ..turn import Turn
from . import touches
from .checks import (
    LONGEST_ERROR,
    age_sec,
    check_binary,
    check_key,
    check_optional_json,
    check_optional_key,
    page_size,
    plain_text,
)
from .demands import Lease, dealt, limit_of_all
from .manager import Manager
from .operation import Hint, operation
from .statement import columns, merged, sql

OUTBOX_TOPIC = "workflow_outbox_pending"
_FIRST_PAUSE_SEC = 1.0
_LONGEST_PAUSE_SEC = 300.0


class Outbox(Manager):
    """Implements `OutboxManager`."""

    relayer_id: str

    _add = sql("""
        INSERT INTO outbox_events
               (event_id, event_type, event_source, data_type, event_data, event_data_binary, content_type,
                created_at, updated_at, published_at, status, retry_count, last_error)
        VALUES (:event_id, :event_type, :event_source, :data_type, :event_data, :event_data_binary, :content_type,
                COALESCE(:created_at, {now}), {now}, :published_at, :status, :retry_count, :last_error)
        {on_conflict_do_nothing:event_id}""")

    # Rows that another framework is processing carry no lease of ours, and are left alone.
    _due = sql(
        """
        SELECT {outbox_columns} FROM outbox_events
         WHERE status IN ('pending', 'processing')
           AND ((status = 'pending' AND (next_attempt_at IS NULL OR next_attempt_at <= {now}))
                OR (status = 'processing' AND lease_until <= {now}))
         ORDER BY created_at, {insertion_order} LIMIT :limit {for_update_skip_locked}""",
        mysql=merged(
            (
                f"""
                SELECT {{outbox_columns}}, sequence FROM outbox_events
                 WHERE {due}
                 ORDER BY created_at, sequence LIMIT :limit {{for_update_skip_locked}}"""
                for due in (
                    "status = 'pending' AND (next_attempt_at IS NULL OR next_attempt_at <= {now})",
                    "status = 'processing' AND lease_until <= {now}",
                )
            ),
            columns=columns(OutboxEvent),
            order="created_at, sequence",
        ),
        row=OutboxEvent,
    )

    _lease = sql("""
        UPDATE outbox_events
           SET status = 'processing', lease_owner = :owner, lease_until = {seconds_from_now:lease_sec},
               updated_at = {now}
         WHERE {in:event_id, event_ids}""")

    _end_lease = sql("""
        UPDATE outbox_events SET status = 'pending', lease_owner = NULL, lease_until = NULL
         WHERE {in:event_id, event_ids} AND status = 'processing'""")

    _sent = sql("""
        UPDATE outbox_events
           SET status = 'published', published_at = {now}, updated_at = {now}, lease_owner = :mark, lease_until = NULL
         WHERE event_id = :event_id AND status <> 'published'""")

    _sent_by = sql("SELECT 1 FROM outbox_events WHERE event_id = :event_id AND lease_owner = :mark")

    _failed = sql("""
        UPDATE outbox_events
           SET status = :status, last_error = COALESCE(:error, last_error), updated_at = {now},
               lease_owner = NULL, lease_until = NULL
         WHERE event_id = :event_id AND status IN ('pending', 'processing') AND {not_anothers}""")

    _attempts = sql("""
        SELECT COALESCE(retry_count, 0) FROM outbox_events
         WHERE event_id = :event_id AND status IN ('pending', 'processing') AND {not_anothers} {for_update}""")

    _retry = sql("""
        UPDATE outbox_events
           SET status = 'pending', retry_count = :attempts, last_error = COALESCE(:error, last_error),
               next_attempt_at = {seconds_from_now:pause_sec}, updated_at = {now},
               lease_owner = NULL, lease_until = NULL
         WHERE event_id = :event_id""")

    _published_long_ago = sql("""
        SELECT event_id FROM outbox_events
         WHERE status = 'published' AND published_at < {seconds_ago:seconds}
         ORDER BY published_at LIMIT :limit {for_update_skip_locked}""")

    _delete_events = sql("DELETE FROM outbox_events WHERE {in:event_id, event_ids}")

    @operation(touches=touches.of_outbox)
    async def add_outbox_event(
        self, event: OutboxEvent, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        row = self._checked_outbox_event(event)
        recorded = await self._begin_step(lock, record)
        if recorded is not None:
            return recorded
        if not await self._add.run(row):
            raise OutboxEventExistsError(event.event_id)
        await outbox_hint(event)
        return None

    def _checked_outbox_event(self, event: OutboxEvent) -> dict[str, Any]:
        data = event.event_data
        if data is None and event.event_data_binary is None:
            data = "null"
        return {
            "event_id": check_key("event_id", event.event_id),
            "event_type": check_key("event_type", event.event_type),
            "event_source": check_key("event_source", event.event_source),
            "data_type": event.data_type,
            "event_data": check_optional_json("event_data", data, self.payload_limit),
            "event_data_binary": check_binary("event_data_binary", event.event_data_binary, self.payload_limit),
            "content_type": check_key("content_type", event.content_type, 100),
            "created_at": event.created_at,
            "published_at": event.published_at,
            "status": OutboxStatus(event.status),
            "retry_count": event.retry_count,
            "last_error": None if event.last_error is None else clipped(event.last_error),
        }

    def get_pending_outbox_events(
        self, limit: int = 100, *, lease_sec: float = 60.0, owner: str | None = None
    ) -> Coroutine[Any, Any, list[OutboxEvent]]:
        return self._lease_due(Lease(self.relayer_id if owner is None else owner, lease_sec, limit))

    @operation(undo="_give_leases_back", touches=touches.of_lease, as_one="_lease_for_all")
    async def _lease_due(self, lease: Lease) -> list[OutboxEvent]:
        (events,) = await self._lease_for_all([lease])
        return events

    async def _lease_for_all(self, demands: Sequence[Lease]) -> list[list[OutboxEvent]]:
        """Lease to several who ask at the same time; what each of them gets."""
        for demand in demands:
            demand.check()
        due = await self._due.all(limit=limit_of_all(demands))
        leased = [msgspec.structs.replace(event, status=OutboxStatus.PROCESSING) for event in due]
        hands = dealt(leased, demands)
        event_ids: dict[tuple[str, float], list[str]] = {}
        for demand, events in zip(demands, hands, strict=True):
            if events:
                ids = event_ids.setdefault((demand.owner, float(demand.lease_sec)), [])
                ids += [event.event_id for event in events]
        for (owner, lease_sec), ids in event_ids.items():
            await self._lease.run(event_ids=ids, owner=owner, lease_sec=lease_sec)
        return hands

    async def _give_leases_back(self, events: list[OutboxEvent]) -> None:
        if events:
            await self._end_lease.run(event_ids=[event.event_id for event in events])

    async def mark_outbox_event_sent(self, event_id: str) -> bool:
        return await self._mark_sent(event_id, f"sent-{uuid4().hex}")

    @operation(autocommit=True, idempotent=True, touches=touches.of_mark)
    async def _mark_sent(self, event_id: str, mark: str) -> bool:
        """Mark an event as published; by the mark, a repetition whose first outcome got lost knows its own doing."""
        if await self._sent.run(event_id=check_key("event_id", event_id), mark=mark):
            return True
        return await self._sent_by.value(event_id=event_id, mark=mark) is not None

    @operation(autocommit=True, touches=touches.of_mark)
    async def mark_outbox_event_failed(
        self, event_id: str, *, error: str = "", invalid: bool = False, owner: str | None = None
    ) -> bool:
        status = OutboxStatus.INVALID if invalid else OutboxStatus.FAILED
        marked = await self._failed.run(
            event_id=check_key("event_id", event_id),
            status=status,
            error=clipped(error) or None,
            owner=check_optional_key("owner", owner),
        )
        return bool(marked)

    @operation(touches=touches.of_mark)
    async def increment_outbox_attempts(self, event_id: str, *, error: str = "", owner: str | None = None) -> bool:
        attempts = await self._attempts.value(
            event_id=check_key("event_id", event_id), owner=check_optional_key("owner", owner)
        )
        if attempts is None:
            return False
        pause = pause_before_retry(attempts)
        await self._retry.run(event_id=event_id, attempts=attempts + 1, error=clipped(error) or None, pause_sec=pause)
        return True

    @operation
    async def cleanup_old_outbox_events(
        self, older_than: timedelta, *, limit: int = 1000, turn: Turn | None = None
    ) -> int:
        with turn or Turn():
            old = await self._published_long_ago.all(seconds=age_sec(older_than), limit=page_size(limit, 1000))
            return await self._delete_events.run(event_ids=[event_id for (event_id,) in old]) if old else 0


def clipped(error: str) -> str:
    """An error message as it is kept: of bounded length."""
    return plain_text(error)[:LONGEST_ERROR]


def pause_before_retry(attempts: int) -> float:
    """How long a failed event waits: twice as long each time, up to five minutes, with jitter."""
    pause = min(_FIRST_PAUSE_SEC * 2.0 ** min(attempts, 20), _LONGEST_PAUSE_SEC)
    return float(pause * random.uniform(0.8, 1.2))


def new_relayer_id() -> str:
    """A name for whoever leases events through one storage object."""
    return f"relayer-{uuid4().hex}"


def outbox_hint(event: OutboxEvent) -> Hint:
    """Tell relayers of every framework that an event is waiting."""
    payload = {"evt_id": event.event_id, "evt_type": event.event_type, "event_id": event.event_id}
    return Hint(OUTBOX_TOPIC, msgspec.json.encode(payload).decode())
