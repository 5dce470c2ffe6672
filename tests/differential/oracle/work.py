"""What there is to do, seen in one look."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from romancy.storage import Work

from .outbox import Outbox
from .waking import Waking


class Looking(Waking, Outbox):
    """Implements `look_for_work`."""

    def look_for_work(
        self,
        soon_sec: float = 0.0,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> Work:
        asked = {"workflow_names": workflow_names, "owner_service": owner_service}
        polled = {name for name in self.instances if self._polled(name, workflow_names, owner_service)}

        def soonest(moments: Iterable[datetime | None]) -> datetime | None:
            end = self.now + timedelta(seconds=soon_sec)
            return min((moment for moment in moments if moment is not None and moment <= end), default=None)

        return Work(
            now=self.now,
            runnable=bool(self.find_resumable_workflows(**asked)),
            next_timer=soonest(timer.expires_at for key, timer in self.timers.items() if key[0] in polled),
            next_timeout=soonest(wait.timeout_at for key, wait in self.channel_waits.items() if key[0] in polled),
            messages=bool(self.find_deliverable_subscriptions(**asked)),
            events=bool(self._due_events()),
        )
