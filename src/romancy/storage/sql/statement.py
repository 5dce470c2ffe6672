"""SQL is written once: named statements with a handful of hooks, rendered once per driver.

    _join = sql('''
        INSERT INTO workflow_group_memberships (instance_id, group_name, joined_at)
        VALUES (:instance_id, :group_name, {now})
        {on_conflict_do_nothing:instance_id, group_name}''')

``:name`` is a parameter, ``{hook}`` or ``{hook:argument}`` one of the words the databases disagree on (`Driver.hooks`).
A parameter whose name ends in ``_at`` is a time; a list is given to ``{in:column, list}`` or ``{among:column, list}``.
Statements know nothing of connections: awaiting ``statement.one(…)`` hands the query to whoever runs the operation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args, get_type_hints, overload

import msgspec

from ..models import ChannelMode, HistoryEventType, OutboxStatus, WorkflowStatus

if TYPE_CHECKING:
    from .drivers.driver import Driver

T = TypeVar("T")
RowT = TypeVar("RowT")
Encoder = Callable[[Any], Any]
Decoder = Callable[[Any], Any]
Decode = Callable[[Sequence[Any]], list[Any]]
"""Turns all rows of an answer into values at once."""


_PAYLOADS = ("event_data", "event_data_binary", "input_data", "output_data")
"""Parameters that may be long; all others are keys, numbers and times."""


class Want(Enum):
    """What a query is asked for."""

    ONE = "one"
    ALL = "all"
    VALUE = "value"
    COUNT = "count"
    ID = "id"


# Under names of their own: before Python 3.12 looking a member up costs more than the comparison it is needed for.
ONE, ALL, VALUE, COUNT, ID = Want.ONE, Want.ALL, Want.VALUE, Want.COUNT, Want.ID


class Query(Generic[T]):
    """A statement with its parameters; the only thing an operation may await."""

    __slots__ = ("params", "statement", "want")

    can_wait: ClassVar[bool] = False
    """Whether nobody looks at its answer: it may be sent together with what follows, at the latest with COMMIT."""

    def __init__(self, statement: Statement[Any], params: Mapping[str, Any], want: Want) -> None:
        self.statement = statement
        self.params = params
        self.want = want

    def __await__(self) -> Generator[Query[T], T, T]:
        return (yield self)

    @property
    def writes(self) -> bool:
        """Whether it may change anything."""
        return self.statement.writes

    def resolve(self, driver: Driver) -> tuple[Rendered, Sequence[Any]]:
        """What to send to the database."""
        rendered = driver.rendered(self.statement)
        return rendered, rendered.bind(self.params)


class Unanswered(Query[Any]):
    """A write whose answer nobody looks at."""

    __slots__ = ()

    can_wait = True


class NativeQuery(Query[T]):
    """A query written in the database's own words: the user's SQL, or one put together at run time."""

    __slots__ = ("args", "rendered")

    def __init__(
        self,
        text: str,
        args: Sequence[Any],
        want: Want,
        decode: Decode | None = None,
        *,
        within_sec: float | None = None,
    ) -> None:
        self.rendered = Rendered("(native)", text, (), duplicate_is_nothing=False, decode=decode, within_sec=within_sec)
        self.args = args
        self.want = want

    @property
    def writes(self) -> bool:
        return True

    def resolve(self, driver: Driver) -> tuple[Rendered, Sequence[Any]]:
        return self.rendered, self.args


class Many(msgspec.Struct, frozen=True):
    """A write for many sets of parameters at once, where that was measured to be worth a text of its own.

    ``{rows}`` stands for them: a table ``r`` with a column for each parameter, and a `number`. Whose row cannot be
    written is left out.
    """

    columns: Mapping[str, str]
    """The parameters, with the types that PostgreSQL wants to be told."""
    key: tuple[str, ...]
    """By these parameters, which are columns too, a written row is found again."""
    postgres: str
    """Ends with RETURNING: the answer, then the key."""
    left_out: Any = None
    """The answer of whose row was left out; with None nobody can say why it was, and it starts over alone."""
    mysql: str = ""
    """Where MySQL and MariaDB need another one than `Together`."""
    sqlite: str = ""
    """Where SQLite has one; it ends like PostgreSQL's."""
    inserted_by: tuple[str, str] = ("", "")
    """A column, and the parameter that is in it: what tells our row from one that somebody else has inserted."""
    table: str = ""
    """Where the rows go; `id` is its column."""


def as_json(rows: Sequence[Any]) -> str:
    """Parameters of many as one: a text that the database takes apart."""
    return _json.encode(rows).decode()


