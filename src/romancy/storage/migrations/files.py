"""The migration files: one directory per database, dbmate's format, read as package data.

    20251217000000_base.sql          the shared tables; every framework knows this version
    20261115000001_romancy.sql       what this library adds
    ledger.sql                       the two tables that record which migrations have run

A file has a ``-- migrate:up`` and a ``-- migrate:down`` section; ``transaction:false`` behind such a mark says that its
statements cannot run in a transaction. ``{collation}`` stands for the collation that keys have in the database at hand.
A file that has been released never changes: what comes later goes into a new one, and only adds, so that old code keeps
working.
"""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import resources
from importlib.resources.abc import Traversable

import msgspec

BASE = "20251217000000"
"""The version of the shared tables, recorded where Edda records it too."""

COLLATIONS = {
    "sqlite": "BINARY",
    "postgres": 'pg_catalog."C"',
    "mysql": "utf8mb4_0900_bin",
    "mariadb": "utf8mb4_nopad_bin",
}
"""Every kind of database, with the collation that compares keys byte for byte, trailing spaces too."""

_FILE = re.compile(r"(?P<version>\d{14})_(?P<name>\w+)\.sql")
_MARK = re.compile(r"^-- migrate:(?P<direction>up|down)(?P<options>[^\n]*)$", re.MULTILINE)
_TOKEN = re.compile(
    r"""
    '(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*`       # texts and names
    | (?P<tag>\$\w*\$).*?(?P=tag)                   # a function's body
    | (?P<comment>--[^\n]* | /\*.*?\*/)
    | (?P<end>;)
    | [^;'"`$/-]+ | .
    """,
    re.VERBOSE | re.DOTALL,
)
_OPEN_TRIGGER = re.compile(r"\s*CREATE\s+TRIGGER\b.*(?<!\bEND)", re.IGNORECASE | re.DOTALL)


class Section(msgspec.Struct, frozen=True):
    """One direction of a migration."""

    text: str
    in_transaction: bool = True

    def filled_in(self, collation: str) -> str:
        """Its text for a database whose keys have this collation."""
        return self.text.replace("{collation}", collation)

    def statements(self, collation: str) -> list[str]:
        """The same, one statement at a time."""
        return split(self.filled_in(collation))


class Migration(msgspec.Struct, frozen=True):
    """One file."""

    version: str
    name: str
    checksum: str
    up: Section
    down: Section

    @property
    def is_base(self) -> bool:
        return self.version == BASE

    @property
    def records(self) -> list[str]:
        """The statements that write down that it has been applied; doing so twice does no harm."""
        ours = _insert("romancy_migrations", version=self.version, checksum=self.checksum)
        return [ours, _insert("schema_migrations", version=self.version)] if self.is_base else [ours]

    @property
    def forgotten(self) -> str:
        """The statement that takes the record back."""
        return f"DELETE FROM romancy_migrations WHERE version = '{self.version}'"

    def __str__(self) -> str:
        return f"{self.version}_{self.name}"

    def __repr__(self) -> str:
        return f"<Migration {self}>"


def _insert(table: str, *, version: str, **values: str) -> str:
    columns = ", ".join(("version", *values))
    literals = ", ".join(f"'{value}'" for value in (version, *values.values()))
    there_already = f"SELECT 1 FROM {table} WHERE version = '{version}'"
    return f"INSERT INTO {table} ({columns}) SELECT {literals} WHERE NOT EXISTS ({there_already})"


@functools.cache
def migrations(kind: str) -> tuple[Migration, ...]:
    """All migrations of a kind of database, oldest first."""
    directory = _directory(kind)
    named = [(_FILE.fullmatch(file.name), file) for file in directory.iterdir()]
    found = [_parse(name["version"], name["name"], file.read_text("utf-8")) for name, file in named if name]
    return tuple(sorted(found, key=lambda migration: migration.version))


@functools.cache
def ledger(kind: str) -> Section:
    """What creates the tables in which migrations are recorded."""
    return Section(_unix((_directory(kind) / "ledger.sql").read_text("utf-8")).strip())


def _directory(kind: str) -> Traversable:
    if kind not in COLLATIONS:
        raise ValueError(f"there are no migrations for {kind!r}, only for {', '.join(COLLATIONS)}")
    return resources.files(__package__) / ("mysql" if kind == "mariadb" else kind)


def _parse(version: str, name: str, text: str) -> Migration:
    text = _unix(text)
    _, *marked = _MARK.split(text)
    sections = {
        direction: Section(body.strip(), in_transaction="transaction:false" not in options)
        for direction, options, body in zip(marked[::3], marked[1::3], marked[2::3], strict=True)
    }
    return Migration(version, name, hashlib.sha256(text.encode()).hexdigest(), sections["up"], sections["down"])


def _unix(text: str) -> str:
    """A checkout with other line ends is the same file."""
    return text.replace("\r\n", "\n")


def split(text: str) -> list[str]:
    """Cut SQL at its semicolons, not at those inside quotes, comments, ``$$`` bodies and triggers.

    Comments are left out. A trigger ends with the first END that a semicolon follows.
    """
    statements = [""]
    for token in _TOKEN.finditer(text):
        if token["end"] and _OPEN_TRIGGER.fullmatch(statements[-1]):
            statements[-1] += token[0]
        elif token["end"]:
            statements.append("")
        elif token["comment"]:
            statements[-1] += " "
        else:
            statements[-1] += token[0]
    return [statement.strip() for statement in statements if statement.strip()]
