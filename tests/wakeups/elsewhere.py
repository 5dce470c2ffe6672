"""A worker in a process of its own: ``python -m tests.wakeups.elsewhere URL POLL_SEC``; ends when its input does."""

import asyncio
import sys

from romancy import App, Settings, activity, receive, sleep, subscribe, workflow


@activity
async def greet(name: str) -> str:
    return f"hello, {name}"


@workflow
async def greeting(name: str) -> str:
    return await greet(name)


@workflow
async def guest() -> str:
    await subscribe("names")
    return await greet((await receive("names")).data)


@workflow
async def nap(seconds: float) -> str:
    await sleep(seconds)
    return "rested"


@activity
async def occupied() -> None:
    await asyncio.sleep(60)


@workflow
async def busy() -> None:
    await occupied()


WORKFLOWS = [greeting, guest, nap, busy]


async def work(url: str, poll_sec: float) -> None:
    settings = Settings(poll_sec=poll_sec, heartbeat_sec=20, lock_timeout_sec=60, drain_sec=0)
    async with App(url, workflows=WORKFLOWS, settings=settings):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], float(sys.argv[2])))
