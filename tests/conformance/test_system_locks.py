"""System locks: background work that only one process should do."""

import asyncio

import pytest

from romancy.storage import InvalidKeyError, SQLStorage
from tests.conformance.arrange import another
from tests.conformance.neighbours import row
from tests.harness import Harness

take = SQLStorage.try_acquire_system_lock


async def test_a_lock_has_one_owner(storage: SQLStorage) -> None:
    assert await take(storage, "sweeper", "worker-1", 30)
    assert not await take(storage, "sweeper", "worker-2", 30)
    assert await take(storage, "poller", "worker-2", 30)


async def test_the_owner_renews_its_lock(harness: Harness, storage: SQLStorage) -> None:
    assert await take(storage, "sweeper", "worker-1", 30)
    harness.advance(seconds=20)
    assert await take(storage, "sweeper", "worker-1", 30)

    harness.advance(seconds=20)
    assert not await take(storage, "sweeper", "worker-2", 30)
    harness.advance(seconds=11)
    assert await take(storage, "sweeper", "worker-2", 30)


async def test_an_expired_lock_goes_to_whoever_asks_first(harness: Harness, storage: SQLStorage) -> None:
    await take(storage, "sweeper", "worker-1", 0.5)
    harness.advance(seconds=1)

    assert await take(storage, "sweeper", "worker-2", 30)
    assert not await take(storage, "sweeper", "worker-1", 30)


@pytest.mark.parametrize("expired", [False, True])
async def test_rivals_never_own_it_together(harness: Harness, storage: SQLStorage, expired: bool) -> None:
    storages = [storage, await another(harness), await another(harness)]
    if expired:
        await take(storage, "sweeper", "worker-0", 1)
        harness.advance(seconds=2)

    won = await asyncio.gather(*(take(storages[n % 3], "sweeper", f"worker-{n}", 30) for n in range(1, 10)))

    assert sum(won) == 1


async def test_a_released_lock_is_free_at_once(storage: SQLStorage) -> None:
    await take(storage, "sweeper", "worker-1", 30)

    for _ in range(2):
        await storage.release_system_lock("sweeper", "worker-1")

    assert await take(storage, "sweeper", "worker-2", 30)


async def test_only_the_owner_releases(storage: SQLStorage) -> None:
    await take(storage, "sweeper", "worker-1", 30)

    await storage.release_system_lock("sweeper", "worker-2")
    await storage.release_system_lock("poller", "worker-1")

    assert not await take(storage, "sweeper", "worker-2", 30)


async def test_only_expired_locks_are_cleaned_up(harness: Harness, storage: SQLStorage) -> None:
    for name, seconds in [("a", 10), ("b", 10), ("c", 100)]:
        await take(storage, name, "worker-1", seconds)
    assert await storage.cleanup_expired_system_locks() == 0
    harness.advance(seconds=11)

    assert await storage.cleanup_expired_system_locks() == 2
    assert await storage.cleanup_expired_system_locks() == 0

    assert await row(storage, "SELECT lock_name, locked_by FROM system_locks") == ("c", "worker-1")


@pytest.mark.parametrize("held_by", [None, ""])
async def test_a_lock_of_nobody_is_free(storage: SQLStorage, held_by: str | None) -> None:
    await storage.conn().execute(
        "INSERT INTO system_locks (lock_name, locked_by) VALUES ('sweeper', :held_by)", held_by=held_by
    )

    assert await take(storage, "sweeper", "worker-1", 30)
    assert not await take(storage, "sweeper", "worker-2", 30)


async def test_names_are_compared_byte_for_byte(storage: SQLStorage) -> None:
    for name in ("sweeper", "Sweeper", "sweeper ", "swéeper"):
        assert await take(storage, name, "worker-1", 30)
    assert not await take(storage, "sweeper", "Worker-1", 30)
    assert not await take(storage, "sweeper", "worker-1 ", 30)


async def test_what_makes_no_sense_is_refused(storage: SQLStorage) -> None:
    for name, worker_id in [("", "worker-1"), ("sweeper", ""), ("x" * 256, "worker-1"), ("a\0", "worker-1")]:
        with pytest.raises(InvalidKeyError):
            await take(storage, name, worker_id, 30)
        with pytest.raises(InvalidKeyError):
            await storage.release_system_lock(name, worker_id)
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout_sec"):
            await take(storage, "sweeper", "worker-1", seconds)


async def test_a_lock_taken_in_a_rolled_back_transaction_was_not_taken(harness: Harness, storage: SQLStorage) -> None:
    with pytest.raises(KeyError):
        async with storage.transaction():
            assert await take(storage, "sweeper", "worker-1", 30)
            raise KeyError

    assert await take(await another(harness), "sweeper", "worker-2", 30)
