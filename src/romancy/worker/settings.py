"""How a worker works."""

from __future__ import annotations

from datetime import timedelta

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker works."""

    concurrency: int = 100
    """How many instances run at once in this process."""
    lock_timeout_sec: float = 6.0
    """After how long without a heartbeat others take an instance over."""
    heartbeat_sec: float = 1.5
    poll_sec: float = 1.0
    """How often to look without having been told."""
    takeovers: int = 10
    """After how many workers in a row that died with an instance, without a new step of it, the instance is parked."""
    warm: int = 1000
    """How many suspended instances stay in memory, so that they need no replay."""
    drain_sec: float = 5.0
    """How long running steps may go on at shutdown before they are handed back."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long what is over is kept; None is for ever."""

    instances: timedelta | None = None
    """Finished instances, with their history. They are yours: none goes unless you say so."""
    messages: timedelta | None = timedelta(days=7)
    """Messages that every subscriber has received, or that nobody subscribes to."""
    events: timedelta | None = timedelta(days=7)
    """Outbox events that were published."""
    seen_events: timedelta | None = timedelta(days=30)
    """Keys of events that came in: for so long a repetition is recognised."""
    every: timedelta = timedelta(minutes=1)
    """How often to look."""
