"""The workflows of the chaos test, and a worker that runs them until it is killed: ``python -m tests.chaos.orders``.

What a workflow did is counted by the database itself, in tables of the test's own that transactional activities write.
"""

import asyncio
import random
import sys

from romancy import NO_RETRY, App, Retry, Settings, activity, conn, publish, receive, sleep, subscribe, workflow

SETTINGS = Settings(lock_timeout_sec=3.0, heartbeat_sec=0.75, poll_sec=0.25, concurrency=50)

TABLES = ("CREATE TABLE IF NOT EXISTS chaos_ledger (order_id VARCHAR(50) NOT NULL, entry VARCHAR(50) NOT NULL)",)


@activity(transactional=True)
async def book(order: str, entry: str) -> str:
    """Exactly once, or the ledger shows it."""
    await conn().execute(
        "INSERT INTO chaos_ledger (order_id, entry) VALUES (:order_id, :entry)", order_id=order, entry=entry
    )
    return entry


async def unbook(order: str, entry: str) -> None:
    """At least once: the ledger may show it twice, and must show it."""
    await asyncio.sleep(0)


@activity(retry=Retry(max_attempts=0, initial_sec=0.05, longest_sec=1.0), compensate=unbook)
async def fragile(order: str, entry: str) -> str:
    await asyncio.sleep(random.uniform(0, 0.05))
    if random.random() < 0.1:
        raise ConnectionError("bad luck")
    return entry


@activity(retry=NO_RETRY)
async def refuse(order: str) -> None:
    raise ValueError(order)


@workflow
async def timed(order: str) -> list[str]:
    first = await book(order, "first")
    await sleep(0.5)
    middle = await asyncio.gather(fragile(order, "a"), fragile(order, "b"))
    return [first, *middle, await book(order, "last")]


@workflow
async def talking(order: str) -> list[str]:
    await subscribe(f"chan-{order}")
    heard = []
    for number in range(3):
        await publish(f"chan-{order}", number)
        heard.append((await receive(f"chan-{order}")).data)
    return [await book(order, str(word)) for word in heard]


@workflow
async def failing(order: str) -> None:
    await fragile(order, "a")
    await book(order, "first")
    await refuse(order)


WORKFLOWS = [timed, talking, failing]


async def main(url: str) -> None:
    async with App(url, workflows=WORKFLOWS, settings=SETTINGS):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
