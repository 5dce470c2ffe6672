"""The outbox: events leave after the transaction that caused them, leased to one relayer at a time."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from romancy.storage import (
    InvalidJSONError,
    InvalidKeyError,
    OutboxEvent,
    OutboxEventExistsError,
    OutboxStatus,
    PayloadTooLargeError,
    SQLStorage,
)
from tests.conformance.arrange import another
from tests.conformance.neighbours import row
from tests.harness import Harness, contents

STATE = "SELECT status, retry_count, last_error, published_at FROM outbox_events WHERE event_id = :id"


def event(event_id: str = "e1", **fields: Any) -> OutboxEvent:
    return OutboxEvent(**{"event_id": event_id, "event_type": "order.paid", "event_source": "/orders", **fields})


async def add(storage: SQLStorage, *event_ids: str) -> None:
    for event_id in event_ids:
        await storage.add_outbox_event(event(event_id))


async def lease(storage: SQLStorage, limit: int = 100, **options: Any) -> list[str]:
    return [each.event_id for each in await storage.get_pending_outbox_events(limit, **options)]


async def status(storage: SQLStorage, event_id: str = "e1") -> str | None:
    found = await row(storage, STATE, id=event_id)
    return None if found is None else str(found[0])


# Adding.


@pytest.mark.parametrize(
    "fields",
    [
        {"event_data": '{"b": 9007199254740993, "a": "Grüße 🎉"}'},
        {"event_data_binary": bytes(range(256)), "content_type": "image/png"},
        {"event_data_binary": b"", "content_type": "application/octet-stream"},
    ],
    ids=["json", "binary", "empty"],
)
async def test_an_event_goes_out_as_it_came_in(storage: SQLStorage, fields: dict[str, Any]) -> None:
    given = event(**fields)
    await storage.add_outbox_event(given)

    [leased] = await storage.get_pending_outbox_events()

    for name in ("event_id", "event_type", "event_source", "event_data", "event_data_binary", "content_type"):
        assert getattr(leased, name) == getattr(given, name)
    assert (leased.data_type, leased.retry_count, leased.last_error) == (given.data_type, 0, None)
    assert leased.status == OutboxStatus.PROCESSING
    assert leased.created_at is not None
    assert abs(leased.created_at - await storage.current_time()) < timedelta(minutes=1)


async def test_an_event_id_is_taken_once(storage: SQLStorage) -> None:
    await add(storage, "e1")

    with pytest.raises(OutboxEventExistsError) as caught:
        await storage.add_outbox_event(event("e1", event_type="other"))
    await add(storage, "E1", "e1 ")

    assert caught.value.event_id == "e1"
    assert await lease(storage) == ["e1", "E1", "e1 "]


async def test_what_is_no_event_is_refused(harness: Harness) -> None:
    storage = await harness.open(max_payload_bytes=100)

    for fields, error in (
        ({"event_data": "{"}, InvalidJSONError),
        ({"event_data": '"' + "x" * 100 + '"'}, PayloadTooLargeError),
        ({"event_data_binary": b"x" * 101}, PayloadTooLargeError),
        ({"event_id": ""}, InvalidKeyError),
        ({"event_type": "a\0"}, InvalidKeyError),
        ({"event_source": "x" * 256}, InvalidKeyError),
    ):
        with pytest.raises(error):
            await storage.add_outbox_event(event(**fields))

    assert await lease(storage) == []


async def test_an_event_leaves_with_its_transaction_or_not_at_all(harness: Harness, storage: SQLStorage) -> None:
    with pytest.raises(KeyError):
        async with storage.transaction():
            await add(storage, "never")
            raise KeyError
    async with storage.transaction():
        await add(storage, "later")

    assert await lease(await another(harness)) == ["later"]


# Leasing.


async def test_events_are_leased_in_the_order_of_their_creation(harness: Harness, storage: SQLStorage) -> None:
    now = await storage.current_time()
    for name, seconds in [("d", 0), ("c", 0), ("a", -2), ("b", 0), ("e", 5)]:
        await storage.add_outbox_event(event(name, created_at=now + timedelta(seconds=seconds)))

    assert await lease(storage, 2) == ["a", "d"]
    assert await lease(storage, 0) == ["c", "b", "e"]
    with pytest.raises(ValueError, match="limit"):
        await lease(storage, -1)
    with pytest.raises(ValueError, match="lease_sec"):
        await lease(storage, lease_sec=0)


async def test_a_leased_event_is_nobody_elses_until_the_lease_ends(harness: Harness, storage: SQLStorage) -> None:
    rival = await harness.open()
    await add(storage, "e1")
    assert await lease(storage, lease_sec=60) == ["e1"]

    harness.advance(seconds=59)
    assert await lease(rival) == []
    assert await lease(storage) == []

    harness.advance(seconds=2)
    assert await lease(rival) == ["e1"]
    assert await lease(storage) == []


async def test_rivals_never_lease_the_same_event(harness: Harness, storage: SQLStorage) -> None:
    storages = [storage, await another(harness), await another(harness)]
    names = [f"e{n:02}" for n in range(30)]
    await add(storage, *names)

    batches = await asyncio.gather(*(lease(storages[n % 3], 4) for n in range(12)))
    for _ in range(8):
        batches.append(await lease(storage, 4))

    assert sorted(name for batch in batches for name in batch) == names


@pytest.mark.databases("postgres", "mariadb", "mysql")
async def test_a_relayer_passes_over_what_another_is_leasing(harness: Harness, storage: SQLStorage) -> None:
    rival = await another(harness)
    await add(storage, "e1", "e2", "e3")
    async with storage.transaction():
        assert await lease(storage, 1) == ["e1"]
        async with asyncio.timeout(5):
            assert "e1" not in await lease(rival, 1)

    assert "e1" not in await lease(rival)


async def test_what_another_framework_is_processing_is_left_alone(harness: Harness, storage: SQLStorage) -> None:
    await add(storage, "theirs", "failed", "ours")
    conn = storage.conn()
    await conn.execute("UPDATE outbox_events SET status = 'processing' WHERE event_id = 'theirs'")
    await conn.execute("UPDATE outbox_events SET status = 'failed' WHERE event_id = 'failed'")
    harness.advance(seconds=86400)

    assert await lease(storage) == ["ours"]


async def test_what_another_framework_added_is_leased(storage: SQLStorage) -> None:
    await storage.conn().execute(
        "INSERT INTO outbox_events (event_id, event_type, event_source, event_data, retry_count)"
        " VALUES ('e1', 'order.paid', '/orders', '{}', NULL)"
    )

    [leased] = await storage.get_pending_outbox_events()
    assert (leased.event_id, leased.retry_count) == ("e1", 0)
    assert await storage.increment_outbox_attempts("e1")
    assert (await row(storage, STATE, id="e1") or ())[1] == 1


# Sent.


async def test_a_sent_event_is_published_once_for_all(harness: Harness, storage: SQLStorage) -> None:
    await add(storage, "e1")
    await lease(storage)

    assert await storage.mark_outbox_event_sent("e1")
    assert not await storage.mark_outbox_event_sent("e1")
    assert not await storage.increment_outbox_attempts("e1")
    assert not await storage.mark_outbox_event_failed("e1")

    harness.advance(seconds=86400)
    assert await lease(storage) == []
    state = await row(storage, STATE, id="e1")
    assert state is not None
    assert state[:3] == ("published", 0, None)
    assert state[3] is not None


@pytest.mark.parametrize("before", ["pending", "leased by another", "failed", "processing elsewhere"])
async def test_what_went_out_went_out_whoever_says_so(harness: Harness, storage: SQLStorage, before: str) -> None:
    await add(storage, "e1")
    if before == "leased by another":
        await lease(await harness.open())
    elif before == "failed":
        await storage.mark_outbox_event_failed("e1", error="gave up")
    elif before == "processing elsewhere":
        await storage.conn().execute("UPDATE outbox_events SET status = 'processing'")

    assert await storage.mark_outbox_event_sent("e1")

    assert await status(storage) == "published"


async def test_nothing_happens_to_an_event_that_is_not_there(storage: SQLStorage) -> None:
    assert not await storage.mark_outbox_event_sent("nothing")
    assert not await storage.mark_outbox_event_failed("nothing")
    assert not await storage.increment_outbox_attempts("nothing")


# Failed attempts.


async def test_a_failed_attempt_is_counted_and_tried_again_later(harness: Harness, storage: SQLStorage) -> None:
    await add(storage, "e1")
    await lease(storage)

    assert await storage.increment_outbox_attempts("e1", error="no route to broker")

    assert await row(storage, STATE, id="e1") == ("pending", 1, "no route to broker", None)
    assert await lease(storage) == []
    harness.advance(seconds=5)
    [again] = await storage.get_pending_outbox_events()
    assert (again.event_id, again.retry_count, again.last_error) == ("e1", 1, "no route to broker")


async def test_an_attempt_without_words_keeps_the_last_ones(storage: SQLStorage) -> None:
    await add(storage, "e1")
    await storage.increment_outbox_attempts("e1", error="no route")
    await storage.increment_outbox_attempts("e1")

    assert await row(storage, STATE, id="e1") == ("pending", 2, "no route", None)


async def test_the_pause_grows_with_each_attempt_and_has_an_end(harness: Harness, storage: SQLStorage) -> None:
    await add(storage, "e1")
    pauses = []
    for _ in range(14):
        await storage.increment_outbox_attempts("e1")
        now = await storage.current_time()
        state = await row(storage, "SELECT next_attempt_at FROM outbox_events")
        assert state is not None
        pauses.append((storage.runner.driver.decode_time(state[0]) - now).total_seconds())  # type: ignore[misc]

    assert pauses[0] < 2
    assert all(later > earlier for earlier, later in zip(pauses[:8], pauses[2:8], strict=False))
    assert max(pauses) <= 360
    harness.advance(seconds=361)
    assert await lease(storage) == ["e1"]


async def test_a_long_outage_gives_no_event_up(harness: Harness, storage: SQLStorage) -> None:
    await add(storage, "e1", "e2")
    for _ in range(50):
        for event_id in await lease(storage):
            await storage.increment_outbox_attempts(event_id, error="down")
        harness.advance(seconds=400)

    assert await lease(storage) == ["e1", "e2"]


async def test_an_event_that_fails_does_not_block_what_is_behind_it(storage: SQLStorage) -> None:
    await add(storage, "bad", "good")
    assert await lease(storage, 1) == ["bad"]
    await storage.increment_outbox_attempts("bad")

    assert await lease(storage, 1) == ["good"]


async def test_a_relayer_whose_lease_has_ended_cannot_take_the_event_from_the_next_one(
    harness: Harness, storage: SQLStorage
) -> None:
    slow, quick, third = storage, await harness.open(), await harness.open()
    await add(storage, "e1")
    assert await lease(slow, lease_sec=60) == ["e1"]
    harness.advance(seconds=61)
    assert await lease(quick) == ["e1"]
    before = await contents(storage)

    assert not await slow.increment_outbox_attempts("e1", error="too late", owner=slow.relayer_id)
    assert not await slow.mark_outbox_event_failed("e1", error="too late", owner=slow.relayer_id)

    assert await contents(storage) == before
    harness.advance(seconds=30)
    assert await lease(third) == []
    assert await quick.increment_outbox_attempts("e1", owner=quick.relayer_id)
    assert await storage.mark_outbox_event_failed("e1", owner="anybody")  # nobody holds it any more


# Given up.


@pytest.mark.parametrize(("invalid", "target"), [(False, "failed"), (True, "invalid")])
async def test_an_event_can_be_given_up_for_good(
    harness: Harness, storage: SQLStorage, invalid: bool, target: str
) -> None:
    await add(storage, "e1")
    await lease(storage)

    assert await storage.mark_outbox_event_failed("e1", error="400 Bad Request", invalid=invalid)
    assert not await storage.mark_outbox_event_failed("e1", error="again")
    assert not await storage.increment_outbox_attempts("e1")

    harness.advance(seconds=86400)
    assert await lease(storage) == []
    assert await row(storage, STATE, id="e1") == (target, 0, "400 Bad Request", None)


@pytest.mark.parametrize("operation", ["increment_outbox_attempts", "mark_outbox_event_failed"])
async def test_an_error_is_kept_in_bounds_and_always_can_be(storage: SQLStorage, operation: str) -> None:
    await add(storage, "e1")

    await getattr(storage, operation)("e1", error="naïve \0 \ud800 " + "x" * 1_000_000)

    state = await row(storage, STATE, id="e1")
    assert state is not None
    assert state[2].startswith("naïve ")
    assert len(state[2]) <= 10_000


# Cleaning up.


async def test_events_are_deleted_some_time_after_they_were_published(harness: Harness, storage: SQLStorage) -> None:
    await add(storage, "old", "young", "pending", "failed", "invalid")
    await storage.mark_outbox_event_failed("failed")
    await storage.mark_outbox_event_failed("invalid", invalid=True)
    await storage.mark_outbox_event_sent("old")
    harness.advance(seconds=3600)
    await storage.mark_outbox_event_sent("young")  # it was created as long ago

    assert await storage.cleanup_old_outbox_events(timedelta(minutes=30)) == 1
    assert await storage.cleanup_old_outbox_events(timedelta(minutes=30)) == 0

    assert [await status(storage, name) for name in ("old", "young", "pending", "failed", "invalid")] == [
        None,
        "published",
        "pending",
        "failed",
        "invalid",
    ]


async def test_old_events_are_deleted_in_batches_oldest_first(harness: Harness, storage: SQLStorage) -> None:
    await add(storage, "e1", "e2", "e3")
    for name in ("e2", "e3", "e1"):
        await storage.mark_outbox_event_sent(name)
        harness.advance(seconds=1)

    assert await storage.cleanup_old_outbox_events(timedelta(0), limit=2) == 2

    assert [await status(storage, name) for name in ("e1", "e2", "e3")] == ["published", None, None]
