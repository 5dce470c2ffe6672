"""How long a batch of deletions may keep others waiting."""

from __future__ import annotations

import time


class Turn:
    """One batch's turn: since when others wait for it, and whether they have waited long enough."""

    __slots__ = ("_sec", "began", "cut_short")

    def __init__(self, sec: float) -> None:
        self._sec = sec
        self.began = time.monotonic()
        """What the batch itself has to wait for before is not its own doing: see `begin`."""
        self.cut_short = False
        """It ended before it had done what it was asked for."""

    def begin(self) -> None:
        """From now on others wait."""
        self.began = time.monotonic()
        self.cut_short = False

    def is_over(self) -> bool:
        """Whether to stop here; asked only when there is more to do."""
        self.cut_short = time.monotonic() - self.began >= self._sec
        return self.cut_short
