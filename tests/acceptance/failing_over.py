"""A worker for tests, in a process of its own: ``python -m tests.acceptance.failing_over URL LOG``.

Every effect is a line in LOG; a step whose name is in the environment variable HANG blocks until the process dies.
"""

import asyncio
import os
import sys
from pathlib import Path

from romancy import App, Settings, activity, sleep, workflow

LOG = Path(os.environ.get("ROMANCY_TEST_LOG", os.devnull))


async def effect(name: str) -> None:
    with LOG.open("a") as log:
        log.write(f"{name}\n")
    if os.environ.get("HANG") == name:
        await asyncio.sleep(3600)


async def refund(order: str) -> None:
    await effect("refund")


@activity(compensate=refund)
async def charge(order: str) -> str:
    await effect("charge")
    return f"receipt of {order}"


@activity
async def pack(order: str) -> str:
    await effect("pack")
    return "parcel"


@activity
async def ship(parcel: str) -> str:
    await effect("ship")
    return "shipped"


@workflow
async def fulfil(order: str) -> str:
    receipt = await charge(order)
    await sleep(0.3)
    parcel, _ = await asyncio.gather(pack(order), sleep(0.1))
    return f"{receipt}, {await ship(parcel)}"


@workflow
async def regret(order: str) -> None:
    await charge(order)
    raise ValueError("second thoughts")


def app(url: str, *, worker: bool = True) -> App:
    quick = Settings(lock_timeout_sec=2.0, heartbeat_sec=0.5, poll_sec=0.2)
    settings = Settings() if os.environ.get("DEFAULTS") else quick
    return App(url, workflows=[fulfil, regret], worker=worker, settings=settings)


async def main(url: str) -> None:
    async with app(url):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
