"""A full disk on SQLite: what fits is done, what does not is refused in clear words, and nothing answered is lost."""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from romancy.storage import (
    SQLiteStorage,
    SQLStorage,
    StorageUnavailableError,
    WorkflowInstance,
    open_storage,
)
from romancy.storage.sql.runners.sqlite import SQLiteRunner
from tests.harness import Harness, history_of, step

pytestmark = pytest.mark.databases("sqlite")

SMALL = '"' + "x" * 100 + '"'
LARGE = '"' + "x" * 1_000_000 + '"'


def pages(storage: SQLStorage) -> int:
    assert isinstance(storage.runner, SQLiteRunner)
    return int(storage.runner._connection().execute("PRAGMA page_count").fetchone()[0])


def leave_room(storage: SQLStorage, spare_pages: int) -> None:
    """Let the file grow by so many pages and no more."""
    assert isinstance(storage.runner, SQLiteRunner)
    storage.runner._connection().execute(f"PRAGMA max_page_count = {pages(storage) + spare_pages}")


async def test_a_write_that_does_not_fit_is_refused_in_clear_words(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    leave_room(storage, 20)

    with pytest.raises(StorageUnavailableError, match="full"):
        await storage.append_history(step(instance_id, data=LARGE))

    assert await history_of(storage, instance_id) == []
    await storage.append_history(step(instance_id, data=SMALL))


# SQLite undoes some statements when the disk is full; with others it ends the whole transaction, savepoints and all.
TOO_LARGE: dict[str, Callable[[SQLStorage, str], Awaitable[object]]] = {
    "statement": lambda storage, instance_id: storage.append_history_many([step(instance_id, "large", data=LARGE)]),
    "transaction": lambda storage, instance_id: storage.update_instance_output(instance_id, LARGE),
}


@pytest.mark.parametrize("write", TOO_LARGE.values(), ids=TOO_LARGE)
async def test_of_a_batch_what_fits_is_done_and_only_what_does_not_is_refused(
    harness: Harness, storage: SQLStorage, write: Callable[[SQLStorage, str], Awaitable[object]]
) -> None:
    ids = [await harness.instance(storage) for _ in range(20)]
    leave_room(storage, 60)

    answers = await asyncio.gather(
        *(storage.join_group(instance_id, "all") for instance_id in ids[:10]),
        write(storage, ids[10]),
        *(storage.append_history(step(instance_id, data=SMALL)) for instance_id in ids[11:]),
        return_exceptions=True,
    )

    assert isinstance(answers.pop(10), StorageUnavailableError)
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    assert sorted(await storage.get_group_members("all")) == sorted(ids[:10])
    assert [len(await history_of(storage, instance_id)) for instance_id in ids[10:]] == [0] + [1] * 9


async def test_nothing_that_was_answered_is_lost_while_the_disk_fills_up(harness: Harness, storage: SQLStorage) -> None:
    ids = [await harness.instance(storage) for _ in range(10)]
    leave_room(storage, 100)
    answered: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []

    async def fill(instance_id: str) -> None:
        for number in range(30):
            name = f"step:{number}"
            try:
                await storage.append_history(step(instance_id, name, data='"' + "x" * 2000 + '"'))
            except StorageUnavailableError:
                refused.append((instance_id, name))
            else:
                answered.append((instance_id, name))

    await asyncio.gather(*(fill(instance_id) for instance_id in ids))

    assert answered
    assert refused
    await storage.close()
    async with open_storage(harness.url) as again:
        recorded = [(each, event.activity_id) for each in ids for event in await history_of(again, each)]
    assert sorted(recorded) == sorted(answered)


async def test_the_storage_works_again_when_there_is_room(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    leave_room(storage, 0)
    with pytest.raises(StorageUnavailableError):
        await storage.append_history(step(instance_id, data=LARGE))

    leave_room(storage, 10_000)
    await storage.append_history(step(instance_id, data=LARGE))

    assert len(await history_of(storage, instance_id)) == 1


@pytest.mark.parametrize("write", TOO_LARGE.values(), ids=TOO_LARGE)
async def test_a_transaction_that_does_not_fit_writes_nothing(
    harness: Harness, storage: SQLStorage, write: Callable[[SQLStorage, str], Awaitable[object]]
) -> None:
    instance_id = await harness.instance(storage)
    leave_room(storage, 20)

    with pytest.raises(StorageUnavailableError):
        async with storage.transaction():
            await storage.append_history(step(instance_id, data=SMALL))
            await write(storage, instance_id)

    assert await history_of(storage, instance_id) == []
    await storage.append_history(step(instance_id, data=SMALL))


async def test_a_savepoint_that_does_not_fit_ends_its_transaction_aloud(harness: Harness, storage: SQLStorage) -> None:
    """SQLite ends the whole transaction, whatever savepoints there are: going on would lose what came before."""
    instance_id = await harness.instance(storage)
    leave_room(storage, 20)

    with pytest.raises(StorageUnavailableError):
        async with storage.transaction():
            await storage.append_history(step(instance_id, data=SMALL))
            with pytest.raises(StorageUnavailableError):
                async with storage.transaction():
                    await TOO_LARGE["transaction"](storage, instance_id)
            await storage.append_history(step(instance_id, "charge:3", data=SMALL))

    assert await history_of(storage, instance_id) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte; a plain directory for those who may not mount one."""
    place = tmp_path / "tiny"
    place.mkdir()
    mounted = (
        os.getuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True
        ).returncode
    )
    yield place
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


async def test_a_disk_that_is_really_full_loses_nothing_that_was_answered(tiny_disk: Path) -> None:
    limited = os.statvfs(tiny_disk).f_blocks * os.statvfs(tiny_disk).f_frsize < 2_000_000
    answered = []
    async with SQLiteStorage(str(tiny_disk / "romancy.db")) as storage:
        await storage.initialize()
        await storage.create_instance(WorkflowInstance("order", "order"))
        if not limited:
            leave_room(storage, 100)
        with pytest.raises(StorageUnavailableError, match="full"):
            for number in range(1000):
                await storage.append_history(step("order", f"step:{number}", data='"' + "x" * 5000 + '"'))
                answered.append(f"step:{number}")

        assert answered
        assert [event.activity_id for event in await history_of(storage, "order")] == answered
