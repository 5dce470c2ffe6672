"""How a peer's process is asked for workflows: a line with their number and how many at once; seconds in answer."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TextIO

STEPS = 5


async def serve(batch: Callable[[int, int], Awaitable[None]], answers: TextIO) -> None:
    """Answer each line `WORKFLOWS AT_ONCE` with the seconds that it took, until there are no more lines."""
    print("ready", file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        workflows, at_once = map(int, line.split())
        started = time.perf_counter()
        await batch(workflows, at_once)
        print(time.perf_counter() - started, file=answers, flush=True)


async def closed_loop(one: Callable[[], Awaitable[object]], workflows: int, at_once: int) -> None:
    """Run workflows, so many at once: each caller starts the next one when its last has finished."""

    async def caller(number: int) -> None:
        for _ in range(number, workflows, at_once):
            await one()

    await asyncio.gather(*(caller(number) for number in range(at_once)))


def answers_only() -> TextIO:
    """Keep our output for answers: whatever else the process prints goes to its log."""
    answers, sys.stdout = sys.stdout, sys.stderr
    return answers
