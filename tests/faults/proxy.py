"""A TCP proxy on loopback that cuts, delays and freezes connections between a storage and its server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """Passes everything on, until told otherwise.

    `cut_when_sent` and `cut_when_answered` are looked for in what clients send. The first cuts before the bytes are
    passed on: the server never sees them. The second passes them on, waits for the server's answer and cuts instead of
    giving it to the client: done, but not known.
    """

    def __init__(self, server_url: str) -> None:
        self._server = urlsplit(server_url)
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self.cut_when_sent: bytes | None = None
        self.cut_when_answered: bytes | None = None
        self.frozen = False
        self.closed_after_cut = False
        """Whether the first cut is the last that is heard of the server."""
        self.delay_sec = 0.0
        self.cuts = 0
        self.connections = 0
        self.url = ""

    async def _serve(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.closed_after_cut and self.cuts:
            client.transport.abort()
            return
        server_reader, server = await asyncio.open_connection(self._server.hostname, self._server.port)
        pair = (client, server)
        self._pairs.append(pair)
        waiting_for_answer = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._upwards(client_reader, pair, waiting_for_answer))
                both.create_task(self._downwards(server_reader, pair, waiting_for_answer))
        except* OSError:
            pass
        finally:
            self._cut(pair)

    async def _upwards(
        self,
        reader: asyncio.StreamReader,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
        waiting_for_answer: asyncio.Event,
    ) -> None:
        while data := await reader.read(65536):
            await self._hold()
            if self.cut_when_sent is not None and self.cut_when_sent in data:
                self.cut_when_sent = None
                self.cuts += 1
                break
            if self.cut_when_answered is not None and self.cut_when_answered in data:
                self.cut_when_answered = None
                waiting_for_answer.set()
            pair[1].write(data)
            await pair[1].drain()
        self._cut(pair)

    async def _downwards(
        self,
        reader: asyncio.StreamReader,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
        waiting_for_answer: asyncio.Event,
    ) -> None:
        while data := await reader.read(65536):
            await self._hold()
            if waiting_for_answer.is_set():
                self.cuts += 1
                if self.closed_after_cut:
                    self.cut_all()
                break
            pair[0].write(data)
            await pair[0].drain()
        self._cut(pair)

    async def _hold(self) -> None:
        if self.delay_sec:
            await asyncio.sleep(self.delay_sec)
        while self.frozen:
            await asyncio.sleep(0.01)

    @staticmethod
    def _cut(pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        for writer in pair:
            with suppress(OSError, RuntimeError):
                writer.transport.abort()

    def cut_all(self) -> None:
        """Cut every connection there is."""
        for pair in self._pairs:
            self._cut(pair)
        self._pairs.clear()


@asynccontextmanager
async def proxied(server_url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the server; its `url` is the server's with another port."""
    proxy = Proxy(server_url)
    listener = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    parts = urlsplit(server_url)
    credentials = parts.netloc.rpartition("@")[0]
    proxy.url = urlunsplit(parts._replace(netloc=f"{credentials}@{host}:{port}"))
    try:
        yield proxy
    finally:
        proxy.frozen = False
        listener.close()
        proxy.cut_all()
        await listener.wait_closed()
