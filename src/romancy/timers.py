"""Sleeping: a timer in the database, so that a worker may stop meanwhile, or die."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from .engine.ambient import current_run
from .engine.steps import Kind
from .storage import TimerSubscription
from .storage.sql.checks import LONGEST_SEC


async def sleep(duration: timedelta | float) -> None:
    """Wait for a while; neither a lock nor a process is held."""
    run = current_run("sleep")
    if isinstance(duration, bool) or not isinstance(duration, timedelta | int | float):
        raise TypeError(f"sleep() needs a timedelta or a number of seconds, not {duration!r}")
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if not seconds <= LONGEST_SEC:
        raise ValueError(f"sleep() needs at most {LONGEST_SEC} seconds, not {seconds}")
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
