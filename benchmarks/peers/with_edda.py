"""A workflow of five activities in Edda."""

import asyncio
import logging
import sys

from edda import EddaApp, WorkflowContext, activity, workflow
from serving import STEPS, answers_only, closed_loop, serve


@activity
async def step(ctx: WorkflowContext, number: int) -> int:
    return number + 1


@workflow
async def steps(ctx: WorkflowContext, number: int) -> int:
    for _ in range(STEPS):
        number = await step(ctx, number)
    return number


async def one() -> str:
    return await steps.start(number=1)  # returns when the workflow has finished


async def main() -> None:
    url = sys.argv[1]
    answers = answers_only()
    logging.disable(logging.WARNING)
    app = EddaApp(service_name="bench", db_url=url)
    await app.initialize()
    first = await one()  # its definition: the first of several at once would fail
    assert (await app.storage.get_instance(first))["status"] == "completed"
    try:
        await serve(lambda workflows, at_once: closed_loop(one, workflows, at_once), answers)
    finally:
        await app.shutdown()


asyncio.run(main())
