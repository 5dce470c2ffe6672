"""How a worker works."""

from __future__ import annotations

from datetime import timedelta

import msgspec

from ..checks import number, optional_duration, seconds, whole_number


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker works."""

    concurrency: int = 100
    """How many instances run at once in this process."""
    lock_timeout_sec: float = 6.0
    """After how long without a heartbeat others take an instance over."""
    heartbeat_sec: float = 1.5
    """How often locks are renewed: well within the time that they last."""
    poll_sec: float = 1.0
    """How often to look without having been told."""
    takeovers: int = 10
    """After how many workers in a row that died with an instance, without a new step of it, the instance is parked."""
    warm: int = 1000
    """How many suspended instances stay in memory, so that they need no replay."""
    drain_sec: float = 5.0
    """How long running steps may go on at shutdown before they are handed back."""

    def __post_init__(self) -> None:
        whole_number("concurrency", self.concurrency, 1)
        seconds("lock_timeout_sec", self.lock_timeout_sec)
        seconds("heartbeat_sec", self.heartbeat_sec)
        if self.heartbeat_sec >= self.lock_timeout_sec:
            raise ValueError(
                f"heartbeat_sec ({self.heartbeat_sec}) must be less than lock_timeout_sec ({self.lock_timeout_sec}),"
                " a quarter of it is good: a lock that runs out before it is renewed is taken over by others"
            )
        seconds("poll_sec", self.poll_sec)
        whole_number("takeovers", self.takeovers, 1)
        whole_number("warm", self.warm, 0)
        number("drain_sec", self.drain_sec)


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

    def __post_init__(self) -> None:
        optional_duration("instances", self.instances)
        optional_duration("messages", self.messages)
        optional_duration("events", self.events)
        optional_duration("seen_events", self.seen_events)
        if not isinstance(self.every, timedelta):
            raise TypeError(f"every must be a timedelta of more than 0, not {self.every!r}")
        if self.every <= timedelta(0):
            raise ValueError(f"every must be a timedelta of more than 0, not {self.every}")
