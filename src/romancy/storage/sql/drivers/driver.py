"""The words the databases disagree on, each under a name that statements use as a hook."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar, NamedTuple

from ..statement import Decoder, Encoder, Rendered, Statement, expand_hooks, render

Binders = tuple[tuple[str, Encoder | None], ...]


def identifiers(argument: str) -> list[str]:
    """Split the argument of a hook at its commas."""
    return [part.strip() for part in argument.split(",")]


def split_arguments(argument: str) -> list[str]:
    """Split at the commas that stand outside parentheses."""
    parts, depth = [""], 0
    for character in argument:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def utc_naive(moment: datetime) -> datetime:
    """UTC wall-clock time without a zone, as the shared tables keep it."""
    if moment.tzinfo is None:
        raise ValueError(f"a time must know its zone: {moment!r}")
    try:
        in_utc = moment if moment.tzinfo is UTC else moment.astimezone(UTC)
    except OverflowError as error:
        raise ValueError(f"a time must be within the years 1 to 9999 of UTC: {moment!r}") from error
    return datetime.combine(in_utc, in_utc.time())


def aware(moment: datetime) -> datetime:
    """UTC wall-clock time as a time that knows its zone."""
    return datetime.combine(moment, moment.time(), UTC)  # `replace` takes four times as long


class Bucket(NamedTuple):
    """A key of declared inputs: how the key's expression is compared, and with what."""

    comparison: str
    argument: Any = None


