"""A workflow of five steps in DBOS."""

import asyncio
import logging
import sys

from dbos import DBOS
from serving import STEPS, answers_only, closed_loop, serve


@DBOS.step()
async def step(number: int) -> int:
    return number + 1


@DBOS.workflow()
async def workflow(number: int) -> int:
    for _ in range(STEPS):
        number = await step(number)
    return number


async def one() -> None:
    handle = await DBOS.start_workflow_async(workflow, 1)
    assert await handle.get_result() == 1 + STEPS


async def main() -> None:
    url = sys.argv[1]
    answers = answers_only()
    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR", "sys_db_pool_size": 32})
    logging.disable(logging.WARNING)
    DBOS.launch()
    try:
        await serve(lambda workflows, at_once: closed_loop(one, workflows, at_once), answers)
    finally:
        DBOS.destroy()


asyncio.run(main())
