"""SQLite's write-ahead log, and when to write it back into the file."""

from __future__ import annotations

from pathlib import Path

_COMMITS_PER_LOOK = 25
_COMMITS_PER_CHECKPOINT = 500
_BYTES_PER_CHECKPOINT = 4 << 20


class Log:
    """How long the log has become.

    SQLite would do so within whichever commit makes the log long, in the event loop's thread as well.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(f"{path}-wal")
        self._length = 0
        self.commits = 0
        self.due = False
        """It is long, until it is written back: that goes before further commits in the event loop's thread."""

    def is_long_now(self) -> bool:
        """Look: a single transaction may have written much."""
        if not self.due:
            many = self.commits >= _COMMITS_PER_CHECKPOINT
            self.due = many or self.measured() > self._length + _BYTES_PER_CHECKPOINT
        return self.due

    def is_long(self) -> bool:
        """The same after single small writes, of which only some are worth a look."""
        if not self.due and self.commits and not self.commits % _COMMITS_PER_LOOK:
            return self.is_long_now()
        return self.due

    def was_written_back(self) -> None:
        self.commits = 0
        self.due = False
        self._length = self.measured()

    def measured(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0  # in memory there is none
