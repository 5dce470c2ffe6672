"""A worker for tests, in a process of its own, that its workflow kills: ``python -m tests.engine.poisonous URL``."""

import asyncio
import os
import sys

from romancy import App, Settings, activity, workflow

SETTINGS = Settings(lock_timeout_sec=0.5, heartbeat_sec=0.1, poll_sec=0.05, takeovers=3)


@activity
async def prepare() -> str:
    return "prepared"


@workflow
async def deadly() -> str:
    await prepare()
    if os.environ.get("DEADLY"):
        os._exit(42)
    return "alive"


async def main(url: str) -> None:
    async with App(url, workflows=[deadly], settings=SETTINGS):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
