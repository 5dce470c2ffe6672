"""A proxy in front of a database server that loses a request, or the reply to it, together with the connection."""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """Passes everything on, until it is told to lose something."""

    def __init__(self, url: str) -> None:
        self._behind = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._countdown = 0
        self._lose_reply = False
        self.has_lost = False
        self.url = ""
        """The database's URL by way of this proxy."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        credentials, at, _ = self._behind.netloc.rpartition("@")
        self.url = urlunsplit(self._behind._replace(netloc=f"{credentials}{at}127.0.0.1:{port}"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=1)  # those whose client has just closed end by themselves
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def lose(self, number: int, *, reply: bool) -> None:
        """Lose the nth request from now, or only the reply to it."""
        self._countdown = number
        self._lose_reply = reply
        self.has_lost = False

    def relent(self) -> None:
        """Lose nothing more."""
        self._countdown = 0

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        server, to_server = await asyncio.open_connection(self._behind.hostname, self._behind.port)
        replies = asyncio.create_task(_pass_on(server, to_client))
        try:
            while request := await client.read(1 << 20):
                self._countdown -= 1
                if self._countdown == 0:
                    self.has_lost = True
                    await _stop(replies)
                    if self._lose_reply:
                        to_server.write(request)
                        await server.read(1)  # it has been carried out
                    break
                to_server.write(request)
        finally:
            await _stop(replies)
            for writer in (to_client, to_server):
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
            self._connections.discard(task)


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 20):
            target.write(data)
        target.close()


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
