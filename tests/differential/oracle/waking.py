"""Waking: who wakes an instance may take its lock at once."""

from collections.abc import Sequence

from romancy.storage import ChannelSubscription, HistoryEvent, TimerSubscription, Woken

from .instances import Instances
from .waiting import Waiting


class Waking(Instances, Waiting):
    """What happens to a waiting instance, and who runs it then."""

    def deliver_and_claim(
        self,
        subscription: ChannelSubscription,
        worker_id: str,
        timeout_sec: float,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> Woken | None:
        instance_id, channel = subscription.instance_id, subscription.channel
        before = self._newest_event(instance_id)
        waits = self._waits_on(instance_id, channel)
        if not self._can_wake(instance_id, "") or self._deliver_to_waiter(instance_id, channel, keep_lock=True) is None:
            return None
        event = self.history[instance_id, waits[0].activity_id]
        return self._woken(event, before, worker_id, timeout_sec, workflow_names, owner_service)

    def fire_and_claim(
        self,
        timer: TimerSubscription,
        worker_id: str,
        timeout_sec: float,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> Woken | None:
        before = self._newest_event(timer.instance_id)
        registered = self.timers.get((timer.instance_id, timer.timer_id))
        if not self.fire_timer(timer, worker_id=""):
            return None
        assert registered is not None
        event = self.history[timer.instance_id, registered.activity_id or registered.timer_id]
        return self._woken(event, before, worker_id, timeout_sec, workflow_names, owner_service)

    def _newest_event(self, instance_id: str) -> int:
        return max((event.id or 0 for key, event in self.history.items() if key[0] == instance_id), default=0)

    def _woken(
        self,
        event: HistoryEvent,
        before: int,
        worker_id: str,
        timeout_sec: float,
        workflow_names: Sequence[str] | None,
        owner_service: str | None,
    ) -> Woken:
        instance = self.instances[event.instance_id]
        ours = self._ours([instance], workflow_names, owner_service) and not self._is_parked(instance)
        self._unlock(instance.instance_id)
        shown = self.instances[event.instance_id].shown
        lock = self.try_acquire_lock(instance.instance_id, worker_id, timeout_sec) if ours else None
        return Woken(shown, event, before, lock)