class Driver(ABC):
    """How one database spells what statements need.

    `clock_offset` moves the database's clock for this driver: tests travel in time with it, nothing else does.
    """

    name: ClassVar[str]
    duplicate_is_an_error: ClassVar[bool] = False
    """Whether a duplicate can only be noticed as an error of the statement (MySQL has no ON CONFLICT DO NOTHING)."""
    json_is_exact: ClassVar[bool] = False
    """Whether JSON conditions decide by themselves; if not, they narrow down, and `input_matches` decides."""
    text_type: ClassVar[str] = "TEXT"
    """What a parameter is cast to where its type cannot be seen."""
    decode_time: Decoder | None = None
    """How a stored time becomes an aware datetime."""

    def __init__(self) -> None:
        self._clock_offset = 0.0
        self._rendered: dict[Statement[Any] | str, Rendered] = {}
        self._expanded: dict[str, str] = {}
        self.hooks: dict[str, Callable[..., str]] = {
            "now": self.now,
            "statement_now": self.statement_now,
            "publishing_now": self.publishing_now,
            "seconds_from_now": self.seconds_from_now,
            "seconds_ago": self.seconds_ago,
            "seconds_after": lambda argument: self.seconds_after(*identifiers(argument)),
            "for_update": self.for_update,
            "for_update_skip_locked": self.select_for_update_skip_locked,
            "for_share": self.for_share,
            "on_conflict_do_nothing": lambda argument: self.on_conflict_do_nothing(*identifiers(argument)),
            "on_conflict_update": lambda argument: self.on_conflict_update(*identifiers(argument)),
            "excluded": self.excluded,
            "returning_id": self.returning_id,
            "in": lambda argument: self.is_in(*identifiers(argument)),
            "among": lambda argument: self.is_among(*identifiers(argument)),
            "through_index": self.through_index,
            "key_of_page": self.key_of_page,
            "same_key": lambda argument: self.same_key(*identifiers(argument)),
            "order_of_page": lambda argument: self.order_of_page(*identifiers(argument)),
            "limit_of_page": self.limit_of_page,
            "hidden": self.hidden,
            "ascii_lower": self.ascii_lower,
            "position": lambda argument: self.position(*identifiers(argument)),
            "greatest": lambda argument: self.greatest(*split_arguments(argument)),
            "forever": self.forever,
            "text": self.text,
            "insertion_order": self.insertion_order,
            "then_join": self.then_join,
            "then_each": lambda argument: self.then_each(*split_arguments(argument)),
            "any_id": self.any_id,
            "keys_unchanged": self.keys_unchanged,
        }

    # The reference's methods.

    def driver_name(self) -> str:
        """The database's name: sqlite, postgres or mysql."""
        return self.name

    def get_current_time_expr(self) -> str:
        """The database's clock at statement time, in UTC."""
        return self.now()

    def make_datetime_comparable(self, column: str) -> str:
        """A time column as it is compared with other times, another framework's included."""
        return column

    @abstractmethod
    def select_for_update_skip_locked(self) -> str:
        """Lock the selected rows until commit, passing over those that are locked."""

    @abstractmethod
    def placeholder(self, n: int) -> str:
        """The placeholder of the nth positional parameter, counted from 1."""

    @abstractmethod
    def on_conflict_do_nothing(self, *conflict_columns: str) -> str:
        """End an insert that skips a row which is there already."""

    @abstractmethod
    def returning_clause(self, *columns: str) -> str:
        """End an insert that returns columns, where the database can."""

    @abstractmethod
    def json_extract(self, column: str, path: str) -> str:
        """The JSON value at a dotted path of a text column, where only an object has any.

        JSON's null where it is missing, and SQL's NULL where the database cannot tell.
        """

    @abstractmethod
    def json_compare(self, extract_expr: str, value: Any, placeholder_num: int) -> tuple[str, list[Any]]:
        """Compare a `json_extract` expression with a value, type and all: the condition and its arguments.

        NULL where the database cannot tell. Unless `json_is_exact`, the condition may also be true of too much.
        """

    # What statements need beyond them.

    @abstractmethod
    def now(self) -> str:
        """The database's clock at statement time, in UTC."""

    def statement_now(self) -> str:
        """The clock at the start of the statement: for searching an index, where the clock itself could go on."""
        return self.now()

    def publishing_now(self) -> str:
        """Now, as precise as other frameworks' messages have it: Edda's receivers sort by it, and skip what is late."""
        return self.now()

    @abstractmethod
    def seconds_after(self, moment: str, parameter: str) -> str:
        """`moment` plus a number of seconds given by a parameter or column."""

    def seconds_from_now(self, parameter: str) -> str:
        """Now plus the parameter's seconds."""
        return self.seconds_after(self.now(), f":{parameter}")

    @abstractmethod
    def seconds_ago(self, parameter: str) -> str:
        """Now minus the parameter's seconds."""

    def returning_id(self) -> str:
        """End an insert whose id is asked for; nothing where the driver is told it anyway."""
        return ""

    def unforeseen(self, parameter: str) -> str:
        """A parameter whose value the planner must not count on."""
        return parameter

    # A page of the rows with one key, in the order of the index by that key and something else, which must be used.

    def key_of_page(self, key: str) -> str:
        """The key equals the parameter of its name."""
        return self.same_key(key, f":{key.rpartition('.')[2]}")

    def same_key(self, key: str, value: str) -> str:
        """The key equals what another table has, that is read with it."""
        return f"{key} = {value}"

    def order_of_page(self, key: str, column: str, direction: str = "ASC") -> str:
        """By which the rows are sorted: the key is the same in all of them."""
        return f"{column} {direction}"

    def limit_of_page(self, parameter: str) -> str:
        """How many rows are asked for."""
        return f":{parameter}"

    def hidden(self, column: str) -> str:
        """A text column that the planner must not search an index by, where it cannot be told which one to take."""
        return column

    def through_index(self, index: str) -> str:
        """Behind a table's name: read it through this index, where the planner cannot be trusted to find it."""
        return ""

    def bounded(self, query: str, seconds: float) -> str:
        """A query that the server gives up after so long, where it can be told so in the query itself."""
        return query

    # Declared input paths: an index over a key of the value at the path. Equal values have equal keys; a document
    # whose value the database cannot be sure of has the key of those, and is looked at by everybody who asks.

    @abstractmethod
    def input_key(self, table: str, path: str) -> str:
        """The key of the value at a path of ``input_data``."""

    @abstractmethod
    def input_buckets(self, path: str, value: Any) -> list[Bucket]:
        """The keys under which the value may be found."""

    @abstractmethod
    def index_input(self, path: str) -> list[str]:
        """Statements that make the index of a path."""

    @abstractmethod
    def unindex_input(self, path: str) -> list[str]:
        """Statements that remove it."""

    @staticmethod
    def input_index(path: str) -> str:
        """The name of a path's index."""
        return f"romancy_input_{hashlib.sha256(path.encode()).hexdigest()[:16]}"

    @abstractmethod
    def for_update(self) -> str:
        """Lock the selected rows against other writers until commit."""

    @abstractmethod
    def for_share(self) -> str:
        """Keep the selected rows as they are until commit."""

    @abstractmethod
    def on_conflict_update(self, *conflict_columns: str) -> str:
        """Begin the SET list of an insert that updates the row which is there already."""

    @abstractmethod
    def excluded(self, column: str) -> str:
        """Inside `on_conflict_update`: the value that could not be inserted."""

    @abstractmethod
    def is_in(self, column: str, parameter: str) -> str:
        """Whether a column is one of a list."""

    @abstractmethod
    def is_among(self, column: str, parameter: str) -> str:
        """Whether a column is one of a list; true when the list is None."""

    @abstractmethod
    def ascii_lower(self, expression: str) -> str:
        """Lower-case A to Z and nothing else."""

    @abstractmethod
    def position(self, needle: str, haystack: str) -> str:
        """Where a text occurs in another, 0 when it does not."""

    def text(self, parameter: str) -> str:
        """A text parameter in a select list, where its type cannot be seen."""
        return f":{parameter}"

    def forever(self) -> str:
        """A moment that never comes."""
        return "'9999-12-31 00:00:00.000000'"

    def insertion_order(self) -> str:
        """The column that numbers outbox events as they were inserted."""
        return "sequence"

    def then_join(self) -> str:
        """Join what was named before with this, in that order where the planner has to be told."""
        return "JOIN"

    def then_each(self, table: str, condition: str) -> str:
        """Look up what belongs to each row of what was named before, in its order: never the other way round."""
        return f"{self.then_join()} {table} ON {condition}"

    def keys_unchanged(self) -> str:
        """In an update that changes no key, own or foreign: there is nothing to check, where that has to be said."""
        return ""

    def any_id(self, parameter: str) -> str:
        """An id that a caller gave, to be compared with a column that may be too small for it."""
        return f":{parameter}"

    def byte_order(self, column: str) -> str:
        """A key column, compared and sorted byte for byte."""
        return column

    def greatest(self, first: str, second: str) -> str:
        """The larger of two values."""
        return f"GREATEST({first}, {second})"

    @abstractmethod
    def encode_time(self, moment: datetime) -> Any:
        """How an aware datetime is given to the database."""

    def encode_optional_time(self, moment: datetime | None) -> Any:
        """The same, None staying None."""
        return None if moment is None else self.encode_time(moment)

    def hook(self, name: str, argument: str | None) -> str:
        """What stands for ``{name:argument}`` in a statement."""
        return self.hooks[name]() if argument is None else self.hooks[name](argument)

    @abstractmethod
    def bind_names(self, text: str, parameter: re.Pattern[str], lists: set[str]) -> tuple[str, Binders]:
        """Replace ``:name`` by the database's placeholders; which value goes where, and how it is encoded."""

    def encoder(self, name: str) -> Encoder | None:
        """How the parameter of this name is given to the database."""
        return self.encode_optional_time if name.endswith("_at") else None

    def expand(self, text: str) -> str:
        """A fragment with its hooks replaced, for statements put together at run time."""
        found = self._expanded.get(text)
        if found is None:
            found = self._expanded[text] = expand_hooks(text, self, set())
        return found

    def rendered(self, statement: Statement[Any]) -> Rendered:
        """The statement in this database's words, rendered once."""
        found = self._rendered.get(statement)
        if found is None:
            found = self._rendered[statement] = render(statement, self)
        return found

    @property
    def clock_offset(self) -> float:
        """By how many seconds tests have moved the clock."""
        return self._clock_offset

    @clock_offset.setter
    def clock_offset(self, seconds: float) -> None:
        self._clock_offset = seconds
        self._rendered.clear()
        self._expanded.clear()
