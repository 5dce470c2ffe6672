"""Declared input paths: an index each, made and removed while the database is in use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..input_filters import validate_json_path
from ..sql.runners.runner import BaseRunner
from .connection import MigrationConnection
from .runner import alone, read


async def declare_input_path(runner: BaseRunner, path: str, *, wait_sec: float = 600.0) -> None:
    """Index the values at a path; recorded when the index is whole, so that nobody looks into half of one."""
    validate_json_path(path)
    if path in await declared_input_paths(runner):
        return
    async with alone(runner, wait_sec) as connection:
        await runner.open()  # the words depend on which server it is
        record = f"INSERT INTO romancy_input_paths (path) VALUES ('{path}')"
        await connection.retried(partial(_make, connection, runner.driver.index_input(path)))
        if path not in await declared_input_paths(runner):
            await connection.retried(partial(_make, connection, [record]))


async def forget_input_path(runner: BaseRunner, path: str, *, wait_sec: float = 600.0) -> None:
    """Remove a path's index; a filter on it is a search again."""
    validate_json_path(path)
    async with alone(runner, wait_sec) as connection:
        forget = f"DELETE FROM romancy_input_paths WHERE path = '{path}'"
        await connection.retried(partial(_make, connection, [forget]))
        await connection.retried(partial(_make, connection, runner.driver.unindex_input(path)))


async def declared_input_paths(runner: BaseRunner) -> list[str]:
    """The paths whose values are indexed."""
    return [path for (path,) in await read(runner, "SELECT path FROM romancy_input_paths ORDER BY path")]


async def _make(connection: MigrationConnection, statements: Sequence[str]) -> None:
    async with connection.step(in_transaction=False):
        for statement in statements:
            await connection.execute(statement)
