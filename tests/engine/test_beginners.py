"""What beginners get wrong is said at once, in words that help."""

import logging

import pytest

from romancy import App, RomancyError, WorkflowFailedError, activity, workflow

from .conftest import MakeApp

pytestmark = pytest.mark.databases("sqlite")


@activity
async def step() -> int:
    return 1


@workflow
async def plain() -> int:
    return await step()


@workflow
async def other() -> int:
    return 2


@workflow
async def broken() -> None:
    raise KeyError("missing")


@pytest.mark.parametrize("wrong", [step, "plain", plain.fn, None])
async def test_only_a_workflow_can_be_started(make_app: MakeApp, wrong: object) -> None:
    app = await make_app(plain)
    with pytest.raises(TypeError, match="is @workflow missing"):
        await app.start(wrong)


async def test_an_app_that_was_not_entered_says_so() -> None:
    app = App("sqlite://:memory:", workflows=[plain])
    with pytest.raises(RomancyError, match="async with app"):
        await app.start(plain)
    with pytest.raises(RomancyError, match="async with app"):
        await app.handle("order-1").result()


async def test_starting_what_only_others_can_run_is_warned_of_once(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = await make_app(plain)
    with caplog.at_level(logging.WARNING, "romancy"):
        await app.start(other)
        await app.start(other)
    assert [record.getMessage() for record in caplog.records] == [
        "workflow 'other' is not one of this app's: it waits for another worker to run it"
    ]


async def test_waiting_for_what_is_parked_is_warned_of(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    client = await make_app(worker=False)
    handle = await client.start(plain, id="order-1")
    await client.storage.park("order-1", "why")
    with caplog.at_level(logging.WARNING, "romancy"), pytest.raises(TimeoutError):
        await handle.result(timeout=0.3)
    assert [record.getMessage() for record in caplog.records] == [
        "instance order-1 is parked, and waited for; `romancy show` tells why"
    ]


async def test_a_failure_tells_where_it_happened(make_app: MakeApp) -> None:
    app = await make_app(broken)
    with pytest.raises(WorkflowFailedError) as failed:
        await (await app.start(broken)).result(timeout=10)
    (note,) = failed.value.__notes__
    assert __file__ in note
    assert 'raise KeyError("missing")' in note
