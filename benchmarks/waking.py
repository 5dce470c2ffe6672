"""How soon a waiting workflow goes on: after a message, from this process and from another one, and after a timer.

`python -m benchmarks.waking URL` is the other process: a worker that writes down when its workflow has gone on.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from romancy import App, WorkflowHandle, receive, sleep, subscribe, workflow
from romancy.storage import WorkflowStatus

from .databases import Database, Place
from .filling import sleeping
from .measuring import Report, Result, Series, Size, Target
from .workflows import commit_sec

MESSAGE = Target(most=10)
TIMER = Target(most=20)
DRAINED = Target(most=10)

_CHANNEL = "wake-up"
_NAP_SEC = 0.05
_PATIENCE_SEC = 60.0

_on_resumed: Callable[[float], None] = print


@workflow
async def receiver(messages: int) -> None:
    await subscribe(_CHANNEL)
    for _ in range(messages):
        await receive(_CHANNEL)
        _on_resumed(time.perf_counter())


@workflow
async def napper(naps: int) -> None:
    for _ in range(naps):
        due = time.perf_counter() + _NAP_SEC
        await sleep(_NAP_SEC)
        _on_resumed(time.perf_counter() - due)


@workflow
async def sleeper() -> None:
    await sleep(1)


async def measure(places: Sequence[Place], size: Size, report: Report) -> None:
    """Milliseconds from publishing to going on, how late timers are, and how long many due ones take."""
    report.section("How soon a waiting workflow goes on (median, in brackets the 99th percentile)")
    for place in places:
        async with place.database() as database:
            for what, wakes, target in (
                ("message, own process", _in_this_process, MESSAGE),
                ("message, another process", _in_another_process, MESSAGE),
                ("timer, how late", _timers, TIMER),
            ):
                commit_ms = 1000 * await commit_sec(database)  # no wake-up needs fewer than two
                delays = await wakes(database, size.wakes)
                report.add(_milliseconds(what, place, delays, target, beside=f"{commit_ms:.1f} ms a bare commit"))
    report.section(f"{size.due:,} timers that are due at once")
    for place in places:
        async with place.database() as database:
            seconds = Series([await _drain(database, size.due)])
        report.add(Result("fired, resumed and completed", place.title, seconds, unit=" s", target=DRAINED))


def _milliseconds(what: str, place: Place, delays: list[float], target: Target, *, beside: str) -> Result:
    p50 = Series([1000 * statistics.median(delays)])
    p99 = 1000 * statistics.quantiles(delays, n=100, method="inclusive")[98]
    return Result(what, place.title, p50, unit=" ms", target=target, beside=beside, spread=f"p99 {p99:.1f}")


async def _in_this_process(database: Database, messages: int) -> list[float]:
    async with App(database.url, workflows=[receiver]) as app:
        return await _publish(app, messages, _heard_here())


def _heard_here() -> Callable[[], Awaitable[float]]:
    """What is awaited to learn when a workflow of this process has gone on."""
    global _on_resumed
    heard: asyncio.Queue[float] = asyncio.Queue()
    _on_resumed = heard.put_nowait
    return heard.get


async def _in_another_process(database: Database, messages: int) -> list[float]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.waking",
        database.url,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines = process.stdout

    async def heard() -> float:
        return float(await lines.readline())

    try:
        await heard()  # it has started
        async with App(database.url, workflows=[receiver], worker=False) as app:
            return await _publish(app, messages, heard)
    finally:
        process.stdin.close()
        await process.wait()


async def _publish(app: App, messages: int, heard: Callable[[], Awaitable[float]]) -> list[float]:
    """Publish one message after the other to a workflow that waits; how long each took to arrive."""
    handle = await app.start(receiver, messages + 1)
    delays = []
    for _ in range(messages + 1):
        await _until_it_waits(handle)
        published_at = time.perf_counter()
        await app.publish(_CHANNEL, "wake up")
        async with asyncio.timeout(_PATIENCE_SEC):
            delays.append(await heard() - published_at)
    await handle.result(_PATIENCE_SEC)
    return delays[1:]  # the first one warms up


async def _until_it_waits(handle: WorkflowHandle[None]) -> None:
    async with asyncio.timeout(_PATIENCE_SEC):
        while await handle.status() is not WorkflowStatus.WAITING_FOR_MESSAGE:
            await asyncio.sleep(0.002)
    await asyncio.sleep(0.01)  # so that nothing of its suspending is still under way


async def _timers(database: Database, naps: int) -> list[float]:
    async with App(database.url, workflows=[napper]) as app:
        heard = _heard_here()
        handle = await app.start(napper, naps + 1)
        lateness = [await heard() for _ in range(naps + 1)]
        await handle.result(_PATIENCE_SEC)
    return lateness[1:]


async def _drain(database: Database, timers: int) -> float:
    """Seconds that a worker needs for instances which all slept until now."""
    async with database.open() as storage:
        await sleeping(storage, sleeper, timers, due_in_sec=-1)
    started = time.perf_counter()
    async with App(database.url, workflows=[sleeper]) as app, asyncio.timeout(10 * _PATIENCE_SEC):
        left = "SELECT COUNT(*) FROM workflow_instances WHERE status <> 'completed'"
        while await app.storage.conn().fetch_value(left):
            await asyncio.sleep(timers / 50_000)  # seldom: whoever counts keeps the database from its work
        seconds = time.perf_counter() - started
    assert await database.count("workflow_history", "event_type = 'TimerExpired'") == timers
    return seconds


async def _work(url: str) -> None:
    global _on_resumed
    _on_resumed = lambda moment: print(moment, flush=True)  # noqa: E731
    async with App(url, workflows=[receiver]):
        print(0.0, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_work(sys.argv[1]))
