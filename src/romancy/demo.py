"""``romancy demo``: an order loses its worker to ``kill -9`` and goes on as if nothing had happened.

Everything printed is real: a shop, which starts orders and looks at them, and two workers in processes of their own,
the first of which is killed. They share an SQLite file and nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

from romancy import (
    App,
    Settings,
    TerminalError,
    WorkflowFailedError,
    WorkflowHandle,
    activity,
    receive_direct,
    sleep,
    subscribe,
    workflow,
)
from romancy.storage import HistoryEvent, HistoryEventType, WorkflowStatus
from romancy.storage.notifications.datagrams import DIRECTORY_VARIABLE

# The program: activities touch the world, the workflow says in which order.


@dataclass
class Order:
    id: str
    total: int
    to: str


async def refund(order: Order, result: str | None) -> None:
    print(f"refund: {order.total} euros for {order.id}, by {result}")


@activity(compensate=refund)
async def charge(order: Order) -> str:
    print(f"charge: {order.total} euros for {order.id}")
    await asyncio.sleep(0.5)
    return f"receipt R-{order.id}"


async def unpack(order: Order) -> None:
    print(f"unpack: {order.id} back on the shelf")


@activity(compensate=unpack)
async def pack(order: Order) -> str:
    print(f"pack: {order.id}, this takes a moment ...")
    await asyncio.sleep(2.5)
    print(f"pack: {order.id} is in its box")
    return f"parcel P-{order.id}"


@activity
async def ship(parcel: str, to: str) -> str:
    if to == "the Moon":
        print("ship: no carrier flies to the Moon")
        raise TerminalError("no carrier flies to the Moon")
    print(f"ship: {parcel} to {to}")
    return f"{parcel} is on its way to {to}"


@workflow
async def fulfil(order: Order) -> str:
    await charge(order)
    parcel = await pack(order)
    await sleep(timedelta(seconds=2))  # the glue dries; it might as well be two months
    await subscribe("approval", "direct")
    await receive_direct("approval")
    return await ship(parcel, order.to)


def app(url: str, *, worker: bool) -> App:
    """A lock lasts 3 s, half of the default, so that nobody has to watch it expire for long."""
    settings = Settings(lock_timeout_sec=3.0, heartbeat_sec=0.75, poll_sec=0.25)
    return App(url, workflows=[fulfil], worker=worker, settings=settings)


async def work(url: str) -> None:
    """A worker's whole life; it ends when its parent closes the pipe, or has ended itself."""
    logging.getLogger("romancy").setLevel(logging.ERROR)  # the story is told by what the activities print
    async with app(url, worker=True):
        await asyncio.to_thread(sys.stdin.read)


# The story: what the shop sees of it.


async def tell() -> None:
    with tempfile.TemporaryDirectory(prefix="romancy-demo-") as directory:
        os.environ.setdefault(DIRECTORY_VARIABLE, directory)  # what killed workers leave behind goes with it
        url = f"sqlite:///{directory}/orders.db"
        async with asyncio.timeout(60), app(url, worker=False) as shop:
            chapter("A workflow is an async function")
            print(inspect.getsource(fulfil.fn).rstrip())
            chapter("An order is stored, and a worker in another process runs it")
            async with Worker("worker-1", url) as first:
                order = await start_an_order(shop, first)
                chapter("In the middle of a step, the worker dies")
                await kill(first, order)
            chapter("Another one goes on, once the dead one's lock has expired (3 s here, 6 s by default)")
            async with Worker("worker-2", url) as second:
                await take_over(second)
                chapter("The order waits for a timer, then for a person; waiting, it is only rows")
                await wait_for_time_and_people(shop, order)
                chapter("An order that cannot be finished is undone, last step first")
                undone = await fail_and_undo(shop)
            chapter("What is recorded, each step once")
            await look_back(order, undone)
    chapter("Where to go next")
    where_to_go_next()


async def start_an_order(shop: App, worker: Worker) -> WorkflowHandle[str]:
    say("shop", "await app.start(fulfil, Order('order-17', 42, 'Paris'), id='order-17')")
    order = await shop.start(fulfil, Order("order-17", 42, "Paris"), id="order-17")
    await worker.says("takes a moment")
    await asyncio.sleep(0.5)
    return order


