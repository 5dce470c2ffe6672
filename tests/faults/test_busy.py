"""Another process holds SQLite's write lock: callers wait for it, and not for ever."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from romancy.storage import SQLStorage, TransientStorageError
from romancy.storage.sql.runners.sqlite import SQLiteRunner
from tests.faults.leaks import assert_nothing_is_held
from tests.harness import Harness, history_of, step

pytestmark = pytest.mark.databases("sqlite")


@asynccontextmanager
async def somebody_writing(storage: SQLStorage) -> AsyncIterator[Callable[[], None]]:
    """The write lock is held by another connection until the function is called."""
    assert isinstance(storage.runner, SQLiteRunner)
    other = sqlite3.connect(storage.runner.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield lambda: other.execute("COMMIT") and None
    finally:
        other.close()


async def test_callers_wait_while_another_process_writes(harness: Harness, storage: SQLStorage) -> None:
    ids = [await harness.instance(storage) for _ in range(5)]

    async with somebody_writing(storage) as finish:
        begun = time.monotonic()
        writing = asyncio.gather(*(storage.append_history(step(instance_id)) for instance_id in ids))
        await asyncio.sleep(3)
        assert not writing.done()
        finish()
        await writing

    assert time.monotonic() - begun < 4
    assert [len(await history_of(storage, instance_id)) for instance_id in ids] == [1] * 5


async def test_reads_do_not_wait_for_a_writer(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)

    async with somebody_writing(storage):
        begun = time.monotonic()
        assert await storage.get_instance(instance_id) is not None
        assert await storage.find_resumable_workflows()

    assert time.monotonic() - begun < 1


async def test_a_writer_that_never_ends_is_an_error_for_all_who_wait_at_once(
    harness: Harness, storage: SQLStorage
) -> None:
    ids = [await harness.instance(storage) for _ in range(20)]
    storage.runner._busy_sec = 0.5  # type: ignore[attr-defined]

    async with somebody_writing(storage):
        begun = time.monotonic()
        answers = await asyncio.gather(
            *(storage.append_history(step(instance_id)) for instance_id in ids), return_exceptions=True
        )
        with pytest.raises(TransientStorageError, match="busy"):
            await storage.begin_transaction()
        assert time.monotonic() - begun < 3

    assert {type(answer) for answer in answers} == {TransientStorageError}
    assert len({id(answer) for answer in answers}) == 20, "each caller has an error of its own"
    await storage.append_history(step(ids[0]))
    await assert_nothing_is_held(storage)


async def test_the_event_loop_is_not_blocked_while_a_busy_file_is_opened(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage)
    another = await harness.open()

    async with somebody_writing(storage) as finish:
        creating = asyncio.create_task(harness.instance(another))
        longest = await longest_pause_of_the_loop(0.3)
        finish()
        await creating

    assert longest < 0.2


async def longest_pause_of_the_loop(seconds: float) -> float:
    longest, end = 0.0, time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - begun)
    return longest
