"""A workflow of five steps in absurd, with as many workers as it is told.

Its async worker has one connection. Waiting for a result means polling with growing pauses; so as not to measure those,
the tasks of a batch are counted by one statement every few milliseconds instead.
"""

import asyncio
import sys

import psycopg
from absurd_sdk import AsyncAbsurd
from absurdctl import BUNDLED_SCHEMA_SQL
from serving import STEPS, answers_only, serve

POLL_SEC = 0.005
FINISHED = "SELECT count(*) FROM absurd.t_bench WHERE state = 'completed'"


async def workflow(params, ctx):
    number = params["number"]
    for at in range(STEPS):
        number = await ctx.step(f"step-{at}", lambda number=number: step(number))
    return {"number": number}


async def step(number: int) -> int:
    return number + 1


def client(url: str) -> AsyncAbsurd:
    made = AsyncAbsurd(url, queue_name="bench")
    made.register_task(name="workflow")(workflow)
    return made


async def main() -> None:
    url, workers_wanted = sys.argv[1], int(sys.argv[2])
    answers = answers_only()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(BUNDLED_SCHEMA_SQL)
        connection.execute("SELECT absurd.create_queue('bench')")
    clients = [client(url) for _ in range(workers_wanted)]
    watcher = await psycopg.AsyncConnection.connect(url, autocommit=True)

    async def finished() -> int:
        return (await (await watcher.execute(FINISHED)).fetchone())[0]

    async def spawn(by: AsyncAbsurd, tasks: int) -> None:
        for _ in range(tasks):
            await by.spawn("workflow", {"number": 1})

    async def batch(workflows: int, at_once: int) -> None:
        """Workers take `at_once` tasks together; with one, the next is spawned when the last has finished."""
        expected = await finished() + workflows
        each = max(1, at_once // workers_wanted)
        workers = [
            asyncio.create_task(one.start_worker(concurrency=each, poll_interval=POLL_SEC))
            for one in clients[: max(1, at_once // each)]
        ]
        if at_once == 1:
            for left in reversed(range(workflows)):
                await spawn(clients[0], 1)
                while await finished() < expected - left:
                    await asyncio.sleep(0.001)
        else:
            shares = [len(range(at, workflows, len(clients))) for at in range(len(clients))]
            await asyncio.gather(*(spawn(by, tasks) for by, tasks in zip(clients, shares, strict=True)))
            while await finished() < expected:
                await asyncio.sleep(POLL_SEC)
        for one in clients:
            one.stop_worker()
        await asyncio.gather(*workers)

    try:
        await serve(batch, answers)
    finally:
        for one in clients:
            await one.close()
        await watcher.close()


asyncio.run(main())
