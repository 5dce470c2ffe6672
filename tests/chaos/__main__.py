"""Chaos: workers killed at random, the database restarted, and afterwards everything is counted.

    python -m tests.chaos --database postgres --minutes 10 --workflows 1000 --seed 1

Four worker processes run workflows with timers, messages and sagas. Every second or two one of them is killed with
kill -9 and replaced; every thirty seconds the database server is restarted (not SQLite, which has none). At the end
all workflows have finished, and what transactional activities booked is there exactly once.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time

from romancy import App, WorkflowFailedError
from romancy.storage import StorageError
from tests.chaos.orders import SETTINGS, TABLES, WORKFLOWS, failing, talking, timed
from tests.servers import Servers

EXPECTED = {
    "timed": (["first", "a", "b", "last"], ["first", "last"]),
    "talking": (["0", "1", "2"], ["0", "1", "2"]),
    "failing": (None, ["first"]),
}


def say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)


class Chaos:
    """The workers, and what is done to them."""

    def __init__(self, url: str, workers: int, rng: random.Random) -> None:
        self._url = url
        self._rng = rng
        self._count = workers
        self._workers: list[asyncio.subprocess.Process] = []
        self.kills = 0

    async def start_worker(self) -> None:
        self._workers.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.chaos.orders", self._url, stderr=asyncio.subprocess.DEVNULL
            )
        )

    async def kill_at_random(self, enough: asyncio.Event) -> None:
        """Kill one worker after another, each replaced at once."""
        while not await came_within(self._rng.uniform(0.5, 3.0), enough):
            await self.kill(self._rng.choice(self._workers))
            await self.start_worker()

    async def kill(self, worker: asyncio.subprocess.Process) -> None:
        self._workers.remove(worker)
        if worker.returncode is None:
            worker.send_signal(signal.SIGKILL)
            self.kills += 1
        await worker.wait()

    async def __aenter__(self) -> "Chaos":
        for _ in range(self._count):
            await self.start_worker()
        return self

    async def __aexit__(self, *exception: object) -> None:
        for worker in list(self._workers):
            await self.kill(worker)


async def restart_now_and_then(server: object, seconds: float, enough: asyncio.Event) -> None:
    while not await came_within(seconds, enough):
        await server.restart()  # type: ignore[attr-defined]
        say("the database was restarted")


async def came_within(seconds: float, event: asyncio.Event) -> bool:
    """Whether it did. Troubles end between two of them: one that is cancelled half-way leaves no database behind."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def persistently(work: object) -> object:
    """Do something against a database that comes and goes."""
    while True:
        try:
            return await work()  # type: ignore[operator]
        except (StorageError, OSError, TimeoutError):
            await asyncio.sleep(0.5)


async def torment(url: str, server: object, options: argparse.Namespace) -> bool:
    rng = random.Random(options.seed)
    client = App(url, workflows=WORKFLOWS, worker=False, settings=SETTINGS)
    async with client:
        for table in TABLES:
            await client.storage.conn().execute(table)
        async with Chaos(url, options.workers, rng) as chaos:
            say(f"{options.workers} workers, {options.workflows} workflows on {client.shown_url}, seed {options.seed}")
            enough = asyncio.Event()
            async with asyncio.TaskGroup() as troubles:
                troubles.create_task(chaos.kill_at_random(enough))
                if server is not None:
                    troubles.create_task(restart_now_and_then(server, options.restart_sec, enough))
                await feed(client, options)
                say("all are started; waiting for them to finish")
                enough.set()
            results = await gather_results(client, options)
            say(f"{chaos.kills} workers were killed")
        return await judge(client, results)


async def feed(client: App, options: argparse.Namespace) -> None:
    """Start the workflows, spread over the time."""
    pause = options.minutes * 60 / options.workflows
    for number in range(options.workflows):
        workflow = (timed, talking, failing)[number % 3]
        name = f"{workflow.name}-{number}"
        await persistently(lambda workflow=workflow, name=name: client.start(workflow, name, id=name))
        await asyncio.sleep(pause)


async def gather_results(client: App, options: argparse.Namespace) -> dict[str, object]:
    async def result(number: int) -> tuple[str, object]:
        workflow = (timed, talking, failing)[number % 3]
        name = f"{workflow.name}-{number}"

        async def wait() -> object:
            with contextlib.suppress(WorkflowFailedError):
                return await client.handle(name, workflow).result(120)
            return None

        return name, await persistently(wait)

    async with asyncio.timeout(300):
        return dict(await asyncio.gather(*(result(number) for number in range(options.workflows))))


async def judge(client: App, results: dict[str, object]) -> bool:
    """Whether every workflow ended as it should and the ledger has every booking exactly once."""
    wrong = []
    rows = await client.storage.conn().fetch_all("SELECT order_id, entry FROM chaos_ledger")
    for name, result in results.items():
        expected, booked = EXPECTED[name.partition("-")[0]]
        entries = sorted(entry for order, entry in rows if order == name)
        if result != expected or entries != sorted(booked):
            wrong.append(f"{name}: {result}, booked {entries}")
    for line in wrong[:20]:
        say(f"WRONG {line}")
    say(f"{len(results)} workflows finished, {len(wrong)} of them wrong")
    return not wrong


async def main(options: argparse.Namespace) -> bool:
    if options.database == "sqlite":
        with tempfile.TemporaryDirectory(prefix="romancy-chaos-") as directory:
            return await torment(f"sqlite:///{directory}/chaos.db", None, options)
    async with Servers([options.database], durable=True, private=True) as servers:
        server = servers[options.database]
        return await torment(await server.create_database(), server, options)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(prog="python -m tests.chaos", description="Torment workers and their database.")
    arguments.add_argument("--database", default="sqlite", choices=["sqlite", "postgres", "mariadb", "mysql"])
    arguments.add_argument("--minutes", type=float, default=10.0)
    arguments.add_argument("--workflows", type=int, default=1000)
    arguments.add_argument("--workers", type=int, default=4)
    arguments.add_argument("--restart-sec", type=float, default=30.0)
    arguments.add_argument("--seed", type=int, default=1)
    sys.exit(0 if asyncio.run(main(arguments.parse_args())) else 1)
