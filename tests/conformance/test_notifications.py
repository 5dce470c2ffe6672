"""Hints: told after the commit, to every listener, never instead of the poll."""

import asyncio
import json

import pytest

from romancy.storage import ChannelMode, SQLStorage
from romancy.storage.notifications import CATCH_UP, Told, told
from romancy.storage.notifications.hints import digest
from romancy.storage.sql.channels import message_hint
from romancy.storage.sql.ending import finished_hint
from romancy.storage.sql.operation import Hint
from tests.harness import Harness


async def next_hint(hints: object, topic: str) -> Hint:
    async with asyncio.timeout(5):
        async for hint in hints:  # type: ignore[attr-defined]
            if hint.topic == topic:
                return hint  # type: ignore[no-any-return]
    raise AssertionError("a listener has no end")


async def test_a_publish_is_announced_to_listeners_of_the_same_storage(storage: SQLStorage) -> None:
    async with storage.listen() as hints:
        message_id = await storage.publish_to_channel("orders", "{}")
        hint = await next_hint(hints, "workflow_channel_message")

    told = json.loads(hint.payload)
    assert (told["channel"], told["ch"], told["channel_name"]) == ("orders", "orders", "orders")
    assert told["message_id"] == message_id


async def test_nothing_is_announced_before_the_transaction_commits(storage: SQLStorage) -> None:
    async with storage.listen() as hints:
        async with storage.transaction():
            await storage.publish_to_channel("orders", "{}")
            await asyncio.sleep(0.05)
            assert hints._waiting.empty()
        await next_hint(hints, "workflow_channel_message")


async def test_a_rolled_back_publish_is_never_announced(storage: SQLStorage) -> None:
    async with storage.listen() as hints:
        with pytest.raises(KeyError):
            async with storage.transaction():
                await storage.publish_to_channel("orders", "{}")
                raise KeyError
        await storage.publish_to_channel("other", "{}")
        hint = await next_hint(hints, "workflow_channel_message")

    assert json.loads(hint.payload)["channel"] == "other"


async def test_a_rolled_back_savepoint_takes_its_hints_along(storage: SQLStorage) -> None:
    async with storage.listen() as hints:
        async with storage.transaction():
            with pytest.raises(KeyError):
                async with storage.transaction():
                    await storage.publish_to_channel("orders", "{}")
                    raise KeyError
            await storage.publish_to_channel("other", "{}")
        hint = await next_hint(hints, "workflow_channel_message")

    assert json.loads(hint.payload)["channel"] == "other"


async def test_a_woken_instance_is_announced_as_resumable(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, "orders", ChannelMode.BROADCAST)
    await storage.register_channel_receive_and_release_lock(
        lock.instance_id, "orders", "worker-1", "receive:1", lock=lock
    )
    await storage.publish_to_channel("orders", "{}")
    [waiting] = await storage.get_channel_subscribers_waiting("orders")
    [message] = await storage.get_pending_channel_messages("orders")

    async with storage.listen() as hints:
        await storage.deliver_channel_message_with_lock(waiting.instance_id, "orders", message, "worker-2", 30)
        hint = await next_hint(hints, "workflow_resumable")

    assert json.loads(hint.payload)["instance_id"] == lock.instance_id


async def test_a_listener_that_falls_behind_is_told_to_look_at_everything(storage: SQLStorage) -> None:
    async with storage.listen() as hints:
        storage.runner.announce([Hint("workflow_resumable", str(number)) for number in range(10_001)])
        assert await anext(hints) is CATCH_UP


async def test_another_storage_on_the_database_hears_it_too(harness: Harness, storage: SQLStorage) -> None:
    elsewhere = await harness.open()
    async with elsewhere.listen(["workflow_channel_message"]) as hints:
        await storage.publish_to_channel("orders", "{}")
        hint = await next_hint(hints, "workflow_channel_message")

    assert told(hint).channel == "orders"


async def test_a_storage_hears_its_own_commits_once(harness: Harness, storage: SQLStorage) -> None:
    elsewhere = await harness.open()
    async with storage.listen() as own, elsewhere.listen() as others:
        await storage.publish_to_channel("orders", "{}")
        await next_hint(own, "workflow_channel_message")
        await next_hint(others, "workflow_channel_message")
        await elsewhere.publish_to_channel("answers", "{}")

        assert told(await next_hint(own, "workflow_channel_message")).channel == "answers"


async def test_several_listeners_of_one_storage_hear_the_same(harness: Harness, storage: SQLStorage) -> None:
    elsewhere = await harness.open()
    async with elsewhere.listen() as stays:
        async with elsewhere.listen() as leaves:
            await storage.publish_to_channel("first", "{}")
            for hints in (leaves, stays):
                assert told(await next_hint(hints, "workflow_channel_message")).channel == "first"
        await storage.publish_to_channel("second", "{}")
        assert told(await next_hint(stays, "workflow_channel_message")).channel == "second"


async def test_announcing_to_others_can_be_switched_off(harness: Harness, storage: SQLStorage) -> None:
    elsewhere = await harness.open()
    assert storage.is_notify_enabled()
    storage.set_notify_enabled(False)
    assert not storage.is_notify_enabled()
    async with elsewhere.listen() as hints:
        await storage.publish_to_channel("silent", "{}")
        storage.set_notify_enabled(True)
        await storage.publish_to_channel("loud", "{}")
        hint = await next_hint(hints, "workflow_channel_message")

    assert told(hint).channel == "loud"


