"""How instances end, and who is woken by it: shared by everything that finishes, cancels or wakes an instance."""

from __future__ import annotations

from datetime import datetime

import msgspec

from ..models import HistoryEvent, HistoryEventType, WorkflowStatus
from .manager import Manager
from .operation import Hint
from .statement import Together, sql

RESUMABLE_TOPIC = "workflow_resumable"
FINISHED_TOPIC = "workflow_finished"
CANCELLED_TOPIC = "workflow_cancelled"


class Leftovers(msgspec.Struct, frozen=True):
    """Which tables hold rows of an instance that is about to end."""

    timers: bool
    channel_waits: bool
    instance_waits: bool
    subscriptions: bool
    cursors: bool
    receipts: bool
    groups: bool
    claims: bool
    awaited: bool


TIED = (
    "workflow_timer_subscriptions",
    "romancy_channel_waits",
    "romancy_instance_waits",
    "channel_subscriptions",
    "channel_delivery_cursors",
    "romancy_receipts",
    "workflow_group_memberships",
    "channel_message_claims",
)
"""Tables whose rows about an instance do not outlive it. Whoever adds one marks the instance (`Manager._tie`)."""


def left_by(instance: str) -> str:
    """The select list that fills `Leftovers`."""
    looks = [f"EXISTS (SELECT 1 FROM {table} t WHERE t.instance_id = {instance})" for table in TIED]
    return ", ".join([*looks, f"EXISTS (SELECT 1 FROM romancy_instance_waits t WHERE t.awaited_id = {instance})"])


class Waiter(msgspec.Struct, frozen=True):
    """An instance's wait for another one to finish."""

    instance_id: str
    activity_id: str


class Clock(msgspec.Struct, frozen=True):
    """The database's clock."""

    now: datetime


