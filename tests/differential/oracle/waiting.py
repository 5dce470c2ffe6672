"""Suspending: an instance waits for messages, timers and other instances."""

from collections.abc import Sequence
from datetime import datetime

from msgspec.structs import replace

from romancy.storage import (
    ChannelDeliveryResult,
    ChannelWait,
    HistoryEvent,
    InstanceNotFoundError,
    InstanceWait,
    InvalidStatusTransitionError,
    Lock,
    TimerSubscription,
    WorkflowStatus,
)

from .channels import Channels
from .memory import FINISHED, Wait, iso


class Waiting(Channels):
    """Implements `suspend`, its single forms, and `TimerSubscriptionManager`."""

    def suspend(
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
        for awaited in sorted({wait.instance_id for wait in waits if isinstance(wait, InstanceWait)}):
            if awaited not in self.instances:
                raise InstanceNotFoundError(awaited)
        instance = self._hold(instance_id, lock)
        self._must_run(instance)
        if only_running and instance.status != "running":
            raise InvalidStatusTransitionError(instance_id, instance.status, "waiting")
        for activity_id in withdrawn:
            self._withdraw(instance_id, activity_id)
        # Channels are looked at in the order of their names.
        ordered = sorted(waits, key=lambda wait: wait.channel if isinstance(wait, ChannelWait) else "")
        due: dict[int, HistoryEvent] = {}
        for wait in ordered:
            if one_message and due and isinstance(wait, ChannelWait):
                continue
            event = self._due(instance_id, wait)
            if event is not None:
                due[id(wait)] = event
        if not due and not keep_lock:
            for wait in waits:
                self._register(instance_id, wait)
            self._suspend(instance_id, waits)
        return [due[id(wait)] for wait in waits if id(wait) in due]

    def get_awaited_steps(self, instance_id: str) -> list[str]:
        timers = [timer.activity_id or timer.timer_id for key, timer in self.timers.items() if key[0] == instance_id]
        others = [key[1] for key in (*self.channel_waits, *self.instance_waits) if key[0] == instance_id]
        return sorted(timers + others)

    def get_waits(self, instance_id: str) -> list[Wait]:
        registered: list[tuple[str, str, Wait]] = [
            (timer.activity_id or timer.timer_id, timer.timer_id, timer)
            for key, timer in self.timers.items()
            if key[0] == instance_id
        ]
        for waits in (self.channel_waits, self.instance_waits):
            registered += [(key[1], "", wait) for key, wait in waits.items() if key[0] == instance_id]
        return [wait for _, _, wait in sorted(registered, key=lambda one: one[:2])]

    def register_channel_receive_and_release_lock(
        self,
        instance_id: str,
        channel_name: str,
        worker_id: str,
        activity_id: str,
        timeout_at: datetime | None = None,
        *,
        lock: Lock | None = None,
        keep_lock: bool = False,
    ) -> ChannelDeliveryResult | None:
        self._must_run(self._hold_owned(instance_id, worker_id, lock))
        if self._receive_now(instance_id, channel_name, activity_id) is None:
            wait = ChannelWait(channel_name, activity_id, timeout_at)
            self._register(instance_id, wait)
            self._suspend(instance_id, [wait])
            return None
        if not keep_lock:
            self._unlock(instance_id)
            self._change(instance_id, runnable_since=self.now)
        return ChannelDeliveryResult(instance_id, self.instances[instance_id].workflow_name, activity_id)

    def _withdraw(self, instance_id: str, activity_id: str) -> None:
        self.channel_waits.pop((instance_id, activity_id), None)
        self.instance_waits.pop((instance_id, activity_id), None)
        self.timers = {
            key: timer
            for key, timer in self.timers.items()
            if (key[0], timer.activity_id or timer.timer_id) != (instance_id, activity_id)
        }

    def _due(self, instance_id: str, wait: Wait) -> HistoryEvent | None:
        """Record what the wait would record, if it has happened already."""
        match wait:
            case TimerSubscription():
                return self._due_timer(wait)
            case ChannelWait():
                event = self._receive_now(instance_id, wait.channel, wait.activity_id)
                if event is None and self.is_past(wait.timeout_at):
                    self.channel_waits.pop((instance_id, wait.activity_id), None)
                    return self._record_timeout(instance_id, wait)
                return event
            case InstanceWait():
                status = self.instances[wait.instance_id].status
                if status not in FINISHED:
                    return None
                self.instance_waits.pop((instance_id, wait.activity_id), None)
                return self._record_finish(instance_id, wait, status)

    def _due_timer(self, timer: TimerSubscription) -> HistoryEvent | None:
        timer = self.timers.get((timer.instance_id, timer.timer_id), timer)
        recorded = (timer.instance_id, timer.activity_id or timer.timer_id) in self.history
        return self._expire_timer(timer) if recorded or self.is_past(timer.expires_at) else None

    def _register(self, instance_id: str, wait: Wait) -> None:
        match wait:
            case TimerSubscription():
                self._keep_timer(wait)
            case ChannelWait():
                self.channel_waits.setdefault((instance_id, wait.activity_id), wait)
            case InstanceWait():
                self.instance_waits.setdefault((instance_id, wait.activity_id), wait)

    def _suspend(self, instance_id: str, waits: Sequence[Wait]) -> None:
        status = WorkflowStatus.WAITING_FOR_EVENT
        if any(isinstance(wait, TimerSubscription) for wait in waits):
            status = WorkflowStatus.WAITING_FOR_TIMER
        if any(isinstance(wait, ChannelWait) for wait in waits):
            status = WorkflowStatus.WAITING_FOR_MESSAGE
        self._change(instance_id, suspended_from=self.instances[instance_id].status, status=status)
        self._unlock(instance_id)

    # Timers.

    def register_timer_subscription(self, subscription: TimerSubscription, *, lock: Lock | None = None) -> None:
        self._hold_unfinished(subscription.instance_id, lock, "waiting")
        self._keep_timer(subscription)

    def register_timer_subscription_and_release_lock(
        self, subscription: TimerSubscription, instance_id: str, worker_id: str, *, lock: Lock | None = None
    ) -> HistoryEvent | None:
        self._must_run(self._hold_owned(instance_id, worker_id, lock))
        event = self._due_timer(subscription)
        if event is None:
            self._keep_timer(subscription)
            self._suspend(instance_id, [subscription])
        else:
            self._unlock(instance_id)
            self._change(instance_id, runnable_since=self.now)
        return event

    def find_expired_timers(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[TimerSubscription]:
        due = [
            timer
            for timer in self.timers.values()
            if self.is_past(timer.expires_at) and self._polled(timer.instance_id, workflow_names, owner_service)
        ]
        return sorted(due, key=lambda timer: (timer.expires_at, timer.id))[:limit]

    def fire_timer(self, timer: TimerSubscription, *, worker_id: str) -> bool:
        registered = self.timers.get((timer.instance_id, timer.timer_id))
        if not self._can_wake(timer.instance_id, worker_id) or registered is None:
            return False
        if not self.is_past(registered.expires_at):
            return False
        self._expire_timer(registered)
        self._wake(timer.instance_id)
        return True

    def remove_timer_subscription(self, instance_id: str, timer_id: str) -> None:
        if self.timers.pop((instance_id, timer_id), None) is not None:
            self._wake_unless_waiting(instance_id)

    def _keep_timer(self, timer: TimerSubscription) -> None:
        key = (timer.instance_id, timer.timer_id)
        if key not in self.timers:
            self.timers[key] = replace(timer, id=self._id(), created_at=self.now)

    def _expire_timer(self, timer: TimerSubscription) -> HistoryEvent:
        self.timers.pop((timer.instance_id, timer.timer_id), None)
        data = f'{{"result":null,"timer_id":"{timer.timer_id}","expires_at":"{iso(timer.expires_at)}"}}'
        return self._record(timer.instance_id, timer.activity_id or timer.timer_id, "TimerExpired", data)
