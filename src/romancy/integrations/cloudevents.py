"""Receive CloudEvents over HTTP: an ASGI application that answers 202 only after the event is stored.

    endpoint = CloudEventsEndpoint(app, token=os.environ["EVENTS_TOKEN"])
    web = Starlette(routes=[Mount("/events", app=endpoint)], lifespan=…)

An event is published on the channel named by its type, where `wait_event` hears it; with the extension attribute
`romancyinstanceid`, only for that instance. An event with the same source and id as an earlier one is acknowledged and
not published again. No framework is needed: an endpoint mounts into Starlette, FastAPI or any other ASGI application,
and is one itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from datetime import timedelta
from typing import Any
from urllib.parse import unquote

import msgspec

from ..app import App
from ..serialization import encode
from ..storage import InvalidJSONError, InvalidKeyError, PayloadTooLargeError, StorageError
from ..storage.sql.checks import LONGEST_KEY, check_key

log = logging.getLogger("romancy")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BYTES = 1024 * 1024
LARGEST_BATCH = 1000
TARGET = "romancyinstanceid"
"""The extension attribute that names the one instance an event is for."""

_FORGET_EVERY = 500
"""After how many events to forget some old ones: fewer than are forgotten at a time, so that they cannot pile up."""

_REQUIRED = {"id", "source", "type"}
_TEXTS = {"time", "subject", "datacontenttype", TARGET}
_CORE = _REQUIRED | {"specversion", "time", "datacontenttype", "subject"}
_NAME = re.compile(r"[a-z0-9]+")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_ONCE = ("authorization", "content-type", "content-length")


class Refused(Exception):
    """A request that is not accepted: with which status, and why."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.headers = headers or {}


class Disconnected(Exception):
    """The sender went away; there is nobody to answer."""


class ReceivedEvent(msgspec.Struct, frozen=True):
    """A checked event."""

    attributes: dict[str, Any]
    data: str | bytes
    """JSON text as it came, or bytes."""

    @property
    def key(self) -> str:
        """The same for repetitions of the event, and for nothing else."""
        key = "cloudevent:" + encode([self.attributes["source"], self.attributes["id"]], "an event's key")
        return key if len(key) <= LONGEST_KEY else f"cloudevent:sha256:{hashlib.sha256(key.encode()).hexdigest()}"

    @property
    def channel(self) -> str:
        return _channel(self.attributes)

    @property
    def metadata(self) -> str:
        about = {
            f"ce_{name}": self.attributes.get(name)
            for name in ("type", "source", "id", "time", "datacontenttype", "subject")
        }
        extensions = {name: value for name, value in self.attributes.items() if name not in _CORE}
        return encode(about | ({"ce_extensions": extensions} if extensions else {}), "an event's attributes")