class Ending(Manager):
    """Finishing, forgetting and waking."""

    _SET_FINISHED = """
        UPDATE {keys_unchanged} workflow_instances AS i
           SET status = :status, output_data = COALESCE(:output_data, i.output_data), {lock_cleared},
               suspended_from = NULL, parked_until = NULL, parked_reason = NULL,
               finished_at = {now}, updated_at = {now}"""

    _finish_instance = sql(f"{_SET_FINISHED} WHERE i.instance_id = :instance_id")

    # Most instances leave nothing behind: one look saves eight deletes.
    _leftovers = sql(
        f"SELECT {left_by(':instance_id')}",
        row=Leftovers,
        together=Together(columns=("instance_id",), text=f"SELECT r.number, {left_by('r.instance_id')} FROM {{rows}}"),
    )

    _forget_timers = sql("DELETE FROM workflow_timer_subscriptions WHERE instance_id = :instance_id")
    _forget_channel_waits = sql("DELETE FROM romancy_channel_waits WHERE instance_id = :instance_id")
    _forget_instance_waits = sql("DELETE FROM romancy_instance_waits WHERE instance_id = :instance_id")
    _forget_subscriptions = sql("DELETE FROM channel_subscriptions WHERE instance_id = :instance_id")
    _forget_cursors = sql("DELETE FROM channel_delivery_cursors WHERE instance_id = :instance_id")
    _forget_receipts = sql("DELETE FROM romancy_receipts WHERE instance_id = :instance_id")
    _forget_groups = sql("DELETE FROM workflow_group_memberships WHERE instance_id = :instance_id")
    _release_claims = sql("DELETE FROM channel_message_claims WHERE instance_id = :instance_id")

    _waiters_for = sql(
        """
        SELECT instance_id, activity_id FROM romancy_instance_waits
         WHERE awaited_id = :instance_id ORDER BY instance_id, id""",
        row=Waiter,
    )
    _forget_instance_wait = sql(
        "DELETE FROM romancy_instance_waits WHERE instance_id = :instance_id AND activity_id = :activity_id"
    )

    _hold_waiting = sql("""
        SELECT i.workflow_name, i.status, i.framework FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND i.status IN {waiting}
        {for_update}""")

    # Ours to wake: it waits, and nobody is working on it. A row that is locked right now is somebody else's business.
    _take_waiting = sql("""
        SELECT i.workflow_name, i.status, i.framework FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND i.status IN {waiting} AND ({lock_is_free} OR i.locked_by = :worker_id)
        {for_update_skip_locked}""")

    _still_waits = sql("""
        SELECT 1 FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND (
               EXISTS (SELECT 1 FROM workflow_timer_subscriptions t WHERE t.instance_id = i.instance_id)
               OR EXISTS (SELECT 1 FROM romancy_channel_waits w WHERE w.instance_id = i.instance_id)
               OR EXISTS (SELECT 1 FROM romancy_instance_waits w WHERE w.instance_id = i.instance_id)
               OR EXISTS (SELECT 1 FROM channel_subscriptions s
                           WHERE s.instance_id = i.instance_id AND s.activity_id IS NOT NULL))""")

    _wake = sql("""
        UPDATE {keys_unchanged} workflow_instances SET {woken}, {lock_cleared}
         WHERE instance_id = :instance_id AND status IN {waiting}""")

    _wake_and_keep_lock = sql("""
        UPDATE {keys_unchanged} workflow_instances SET {woken}
         WHERE instance_id = :instance_id AND status IN {waiting}""")

    _workflow_name = sql("SELECT workflow_name FROM workflow_instances WHERE instance_id = :instance_id")

    _clock = sql("SELECT {now}", row=Clock)

    async def _finish(self, instance_id: str, status: WorkflowStatus, output_data: str | None = None) -> None:
        """End an instance whose row is held."""
        await self._finish_instance.run(instance_id=instance_id, status=status, output_data=output_data)
        await self._clear_away(instance_id, status)

    async def _clear_away(self, instance_id: str, status: WorkflowStatus) -> None:
        """After its end nothing waits for an instance, holds it or counts it any more."""
        left = await self._leftovers.one(instance_id=instance_id)
        assert left is not None, "a SELECT without FROM has a row"
        await self._forget_waits(instance_id, left)
        await self._forget_interests(instance_id, left)
        if left.claims:
            await self._release_claims.run(instance_id=instance_id)
        if left.awaited:
            await self._wake_waiters_for(instance_id, status)
        await finished_hint(instance_id)

    async def _forget_waits(self, instance_id: str, left: Leftovers) -> None:
        if left.timers:
            await self._forget_timers.run(instance_id=instance_id)
        if left.channel_waits:
            await self._forget_channel_waits.run(instance_id=instance_id)
        if left.instance_waits:
            await self._forget_instance_waits.run(instance_id=instance_id)

    async def _forget_interests(self, instance_id: str, left: Leftovers) -> None:
        if left.subscriptions:
            await self._forget_subscriptions.run(instance_id=instance_id)
        if left.cursors:
            await self._forget_cursors.run(instance_id=instance_id)
        if left.receipts:
            await self._forget_receipts.run(instance_id=instance_id)
        if left.groups:
            await self._forget_groups.run(instance_id=instance_id)

    async def _wake_waiters_for(self, finished_id: str, status: WorkflowStatus) -> None:
        for waiter in await self._waiters_for.all(instance_id=finished_id):
            waiting = await self._hold_waiting.one(instance_id=waiter.instance_id)
            if waiting is not None:
                await self._record(finished_event(waiter.instance_id, waiter.activity_id, finished_id, status))
                await self._wake_instance(waiter.instance_id, waiting[0], keep_lock=True)
            # One that runs finds the instance finished at its next suspend. A wait that nothing can end any more must
            # not stay: the instance would be taken for one that something will wake.
            await self._forget_instance_wait.run(instance_id=waiter.instance_id, activity_id=waiter.activity_id)

    async def _wake_instance(self, instance_id: str, workflow_name: str, *, keep_lock: bool = False) -> None:
        """Make a waiting instance runnable again, with the status it was suspended from."""
        await (self._wake_and_keep_lock if keep_lock else self._wake).run(instance_id=instance_id)
        await resumable_hint(instance_id, workflow_name)

    async def _wake_unless_waiting(self, instance_id: str) -> None:
        """Let a held instance run again that nothing can wake any more; whoever has its lock keeps it."""
        if await self._still_waits.value(instance_id=instance_id):
            return
        waiting = await self._hold_waiting.one(instance_id=instance_id)
        if waiting is not None:
            await self._wake_instance(instance_id, waiting[0], keep_lock=True)

    async def _now(self) -> datetime:
        """The database's clock."""
        row = await self._clock.one()
        assert row is not None, "a SELECT without FROM has a row"
        return row.now


def resumable_hint(instance_id: str, workflow_name: str) -> Hint:
    """Tell workers of every framework that an instance can be picked up."""
    payload = {
        "wf_id": instance_id,
        "wf_name": workflow_name,
        "instance_id": instance_id,
        "workflow_name": workflow_name,
    }
    return Hint(RESUMABLE_TOPIC, msgspec.json.encode(payload).decode())


def finished_hint(instance_id: str) -> Hint:
    """Tell whoever waits for the instance's result."""
    return Hint(FINISHED_TOPIC, msgspec.json.encode({"instance_id": instance_id}).decode())


def cancelled_hint(instance_id: str) -> Hint:
    """Tell whoever runs the instance now, before its next heartbeat would."""
    return Hint(CANCELLED_TOPIC, msgspec.json.encode({"instance_id": instance_id}).decode())


def finished_event(instance_id: str, activity_id: str, finished_id: str, status: WorkflowStatus) -> HistoryEvent:
    """What a wait for an instance records when that instance has finished."""
    return HistoryEvent(
        instance_id=instance_id,
        activity_id=activity_id,
        event_type=HistoryEventType.INSTANCE_FINISHED,
        event_data=msgspec.json.encode({"instance_id": finished_id, "status": str(status)}).decode(),
    )
