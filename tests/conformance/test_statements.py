"""Every statement is understood by every real database, also those that no test happens to run."""

import re
import sqlite3
from pathlib import Path
from typing import Any

from romancy.storage import SQLStorage
from romancy.storage.sql.drivers.driver import Driver
from romancy.storage.sql.runners.mysql import MySQLRunner
from romancy.storage.sql.runners.postgres import PostgresRunner
from romancy.storage.sql.statement import REGISTRY, Statement
from romancy.storage.urls import parse_url
from tests.harness import Harness

STATEMENTS = sorted(REGISTRY)
KEYS_OF_INSTANCES = {"instance_id", "workflow_name", "source_hash", "continued_from"}


def test_the_registry_knows_the_statements_of_every_manager() -> None:
    owners = {name.partition(".")[0] for name in STATEMENTS}
    assert owners >= {"Manager", "Instances", "Locks", "History", "Timers", "Outbox", "Channels", "Delivery", "Archive"}


def test_no_key_is_changed_where_keys_are_said_to_be_unchanged() -> None:
    texts = [text for name in STATEMENTS for text in all_texts(REGISTRY[name])]
    unchecked = [text for text in texts if "{keys_unchanged}" in text]
    changed = {column for text in unchecked for column in re.findall(r"(\w+) =", set_list(text))}
    assert "status" in changed
    assert not changed & KEYS_OF_INSTANCES


def all_texts(statement: Statement[Any]) -> list[str]:
    """The statement, and its form for many sets of parameters."""
    return [statement.text] if statement.together is None else [statement.text, statement.together.text]


def set_list(text: str) -> str:
    return text.partition(" SET ")[2].partition("WHERE")[0]


async def test_every_statement_can_be_prepared(harness: Harness, storage: SQLStorage) -> None:
    refused: dict[str, str] = {}
    match storage.runner:
        case PostgresRunner() as runner:
            connection = await runner.connect_raw()
            for name in STATEMENTS:
                try:
                    await connection.prepare(runner.driver.rendered(REGISTRY[name]).text)
                except Exception as error:
                    refused[name] = str(error)
            await connection.close()
        case MySQLRunner() as runner:
            connection = await runner.connect_raw()
            for name in STATEMENTS:
                try:
                    await connection.query(f"PREPARE checked FROM {quoted(with_questions(runner.driver, name))}")
                except Exception as error:
                    refused[name] = str(error)
            await connection.ensure_closed()
        case _:
            refused = explained_by_sqlite(storage, Path(parse_url(harness.url).database))
    assert refused == {}


def with_questions(driver: Driver, name: str) -> str:
    """The statement as the server prepares it: the client writes values in place of %s, and lists in parentheses."""
    rendered = driver.rendered(REGISTRY[name])
    return rendered.text.replace("IN %s", "IN (?)").replace("%s", "?").replace("%%", "%")


def quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def explained_by_sqlite(storage: SQLStorage, path: Path) -> dict[str, str]:
    refused: dict[str, str] = {}
    connection = sqlite3.connect(path)
    for name in STATEMENTS:
        rendered = storage.runner.driver.rendered(REGISTRY[name])
        nothing: list[Any] = [None] * len(rendered.binders)
        try:
            connection.execute(f"EXPLAIN {rendered.text}", nothing)
        except sqlite3.Error as error:
            refused[name] = str(error)
    connection.close()
    return refused
