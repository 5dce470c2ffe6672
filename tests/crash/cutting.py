"""How operations are cut: a probe that the storage calls before each statement and after each commit."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from romancy.storage import SQLStorage, StorageError
from romancy.storage.sql.operation import OPERATIONS
from tests.comparison import FOREVER, TABLES, Comparison, Difference, read_tables
from tests.harness import Harness, empty

from .scenarios import UNIT, Scenario

ALL_TABLES = {
    **TABLES,
    "channels": "SELECT channel, unsettled_since FROM romancy_channels ORDER BY channel",
    "receipts": "SELECT instance_id, message_id AS message FROM romancy_receipts ORDER BY instance_id, message_id",
    "marks": "SELECT name, value AS message FROM romancy_marks ORDER BY name",
    "states": "SELECT instance_id, state, updated_at FROM romancy_states ORDER BY instance_id",
    "seen_events": "SELECT event_key, seen_at FROM romancy_seen_events ORDER BY event_key",
}

BEFORE_STATEMENT, AFTER_COMMIT = "before statement", "after commit"


class Cut(StorageError):
    """What a cut operation ends with."""


def cut() -> None:
    raise Cut


class Cutter:
    """Does something nasty at the nth statement of the operations that write, or after a commit."""

    def __init__(self, number: int | None, strike: Callable[[], None] = cut, *, spare: str = "") -> None:
        self.number = number
        """Which statement; None for after the first commit, 0 for never."""
        self.strike = strike
        self.spare = spare
        """An operation that is left alone."""
        self.seen: list[str] = []
        """The operation of each statement up to the cut."""
        self.struck = False

    def __call__(self, point: str, operation: str) -> None:
        if operation not in OPERATIONS or OPERATIONS[operation].reads or operation == self.spare or self.struck:
            return
        if point == BEFORE_STATEMENT:
            self.seen.append(operation)
        if point == AFTER_COMMIT if self.number is None else len(self.seen) == self.number:
            self.struck = True
            self.strike()

    @contextmanager
    def at(self, storage: SQLStorage) -> Iterator[None]:
        storage.runner.probe = self
        try:
            yield
        finally:
            storage.runner.probe = None


async def cut_at(storage: SQLStorage, number: int | None, act: Callable[[SQLStorage], Awaitable[object]]) -> Cutter:
    """Make the call and cut it there; look at `struck` for whether it came so far."""
    cutter = Cutter(number)
    with cutter.at(storage), suppress(Cut):
        await act(storage)
    return cutter


@dataclass(frozen=True)
class Outcome:
    """What a scenario has left in the tables."""

    start: datetime
    answer: Any
    tables: dict[str, Any]

    @classmethod
    async def of(
        cls,
        harness: Harness,
        storage: SQLStorage,
        scenario: Scenario,
        cutter: Cutter | None = None,
        *,
        actor: SQLStorage | None = None,
    ) -> Self:
        """Play a scenario on an emptied database; `actor`, if not the same storage, is disturbed by the cutter."""
        actor = actor or storage
        await empty(storage)
        start = await storage.current_time()
        await scenario.arrange(harness, storage)
        with (cutter or Cutter(0)).at(actor):
            try:
                answer = await scenario.act(actor)
            except StorageError as error:
                answer = error
        return cls(start, answer, await read_tables(storage, ALL_TABLES))

    @classmethod
    async def read(cls, storage: SQLStorage) -> Self:
        """What is there, wherever it comes from."""
        return cls(FOREVER, None, await read_tables(storage, ALL_TABLES))

    def equals(self, expected: "Outcome") -> bool:
        try:
            self.must_equal(expected)
        except Difference:
            return False
        return True

    def must_equal(self, expected: "Outcome") -> None:
        """Raise Difference unless it is the same, but for ids and times."""
        Comparison(expected.start, self.start, UNIT / 2).check(expected.tables, self.tables, where="tables")
