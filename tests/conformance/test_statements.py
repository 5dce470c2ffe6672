"""Every statement is understood by every real database, also those that no test happens to run."""

import sqlite3
from pathlib import Path
from typing import Any

from romancy.storage import SQLStorage
from romancy.storage.sql.drivers.driver import Driver
from romancy.storage.sql.runners.mysql import MySQLRunner
from romancy.storage.sql.runners.postgres import PostgresRunner
from romancy.storage.sql.statement import REGISTRY
from romancy.storage.urls import parse_url
from tests.harness import Harness

STATEMENTS = sorted(REGISTRY)


def test_the_registry_knows_the_statements_of_every_manager() -> None:
    owners = {name.partition(".")[0] for name in STATEMENTS}
    assert owners >= {"Manager", "Instances", "Locks", "History", "Timers", "Outbox", "Channels", "Delivery", "Archive"}


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
