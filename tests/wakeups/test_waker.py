"""The waker: what it wakes runs here at once, but never more than there is room for."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from romancy import App, Settings, Workflow, WorkflowHandle, activity, receive, sleep_until, subscribe, workflow
from romancy.storage import WorkflowStatus
from tests.engine.test_messages import until
from tests.harness import Harness

RECEIVERS = 6


class Crowd:
    """Who is at it, and how many there have been at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.may_go = asyncio.Event()


crowd = Crowd()


@activity
async def join_in() -> None:
    crowd.now += 1
    crowd.most = max(crowd.most, crowd.now)
    await crowd.may_go.wait()
    crowd.now -= 1


async def _receive() -> None:
    await subscribe("news")
    await receive("news")
    await join_in()


@workflow
async def unlimited() -> None:
    await _receive()


@workflow(max_concurrent=1)
async def limited() -> None:
    await _receive()


@workflow
async def early_bird(moment: float) -> None:
    await sleep_until(datetime.fromtimestamp(moment, UTC))
    await join_in()


@pytest.fixture
async def app(harness: Harness) -> AsyncIterator[App]:
    """An app with room for two."""
    crowd.__init__()  # type: ignore[misc]
    settings = Settings(concurrency=2, poll_sec=0.1)
    async with App(harness.url, workflows=[unlimited, limited, early_bird], settings=settings) as app:
        yield app


async def waiting(app: App, receiver: Workflow[[], Any]) -> list[WorkflowHandle[Any]]:
    """Instances that wait for news."""
    handles = []
    for _ in range(RECEIVERS):
        handles.append(await app.start(receiver))
        await has_status(handles[-1], WorkflowStatus.WAITING_FOR_MESSAGE)
    return handles


async def has_status(handle: WorkflowHandle[Any], status: WorkflowStatus) -> None:
    async def reached() -> bool:
        return await handle.status() is status

    await until(reached)


@pytest.mark.parametrize(("receiver", "room"), [(unlimited, 2), (limited, 1)], ids=["of the worker", "of its own"])
async def test_a_message_to_many_starts_no_more_than_there_is_room_for(
    app: App, receiver: Workflow[[], Any], room: int
) -> None:
    handles = await waiting(app, receiver)
    await app.publish("news", 1)
    for handle in handles:
        await has_status(handle, WorkflowStatus.RUNNING)
    instances = [await app.storage.get_instance(handle.id) for handle in handles]
    assert sum(instance is not None and instance.locked_by is not None for instance in instances) <= room
    crowd.may_go.set()
    for handle in handles:
        await handle.result(30)
    assert crowd.most <= room


async def test_many_timers_start_no_more_than_there_is_room_for(app: App) -> None:
    moment = (await app.storage.current_time() + timedelta(seconds=1)).timestamp()
    handles = [await app.start(early_bird, moment) for _ in range(RECEIVERS)]

    async def somebody_is_there() -> bool:
        return crowd.most > 0

    await until(somebody_is_there)
    await asyncio.sleep(0.1)
    crowd.may_go.set()
    for handle in handles:
        await handle.result(30)
    assert crowd.most <= 2