class CloudEventsEndpoint:
    """An ASGI application that stores CloudEvents (structured, binary or in batches) for workflows to receive.

    Whoever can send events can wake and feed workflows, so senders must prove themselves: with ``token`` by
    ``Authorization: Bearer …``, with ``hmac_secret`` by a signature (`sign`), with both by both. To do without, say
    ``open_to_everybody=True``, and keep strangers out by other means.
    """

    def __init__(
        self,
        app: App,
        *,
        token: str | None = None,
        hmac_secret: str | bytes | None = None,
        open_to_everybody: bool = False,
        signature_header: str = "x-signature-256",
        max_bytes: int = MAX_BYTES,
        remember: timedelta = timedelta(days=7),
    ) -> None:
        if token == "" or hmac_secret in ("", b""):
            raise ValueError("an empty token or secret protects nothing")
        if open_to_everybody == (token is not None or hmac_secret is not None):
            raise ValueError("give token= or hmac_secret=, or else say open_to_everybody=True")
        if remember <= timedelta(0):
            raise ValueError(f"events must be remembered for some time, not for {remember}")
        self._app = app
        self._token = None if token is None else token.encode()
        self._secret = hmac_secret.encode() if isinstance(hmac_secret, str) else hmac_secret
        self._signature_header = signature_header.lower()
        self._max_bytes = min(max_bytes, app.storage.max_payload_bytes)
        self._remember = remember
        self._stored = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._answer(scope, receive, send)
            case "lifespan":
                await _live(receive, send)
            case "websocket":
                await send({"type": "websocket.close", "code": 1000})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            stored, repeated = await self._accept(scope, receive)
            await _respond(send, 202, {"stored": stored, "repeated": repeated})
        except Refused as refused:
            await _respond(send, refused.status, {"error": refused.reason}, refused.headers)
        except Disconnected:
            return

    async def _accept(self, scope: Scope, receive: Receive) -> tuple[int, int]:
        if scope["method"] != "POST":
            raise Refused(405, "send events with POST", {"allow": "POST"})
        headers = _headers(scope["headers"], {*_ONCE, self._signature_header})
        self._check_token(headers)
        body = await _body(receive, headers, self._max_bytes)
        self._check_signature(headers, body)
        events = parse(headers, body)  # all of them, before any is stored
        stored = 0
        for event in events:
            stored += await self._store(event)
        return stored, len(events) - stored

    def _check_token(self, headers: Mapping[str, str]) -> None:
        if self._token is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._token):
            raise Refused(401, "the bearer token is missing or wrong", {"www-authenticate": "Bearer"})

    def _check_signature(self, headers: Mapping[str, str], body: bytes) -> None:
        if self._secret is None:
            return
        given = headers.get(self._signature_header, "")
        if not hmac.compare_digest(given.encode("latin-1"), sign(self._secret, headers, body).encode()):
            raise Refused(401, f"the signature in {self._signature_header} is missing or wrong")

    async def _store(self, event: ReceivedEvent) -> bool:
        """Store the event; False if it was there already."""
        storage = self._app.storage
        try:
            published = await storage.publish_once(event.key, event.channel, event.data, event.metadata)
        except (InvalidKeyError, InvalidJSONError) as error:
            raise Refused(400, str(error)) from error
        except PayloadTooLargeError as error:
            raise Refused(413, str(error)) from error
        except StorageError as error:
            log.warning("an event could not be stored: %s", error)
            raise Refused(503, "the event cannot be stored now: send it again", {"retry-after": "1"}) from error
        if published is None:
            return False
        self._stored += 1
        if self._stored % _FORGET_EVERY == 0:
            await self._forget()
        return True

    async def _forget(self) -> None:
        try:
            await self._app.storage.cleanup_seen_events(self._remember)
        except StorageError as error:
            log.warning("old events are not forgotten yet: %s", error)


