"""SQLite: a disk that is slow keeps threads waiting, not the event loop."""

import asyncio
import sqlite3
import threading
import time
from typing import Any

import pytest

from romancy.storage import SQLStorage
from romancy.storage.sql.operation import Call
from romancy.storage.sql.runners.sqlite import SQLiteRunner
from tests.harness import Harness, step

SLOW_SEC = 0.1


@pytest.mark.databases("sqlite")
async def test_after_a_slow_read_others_read_elsewhere_for_a_while(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance_id = await harness.instance(storage)
    await storage.append_history(step(instance_id))
    read_on, here, takes_sec = SQLiteRunner._read_on, [], 0.0

    def read(self: SQLiteRunner, connection: sqlite3.Connection, call: Call[Any]) -> Any:
        here.append(threading.current_thread() is threading.main_thread())
        time.sleep(takes_sec)
        return read_on(self, connection, call)

    monkeypatch.setattr(SQLiteRunner, "_read_on", read)
    runner: Any = storage.runner
    runner._reads_are_slow_until = 0.0  # however slow the disk was just now
    takes_sec = SLOW_SEC
    assert len((await storage.get_history_to_replay(instance_id)).events) == 1
    takes_sec = 0.0
    slow_until = time.perf_counter() + SLOW_SEC
    while time.perf_counter() < slow_until:
        assert await storage.get_instance(instance_id) is not None
        assert len((await storage.get_history_to_replay(instance_id)).events) == 1
    assert here[0] is True
    assert not any(here[1:])

    here.clear()
    await asyncio.sleep(runner._reads_are_slow_until - time.perf_counter() + 0.01)
    assert await storage.get_instance(instance_id) is not None
    assert here == [True]