async def test_what_is_announced_just_before_closing_is_heard(harness: Harness) -> None:
    elsewhere = await harness.open()
    async with elsewhere.listen() as hints:
        async with await harness.open() as brief:
            await brief.publish_to_channel("orders", "{}")
        assert told(await next_hint(hints, "workflow_channel_message")).channel == "orders"


async def test_a_burst_of_commits_is_announced_in_few_words(
    harness: Harness, storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[Hint]] = []
    send = storage.wakeups._send

    async def counted(hints: list[Hint]) -> None:
        sent.append(hints)
        await send(hints)

    monkeypatch.setattr(storage.wakeups, "_send", counted)
    for _ in range(1000):
        storage.runner.announce([message_hint("orders", "name", 1), message_hint("returns", "name", 2)])
        await asyncio.sleep(0)
    await storage.wakeups.close()

    assert 1 <= len(sent) < 100  # one every few milliseconds
    assert max(map(len, sent)) <= 2  # each channel once


async def test_many_results_wait_for_more_of_them_and_for_nothing_that_somebody_could_begin_with(
    storage: SQLStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: asyncio.Queue[list[Hint]] = asyncio.Queue()
    monkeypatch.setattr(storage.wakeups, "_send", sent.put)
    monkeypatch.setattr("romancy.storage.notifications.wakeups._GAP_OF_MANY_SEC", 60.0)
    async with asyncio.timeout(10):
        storage.runner.announce([finished_hint("first")])
        assert await sent.get() == [finished_hint("first")]
        storage.runner.announce([finished_hint(str(number)) for number in range(10)])
        await asyncio.sleep(0.1)
        assert sent.empty()

        storage.runner.announce([message_hint("orders", "name", 1)])
        results, message = await sent.get()

        assert told(results).instance_ids == tuple(map(str, range(10)))
        assert told(message).channel == "orders"
        storage.runner.announce([finished_hint(str(number)) for number in range(10)])
        await asyncio.sleep(0.1)
        assert sent.empty()
        await storage.wakeups.close()
        assert not sent.empty()


async def test_a_cancel_is_announced_to_whoever_runs_the_instance(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    elsewhere = await harness.open()
    async with elsewhere.listen() as hints:
        await storage.cancel_instance(instance_id, "no more", compensate=True)
        assert told(await next_hint(hints, "workflow_cancelled")).instance_id == instance_id


@pytest.mark.parametrize("payload", ["", "{", "[]", "null", '"text"', '{"channel": 7}', '{"channel": "\\ud800"}'])
def test_a_payload_that_cannot_be_read_means_a_look_at_everything(payload: str) -> None:
    assert told(Hint("workflow_channel_message", payload)) == Told(more=True)


def test_every_framework_has_its_own_names_for_the_same_things() -> None:
    assert told(Hint("workflow_channel_message", '{"ch": "orders"}')).channel == "orders"
    assert told(Hint("workflow_channel_message", '{"channel_name": "orders"}')).channel == "orders"
    assert told(Hint("workflow_resumable", '{"wf_id": "1", "wf_name": "order"}')) == Told("1", "order")


def test_more_subjects_than_a_listener_wants_to_be_told_of_become_one_hint() -> None:
    cancelled = [Hint("workflow_cancelled", json.dumps({"instance_id": str(number)})) for number in range(101)]

    assert digest(cancelled[:100]) == cancelled[:100]
    [few] = digest(cancelled)
    assert told(few).more


def test_all_that_have_finished_are_told_of_by_one_hint() -> None:
    def finished(*ids: str) -> list[Hint]:
        return [Hint("workflow_finished", json.dumps({"instance_id": instance_id})) for instance_id in ids]

    assert digest(finished("1")) == finished("1")
    [few] = digest(finished("1", "2", "3"))
    assert told(few).instance_ids == ("1", "2", "3")
    long = finished(*(f"{number:0255}" for number in range(40)))
    assert digest(long) == long  # too long for one
    [few] = digest(finished(*map(str, range(101))))
    assert told(few).more


@pytest.mark.databases("postgres")
async def test_a_listener_whose_connection_broke_reconnects_and_asks_for_one_look_at_everything(
    harness: Harness, storage: SQLStorage
) -> None:
    elsewhere = await harness.open()
    async with elsewhere.listen() as hints:
        await storage.conn().execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        )
        await next_hint(hints, CATCH_UP.topic)
        await storage.publish_to_channel("orders", "{}")
        await next_hint(hints, "workflow_channel_message")


@pytest.mark.databases("postgres")
async def test_a_listener_can_have_an_address_of_its_own(harness: Harness, storage: SQLStorage) -> None:
    """As behind a pooler: what is said through it arrives past it."""
    direct = f"{harness.url}?application_name=listening"
    elsewhere = await harness.open(listen_url=direct)
    async with elsewhere.listen() as hints:
        listening = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'listening'"
        assert await storage.conn().fetch_value(listening) == 1
        await storage.publish_to_channel("orders", "{}")
        await next_hint(hints, "workflow_channel_message")


@pytest.mark.databases("postgres")
async def test_who_cannot_listen_is_told_so_once_and_hears_at_least_itself(
    harness: Harness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("romancy.storage.notifications.postgres._FIRST_PAUSE_SEC", 0.001)
    deaf = await harness.open(listen_url="postgresql://127.0.0.1:1/nowhere")
    elsewhere = await harness.open()
    async with deaf.listen() as hints, elsewhere.listen() as others:
        await deaf.publish_to_channel("orders", "{}")
        await next_hint(hints, "workflow_channel_message")
        await next_hint(others, "workflow_channel_message")
        await asyncio.sleep(0.1)

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot listen for notifications yet" in caplog.text
