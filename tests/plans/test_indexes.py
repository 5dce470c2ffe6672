"""No index without a statement that uses it: each has to be written to for ever."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from romancy.storage import open_storage
from romancy.storage.migrations.files import COLLATIONS, migrations
from romancy.storage.sql.statement import REGISTRY

from .asking import PAGES
from .filling import SMALL, Filler
from .looking import statements_sent

_MADE = re.compile(r"INDEX (?:CONCURRENTLY )?(?:IF NOT EXISTS )?(romancy_\w+) (?:ON|\()([^\n]*)")


async def test_each_index_is_used_by_a_statement(tmp_path: Path) -> None:
    async with open_storage(f"sqlite:///{tmp_path}/orders.db") as storage:
        await storage.initialize()
        await Filler(storage, SMALL).fill()
        with statements_sent() as sent:
            for options, _ in PAGES.values():
                await storage.list_instances(options)
        rendered = [storage.runner.driver.rendered(statement) for statement in REGISTRY.values()]
        texts = [statement.text for statement in [*rendered, *sent]]

    with closing(sqlite3.connect(tmp_path / "orders.db")) as connection:
        indexes = connection.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND name LIKE 'romancy%'")
        plans = " ".join(plan for text in texts for plan in explained(connection, text))
        assert [name for (name,) in indexes if not re.search(rf"\b{name}\b", plans)] == []


def explained(connection: sqlite3.Connection, text: str) -> Iterator[str]:
    arguments = [None] * text.count("?")
    for *_, plan in connection.execute(f"EXPLAIN QUERY PLAN {text}", arguments):
        yield plan


@pytest.mark.parametrize("kind", [kind for kind in COLLATIONS if kind != "mariadb"])
def test_each_index_says_what_it_is_for(kind: str) -> None:
    text = "\n".join(migration.up.text for migration in migrations(kind))
    assert [name for name, rest in _MADE.findall(text) if " -- " not in rest] == []