async def kill(worker: Worker, order: WorkflowHandle[str]) -> None:
    say("shop", bad(f"$ kill -9 {worker.process.pid}"))
    worker.process.kill()
    say("shop", f"{worker.name} is gone, exit status {await worker.process.wait()}")
    say("shop", f"recorded so far: {[event.activity_id for event in await order.history()]}, paid and not packed")


async def take_over(worker: Worker) -> None:
    await worker.says("takes a moment")
    say("shop", good("charge is recorded and not repeated; pack was cut off, so it begins again"))
    await worker.says("in its box")


async def wait_for_time_and_people(shop: App, order: WorkflowHandle[str]) -> None:
    await watch(order, until=WorkflowStatus.WAITING_FOR_MESSAGE)
    say("shop", "await app.send_to('order-17', {'approved by': 'Ada'}, channel='approval')")
    await shop.send_to("order-17", {"approved by": "Ada"}, channel="approval")
    say("shop", good(f"await order.result()  ->  {await order.result()!r}"))


async def fail_and_undo(shop: App) -> WorkflowHandle[str]:
    say("shop", "await app.start(fulfil, Order('order-18', 99, 'the Moon'), id='order-18')")
    order = await shop.start(fulfil, Order("order-18", 99, "the Moon"), id="order-18")
    say("shop", "await app.send_to('order-18', {'approved by': 'Bob'}, channel='approval')")  # early, and not lost
    await shop.send_to("order-18", {"approved by": "Bob"}, channel="approval")
    try:
        await order.result()
    except WorkflowFailedError as error:
        say("shop", good(f"await order.result()  ->  {type(error).__name__}: {error.message}"))
    return order


async def look_back(*orders: WorkflowHandle[str]) -> None:
    for order in orders:
        for event in await order.history():
            print(f"  {order.id}  {event.activity_id:<29}{event.event_type:<24}{content(event)}".rstrip())


def where_to_go_next() -> None:
    print("  docs/tutorial.md      from a first workflow to several workers")
    print("  examples/             small programs to run and change: sagas, approvals, queues, FastAPI")
    print("  src/romancy/demo.py   what you have just seen")


# What the chapters have in common.


class Worker:
    """A worker in a process of its own, whose words are printed as they come."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url
        self._said = ""
        self._spoke = asyncio.Condition()

    async def __aenter__(self) -> Self:
        command = [sys.executable, "-u", "-m", "romancy.demo", "worker", self._url]
        pipe = asyncio.subprocess.PIPE
        # In a session of its own, Ctrl-C does not reach it: it ends when we close its stdin.
        self.process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
        say(self.name, f"starts, process {self.process.pid}")
        self._listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self._listening
        await self.process.wait()

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            say(self.name, line.decode().rstrip())
            async with self._spoke:
                self._said += line.decode()
                self._spoke.notify_all()

    async def says(self, words: str) -> None:
        """Wait until it has said something."""
        async with self._spoke:
            await self._spoke.wait_for(lambda: words in self._said)


async def watch(order: WorkflowHandle[str], until: WorkflowStatus) -> None:
    """Say what the order waits for, until it waits for this."""
    seen = None
    while seen is not until:
        now = await order.instance()
        if now.status is not seen and now.status.startswith("waiting"):
            seen = now.status
            say("shop", f"{order.id} is {now.status}, locked by {now.locked_by or 'nobody'}")
        await asyncio.sleep(0.05)


def content(event: HistoryEvent) -> str:
    """What an event has recorded, in short."""
    recorded = json.loads(event.event_data or "{}")
    if event.event_type == HistoryEventType.COMPENSATION_EXECUTED:
        return str(recorded["activity_name"]).rpartition(":")[2]
    found = (recorded.get(key) for key in ("result", "data", "error_message"))
    return next((str(value) for value in found if value is not None), "")


BEGAN = time.monotonic()


def chapter(title: str) -> None:
    print(f"\n{paint('1', title)}", flush=True)


def say(who: str, what: str) -> None:
    colour = {"worker-1": "33", "worker-2": "35"}.get(who, "36")
    print(f"{time.monotonic() - BEGAN:5.1f} s  {paint(colour, f'{who:<10}')}{what}", flush=True)


def good(text: str) -> str:
    return paint("32", text)


def bad(text: str) -> str:
    return paint("1;31", text)


def paint(code: str, text: str) -> str:
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[{code}m{text}\033[0m" if coloured else text


if __name__ == "__main__":
    asyncio.run(work(sys.argv[2]) if sys.argv[1:2] == ["worker"] else tell())
