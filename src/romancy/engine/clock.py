"""The database's clock, read now and then and carried on by this process's monotonic one.

The wall clocks of workers never matter: not for timers, not for locks, not for what a workflow sees.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from ..storage import SQLStorage


class DatabaseClock:
    """What time it is on the database."""

    def __init__(self, storage: SQLStorage) -> None:
        self._storage = storage
        self._moment: datetime | None = None
        self._timestamp = 0.0
        self._read_at = 0.0

    async def read(self) -> datetime:
        """Ask the database."""
        moment = await self._storage.current_time()
        self.told(moment)
        return moment

    def told(self, moment: datetime) -> None:
        """The database has just said what time it is, together with something else."""
        self._moment, self._read_at = moment, time.monotonic()
        self._timestamp = moment.timestamp()

    def now(self) -> datetime:
        """What the database would answer."""
        assert self._moment is not None, "the clock is read before anything runs"
        return self._moment + timedelta(seconds=time.monotonic() - self._read_at)

    def timestamp(self) -> float:
        """The same in seconds."""
        return self._timestamp + time.monotonic() - self._read_at
