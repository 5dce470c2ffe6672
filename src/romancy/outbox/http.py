"""CloudEvents over HTTP, structured or binary (the extra ``romancy[http]``)."""

from __future__ import annotations

from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ..storage import OutboxEvent
from .relayer import InvalidEventError

if TYPE_CHECKING:
    import httpx


class CloudEventsPublisher:
    """Posts events to one address; a 4xx answer (but 408, 425 and 429) says that the event is invalid."""

    def __init__(
        self, url: str, *, binary: bool = False, headers: dict[str, str] | None = None, timeout_sec: float = 10.0
    ) -> None:
        if find_spec("httpx") is None:  # now, and not when the first event is sent
            raise ModuleNotFoundError("httpx is not installed: run pip install 'romancy[http]'", name="httpx")
        self._url = url
        self._binary = binary
        self._headers = headers or {}
        self._timeout_sec = timeout_sec
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def __call__(self, event: OutboxEvent) -> None:
        headers, body = binary_mode(event) if self._binary else structured_mode(event)
        response = await self._http().post(self._url, headers={**self._headers, **headers}, content=body)
        if 400 <= response.status_code < 500 and response.status_code not in (408, 425, 429):
            raise InvalidEventError(f"the receiver answered {response.status_code}")
        response.raise_for_status()

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx

            self._client = httpx.AsyncClient(timeout=self._timeout_sec)
        return self._client


def structured_mode(event: OutboxEvent) -> tuple[dict[str, str], bytes]:
    """The whole event as one JSON document."""
    envelope: dict[str, Any] = {**_attributes(event), "datacontenttype": event.content_type}
    if event.event_data_binary is not None:
        envelope["data_base64"] = event.event_data_binary
    else:
        envelope["data"] = msgspec.Raw((event.event_data or "null").encode())
    return {"content-type": "application/cloudevents+json"}, msgspec.json.encode(envelope)


def binary_mode(event: OutboxEvent) -> tuple[dict[str, str], bytes]:
    """The payload as it is, the rest in headers."""
    headers = {f"ce-{name}": value for name, value in _attributes(event).items()}
    body = event.event_data_binary if event.event_data_binary is not None else (event.event_data or "null").encode()
    return {**headers, "content-type": event.content_type}, body


def _attributes(event: OutboxEvent) -> dict[str, str]:
    attributes = {
        "specversion": "1.0",
        "id": event.event_id,
        "type": event.event_type,
        "source": event.event_source,
    }
    if event.created_at is not None:
        attributes["time"] = event.created_at.isoformat()
    return attributes
