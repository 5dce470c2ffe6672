"""Numbers that no row has, ages that nothing reaches: answered, or refused, in the same way everywhere."""

from datetime import timedelta

import pytest

from romancy.storage import ChannelMode, SQLStorage
from tests.harness import Harness, contents, step

BEYOND = [2**63, -(2**63) - 1, 2**200]


@pytest.mark.parametrize("number", BEYOND)
async def test_an_id_beyond_64_bits_is_an_id_that_no_row_has(
    harness: Harness, storage: SQLStorage, number: int
) -> None:
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, "news", ChannelMode.BROADCAST)
    await storage.publish_to_channel("news", "{}")
    await storage.append_history(step(lock.instance_id))
    before = await contents(storage)

    rows = 0 if number > 0 else 1
    assert len((await storage.get_history_paginated(lock.instance_id, number)).events) == rows
    assert len(await storage.get_pending_channel_messages("news", number)) == rows
    assert await storage.claim_channel_message(number, lock.instance_id) is False
    await storage.delete_channel_message(number)

    assert await contents(storage) == before


async def test_a_limit_may_be_larger_than_any_table(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    await storage.append_history(step(instance_id))
    assert len(await storage.find_resumable_workflows(2**200)) == 1
    assert len((await storage.get_history_paginated(instance_id, 0, 2**200)).events) == 1


async def test_nothing_is_older_than_the_longest_time(harness: Harness, storage: SQLStorage) -> None:
    for age in (timedelta.max, timedelta(days=3000 * 365)):
        assert await storage.delete_finished_instances(age) == 0
        assert await storage.cleanup_old_outbox_events(age) == 0
        assert await storage.cleanup_old_channel_messages(age) == 0


async def test_an_age_is_not_negative(storage: SQLStorage) -> None:
    for age in (timedelta(seconds=-1), timedelta.min):
        with pytest.raises(ValueError, match="negative"):
            await storage.delete_finished_instances(age)
        with pytest.raises(ValueError, match="negative"):
            await storage.cleanup_old_outbox_events(age)
        with pytest.raises(ValueError, match="negative"):
            await storage.cleanup_old_channel_messages(age)


async def test_stale_locks_need_a_sensible_timeout(storage: SQLStorage) -> None:
    assert await storage.cleanup_stale_locks(0) == []
    for timeout_sec in (-1, float("nan"), float("inf"), 1e15):
        with pytest.raises(ValueError, match="timeout_sec"):
            await storage.cleanup_stale_locks(timeout_sec)
