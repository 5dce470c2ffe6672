"""Waking: whoever wakes an instance may take its lock in the same transaction, and run it without looking for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from ..models import ChannelSubscription, HistoryEvent, Lock, TimerSubscription, Woken, WorkflowInstance, WorkflowStatus
from . import touches
from .checks import check_key, positive
from .operation import operation
from .statement import Together, sql
from .suspending import Suspending
from .timers import check_timer

_UNLOCKED = {"locked_by": None, "locked_at": None, "lock_expires_at": None}


class Sleeper(WorkflowInstance, frozen=True):
    """A waiting instance, whose row is held."""

    suspended_from: str | None = None
    last_id: int = 0
    """Its newest event."""
    now: datetime | None = None


class Waking(Suspending):
    """What happens to a waiting instance, and who runs it then."""

    # Unlike the others who wake, not one whose lock we hold ourselves: nobody takes a lock twice.
    _take_sleeper = sql(
        """
        SELECT {instance_columns}, i.suspended_from,
               COALESCE((SELECT MAX(h.id) FROM workflow_history h WHERE h.instance_id = :instance_id), 0), {now}
          FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND i.status IN {waiting} AND {lock_is_free}
        {for_update_skip_locked}""",
        row=Sleeper,
        together=Together(
            columns=("instance_id",),
            text="""
                SELECT r.number, {instance_columns}, i.suspended_from,
                       COALESCE((SELECT h.id FROM workflow_history h WHERE h.instance_id = i.instance_id
                                  ORDER BY h.instance_id DESC, h.id DESC LIMIT 1), 0), {now}
                  FROM {rows} STRAIGHT_JOIN workflow_instances i ON i.instance_id = r.instance_id
                 WHERE i.status IN {waiting} AND {lock_is_free}
                {for_update_skip_locked}""",
        ),
    )

    _wake_and_lock = sql(
        """
        UPDATE {keys_unchanged} workflow_instances
           SET status = :status, suspended_from = NULL, runnable_since = {now}, updated_at = {now},
               locked_by = :worker_id, locked_at = {now}, lock_expires_at = :expires_at, lock_token = lock_token + 1
         WHERE instance_id = :instance_id AND status IN {waiting}""",
        together=Together(
            columns=("instance_id", "status", "worker_id", "expires_at"),
            text="""
                UPDATE {keys_unchanged} {rows} STRAIGHT_JOIN workflow_instances i ON i.instance_id = r.instance_id
                   SET i.status = r.status, suspended_from = NULL, runnable_since = {now}, updated_at = {now},
                       locked_by = r.worker_id, locked_at = {now},
                       lock_expires_at = CAST(r.expires_at AS DATETIME(6)), lock_token = lock_token + 1
                 WHERE i.status IN {waiting}""",
        ),
    )

    @operation(undo="_give_back_woken")
    async def deliver_and_claim(
        self,
        subscription: ChannelSubscription,
        worker_id: str,
        timeout_sec: float,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> Woken | None:
        check_key("channel", subscription.channel)
        sleeper = await self._sleeping(subscription.instance_id, worker_id, timeout_sec)
        if sleeper is None:
            return None
        event = await self._deliver_to_waiter(
            sleeper.instance_id, subscription.channel, str(sleeper.framework), sleeper.now
        )
        if event is None:
            return None
        ours = self._is_ours(sleeper, workflow_names, owner_service)
        return await self._woken(sleeper, event, worker_id if ours else None, timeout_sec)

    @operation(undo="_give_back_woken", touches=touches.of_firing)
    async def fire_and_claim(
        self,
        timer: TimerSubscription,
        worker_id: str,
        timeout_sec: float,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> Woken | None:
        check_timer(timer)
        sleeper = await self._sleeping(timer.instance_id, worker_id, timeout_sec)
        if sleeper is None:
            return None
        event = await self._fire(timer, sleeper.now)
        if event is None:
            return None
        ours = self._is_ours(sleeper, workflow_names, owner_service)
        return await self._woken(sleeper, event, worker_id if ours else None, timeout_sec)

    async def _sleeping(self, instance_id: str, worker_id: str, timeout_sec: float) -> Sleeper | None:
        """Hold an instance that waits, and that nobody is working on."""
        check_key("worker_id", worker_id)
        positive("timeout_sec", timeout_sec)
        return await self._take_sleeper.one(instance_id=check_key("instance_id", instance_id))

    def _is_ours(
        self, instance: WorkflowInstance, workflow_names: Sequence[str] | None, owner_service: str | None
    ) -> bool:
        """Whether a poll with these options would find the instance."""
        return (
            instance.framework == self.framework
            and (workflow_names is None or instance.workflow_name in workflow_names)
            and (owner_service is None or instance.owner_service == owner_service)
        )

    async def _woken(self, sleeper: Sleeper, event: HistoryEvent, worker_id: str | None, timeout_sec: float) -> Woken:
        """Make a held instance runnable, by `worker_id` alone if one is given and the instance is not set aside."""
        assert sleeper.now is not None, "it was read with the row"
        status = WorkflowStatus(sleeper.suspended_from or WorkflowStatus.RUNNING)
        fields = {name: getattr(sleeper, name) for name in WorkflowInstance.__struct_fields__}
        instance = WorkflowInstance(**fields | _UNLOCKED | {"status": status})
        if worker_id is None or (sleeper.parked_until is not None and sleeper.parked_until > sleeper.now):
            await self._wake_instance(sleeper.instance_id, sleeper.workflow_name)
            return Woken(instance, event, sleeper.last_id)
        expires_at = sleeper.now + timedelta(seconds=sleeper.lock_timeout_seconds or timeout_sec)
        await self._wake_and_lock.later(
            instance_id=sleeper.instance_id, status=status, worker_id=worker_id, expires_at=expires_at
        )
        lock = Lock(sleeper.instance_id, sleeper.lock_token + 1, worker_id, expires_at, status)
        return Woken(instance, event, sleeper.last_id, lock)

    async def _give_back_woken(self, woken: Woken | None) -> None:
        if woken is not None:
            await self._give_back_created(woken.lock)
