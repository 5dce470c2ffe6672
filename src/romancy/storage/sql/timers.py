"""Timers: an instance's wait for a moment, fired once by whoever finds it due."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from ..models import HistoryEvent, HistoryEventType, Lock, TimerSubscription
from . import touches
from .checks import check_key, check_optional_key, page_size
from .locks import Locks
from .operation import operation
from .statement import Together, sql


class Timers(Locks):
    """Implements `TimerSubscriptionManager`."""

    _register_timer = sql("""
        INSERT INTO workflow_timer_subscriptions (instance_id, timer_id, expires_at, activity_id, created_at)
        VALUES (:instance_id, :timer_id, :expires_at, :activity_id, COALESCE(:created_at, {now}))
        {on_conflict_do_nothing:instance_id, timer_id}""")

    _expired_timers = sql(
        """
        SELECT {timer_columns}
          FROM workflow_timer_subscriptions t {through_index:romancy_timers_due}
          {then_each:workflow_instances i, i.instance_id = t.instance_id}
         WHERE t.expires_at <= {statement_now} AND {ours} AND i.status IN {waiting} AND {not_parked}
         ORDER BY t.expires_at, t.id LIMIT :limit""",
        row=TimerSubscription,
    )

    _due_timer = sql(
        """
        SELECT {timer_columns} FROM workflow_timer_subscriptions t
         WHERE t.instance_id = :instance_id AND t.timer_id = :timer_id AND t.expires_at <= {now}""",
        row=TimerSubscription,
    )

    _registered_timer = sql(
        """
        SELECT {timer_columns} FROM workflow_timer_subscriptions t
         WHERE t.instance_id = :instance_id AND t.timer_id = :timer_id""",
        row=TimerSubscription,
    )

    _remove_timer = sql("""
        DELETE FROM workflow_timer_subscriptions WHERE instance_id = :instance_id AND timer_id = :timer_id""")

    # Whoever has found a timer knows it as it is registered, most of the time.
    _remove_if_due = sql(
        """
        DELETE FROM workflow_timer_subscriptions
         WHERE instance_id = :instance_id AND timer_id = :timer_id AND expires_at = :expires_at
           AND COALESCE(activity_id, timer_id) = :activity_id AND expires_at <= {now}""",
        together=Together(
            columns=("instance_id", "timer_id", "expires_at", "activity_id"),
            text="""
                DELETE t FROM {rows} STRAIGHT_JOIN workflow_timer_subscriptions t
                    ON t.instance_id = r.instance_id AND t.timer_id = r.timer_id
                 WHERE t.expires_at = CAST(r.expires_at AS DATETIME(6))
                   AND COALESCE(t.activity_id, t.timer_id) = r.activity_id AND t.expires_at <= {now}""",
        ),
    )

    @operation(idempotent=True)
    async def register_timer_subscription(self, subscription: TimerSubscription, *, lock: Lock | None = None) -> None:
        check_timer(subscription)
        await self._hold_to_tie(subscription.instance_id, lock, "waiting")
        await self._keep_timer(subscription)

    async def _keep_timer(self, timer: TimerSubscription) -> None:
        await self._register_timer.run(
            instance_id=timer.instance_id,
            timer_id=timer.timer_id,
            expires_at=timer.expires_at,
            activity_id=timer.activity_id,
            created_at=timer.created_at,
        )

    @operation(reads=True)
    async def find_expired_timers(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[TimerSubscription]:
        return await self._expired_timers.all(limit=page_size(limit), **self._ours(workflow_names, owner_service))

    @operation(touches=touches.of_firing)
    async def fire_timer(self, timer: TimerSubscription, *, worker_id: str) -> bool:
        check_timer(timer)
        check_key("worker_id", worker_id)
        waiting = await self._take_waiting.one(instance_id=timer.instance_id, worker_id=worker_id)
        if waiting is None:
            return False
        if await self._fire(timer) is None:
            return False
        await self._wake_instance(timer.instance_id, waiting[0])
        return True

    async def _fire(self, timer: TimerSubscription, now: datetime | None = None) -> HistoryEvent | None:
        """Record a registered timer that is due and remove it; what is recorded of it, or None."""
        removed = await self._remove_if_due.run(
            instance_id=timer.instance_id,
            timer_id=timer.timer_id,
            expires_at=timer.expires_at,
            activity_id=timer.activity_id or timer.timer_id,
        )
        due = timer if removed else await self._due_timer.one(instance_id=timer.instance_id, timer_id=timer.timer_id)
        if due is None:
            return None
        if not removed:
            await self._remove_timer.run(instance_id=due.instance_id, timer_id=due.timer_id)
        event = replace(timer_event(due), created_at=now)
        recorded = await self._record_new(event)
        return replace(event, id=recorded) if isinstance(recorded, int) else recorded

    async def _expire_timer(self, timer: TimerSubscription) -> HistoryEvent:
        """Record that a timer has expired and remove it, together."""
        recorded = await self._recorded(timer_event(timer))
        await self._remove_timer.run(instance_id=timer.instance_id, timer_id=timer.timer_id)
        return recorded

    @operation(idempotent=True)
    async def remove_timer_subscription(self, instance_id: str, timer_id: str) -> None:
        check_key("instance_id", instance_id)
        check_key("timer_id", timer_id)
        if await self._hold.one(instance_id=instance_id) is None:
            return
        if await self._remove_timer.run(instance_id=instance_id, timer_id=timer_id):
            await self._wake_unless_waiting(instance_id)


def check_timer(timer: TimerSubscription) -> None:
    """Accept a timer with proper keys and a moment that knows its zone."""
    check_key("instance_id", timer.instance_id)
    check_key("timer_id", timer.timer_id)
    check_optional_key("activity_id", timer.activity_id)
    if timer.expires_at.tzinfo is None:
        raise ValueError(f"expires_at must know its zone: {timer.expires_at!r}")


def timer_event(timer: TimerSubscription) -> HistoryEvent:
    """What an expired timer records."""
    data = {"result": None, "timer_id": timer.timer_id, "expires_at": iso(timer.expires_at)}
    return HistoryEvent(
        instance_id=timer.instance_id,
        activity_id=timer.activity_id or timer.timer_id,
        event_type=HistoryEventType.TIMER_EXPIRED,
        event_data=msgspec.json.encode(data).decode(),
    )


def iso(moment: datetime) -> str:
    """A moment in history: ISO 8601, UTC, microseconds."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")
