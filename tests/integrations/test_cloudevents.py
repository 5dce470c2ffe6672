"""CloudEvents over HTTP: stored before they are acknowledged, once each, from nobody who may not send them."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from romancy import App, Event, recur, wait_event, workflow
from romancy.integrations import cloudevents
from romancy.integrations.cloudevents import CloudEventsEndpoint, sign
from romancy.outbox.http import CloudEventsPublisher, binary_mode, structured_mode
from romancy.storage import OutboxEvent, OutcomeUnknownError, SQLStorage
from tests.engine.conftest import QUICK, MakeApp
from tests.engine.test_messages import waits
from tests.harness import Harness

STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
PAID = {"specversion": "1.0", "id": "1", "source": "/bank", "type": "paid", "data": {"amount": 2**60}}
HEADERS = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/bank", "ce-type": "paid"}

MakeClient = Callable[..., httpx.AsyncClient]

sqlite_only = pytest.mark.databases("sqlite")


def client_of(application: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=application), base_url="http://events")


@pytest.fixture
async def app(harness: Harness) -> AsyncIterator[App]:
    async with App(harness.url, workflows=[expects, expects_two, counts], settings=QUICK) as opened:
        yield opened


@pytest.fixture
async def client(app: App) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(CloudEventsEndpoint(app, open_to_everybody=True)) as opened:
        yield opened


async def send(client: httpx.AsyncClient, *events: Any, **headers: str) -> httpx.Response:
    """Send events, structured: one alone, more as a batch."""
    body, kind = (events[0], STRUCTURED) if len(events) == 1 else (list(events), BATCH)
    return await client.post("/", content=json.dumps(body), headers={"content-type": kind, **headers})


async def stored(storage: SQLStorage, channel: str = "paid") -> list[Any]:
    messages = await storage.get_pending_channel_messages(channel)
    return [message.data_binary if message.data is None else json.loads(message.data) for message in messages]


@workflow
async def expects() -> Event:
    return await wait_event("paid", timeout=20)


@workflow
async def expects_two() -> list[Any]:
    return [(await wait_event("paid", timeout=20)).data for _ in range(2)]


@workflow
async def counts(left: int, seen: list[int]) -> list[int]:
    seen.append((await wait_event("paid", timeout=20)).data)
    if left > 1:
        recur(left - 1, seen)
    return sorted(seen)


# What comes in reaches who waits for it.


async def test_an_event_reaches_the_workflow_that_waits_for_its_type(app: App, client: httpx.AsyncClient) -> None:
    handle = await app.start(expects)
    await waits(handle)

    answer = await send(client, PAID | {"time": "2030-01-31T12:00:00Z", "subject": "order-17", "level": 3})

    assert (answer.status_code, answer.json()) == (202, {"stored": 1, "repeated": 0})
    event = await handle.result(20)
    assert (event.type, event.source, event.id, event.data) == ("paid", "/bank", "1", {"amount": 2**60})
    assert event.attributes == {
        "ce_type": "paid",
        "ce_source": "/bank",
        "ce_id": "1",
        "ce_time": "2030-01-31T12:00:00Z",
        "ce_datacontenttype": None,
        "ce_subject": "order-17",
        "ce_extensions": {"level": 3},
    }


@sqlite_only
@pytest.mark.parametrize("mode", [structured_mode, binary_mode])
@pytest.mark.parametrize(
    "payload", [{"event_data": '{"amount": 1152921504606846977}'}, {"event_data_binary": b"\0\xff"}]
)
async def test_what_our_outbox_sends_can_be_received_in_both_modes(
    app: App, client: httpx.AsyncClient, mode: Any, payload: dict[str, Any]
) -> None:
    kind = "application/json" if "event_data" in payload else "image/png"
    headers, body = mode(OutboxEvent("1", "paid", "/bänk", content_type=kind, **payload))

    answer = await client.post("/", content=body, headers={name: value.encode() for name, value in headers.items()})

    assert answer.status_code == 202
    [message] = await app.storage.get_pending_channel_messages("paid")
    assert {"event_data": message.data} == payload or {"event_data_binary": message.data_binary} == payload
    assert json.loads(message.metadata or "")["ce_datacontenttype"] == kind


@sqlite_only
@pytest.mark.parametrize(
    ("kind", "body", "data"),
    [
        ("application/json", b' {"n": 1} ', {"n": 1}),
        ("application/vnd.shop+json; charset=UTF-8", b"[1]", [1]),
        ("text/plain", "grüezi".encode(), "grüezi"),
        ("application/octet-stream", b"{}", b"{}"),
        (None, b"{}", b"{}"),
        ("application/json", b"", None),
    ],
)
async def test_a_payload_is_read_as_its_content_type_says(
    app: App, client: httpx.AsyncClient, kind: str | None, body: bytes, data: Any
) -> None:
    headers = HEADERS if kind is None else {**HEADERS, "content-type": kind}
    assert (await client.post("/", content=body, headers=headers)).status_code == 202
    assert await stored(app.storage) == [data]


@sqlite_only
async def test_attributes_in_headers_may_be_quoted_and_percent_encoded(app: App, client: httpx.AsyncClient) -> None:
    headers = {**HEADERS, "ce-subject": '"Gr%C3%BC%C3%9Fe \\"an\\" alle"', "ce-extra": "50%25"}
    assert (await client.post("/", headers=headers)).status_code == 202
    [message] = await app.storage.get_pending_channel_messages("paid")
    about = json.loads(message.metadata or "")
    assert (about["ce_subject"], about["ce_extensions"]) == ('Grüße "an" alle', {"extra": "50%"})


async def test_a_batch_is_stored_in_its_order(app: App, client: httpx.AsyncClient) -> None:
    batch = [PAID | {"id": str(number), "data": number} for number in (1, 2, 3, 2)]

    answer = await send(client, *batch)

    assert (answer.status_code, answer.json()) == (202, {"stored": 3, "repeated": 1})
    assert await stored(app.storage) == [1, 2, 3]


async def test_base64_is_bytes(app: App, client: httpx.AsyncClient) -> None:
    event = {name: value for name, value in PAID.items() if name != "data"}
    await send(client, event | {"data_base64": base64.b64encode(bytes(range(256))).decode()})
    assert await stored(app.storage) == [bytes(range(256))]


# For one instance alone.


async def test_an_event_for_one_instance_reaches_no_other_even_if_it_comes_first(
    app: App, client: httpx.AsyncClient
) -> None:
    await send(client, PAID | {"data": "for b", "romancyinstanceid": "b"})
    handles = {name: await app.start(expects, id=name) for name in ("a", "b")}

    assert (await handles["b"].result(20)).data == "for b"
    await waits(handles["a"])
    await send(client, PAID | {"id": "2", "data": "for all"})
    assert (await handles["a"].result(20)).data == "for all"


async def test_events_for_one_and_for_all_are_received_once_each(app: App, client: httpx.AsyncClient) -> None:
    handle = await app.start(expects_two, id="b")
    await waits(handle)
    await send(client, PAID | {"data": "all"}, PAID | {"id": "2", "data": "b", "romancyinstanceid": "b"})
    assert sorted(await handle.result(20)) == ["all", "b"]


async def test_starting_over_loses_no_event(app: App, client: httpx.AsyncClient) -> None:
    handle = await app.start(counts, 6, [], id="b")
    await waits(handle)
    target = {"romancyinstanceid": "b"}
    await send(client, *(PAID | {"id": str(n), "data": n} | (target if n % 2 else {}) for n in range(6)))
    assert await handle.result(20) == [0, 1, 2, 3, 4, 5]


# Once each.


async def test_a_repetition_is_acknowledged_and_not_stored_again(app: App, client: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(send(client, PAID) for _ in range(8)))

    assert {answer.status_code for answer in answers} == {202}
    assert sum(answer.json()["stored"] for answer in answers) == 1
    assert len(await stored(app.storage)) == 1


@sqlite_only
async def test_another_source_or_id_is_another_event(app: App, client: httpx.AsyncClient) -> None:
    same = [("a b", "c"), ("a", "b c"), ("a", 'b","c'), ('a","b', "c"), ("x" * 300, "1"), ("x" * 301, "1")]
    for source, event_id in same * 2:
        await send(client, PAID | {"source": source, "id": event_id})
    assert len(await stored(app.storage)) == len(same)


@sqlite_only
async def test_old_events_are_forgotten_on_the_way(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloudevents, "_FORGET_EVERY", 2)
    endpoint = CloudEventsEndpoint(app, open_to_everybody=True, remember=timedelta(hours=1))
    async with client_of(endpoint) as client:
        for number in range(3):
            await send(client, PAID | {"id": str(number)})
        app.storage.runner.driver.clock_offset = 7200
        assert (await send(client, PAID | {"id": "new"})).status_code == 202
    seen = await app.storage.conn().fetch_all("SELECT event_key FROM romancy_seen_events")
    assert [row[0] for row in seen] == ['cloudevent:["/bank","new"]']


# Not accepted.

BAD = {
    "no JSON": (b"{", "JSON"),
    "no object": (b"[]", "JSON"),
    "not UTF-8": (json.dumps(PAID | {"data": "x"}).replace('"x"', '"\xff"').encode("latin-1"), "UTF-8"),
    "no type": (PAID | {"type": None}, "type"),
    "an empty id": (PAID | {"id": ""}, "id"),
    "a number as source": (PAID | {"source": 7}, "source"),
    "no version": (PAID | {"specversion": None}, "specversion"),
    "another version": (PAID | {"specversion": "0.3"}, "specversion"),
    "a strange name": (PAID | {"Extra": "x"}, "'Extra'"),
    "an object as attribute": (PAID | {"extra": {}}, "extra"),
    "a fraction": (PAID | {"extra": 1.5}, "extra"),
    "no time": (PAID | {"time": "yesterday"}, "time"),
    "two payloads": (PAID | {"data_base64": ""}, "exclude"),
    "no base64": ({**{k: v for k, v in PAID.items() if k != "data"}, "data_base64": "?"}, "base64"),
    "an endless type": (PAID | {"type": "x" * 256}, "255 characters"),
    "an endless target": (PAID | {"romancyinstanceid": "x" * 255}, "255 characters"),
    "NUL": (PAID | {"type": "a\0b"}, "NUL"),
    "too deep": (json.dumps(PAID).replace('{"amount"', "[" * 5000 + '{"amount"').encode(), "JSON"),
}


@sqlite_only
@pytest.mark.parametrize(("body", "reason"), BAD.values(), ids=BAD.keys())
async def test_a_bad_event_is_refused_with_a_reason(
    app: App, client: httpx.AsyncClient, body: Any, reason: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body)
    answer = await client.post("/", content=content, headers={"content-type": STRUCTURED})
    assert answer.status_code == 400
    assert reason in answer.json()["error"]
    assert await app.storage.conn().fetch_value("SELECT COUNT(*) FROM channel_messages") == 0


@sqlite_only
async def test_a_batch_with_a_bad_event_is_refused_as_a_whole(app: App, client: httpx.AsyncClient) -> None:
    answer = await send(client, PAID, PAID | {"id": "2", "type": "x" * 256})
    assert (answer.status_code, answer.json()["error"][:8]) == (400, "event 2:")
    assert await stored(app.storage) == []


@sqlite_only
@pytest.mark.parametrize(
    "headers",
    [
        [*HEADERS.items(), ("ce-id", "2")],
        [*HEADERS.items(), ("ce-subject", "%ff")],
        [*HEADERS.items(), ("ce-bad_name", "x")],
        [("ce-specversion", "1.0")],
    ],
)
async def test_bad_headers_are_refused(client: httpx.AsyncClient, headers: list[tuple[str, str]]) -> None:
    assert (await client.post("/", headers=headers)).status_code == 400


@sqlite_only
async def test_what_is_no_event_is_refused_by_its_kind(client: httpx.AsyncClient) -> None:
    text = json.dumps(PAID)
    for kind in ("application/json", "application/cloudevents+avro", f"{STRUCTURED}; charset=latin-1"):
        headers = {"content-type": kind, **({"ce-specversion": "1.0"} if "avro" in kind else {})}
        assert (await client.post("/", content=text, headers=headers)).status_code == 415
    answer = await client.get("/")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@sqlite_only
async def test_more_than_the_limit_is_refused_before_it_is_read(app: App) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            read.append(1)
            yield b"x" * 100

    read: list[int] = []
    async with client_of(CloudEventsEndpoint(app, open_to_everybody=True, max_bytes=1000)) as client:
        large = PAID | {"data": "x" * 1000}
        assert (await send(client, large)).status_code == 413
        assert (await send(client, *([PAID] * 20))).status_code == 413
        headers = {"content-type": STRUCTURED}
        assert (await client.post("/", content=endless(), headers=headers)).status_code == 413
        assert len(read) < 20
        assert (await send(client, PAID | {"data": "x" * 800})).status_code == 202


@sqlite_only
async def test_a_batch_has_a_limit_too(app: App, client: httpx.AsyncClient) -> None:
    answer = await send(client, *([PAID] * 1001))
    assert (answer.status_code, await stored(app.storage)) == (413, [])


@sqlite_only
async def test_a_sender_that_goes_away_is_not_answered(app: App) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def answer(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", STRUCTURED.encode())]}
    await CloudEventsEndpoint(app, open_to_everybody=True)(scope, receive, answer)


# Who may send.


@sqlite_only
@pytest.mark.parametrize(
    "options", [{}, {"token": ""}, {"hmac_secret": ""}, {"token": "x", "open_to_everybody": True}, {"hmac_secret": b""}]
)
async def test_an_endpoint_says_who_may_send(app: App, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"open_to_everybody|empty"):
        CloudEventsEndpoint(app, **options)


@sqlite_only
async def test_a_token_is_asked_for(app: App) -> None:
    async with client_of(CloudEventsEndpoint(app, token="sésame")) as client:
        for wrong in ({}, {"authorization": "Bearer sesame"}, {"authorization": "Basic sésame"}, {"authorization": ""}):
            encoded: Any = {name: value.encode() for name, value in wrong.items()}
            answer = await send(client, PAID, **encoded)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert await stored(app.storage) == []
        right: Any = {"authorization": "bearer sésame".encode()}
        assert (await send(client, PAID, **right)).status_code == 202


@sqlite_only
async def test_a_signature_covers_the_whole_event(app: App) -> None:
    body = json.dumps(PAID).encode()
    structured = {"content-type": STRUCTURED}
    binary = {**HEADERS, "content-type": "application/json"}
    async with client_of(CloudEventsEndpoint(app, hmac_secret="s3cret")) as client:

        async def status(headers: dict[str, str], content: bytes, signature: str) -> int:
            signed = {**headers, "X-Signature-256": signature}
            return (await client.post("/", content=content, headers=signed)).status_code

        for headers, content in ((structured, body), (binary, b"1")):
            good = sign("s3cret", headers, content)
            assert await status(headers, content, "") == 401
            assert await status(headers, content, sign("wrong", headers, content)) == 401
            assert await status(headers, content + b" ", good) == 401
            assert await status({**headers, "ce-id": "2"}, content, good) == (202 if headers is structured else 401)
            assert await status(headers, content, good) == 202
        assert await status(binary, body, sign("s3cret", structured, body)) == 401
    assert len(await stored(app.storage)) == 1


@sqlite_only
async def test_with_a_token_and_a_secret_both_are_asked_for(app: App) -> None:
    token = {"authorization": "Bearer t"}
    signature = {"x-signature-256": sign(b"s", {"content-type": STRUCTURED}, json.dumps(PAID).encode())}
    async with client_of(CloudEventsEndpoint(app, token="t", hmac_secret=b"s")) as client:
        assert (await send(client, PAID, **token)).status_code == 401
        assert (await send(client, PAID, **signature)).status_code == 401
        assert (await send(client, PAID, **token, **signature)).status_code == 202


# Where it stands.


@pytest.mark.databases("postgres")
async def test_a_database_that_is_away_is_told_and_nothing_is_acknowledged(harness: Harness) -> None:
    away = App("postgresql://nobody@127.0.0.1:1/nothing", worker=False)
    async with client_of(CloudEventsEndpoint(away, open_to_everybody=True)) as client:
        answer = await send(client, PAID)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    await away.storage.close()


@sqlite_only
async def test_an_event_whose_storing_is_uncertain_is_asked_for_again_and_stored_once(
    app: App, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_once = app.storage.publish_once

    async def breaks(*event: Any) -> int | None:
        await publish_once(*event)
        raise OutcomeUnknownError("the connection broke while the answer was on its way")

    monkeypatch.setattr(app.storage, "publish_once", breaks)
    assert (await send(client, PAID)).status_code == 503
    monkeypatch.undo()

    answer = await send(client, PAID)
    assert (answer.status_code, answer.json()) == (202, {"stored": 0, "repeated": 1})
    assert len(await stored(app.storage)) == 1


@sqlite_only
async def test_it_mounts_into_starlette(make_app: MakeApp) -> None:
    app = await make_app(worker=False)
    web = Starlette(routes=[Mount("/events", app=CloudEventsEndpoint(app, token="t"))])
    async with client_of(web) as client:
        headers = {"content-type": STRUCTURED, "authorization": "Bearer t"}
        assert (await client.post("/events/", content=json.dumps(PAID), headers=headers)).status_code == 202
        assert (await client.post("/events/", content=json.dumps(PAID))).status_code == 401
    assert len(await stored(app.storage)) == 1


@sqlite_only
async def test_it_stands_alone_in_a_server_that_asks_for_a_lifespan(app: App) -> None:
    said: list[str] = []
    told = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> dict[str, Any]:
        return next(told)

    async def answer(message: Any) -> None:
        said.append(message["type"])

    await CloudEventsEndpoint(app, open_to_everybody=True)({"type": "lifespan"}, receive, answer)
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_a_publisher_that_cannot_send_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("romancy.outbox.http.find_spec", lambda name: None)

    with pytest.raises(ModuleNotFoundError, match=r"romancy\[http\]"):
        CloudEventsPublisher("https://broker.example/events")
