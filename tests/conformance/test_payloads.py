"""Payloads come back byte for byte, whatever is in them, up to their limit and not one byte beyond."""

from collections.abc import Awaitable, Callable

import pytest

from romancy.storage import (
    ChannelMessage,
    ChannelMode,
    CompensationEntry,
    InvalidJSONError,
    OutboxEvent,
    PayloadTooLargeError,
    SQLStorage,
    WorkflowInstance,
    WorkflowStatus,
)
from tests.harness import Harness, contents, history_of, step

Put = Callable[[SQLStorage, str], Awaitable[object]]

TEXTS = {
    "numbers": "[9007199254740993, 9223372036854775808, 18446744073709551616, -0, 1.0, 1e400, 0.10]",
    "order and space": '{ "z" : 1,\n\t"a":[ ] }\r\n',
    "duplicate keys": '{"a": 1, "a": 2, "a": 1}',
    "escapes": r'"\u0000 \/ \" \\ \u00e9 \ud83d\ude00 \n"',
    "quotes": """{"it's": "%s %(x)s :x $1 ? {now} '' `"}""",
    "unicode": '"é 😀 \u2028 \ufeff \u007f \U0010ffff"',
    "deep": "[" * 500 + "]" * 500,
    "scalar": "null",
    "long": '"' + "x" * 100_000 + '"',
}
BYTES = [b"", b"\0", bytes(range(256)), b'it\'s \\ "quoted" %s', b"\xff" * 100_000]


async def publish(storage: SQLStorage, data: str | bytes, metadata: str | None = None) -> ChannelMessage:
    published = await storage.publish_to_channel("news", data, metadata)
    assert isinstance(published, int)
    (message,) = await storage.get_pending_channel_messages("news", published - 1)
    return message


# What goes in comes out.


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
async def test_json_text_comes_back_byte_for_byte(harness: Harness, storage: SQLStorage, text: str) -> None:
    lock = await harness.locked(storage, instance_id="one", input_data=text, output_data=text)
    found = await storage.get_instance("one")
    assert found is not None
    assert (found.input_data, found.output_data) == (text, text)
    (listed,) = (await storage.list_instances(payloads=True)).instances
    assert (listed.input_data, listed.output_data) == (text, text)

    await storage.append_history(step("one", "a:1", text))
    await storage.append_history(step("one", "b:1", text), lock=lock)
    assert [event.event_data for event in await history_of(storage, "one")] == [text, text]
    await storage.archive_history("one")
    assert [event.event_data for event in await storage.get_archived_history("one")] == [text, text]

    await storage.add_compensation(CompensationEntry("one", "a:1", "undo", args=text))
    assert [entry.args for entry in await storage.get_compensations("one")] == [text]

    await storage.add_outbox_event(OutboxEvent("event", "made", "test", event_data=text))
    assert [event.event_data for event in await storage.get_pending_outbox_events()] == [text]

    message = await publish(storage, text, text)
    assert (message.data, message.metadata, message.data_binary) == (text, text, None)

    await storage.recur_instance("one", text, lock=lock)
    await storage.update_instance_output("one", text, lock=lock)
    found = await storage.get_instance("one")
    assert found is not None
    assert (found.input_data, found.output_data) == (text, text)


@pytest.mark.parametrize("payload", BYTES, ids=["none", "NUL", "all", "quotes", "long"])
async def test_bytes_come_back_as_they_are(harness: Harness, storage: SQLStorage, payload: bytes) -> None:
    lock = await harness.locked(storage, instance_id="one")
    await storage.append_history(step("one", "a:1", None, event_data_binary=payload))
    again = [await storage.append_history(step("one", "b:1", None, event_data_binary=payload), lock=lock) for _ in "12"]
    assert [appended.already_recorded for appended in again] == [False, True]
    assert [event.event_data_binary for event in await history_of(storage, "one")] == [payload, payload]
    await storage.archive_history("one")
    assert [event.event_data_binary for event in await storage.get_archived_history("one")] == [payload, payload]

    await storage.add_outbox_event(OutboxEvent("event", "made", "test", event_data_binary=payload))
    (event,) = await storage.get_pending_outbox_events()
    assert (event.event_data_binary, event.event_data, event.data_type) == (payload, None, "binary")

    message = await publish(storage, payload, '{"kind": "photo"}')
    assert (message.data_binary, message.data, message.data_type) == (payload, None, "binary")
    assert message.metadata == '{"kind": "photo"}'


async def test_a_message_larger_than_any_integer_survives_its_delivery(harness: Harness, storage: SQLStorage) -> None:
    text = '{"n": 18446744073709551617, "b": 1, "a": 1e400, "a": "\\ud83d\\ude00"}'
    lock = await harness.locked(storage)
    await storage.subscribe_to_channel(lock.instance_id, "news", ChannelMode.BROADCAST, lock=lock)
    await storage.publish_to_channel("news", text, text)
    await storage.register_channel_receive_and_release_lock(
        lock.instance_id, "news", "worker-1", "receive:1", lock=lock
    )
    (event,) = await history_of(storage, lock.instance_id)
    assert event.event_data is not None
    assert event.event_data.count(text) == 2


# What is no JSON.

NO_JSON = [
    "",
    " ",
    "{",
    "nul",
    "{'a': 1}",
    "[1,]",
    '{"a": 1}}',
    "NaN",
    "Infinity",
    "01",
    "1.",
    "-",
    '"\t"',
    '"\ud800"',
    "\0",
]

