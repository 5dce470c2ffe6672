"""One look at everything that a worker could do: a single statement, so that an idle process asks for no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..models import RUNNABLE, Work
from .checks import not_negative
from .instances import Instances
from .operation import operation
from .statement import sql


def look(runnable: Iterable[str], due_events: Iterable[str]) -> str:
    """The statement; each condition is looked for by itself, where MySQL finds two in one index only by themselves."""
    runnables = " OR ".join(
        f"""EXISTS (
            SELECT 1 FROM workflow_instances i
             WHERE {{ours}} AND i.status {status} AND {{lock_is_free}} AND {{not_parked}}
             ORDER BY i.runnable_since LIMIT 1)"""
        for status in runnable
    )
    events = " OR ".join(
        f"EXISTS (SELECT 1 FROM outbox_events WHERE {due} ORDER BY created_at LIMIT 1)" for due in due_events
    )
    return f"""
        SELECT {{now}},
               {runnables},
               (SELECT t.expires_at
                  FROM workflow_timer_subscriptions t {{through_index:romancy_timers_due}}
                  {{then_each:workflow_instances i, i.instance_id = t.instance_id}}
                 WHERE t.expires_at <= {{seconds_ago:minus_soon}}
                   AND {{ours}} AND i.status IN {{waiting}} AND {{not_parked}}
                 ORDER BY t.expires_at LIMIT 1),
               (SELECT w.timeout_at
                  FROM romancy_channel_waits w {{through_index:romancy_waits_timeout}}
                  {{then_each:workflow_instances i, i.instance_id = w.instance_id}}
                 WHERE w.timeout_at IS NOT NULL AND w.timeout_at <= {{seconds_ago:minus_soon}}
                   AND {{ours}} AND i.status IN {{waiting}} AND {{not_parked}}
                 ORDER BY w.timeout_at LIMIT 1),
               ({{any_unsettled}} OR {{any_foreign}}),
               ({events})"""


_PENDING = "status = 'pending' AND (next_attempt_at IS NULL OR next_attempt_at <= {now})"
_ABANDONED = "status = 'processing' AND lease_until <= {now}"


class Looking(Instances):
    """Says what there is to do, without doing it."""

    _work = sql(
        look(["IN {runnable}"], [f"status IN ('pending', 'processing') AND (({_PENDING}) OR ({_ABANDONED}))"]),
        mysql=look([f"= '{status}'" for status in RUNNABLE], [_PENDING, _ABANDONED]),
        row=Work,
    )

    @operation(reads=True)
    async def look_for_work(
        self,
        soon_sec: float = 0.0,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> Work:
        soon = not_negative("soon_sec", soon_sec)
        work = await self._work.one(minus_soon=-float(soon), **self._ours(workflow_names, owner_service))
        assert work is not None, "a SELECT without FROM has a row"
        return work
