"""A work queue: each job is done by exactly one of several helpers.

    python examples/work_queue.py

Helpers compete for the messages of a channel. A helper is a workflow, so a job that was taken is never lost: if its
process dies, another one goes on with that helper, and with its job.
"""

import asyncio
import os

from romancy import App, ReceiveTimeoutError, activity, receive, subscribe, workflow

DATABASE = os.environ.get("ROMANCY_URL", "sqlite://:memory:")


@activity
async def resize(helper: str, picture: str) -> None:
    print(f"  {helper} resizes {picture}")
    await asyncio.sleep(0.1)


@workflow
async def helper(name: str) -> list[str]:
    await subscribe("pictures", "competing")
    done: list[str] = []
    while True:
        try:
            picture = (await receive("pictures", timeout=1)).data
        except ReceiveTimeoutError:
            return done  # nothing to do for a second: that is all for today
        await resize(name, picture)
        done.append(picture)


async def main() -> None:
    async with App(DATABASE, workflows=[helper]) as app:
        for number in range(1, 10):
            await app.publish("pictures", f"picture-{number}.jpg")
        helpers = [await app.start(helper, name, id=name) for name in ("Ann", "Ben", "Cat")]
        for handle in helpers:
            print(f"=> {handle.id} has resized {len(await handle.result())} pictures")


if __name__ == "__main__":
    asyncio.run(main())
