"""Suspending: an instance gives its lock back and is only rows until something it waits for happens."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ForeignInstanceError, InstanceNotFoundError, InvalidStatusTransitionError
from ..models import (
    FINISHED,
    ChannelMode,
    ChannelSubscription,
    ChannelWait,
    HistoryEvent,
    InstanceWait,
    Lock,
    TimerSubscription,
    Wait,
    WorkflowStatus,
)
from . import touches
from .archive import Archive
from .checks import check_json, check_key
from .delivery import Delivery
from .ending import finished_event
from .envelopes import EDDA, ROMANCY_GO, timeout_event
from .operation import operation
from .statement import sql
from .timers import check_timer


class Suspending(Delivery, Archive):
    """`suspend` and its single forms, and starting over with `recur_instance`."""

    _share_instance = sql("""
        SELECT i.status, i.framework FROM workflow_instances i WHERE i.instance_id = :instance_id {for_share}""")

    _register_instance_wait = sql("""
        INSERT INTO romancy_instance_waits (instance_id, activity_id, awaited_id)
        VALUES (:instance_id, :activity_id, :awaited_id)
        {on_conflict_do_nothing:instance_id, activity_id}""")

    _forget_timers_of = sql("""
        DELETE FROM workflow_timer_subscriptions
         WHERE instance_id = :instance_id AND COALESCE(activity_id, timer_id) = :activity_id""")

    _forget_compensations = sql("DELETE FROM workflow_compensations WHERE instance_id = :instance_id")

    _start_over = sql("""
        UPDATE {keys_unchanged} workflow_instances
           SET input_data = :input_data, output_data = NULL, current_activity_id = NULL, status = 'running',
               suspended_from = NULL, runnable_since = {now}, updated_at = {now}
         WHERE instance_id = :instance_id""")

    @operation(touches=touches.of_suspension)
    async def suspend(
        self,
        instance_id: str,
        waits: Sequence[Wait],
        *,
        lock: Lock,
        keep_lock: bool = False,
        withdrawn: Sequence[str] = (),
        one_message: bool = False,
        only_running: bool = False,
    ) -> list[HistoryEvent]:
        check_waits(instance_id, waits)
        # Awaited instances before our own: whatever finishes one locks it first, and then those that wait for it.
        awaited_ids = sorted({wait.instance_id for wait in waits if isinstance(wait, InstanceWait)})
        awaited = await self._statuses(awaited_ids, tie=not keep_lock)
        status = await self._hold_instance(instance_id, lock)
        self._must_run(instance_id, status)
        if only_running and status is not WorkflowStatus.RUNNING:
            raise InvalidStatusTransitionError(instance_id, status, "waiting")
        for activity_id in withdrawn:
            await self._withdraw(instance_id, activity_id)
        due: dict[Wait, HistoryEvent] = {}
        for wait in sorted(waits, key=by_channel):
            if one_message and due and isinstance(wait, ChannelWait):
                break  # only channels follow
            event = await self._due_now(instance_id, wait, awaited)
            if event is not None:
                due[wait] = event
        if not due and not keep_lock:
            for wait in waits:
                await self._register(instance_id, wait)
            await self._suspend_instance.run(instance_id=instance_id, status=waiting_status(waits))
        return [due[wait] for wait in waits if wait in due]

    _awaited_steps = sql("""
        SELECT COALESCE(activity_id, timer_id) FROM workflow_timer_subscriptions WHERE instance_id = :instance_id
        UNION ALL SELECT activity_id FROM romancy_channel_waits WHERE instance_id = :instance_id
        UNION ALL SELECT activity_id FROM romancy_instance_waits WHERE instance_id = :instance_id""")

    @operation(reads=True, by_key=True)
    async def get_awaited_steps(self, instance_id: str) -> list[str]:
        rows = await self._awaited_steps.all(instance_id=check_key("instance_id", instance_id))
        # Sorted here, since tables that another framework made would sort by their own collation.
        return sorted((activity_id for (activity_id,) in rows), key=str.encode)

    _timers_of = sql(
        "SELECT {timer_columns} FROM workflow_timer_subscriptions t WHERE t.instance_id = :instance_id",
        row=TimerSubscription,
    )

    _channel_waits_of = sql(
        "SELECT channel, activity_id, timeout_at FROM romancy_channel_waits WHERE instance_id = :instance_id",
        row=ChannelWait,
    )

    _instance_waits_of = sql(
        "SELECT awaited_id, activity_id FROM romancy_instance_waits WHERE instance_id = :instance_id",
        row=InstanceWait,
    )

    @operation(reads=True, by_key=True)
    async def get_waits(self, instance_id: str) -> list[Wait]:
        check_key("instance_id", instance_id)
        waits: list[Wait] = [
            *await self._timers_of.all(instance_id=instance_id),
            *await self._channel_waits_of.all(instance_id=instance_id),
            *await self._instance_waits_of.all(instance_id=instance_id),
        ]
        return sorted(waits, key=by_step)

    async def _withdraw(self, instance_id: str, activity_id: str) -> None:
        """Forget the waits of one step."""
        await self._forget_timers_of.run(instance_id=instance_id, activity_id=activity_id)
        await self._forget_wait.run(instance_id=instance_id, activity_id=activity_id)
        await self._forget_instance_wait.run(instance_id=instance_id, activity_id=activity_id)

    async def _statuses(self, instance_ids: list[str], *, tie: bool) -> dict[str, WorkflowStatus]:
        """Keep these instances, given in order, from finishing until commit; their statuses."""
        statuses: dict[str, WorkflowStatus] = {}
        for instance_id in instance_ids:
            if tie:  # first: two who share a row, and then both want to change it, would wait for each other
                await self._tie.run(instance_id=instance_id)
            found = await self._share_instance.one(instance_id=instance_id)
            if found is None:
                raise InstanceNotFoundError(instance_id)
            status, framework = WorkflowStatus(found[0]), found[1]
            if status not in FINISHED and framework in (EDDA, ROMANCY_GO) and framework != self.framework:
                raise ForeignInstanceError(instance_id, framework)
            statuses[instance_id] = status
        return statuses

    async def _due_now(self, instance_id: str, wait: Wait, awaited: dict[str, WorkflowStatus]) -> HistoryEvent | None:
        """Record what a wait would record, if it has happened already."""
        match wait:
            case TimerSubscription():
                return await self._due_timer_now(wait)
            case ChannelWait():
                return await self._due_message_now(instance_id, wait)
            case InstanceWait():
                status = awaited[wait.instance_id]
                if status not in FINISHED:
                    return None
                event = finished_event(instance_id, wait.activity_id, wait.instance_id, status)
                await self._forget_instance_wait.run(instance_id=instance_id, activity_id=wait.activity_id)
                return await self._recorded(event)

    async def _due_timer_now(self, timer: TimerSubscription) -> HistoryEvent | None:
        key = {"instance_id": timer.instance_id, "timer_id": timer.timer_id}
        registered = await self._registered_timer.one(**key) or timer
        recorded = await self._recorded_step.one(
            instance_id=timer.instance_id, activity_id=registered.activity_id or registered.timer_id
        )
        if recorded is not None or registered.expires_at <= await self._now():
            return await self._expire_timer(registered)
        return None

    async def _due_message_now(self, instance_id: str, wait: ChannelWait) -> HistoryEvent | None:
        event = await self._receive_now(instance_id, wait.channel, wait.activity_id)
        if event is not None or wait.timeout_at is None or wait.timeout_at > await self._now():
            return event
        expired = ChannelSubscription(
            instance_id, wait.channel, ChannelMode.BROADCAST, activity_id=wait.activity_id, timeout_at=wait.timeout_at
        )
        await self._forget_wait.run(instance_id=instance_id, activity_id=wait.activity_id)
        return await self._recorded(timeout_event(expired))

    async def _register(self, instance_id: str, wait: Wait) -> None:
        match wait:
            case TimerSubscription():
                await self._keep_timer(wait)
            case ChannelWait():
                await self._register_wait.run(
                    instance_id=instance_id,
                    channel=wait.channel,
                    activity_id=wait.activity_id,
                    timeout_at=wait.timeout_at,
                )
            case InstanceWait():
                await self._register_instance_wait.run(
                    instance_id=instance_id, activity_id=wait.activity_id, awaited_id=wait.instance_id
                )

    @operation
    async def register_timer_subscription_and_release_lock(
        self, subscription: TimerSubscription, instance_id: str, worker_id: str, *, lock: Lock | None = None
    ) -> HistoryEvent | None:
        check_waits(instance_id, [subscription])
        status = await self._hold_owned(instance_id, check_key("worker_id", worker_id), lock)
        self._must_run(instance_id, status)
        event = await self._due_timer_now(subscription)
        if event is None:
            await self._keep_timer(subscription)
            await self._suspend_instance.run(instance_id=instance_id, status=WorkflowStatus.WAITING_FOR_TIMER)
        else:
            await self._release_held.run(instance_id=instance_id)
        return event

    @operation
    async def recur_instance(self, instance_id: str, input_data: str, *, lock: Lock) -> None:
        checked = check_json("input_data", input_data, self.payload_limit)
        status = await self._hold_instance(check_key("instance_id", instance_id), lock)
        if status is not WorkflowStatus.RUNNING:
            raise InvalidStatusTransitionError(instance_id, status, "starting over")
        await self._archive(instance_id)
        left = await self._leftovers.one(instance_id=instance_id)
        assert left is not None, "a SELECT without FROM has a row"
        await self._forget_waits(instance_id, left)
        await self._forget_compensations.run(instance_id=instance_id)
        await self._start_over.run(instance_id=instance_id, input_data=checked)


def check_waits(instance_id: str, waits: Sequence[Wait]) -> None:
    """Accept one or more waits of the instance, with proper keys."""
    check_key("instance_id", instance_id)
    if not waits:
        raise ValueError("an instance must wait for something")
    for wait in waits:
        match wait:
            case TimerSubscription():
                check_timer(wait)
                if wait.instance_id != instance_id:
                    raise ValueError(f"the timer is of instance {wait.instance_id!r}, not of {instance_id!r}")
            case ChannelWait():
                check_key("channel", wait.channel)
                check_key("activity_id", wait.activity_id)
            case InstanceWait():
                check_key("instance_id", wait.instance_id)
                check_key("activity_id", wait.activity_id)


def by_channel(wait: Wait) -> bytes:
    """Channels are locked in order of their names, after everything else."""
    return b"\1" + wait.channel.encode() if isinstance(wait, ChannelWait) else b""


def by_step(wait: Wait) -> tuple[bytes, bytes]:
    """Waits are told in the order of their steps; several timers of one step in the order of their own ids."""
    if isinstance(wait, TimerSubscription):
        return (wait.activity_id or wait.timer_id).encode(), wait.timer_id.encode()
    return wait.activity_id.encode(), b""


def waiting_status(waits: Sequence[Wait]) -> WorkflowStatus:
    """What an instance with these waits is said to wait for."""
    if any(isinstance(wait, ChannelWait) for wait in waits):
        return WorkflowStatus.WAITING_FOR_MESSAGE
    if any(isinstance(wait, TimerSubscription) for wait in waits):
        return WorkflowStatus.WAITING_FOR_TIMER
    return WorkflowStatus.WAITING_FOR_EVENT
