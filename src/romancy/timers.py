"""Sleeping: a timer in the database, so that a worker may stop meanwhile, or die."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from .engine.ambient import current_run
from .engine.steps import Kind
from .storage import TimerSubscription


async def sleep(duration: timedelta | float) -> None:
    """Wait for a while; neither a lock nor a process is held."""
    run = current_run("sleep")
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    await _until(run.now() + timedelta(seconds=max(0.0, seconds)), "sleep")


async def sleep_until(moment: datetime) -> None:
    """Wait until a moment, which must know its zone."""
    if moment.tzinfo is None:
        raise ValueError(f"sleep_until() needs a time that knows its zone: {moment!r}")
    await _until(moment.astimezone(UTC), "sleep_until")


async def _until(moment: datetime, name: str) -> None:
    run = current_run(name)
    step_id = run.next_step_id(name)
    wait = TimerSubscription(instance_id=run.instance_id, timer_id=step_id, expires_at=moment)
    await run.ask(Kind.TIMER, name, step_id, wait=wait).future
