"""The storage layer on its own, without the engine: an order on its way, printed as it happens.

Two workers open the same SQLite file, as two processes would, and what is printed is what the database answered. Only
time is helped along: nobody wants to watch a lock expire, so the tour moves the database's clock as the tests do.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from datetime import timedelta
from typing import NamedTuple

from romancy.storage import (
    ChannelMode,
    ChannelWait,
    HistoryEvent,
    HistoryEventType,
    HistoryIterator,
    Lock,
    LockLostError,
    OutboxEvent,
    SQLStorage,
    TimerSubscription,
    WorkflowInstance,
    open_storage,
)

ORDER = "order-17"
PARCELS = f"parcel:{ORDER}"


class Worker(NamedTuple):
    """Somebody who runs workflows, with a storage of their own on the common database."""

    name: str
    storage: SQLStorage


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="romancy-tour-") as directory:
        url = f"sqlite:///{directory}/orders.db"
        async with open_storage(url) as one, open_storage(url) as two:
            await one.initialize()
            print(f"Coffee by subscription, one order a month, kept in {url}")
            await an_order(Worker("worker-1", one), Worker("worker-2", two))


async def an_order(*workers: Worker) -> None:
    """The whole story, a chapter each."""
    await create(workers[0])
    owner, rival, lock = await race_for_the_lock(*workers)
    await charge_the_card(owner, lock)
    lock = await take_over(rival, lock, from_silent=owner)
    owner = rival
    lock = await sleep_until_roasting_day(owner, lock, workers)
    await receive_what_came_early(owner, lock)
    await ship_and_tell(owner, lock)
    await relay_the_event(workers)
    await start_next_month(owner, lock)
    where_to_go_next()


async def create(worker: Worker) -> None:
    chapter("An order is a row")
    coffee = WorkflowInstance(
        instance_id=ORDER, workflow_name="coffee_subscription", input_data='{"month": 1, "beans": "Yirgacheffe"}'
    )
    await worker.storage.create_instance(coffee)
    order = await look(worker)
    say("shop", f"{order.instance_id} is {order.status}: {order.input_data}")


async def race_for_the_lock(*workers: Worker) -> tuple[Worker, Worker, Lock]:
    """Who won, who did not, and the lock."""
    chapter("Two workers reach for it at the same moment; one gets it")
    locks = await asyncio.gather(*(worker.storage.try_acquire_lock(ORDER, worker.name, 30) for worker in workers))
    for worker, lock in zip(workers, locks, strict=True):
        say(worker.name, f"gets the lock for 30 s, with token {lock.token}" if lock else "gets None and goes away")
    [(winner, won)] = [(worker, lock) for worker, lock in zip(workers, locks, strict=True) if lock]
    [loser] = [worker for worker in workers if worker is not winner]
    return winner, loser, won


async def charge_the_card(owner: Worker, lock: Lock) -> None:
    chapter("A finished step is recorded once, by whoever holds the lock")
    charged = step("charge_card:1", '{"amount": "14.50 EUR"}')
    appended = await owner.storage.append_history(charged, lock=lock)
    say(owner.name, f"records {charged.activity_id} as history id {appended.id}")
    again = await owner.storage.append_history(charged, lock=lock)
    say(owner.name, f"asks again, unsure of the answer: already_recorded={again.already_recorded}, still id {again.id}")


async def take_over(heir: Worker, stale: Lock, *, from_silent: Worker) -> Lock:
    """The next acquisition; writes bound to the stale one are refused from here on."""
    chapter(f"{from_silent.name} falls silent in mid-work; nobody is told")
    move_clock(timedelta(seconds=31), heir, from_silent)
    [found] = await heir.storage.find_resumable_workflows()
    lock = await acquire(heir)
    say(heir.name, f"finds {found.instance_id} with an expired lock and takes it: token {lock.token}")
    done = [event.activity_id async for event in HistoryIterator(heir.storage, ORDER)]
    say(heir.name, f"reads the history, {done}: the card is not charged again")
    say(from_silent.name, "wakes up, knows nothing of all this, and wants to record its next step")
    try:
        await from_silent.storage.append_history(step("grind:1", '"coarse"'), lock=stale)
    except LockLostError as error:
        say("database", good(f"refused, as it should be: {type(error).__name__}"))
        say("", good(str(error)))
    return lock


async def sleep_until_roasting_day(owner: Worker, lock: Lock, workers: tuple[Worker, ...]) -> Lock:
    chapter("The beans are roasted in two days; a sleeping order is only rows")
    roasting_day = await owner.storage.current_time() + timedelta(days=2)
    timer = TimerSubscription(ORDER, "roasting_day", roasting_day, activity_id="sleep:1")
    await owner.storage.suspend(ORDER, [timer], lock=lock)
    order = await look(owner)
    say(owner.name, f"suspends it: {order.status}, locked by {order.locked_by}")
    move_clock(timedelta(days=2), *workers)
    [due] = await owner.storage.find_expired_timers()
    fired = await asyncio.gather(*(worker.storage.fire_timer(due, worker_id=worker.name) for worker in workers))
    for worker, by_us in zip(workers, fired, strict=True):
        say(worker.name, f"finds {due.timer_id} due and fires it: {by_us}")
    lock = await acquire(owner)
    say(owner.name, f"goes on with token {lock.token}")
    return lock


async def receive_what_came_early(owner: Worker, lock: Lock) -> None:
    chapter("A message that came before anybody waited is not lost")
    message_id = await owner.storage.publish_to_channel(PARCELS, '{"weight_kg": 0.54}')
    say("warehouse", f"publishes message {message_id} on {PARCELS}; nobody listens yet")
    await owner.storage.subscribe_to_channel(ORDER, "parcel", ChannelMode.DIRECT, lock=lock)
    [received] = await owner.storage.suspend(ORDER, [ChannelWait(PARCELS, "receive_parcel:1")], lock=lock)
    say(owner.name, f"wants to wait for it, and has it at once: {json.loads(received.event_data or '')['data']}")


async def ship_and_tell(owner: Worker, lock: Lock) -> None:
    chapter("Our table, the step and the event to the outside: one transaction")
    storage = owner.storage
    await storage.conn().execute("CREATE TABLE shipments (order_id TEXT, month INTEGER)")
    async with storage.transaction() as conn:
        await conn.execute("INSERT INTO shipments VALUES (:order_id, :month)", order_id=ORDER, month=1)
        await storage.append_history(step("ship:1", '{"carrier": "bicycle"}'), lock=lock)
        await storage.add_outbox_event(
            OutboxEvent("shipped-17-1", "order.shipped", "coffee-shop", f'{{"order": "{ORDER}"}}'), lock=lock
        )
    rows = await storage.conn().fetch_value("SELECT COUNT(*) FROM shipments")
    say(owner.name, f"commits {rows} row in shipments, step ship:1 and event shipped-17-1 together")


async def relay_the_event(workers: tuple[Worker, ...]) -> None:
    chapter("The event goes out: leased to one, sent, marked")
    leased = await asyncio.gather(*(worker.storage.get_pending_outbox_events(lease_sec=60) for worker in workers))
    for worker, events in zip(workers, leased, strict=True):
        say(worker.name, f"asks for pending events: {[event.event_id for event in events]}")
    for worker, events in zip(workers, leased, strict=True):
        for event in events:
            say("customer", f"reads {event.event_type} {event.event_data}")
            marked = await worker.storage.mark_outbox_event_sent(event.event_id)
            say(worker.name, f"marks {event.event_id} as sent: {marked}")


async def start_next_month(owner: Worker, lock: Lock) -> None:
    chapter("Next month: the same order starts over, its past goes to the archive")
    await owner.storage.recur_instance(ORDER, '{"month": 2, "beans": "Yirgacheffe"}', lock=lock)
    for event in await owner.storage.get_archived_history(ORDER):
        say("archive", f"{event.original_id}  {event.activity_id:<18}{event.event_type}")
    order, steps = await look(owner), await owner.storage.get_history_count(ORDER)
    say("shop", f"{order.instance_id} is {order.status} with {steps} steps: {order.input_data}")


def where_to_go_next() -> None:
    chapter("Where to go next")
    say("read", "examples/storage_tour.py   what you have just seen")
    say("", "docs/storage.md            every operation, with examples")
    say("", "docs/guarantees.md         what is promised, and what is not")
    say("", "ARCHITECTURE.md            how it is done, once, for four databases")


# What the chapters have in common.


async def look(worker: Worker) -> WorkflowInstance:
    """The order as it is stored now."""
    order = await worker.storage.get_instance(ORDER)
    assert order is not None
    return order


async def acquire(worker: Worker) -> Lock:
    """The order's lock, which is known to be free."""
    lock = await worker.storage.try_acquire_lock(ORDER, worker.name, 30)
    assert lock is not None
    return lock


def step(activity_id: str, result: str) -> HistoryEvent:
    return HistoryEvent(ORDER, activity_id, HistoryEventType.ACTIVITY_COMPLETED, event_data=result)


def move_clock(span: timedelta, *workers: Worker) -> None:
    """Let time pass in the database, as these workers see it."""
    for worker in workers:
        worker.storage.runner.driver.clock_offset += span.total_seconds()
    say("clock", f"{f'{span.days} days' if span.days else f'{span.seconds} seconds'} later (moved, not waited for)")


def chapter(title: str) -> None:
    print(f"\n{paint('1', title)}")


def say(who: str, what: str) -> None:
    print(f"  {paint('36', f'{who:<10}')}  {what}")


def good(text: str) -> str:
    return paint("32", text)


def paint(code: str, text: str) -> str:
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[{code}m{text}\033[0m" if coloured else text


if __name__ == "__main__":
    asyncio.run(main())
