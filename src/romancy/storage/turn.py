"""How long a batch of deletions keeps others waiting."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Self


class Turn:
    """One batch's turn at the database: entered when others begin to wait for it, left before its commit."""

    __slots__ = ("_longest_sec", "began", "cut_short", "ended")

    def __init__(self, longest_sec: float = math.inf) -> None:
        self._longest_sec = longest_sec
        self.began = self.ended = time.monotonic()
        """What the batch itself waits for before it begins is not its own doing."""
        self.cut_short = False
        """It ended before all was done that it was asked for."""

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        self.cut_short = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended = time.monotonic()

    def is_over(self) -> bool:
        """Whether to stop here; asked only when there is more to do."""
        self.cut_short = time.monotonic() - self.began >= self._longest_sec
        return self.cut_short
