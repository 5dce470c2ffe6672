"""Closing, forking, forgetting to close, and event loops that come and go."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest

from romancy.storage import Lock, SQLStorage, StorageClosedError, StorageError, open_storage
from romancy.storage.sql.runners import runner
from tests.harness import Harness, history_of, step


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter deadline for closing."""
    monkeypatch.setattr(runner, "CLOSE_DEADLINE_SEC", 0.3)


async def test_operations_that_are_queued_when_the_storage_closes_are_finished(
    harness: Harness, storage: SQLStorage
) -> None:
    ids = [await harness.instance(storage) for _ in range(100)]
    closing = await harness.open()
    await closing.current_time()

    writing = [asyncio.create_task(closing.append_history(step(instance_id))) for instance_id in ids]
    reading = [asyncio.create_task(closing.list_instances()) for _ in range(10)]
    await asyncio.sleep(0)
    await closing.close()

    assert all(task.done() for task in writing + reading)
    await asyncio.gather(*writing, *reading)
    assert [len(await history_of(storage, instance_id)) for instance_id in ids] == [1] * 100


@pytest.mark.usefixtures("hurry")
async def test_operations_that_are_not_done_at_the_deadline_are_refused(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    assert await storage.get_instance(instance_id)  # readers have their connections, too
    await storage.list_instances()
    holder = await harness.open()

    async with holder.transaction():
        await holder.update_instance_activity(instance_id, "held")
        writing = [asyncio.create_task(storage.update_instance_activity(instance_id, "next")) for _ in range(20)]
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        await storage.close()
        answers = await asyncio.gather(*writing, return_exceptions=True)
        assert time.monotonic() - begun < 3

    assert {isinstance(answer, StorageError) for answer in answers} == {True}
    left = await holder.get_instance(instance_id)
    assert left is not None
    assert left.current_activity_id == "held"


@pytest.mark.usefixtures("hurry")
async def test_a_transaction_that_is_open_at_the_deadline_is_rolled_back(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    closing = await harness.open()
    opened, closed = asyncio.Event(), asyncio.Event()

    async def transact() -> None:
        async with closing.transaction(deadline_sec=60):
            await closing.append_history(step(instance_id))
            opened.set()
            await closed.wait()

    transacting = asyncio.create_task(transact())
    await opened.wait()
    await closing.close()
    closed.set()

    with pytest.raises(StorageError):
        await transacting
    assert await history_of(storage, instance_id) == []
    await storage.append_history(step(instance_id))


async def test_a_transaction_can_be_finished_while_the_storage_closes(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    closing = await harness.open()
    opened = asyncio.Event()

    async def transact() -> None:
        async with closing.transaction():
            await closing.append_history(step(instance_id))
            opened.set()
            await asyncio.sleep(0.1)
            await closing.append_history(step(instance_id, "charge:2"))

    transacting = asyncio.create_task(transact())
    await opened.wait()
    await closing.close()

    await transacting
    assert len(await history_of(storage, instance_id)) == 2


async def test_closing_twice_is_closing_once(storage: SQLStorage) -> None:
    await storage.current_time()

    await asyncio.gather(storage.close(), storage.close())
    await storage.close()


async def test_a_storage_that_was_never_used_can_be_closed(harness: Harness) -> None:
    unused = open_storage(harness.url)

    await unused.close()


async def test_a_closed_storage_says_so(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.close()

    with pytest.raises(StorageClosedError):
        await storage.get_instance(instance_id)
    with pytest.raises(StorageClosedError):
        await storage.list_instances()
    with pytest.raises(StorageClosedError):
        await storage.append_history(step(instance_id))
    with pytest.raises(StorageClosedError):
        await storage.begin_transaction()
    with pytest.raises(StorageClosedError):
        await storage.conn().fetch_value("SELECT 1")


async def test_closing_gives_back_what_a_cancelled_caller_won(harness: Harness, storage: SQLStorage) -> None:
    for number in range(12):
        instance_id = await harness.instance(storage)
        closing = await harness.open()
        await closing.current_time()
        acquiring = asyncio.create_task(closing.try_acquire_lock(instance_id, "w", 60))
        for _ in range(number):
            await asyncio.sleep(0)
        acquiring.cancel()
        async with asyncio.timeout(5):
            await closing.close()
            [outcome] = await asyncio.gather(acquiring, return_exceptions=True)
        if isinstance(outcome, Lock):
            continue  # the answer was quicker than the cancellation

        assert isinstance(outcome, asyncio.CancelledError | StorageClosedError)
        assert await storage.try_acquire_lock(instance_id, "another", 60) is not None


# Forks.


async def test_a_forked_child_is_told_to_open_its_own_storage(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)

    answers = await in_forked_child(storage, instance_id)

    assert answers == "StorageClosedError StorageClosedError StorageClosedError StorageClosedError closed"
    for number in range(20):  # its parent is unharmed
        await storage.append_history(step(instance_id, f"step:{number}"))
    assert len(await history_of(storage, instance_id)) == 20


async def test_a_child_forked_inside_a_transaction_cannot_disturb_it(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)

    async with storage.transaction():
        await storage.append_history(step(instance_id))
        answers = await in_forked_child(storage, instance_id)
        await storage.append_history(step(instance_id, "charge:2"))

    assert answers == "StorageClosedError StorageClosedError StorageClosedError StorageClosedError closed"
    assert len(await history_of(storage, instance_id)) == 2


async def in_forked_child(storage: SQLStorage, instance_id: str) -> str:
    """What a forked child is told when it tries to use, and then closes, its parent's storage."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: there are threads here
        child = os.fork()
    if child == 0:
        try:
            os.write(write_end, asyncio.run(use_and_close(storage, instance_id)).encode())
        except BaseException as error:
            os.write(write_end, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    await asyncio.to_thread(os.waitpid, child, 0)
    with os.fdopen(read_end) as answers:
        return answers.read()


async def use_and_close(storage: SQLStorage, instance_id: str) -> str:
    answers = []
    for use in (
        lambda: storage.get_instance(instance_id),
        lambda: storage.list_instances(),
        lambda: storage.append_history(step(instance_id, "child")),
        lambda: storage.begin_transaction(),
    ):
        try:
            async with asyncio.timeout(5):
                await use()  # type: ignore[no-untyped-call]
            answers.append("worked")
        except Exception as error:
            answers.append(type(error).__name__)
    await storage.close()
    return " ".join([*answers, "closed"])


# Forgetting, and several event loops.

PROGRAM = """
    import asyncio, gc, sys
    from romancy.storage import WorkflowInstance, open_storage

    async def use(storage, name):
        await storage.create_instance(WorkflowInstance(name, "order"))
        async with storage.transaction():
            await storage.update_instance_activity(name, "charge:1")
        assert (await storage.get_instance(name)) is not None
        assert (await storage.list_instances()).instances
"""


def run(harness: Harness, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, with the database's URL as its argument; warnings are errors."""
    text = textwrap.dedent(PROGRAM + program)
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-c", text, harness.url],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)},
    )


async def test_a_storage_that_is_forgotten_ends_quietly(harness: Harness) -> None:
    program = """
    async def main():
        storage = open_storage(sys.argv[1])
        await use(storage, "order-1")
        del storage
        gc.collect()
        await asyncio.sleep(0.05)

    asyncio.run(main())
    gc.collect()
    print("done")
    """
    ended = await asyncio.to_thread(run, harness, program)

    assert (ended.stdout, ended.stderr, ended.returncode) == ("done\n", "", 0)


async def test_a_storage_serves_one_event_loop_after_another(harness: Harness) -> None:
    program = """
    storage = open_storage(sys.argv[1])
    for number in range(3):
        asyncio.run(use(storage, f"order-{number}"))
    asyncio.run(storage.close())
    gc.collect()
    print("done")
    """
    ended = await asyncio.to_thread(run, harness, program)

    assert (ended.stdout, ended.stderr, ended.returncode) == ("done\n", "", 0)


async def test_each_event_loop_can_have_a_storage_of_its_own(harness: Harness) -> None:
    program = """
    async def main(name):
        async with open_storage(sys.argv[1]) as storage:
            await use(storage, name)

    for number in range(3):
        asyncio.run(main(f"order-{number}"))
    gc.collect()
    print("done")
    """
    ended = await asyncio.to_thread(run, harness, program)

    assert (ended.stdout, ended.stderr, ended.returncode) == ("done\n", "", 0)


async def test_a_program_that_ends_in_mid_operation_ends(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, instance_id="order-1")
    program = """
    async def main():
        storage = open_storage(sys.argv[1])
        await storage.current_time()
        tasks = [asyncio.create_task(storage.update_instance_activity("order-1", f"step:{n}")) for n in range(50)]
        await asyncio.sleep(0.01)

    asyncio.run(main())
    print("done")
    """
    ended = await asyncio.to_thread(run, harness, program)

    assert (ended.stdout, ended.returncode) == ("done\n", 0)
    assert "Traceback" not in ended.stderr