def _plain(value: Any) -> str:
    """A text of a type of its own."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"not a parameter: {value!r}")


_json = msgspec.json.Encoder(enc_hook=_plain)


class Together(msgspec.Struct, frozen=True):
    """One statement for many sets of parameters on MySQL and MariaDB, to whom statements cost more than rows.

    ``{rows}`` stands for the parameters, as in `Many`. A SELECT has the row's `number` as its first column. An INSERT
    inserts all of them or none. An UPDATE or DELETE finds one row for each: if there are fewer, nobody can say whose is
    missing, and whoever asked starts over alone.
    """

    columns: tuple[str, ...]
    """The parameters."""
    text: str
    key: tuple[str, ...] = ()
    """By these columns of what was inserted, which are parameters too, the ids are found."""
    table: str = ""
    """Where rows are inserted; `id` is its column."""
    then: Together | None = None
    """The write that follows, for the same sets of parameters."""


def length_of(queries: Sequence[Query[Any]]) -> int:
    """How long the payloads are that go with queries of one statement for many."""
    payloads = queries[0].statement.payloads
    return sum([len(query.params[name] or "") for query in queries for name in payloads])


def has_bytes(query: Query[Any]) -> bool:
    """Whether there is something among its parameters for which JSON has no words."""
    return any(query.params[name] is not None for name in query.statement.binary)


def same_statement(queries: Sequence[Query[Any]]) -> Statement[Any] | None:
    """The statement that several queries run, if it is the same."""
    if len(queries) < 2:
        return None
    statements = {query.statement for query in queries}
    return statements.pop() if len(statements) == 1 else None


class Statement(Generic[RowT]):
    """A statement written once; its rows become `row` when that is given, else they are tuples."""

    def __init__(
        self,
        text: str,
        row: Callable[..., RowT] | None = None,
        variants: Mapping[str, str] | None = None,
        many: Many | None = None,
        together: Together | None = None,
        then: Statement[Any] | None = None,
    ) -> None:
        self.text = text
        self.row = row
        self.variants = variants or {}
        self.many = many
        self.together = together
        self.then = then
        for_many = many or together
        self.payloads = () if for_many is None else tuple(name for name in for_many.columns if name in _PAYLOADS)
        """Its parameters that may be long, if it can be run for many at once."""
        self.binary = () if many is None else tuple(name for name, kind in many.columns.items() if kind == "bytea")
        """Its parameters that are bytes, if it has a form for many."""
        self.name = "(unnamed)"
        self.writes = not text.lstrip().startswith("SELECT")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"{owner.__name__}.{name}"
        REGISTRY[self.name] = self

    def __repr__(self) -> str:
        return f"<Statement {self.name}>"

    def one(self, **params: Any) -> Query[RowT | None]:
        """The first row, or None."""
        return Query(self, params, ONE)

    def all(self, **params: Any) -> Query[list[RowT]]:
        """All rows."""
        return Query(self, params, ALL)

    def value(self, **params: Any) -> Query[Any]:
        """The first column of the first row, or None."""
        return Query(self, params, VALUE)

    # A row is given as it is: spreading it into keywords makes another one, for each step of each workflow.

    def run(self, row: Mapping[str, Any] | None = None, /, **params: Any) -> Query[int]:
        """The number of rows written (on every database: rows matched, not rows changed)."""
        return Query(self, params if row is None else row, COUNT)

    def later(self, **params: Any) -> Query[Any]:
        """Nothing: it is an update or a delete that is right whatever it finds, and may go with what follows."""
        return Unanswered(self, params, COUNT)

    def insert(self, row: Mapping[str, Any] | None = None, /, **params: Any) -> Query[int | None]:
        """The id of the one row inserted, or None when none was."""
        return Query(self, params if row is None else row, ID)


@overload
def sql(
    text: str,
    *,
    postgres: str | None = None,
    mysql: str | None = None,
    many: Many | None = None,
    together: Together | None = None,
    then: Statement[Any] | None = None,
) -> Statement[tuple[Any, ...]]: ...
@overload
def sql(
    text: str,
    *,
    row: Callable[..., RowT],
    postgres: str | None = None,
    mysql: str | None = None,
    together: Together | None = None,
) -> Statement[RowT]: ...
def sql(
    text: str,
    *,
    row: Callable[..., Any] | None = None,
    postgres: str | None = None,
    mysql: str | None = None,
    many: Many | None = None,
    together: Together | None = None,
    then: Statement[Any] | None = None,
) -> Statement[Any]:
    """Write a statement once; a database that was measured to deserve its own text gets it by keyword.

    `then` is the write that follows if this one has found its row, as if both were one; whoever has a text of its own
    does both with it. It is asked for by `run`, within the transaction that there is or in one of its own.
    """
    variants = {"postgres": postgres, "mysql": mysql}
    given = {name: variant for name, variant in variants.items() if variant is not None}
    return Statement(text, row, given, many, together, then)


REGISTRY: dict[str, Statement[Any]] = {}
"""Every named statement, so that tests can prepare all of them on every real database."""

FRAGMENTS: dict[str, str] = {}
"""Pieces of SQL that several statements share, used like hooks."""


class Rendered:
    """A statement as one driver speaks it."""

    __slots__ = (
        "_encoders",
        "_pick",
        "binders",
        "decode",
        "duplicate_is_nothing",
        "name",
        "text",
        "then",
        "within_sec",
    )

    def __init__(
        self,
        name: str,
        text: str,
        binders: tuple[tuple[str, Encoder | None], ...],
        *,
        duplicate_is_nothing: bool,
        decode: Decode | None,
        within_sec: float | None = None,
        then: Statement[Any] | None = None,
    ) -> None:
        self.then = then
        """What follows if it has found its row."""
        self.within_sec = within_sec
        """After how long to give up, if ever."""
        self.name = name
        self.text = text
        self.binders = binders
        self._pick = picker([name for name, _ in binders])
        self._encoders = [(at, encode) for at, (_, encode) in enumerate(binders) if encode is not None]
        self.duplicate_is_nothing = duplicate_is_nothing
        self.decode = decode

    def bind(self, params: Mapping[str, Any]) -> list[Any]:
        """The parameters in the order the driver wants them."""
        values = list(self._pick(params))
        for at, encode in self._encoders:
            values[at] = encode(values[at])
        return values


def picker(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """What takes the parameters of these names, in this order."""
    if len(names) > 1:
        return itemgetter(*names)  # every statement comes this way: no loop of ours
    return lambda params: tuple([params[name] for name in names])


_HOOK = re.compile(r"\{(\w+)(?::([^{}]*))?\}")
PARAMETER = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)")


def by_row(text: str) -> str:
    """A statement's text with the columns of `{rows}` in place of its parameters; it does not look into fragments."""
    return PARAMETER.sub(r"r.\1", text)


