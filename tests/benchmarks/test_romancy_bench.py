"""`romancy bench`: measures on a database of the user's, and leaves it as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

from romancy.storage import SQLStorage, WorkflowInstance
from tests.harness import Harness


def romancy_bench(url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "romancy", "bench", "--json", "--rounds", "1"]
    return subprocess.run(command, env={**os.environ, "ROMANCY_URL": url}, capture_output=True, text=True, timeout=110)


async def test_it_measures_and_leaves_nothing_behind(harness: Harness, storage: SQLStorage) -> None:
    await storage.create_instance(WorkflowInstance("order-1", "fulfil"))
    ended = romancy_bench(harness.url)
    assert ended.returncode == 0, ended.stderr
    assert [result["what"] for result in json.loads(ended.stdout)] == [
        "one caller",
        "64 callers",
        "one at a time",
        "32 at once",
    ]
    conn = storage.conn()
    assert await conn.fetch_value("SELECT COUNT(*) FROM workflow_instances") == 1
    assert await conn.fetch_value("SELECT COUNT(*) FROM workflow_history") == 0
    assert await conn.fetch_value("SELECT COUNT(*) FROM workflow_definitions") == 1


def test_a_database_without_a_schema_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    ended = romancy_bench(f"sqlite:///{tmp_path}/empty.db")
    assert ended.returncode == 1
    assert "romancy migrate" in ended.stderr
