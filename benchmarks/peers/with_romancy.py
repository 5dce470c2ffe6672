"""A workflow of five activities in ours."""

import asyncio
import sys

from serving import STEPS, answers_only, closed_loop, serve

from romancy import App, activity, workflow


@activity
async def step(number: int) -> int:
    return number + 1


@workflow
async def steps(number: int) -> int:
    for _ in range(STEPS):
        number = await step(number)
    return number


async def main() -> None:
    answers = answers_only()
    async with App(sys.argv[1], workflows=[steps]) as app:

        async def one() -> None:
            handle = await app.start(steps, 1)
            assert await handle.result() == 1 + STEPS

        await serve(lambda workflows, at_once: closed_loop(one, workflows, at_once), answers)


asyncio.run(main())