def render(statement: Statement[Any], driver: Driver) -> Rendered:
    """Speak `statement` in the words of `driver`."""
    text = statement.variants.get(driver.driver_name(), statement.text)
    duplicate_is_nothing = "{on_conflict_do_nothing" in text and driver.duplicate_is_an_error
    lists: set[str] = set()

    text = expand_hooks(text, driver, lists)
    text, binders = driver.bind_names(text, PARAMETER, lists)
    return Rendered(
        statement.name,
        text.strip(),
        binders,
        duplicate_is_nothing=duplicate_is_nothing,
        decode=None if statement.row is None else row_decoder(statement.row, driver),
        then=None if driver.driver_name() in statement.variants else statement.then,
    )


def expand_hooks(text: str, driver: Driver, lists: set[str]) -> str:
    """Replace fragments and hooks, innermost first; the names of list parameters are added to `lists`."""

    def hook(match: re.Match[str]) -> str:
        name, argument = match.group(1), match.group(2)
        if argument is None and name in FRAGMENTS:
            return FRAGMENTS[name]
        if name in ("in", "among"):
            lists.add(argument.split(",")[1].strip())
        return driver.hook(name, argument)

    while _HOOK.search(text):
        text = _HOOK.sub(hook, text)
    return text


class _Known(dict[Any, Any]):
    """The members of a StrEnum by value; what another framework invented stays a plain string, and None is None."""

    def __missing__(self, value: Any) -> Any:
        return value


_ENUMS: dict[Any, Decoder] = {
    enum: _Known({str(member.value): member for member in enum}).__getitem__
    for enum in (WorkflowStatus, HistoryEventType, OutboxStatus, ChannelMode)
}


def _decode_all(decode: Decoder, values: Iterable[Any]) -> list[Any]:
    return [None if value is None else decode(value) for value in values]


def row_decoder(row: Callable[..., Any], driver: Driver) -> Decode:
    """Turn a driver's rows into `row`s, converting only the columns whose type the driver does not deliver."""
    conversions: list[tuple[int, Callable[[Iterable[Any]], Iterable[Any]]]] = []
    for index, (_, hint) in enumerate(get_type_hints(row).items()):
        members = set(get_args(hint)) or {hint}
        if datetime in members and driver.decode_time is not None:
            conversions.append((index, partial(_decode_all, driver.decode_time)))
        for member in members & _ENUMS.keys():
            conversions.append((index, partial(map, _ENUMS[member])))

    def decode(rows: Sequence[Any]) -> list[Any]:
        # Column by column: so the loops over many rows are the interpreter's own.
        columns: list[Iterable[Any]] = list(zip(*rows, strict=True))
        if not columns:
            return []
        for index, convert in conversions:
            columns[index] = convert(columns[index])
        return list(map(row, *columns))

    return decode


def columns(model: type[msgspec.Struct], table: str = "", **instead: str) -> str:
    """The select list that fills `model`, column by column; `instead` replaces single ones."""
    prefix = f"{table}." if table else ""
    return ", ".join(
        f"{instead[field]} AS {field}" if field in instead else f"{prefix}{field}" for field in model.__struct_fields__
    )


def merged(selects: Iterable[str], columns: str, order: str) -> str:
    """What several selects find, in one order.

    Each is ordered and limited itself and so reads and locks no more than that. MySQL, asked for two statuses in one
    select, would read, lock and sort all rows that have one of them.
    """
    together = " UNION ALL ".join(f"({select})" for select in selects)
    return f"SELECT {columns} FROM ({together}) found ORDER BY {order} LIMIT :limit"
