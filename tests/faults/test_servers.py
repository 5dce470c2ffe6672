"""The server dies or restarts in the middle of work: what was acknowledged is there, and work goes on by itself."""

import asyncio
import time
from collections import Counter

import pytest

from romancy.storage import ChannelMessage, OutcomeUnknownError, SQLStorage, TransientStorageError, open_storage
from romancy.storage.errors import StorageError
from tests.faults.leaks import assert_nothing_is_held
from tests.harness import Harness, history_of, step
from tests.servers import Server, Servers

pytestmark = pytest.mark.databases("postgres", "mariadb", "mysql")


class Load:
    """Workers that write all the time, remember what was acknowledged, and go on after any outage."""

    def __init__(self, storage: SQLStorage) -> None:
        self.storage = storage
        self.steps: dict[str, list[str]] = {}
        self.unknown: set[str] = set()
        self.messages: list[str] = []
        self.errors: Counter[str] = Counter()
        self.last_error: StorageError | None = None
        self.acknowledged = 0
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, instance_ids: list[str]) -> None:
        for instance_id in instance_ids:
            self._tasks += [
                asyncio.create_task(self._append(instance_id)),
                asyncio.create_task(self._publish(instance_id)),
            ]

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def until_acknowledged(self, more: int) -> None:
        """Wait until so many more writes were acknowledged."""
        wanted, deadline = self.acknowledged + more, time.monotonic() + 120
        while self.acknowledged < wanted:
            assert time.monotonic() < deadline, f"the storage does not work again: {self.errors}, {self.last_error}"
            await asyncio.sleep(0.01)

    async def _append(self, instance_id: str) -> None:
        done = self.steps.setdefault(instance_id, [])
        number = 0
        while not self._stopping:
            number += 1
            name = f"step:{number}"
            try:
                await self.storage.append_history(step(instance_id, name))
            except (TransientStorageError, OutcomeUnknownError) as error:
                await self._note(error, f"{instance_id} {name}")
            else:
                done.append(name)
                self.acknowledged += 1

    async def _publish(self, instance_id: str) -> None:
        number = 0
        while not self._stopping:
            number += 1
            text = f'"{instance_id} {number}"'
            try:
                await self.storage.publish_to_channel("news", text)
            except (TransientStorageError, OutcomeUnknownError) as error:
                await self._note(error, text)
            else:
                self.messages.append(text)
                self.acknowledged += 1

    async def _note(self, error: StorageError, what: str) -> None:
        self.errors[type(error).__name__] += 1
        self.last_error = error
        if isinstance(error, OutcomeUnknownError):
            self.unknown.add(what)
        await asyncio.sleep(0.01)


async def crash(server: Server) -> None:
    await server.kill()
    await server.start()


async def test_what_was_acknowledged_survives_crashes_and_restarts(harness: Harness) -> None:
    # Processes die here, no power is cut: to wait for the disk would only add the disk's own stalls, some of minutes.
    async with Servers([harness.name], private=True) as servers:
        server = servers[harness.name]
        async with open_storage(await server.create_database()) as storage:
            await storage.initialize()
            instance_ids = [await harness.instance(storage) for _ in range(3)]
            load = Load(storage)
            load.start(instance_ids)

            for disaster in (crash, Server.restart):
                await load.until_acknowledged(50)
                await disaster(server)
            await load.until_acknowledged(50)
            await load.stop()

            for instance_id in instance_ids:
                recorded = [event.activity_id for event in await history_of(storage, instance_id)]
                assert set(load.steps[instance_id]) <= set(recorded)
                more = {f"{instance_id} {name}" for name in set(recorded) - set(load.steps[instance_id])}
                assert more <= load.unknown, "what was said to have failed has not happened"
            published = Counter(message.data for message in await all_messages(storage))
            assert set(load.messages) <= published.keys()
            assert set(published.values()) == {1}
            assert published.keys() - set(load.messages) <= load.unknown
            await assert_nothing_is_held(storage)


async def all_messages(storage: SQLStorage) -> list[ChannelMessage]:
    found: list[ChannelMessage] = []
    after_id = 0
    while page := await storage.get_pending_channel_messages("news", after_id, 1000):
        found += page
        after_id = page[-1].id or 0
    return found