def sign(secret: str | bytes, headers: Mapping[str, str], body: bytes) -> str:
    """The signature of a request, as the endpoint expects it: ``sha256=`` and the HMAC-SHA256 in hex.

    A structured or batched event is all in its body, and the body is what is signed. A binary one has its attributes
    in headers: there, a line ``name:value`` for the content type and for each ``ce-…``, in alphabetical order and with
    lower-case names, and an empty line go before the body.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    signed = b""
    if not _media_type(lowered).startswith("application/cloudevents"):
        signs = sorted(name for name in lowered if name.startswith("ce-") or name == "content-type")
        signed = "".join(f"{name}:{lowered[name]}\n" for name in signs).encode("latin-1") + b"\n"
    key = secret.encode() if isinstance(secret, str) else secret
    return "sha256=" + hmac.new(key, signed + body, hashlib.sha256).hexdigest()


# Reading a request.


def parse(headers: Mapping[str, str], body: bytes) -> list[ReceivedEvent]:
    """The events of a request; Refused says what is wrong with one."""
    match _media_type(headers):
        case "application/cloudevents+json":
            _check_charset(headers)
            return [_structured(_json(body, dict[str, msgspec.Raw]))]
        case "application/cloudevents-batch+json":
            _check_charset(headers)
            batch = _json(body, list[dict[str, msgspec.Raw]])
            if len(batch) > LARGEST_BATCH:
                raise Refused(413, f"a batch has at most {LARGEST_BATCH} events, not {len(batch)}")
            return [_structured(members, f"event {number}: ") for number, members in enumerate(batch, 1)]
        case media_type if "ce-specversion" in headers and not media_type.startswith("application/cloudevents"):
            return [_binary(headers, body)]
    raise Refused(
        415, "this is no CloudEvent: neither application/cloudevents+json, nor a batch of these, nor headers ce-…"
    )


def _structured(members: dict[str, msgspec.Raw], where: str = "") -> ReceivedEvent:
    attributes = {
        name: value
        for name, raw in members.items()
        if name not in ("data", "data_base64") and (value := _json(bytes(raw), Any)) is not None
    }
    _check(attributes, where)
    if "data_base64" not in members:
        return ReceivedEvent(attributes, _text(bytes(members.get("data", b"null"))))
    if "data" in members:
        raise Refused(400, f"{where}data and data_base64 exclude each other")
    try:
        return ReceivedEvent(attributes, base64.b64decode(_json(bytes(members["data_base64"]), str), validate=True))
    except binascii.Error as error:
        raise Refused(400, f"{where}data_base64 is not base64: {error}") from error


def _binary(headers: Mapping[str, str], body: bytes) -> ReceivedEvent:
    attributes = {name[3:]: _header_value(name, value) for name, value in headers.items() if name.startswith("ce-")}
    attributes.pop("datacontenttype", None)  # that is the content type
    if "content-type" in headers:
        attributes["datacontenttype"] = headers["content-type"]
    _check(attributes)
    media_type = _media_type(headers)
    if not body:
        return ReceivedEvent(attributes, "null")
    if media_type == "application/json" or media_type.endswith("+json"):
        _check_charset(headers)
        _json(body, msgspec.Raw)
        return ReceivedEvent(attributes, _text(body))
    if media_type.startswith("text/"):
        _check_charset(headers)
        return ReceivedEvent(attributes, encode(_text(body), "a text"))
    return ReceivedEvent(attributes, body)


def _header_value(name: str, value: str) -> str:
    """An attribute as HTTP carries it: maybe in quotes, and everything unusual percent-encoded."""
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError as error:
        raise Refused(400, f"{name} is not percent-encoded UTF-8") from error


def _check(attributes: dict[str, Any], where: str = "") -> None:
    """What the specification says of attributes, and what it takes to store them."""
    for name, value in attributes.items():
        if not _NAME.fullmatch(name):
            raise Refused(400, f"{where}{name!r} is no attribute's name: lower-case letters and digits only")
        if not isinstance(value, str | bool | int):
            raise Refused(400, f"{where}{name} must be a text, a number without fraction, or true or false")
    if attributes.get("specversion") != "1.0":
        raise Refused(400, f"{where}specversion must be 1.0")
    for name in sorted(_REQUIRED | (attributes.keys() & _TEXTS)):
        if not attributes.get(name) or not isinstance(attributes[name], str):
            raise Refused(400, f"{where}{name} must be a text that is not empty")
    if "time" in attributes and not _TIME.fullmatch(attributes["time"]):
        raise Refused(400, f"{where}time must look like 2030-01-31T12:00:00Z")
    try:
        check_key("the type (with the instance's id, if it has one)", _channel(attributes))
    except InvalidKeyError as error:
        raise Refused(400, f"{where}{error}") from error


def _channel(attributes: Mapping[str, Any]) -> str:
    target = attributes.get(TARGET)
    return str(attributes["type"]) if target is None else f"{attributes['type']}:{target}"


def _json(text: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"this is not the JSON it should be: {error}") from error


def _text(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise Refused(400, "this is not UTF-8") from error


def _media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _check_charset(headers: Mapping[str, str]) -> None:
    charset = re.search(r";\s*charset=\"?([^\s;\"]+)", headers.get("content-type", ""), re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise Refused(415, f"texts must be in UTF-8, not in {charset[1]}")


# HTTP, as ASGI tells it.


def _headers(pairs: Iterable[tuple[bytes, bytes]], once: set[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in pairs:
        name = raw_name.decode("latin-1").lower()
        if name in headers and (name in once or name.startswith("ce-")):
            raise Refused(400, f"the header {name} is there twice")
        headers[name] = raw_value.decode("latin-1").strip()
    return headers


async def _body(receive: Receive, headers: Mapping[str, str], max_bytes: int) -> bytes:
    announced = headers.get("content-length", "")[:20]
    size = int(announced) if announced.isdecimal() else 0
    body = bytearray()
    more = True
    while more and size <= max_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        body += message.get("body", b"")
        size = len(body)
        more = message.get("more_body", False)
    if size > max_bytes:
        raise Refused(413, f"at most {max_bytes} bytes are accepted")
    return bytes(body)


async def _respond(send: Send, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
    body = msgspec.json.encode(content)
    named = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Receive, send: Send) -> None:
    """Say yes to a server that asks whether we have started or stopped."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