PUTS: dict[str, Put] = {
    "input_data": lambda s, text: s.create_instance(WorkflowInstance("new", "order", input_data=text)),
    "output_data": lambda s, text: s.create_instance(WorkflowInstance("new", "order", output_data=text)),
    "update_instance_status": lambda s, text: s.update_instance_status(
        "given", WorkflowStatus.FAILED, output_data=text
    ),
    "update_instance_output": lambda s, text: s.update_instance_output("given", text),
    "append_history": lambda s, text: s.append_history(step("given", data=text)),
    "append_history_many": lambda s, text: s.append_history_many([step("given", "a:1"), step("given", "b:1", text)]),
    "add_outbox_event": lambda s, text: s.add_outbox_event(OutboxEvent("new", "made", "test", event_data=text)),
    "add_compensation": lambda s, text: s.add_compensation(CompensationEntry("given", "a:1", "undo", args=text)),
    "publish data": lambda s, text: s.publish_to_channel("news", text),
    "publish metadata": lambda s, text: s.publish_to_channel("news", b"", text),
    "publish_many": lambda s, text: s.publish_many(
        [ChannelMessage(channel="news", data="1"), ChannelMessage(channel="news", data=text)]
    ),
    "record": lambda s, text: s.join_group("given", "riders", record=step("given", data=text)),
}
"""Every way in for JSON text."""


async def refusals(storage: SQLStorage, text: str) -> dict[str, str]:
    """What each way in says about a text, if it is not the expected error."""
    said: dict[str, str] = {}
    for name, put in PUTS.items():
        try:
            said[name] = f"returned {await put(storage, text)!r}"
        except Exception as error:
            said[name] = type(error).__name__
    return said


async def test_what_is_no_json_is_refused_and_leaves_no_trace(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, instance_id="given")
    before = await contents(storage)
    for text in NO_JSON:
        assert set((await refusals(storage, text)).values()) == {InvalidJSONError.__name__}, text
    assert await contents(storage) == before


# Limits.


def document(size: int) -> str:
    """A JSON text of so many bytes, but fewer characters."""
    text = '"' + "é" * ((size - 2) // 2) + "x" * (size % 2) + '"'
    assert len(text.encode()) == size
    return text


async def test_the_limit_counts_bytes_and_is_the_last_that_fits(harness: Harness) -> None:
    storage = await harness.open(max_payload_bytes=1000)
    await harness.instance(storage, instance_id="given")
    before = await contents(storage)

    assert set((await refusals(storage, document(1001))).values()) == {PayloadTooLargeError.__name__}
    with pytest.raises(PayloadTooLargeError) as refused:
        await storage.append_history(step("given", "c:1", None, event_data_binary=b"x" * 1001))
    assert (refused.value.size, refused.value.limit) == (1001, 1000)
    with pytest.raises(PayloadTooLargeError):
        await storage.publish_to_channel("news", b"x" * 1001)
    assert await contents(storage) == before

    await storage.append_history(step("given", "c:1", None, event_data_binary=b"x" * 1000))
    await storage.append_history(step("given", "d:1", document(1000)))
    await storage.publish_to_channel("news", document(1000), document(1000))


FOUR_MIB = 4 * 1024 * 1024


@pytest.mark.parametrize("payload", [b"x", b"'", b"\0"], ids=["plain", "quotes", "NULs"])
async def test_four_mebibytes_are_accepted_by_every_database(
    harness: Harness, storage: SQLStorage, payload: bytes
) -> None:
    """Also when every single byte needs an escape on its way."""
    instance_id = await harness.instance(storage)
    await storage.append_history(step(instance_id, "a:1", None, event_data_binary=payload * FOUR_MIB))
    with pytest.raises(PayloadTooLargeError):
        await storage.append_history(step(instance_id, "b:1", None, event_data_binary=payload * (FOUR_MIB + 1)))
    (event,) = await history_of(storage, instance_id)
    assert event.event_data_binary == payload * FOUR_MIB


async def test_two_payloads_that_do_not_fit_into_one_statement_are_refused_before_anything_is_sent(
    harness: Harness, storage: SQLStorage
) -> None:
    text = '"' + "\\\\" * (FOUR_MIB // 2 - 1) + '"'  # all backslashes, which MySQL's client doubles
    await harness.instance(storage)
    server = storage.runner.payload_limit
    if server is None or 2 * len(text) <= server:
        await harness.instance(storage, instance_id="big", input_data=text, output_data=text)
        found = await storage.get_instance("big")
        assert found is not None
        assert found.input_data == found.output_data == text
        assert (await publish(storage, text, text)).metadata == text
    else:
        with pytest.raises(PayloadTooLargeError):
            await harness.instance(storage, input_data=text, output_data=text)
        with pytest.raises(PayloadTooLargeError):
            await storage.publish_to_channel("news", text, text)


@pytest.mark.databases("mariadb", "mysql")
async def test_the_limit_is_never_above_what_the_server_accepts(harness: Harness) -> None:
    storage = await harness.open(max_payload_bytes=2**40)
    instance_id = await harness.instance(storage)
    packet = int(await storage.conn().fetch_value("SELECT @@max_allowed_packet"))
    with pytest.raises(PayloadTooLargeError):
        await storage.append_history(step(instance_id, "a:1", None, event_data_binary=b"x" * (packet // 2)))
    limit = storage.runner.payload_limit
    assert limit is not None
    assert packet // 3 < limit < packet // 2
    await storage.append_history(step(instance_id, "b:1", None, event_data_binary=b"'" * min(limit, 9_000_000)))
