"""Published state: shown once per step, read from anywhere, kept after the end."""

from dataclasses import dataclass

import pytest

from romancy import (
    NO_RETRY,
    App,
    InActivityError,
    SerializationError,
    WorkflowFailedError,
    activity,
    receive,
    set_state,
    subscribe,
    workflow,
)
from romancy.storage import InstanceNotFoundError
from tests.engine.conftest import QUICK, MakeApp
from tests.engine.test_messages import until, waits
from tests.harness import Harness


@dataclass
class Progress:
    done: int
    of: int


@workflow
async def packing(pieces: int) -> int:
    await subscribe("pieces")
    for done in range(pieces):
        await set_state(Progress(done, pieces))
        await receive("pieces")
    await set_state(Progress(pieces, pieces))
    return pieces


async def test_a_state_is_read_as_its_type_from_any_process_while_the_workflow_waits(
    make_app: MakeApp,
) -> None:
    app, client = await make_app(packing), await make_app(worker=False)
    handle = await app.start(packing, 2, id="order")

    for done in range(2):

        async def shows(done: int = done) -> bool:
            return bool(await client.handle("order").state(type=Progress) == Progress(done, 2))

        await until(shows)
        await client.publish("pieces", "lamp")
    await handle.result(10)

    assert await client.handle("order").state() == {"done": 2, "of": 2}


async def test_a_state_is_set_once_per_step_whoever_runs_it(make_app: MakeApp, harness: Harness) -> None:
    async with App(harness.url, workflows=[packing], settings=QUICK) as app:
        handle = await app.start(packing, 1, id="order")
        await waits(handle)

    replaying = await make_app(packing)
    handle = replaying.handle("order")
    await replaying.publish("pieces", "lamp")

    assert await handle.result(10) == 1
    assert [event.activity_id for event in await handle.history()] == [
        "subscribe:1",
        "set_state:1",
        "receive_pieces:1",
        "set_state:2",
    ]


@workflow
async def silent() -> None:
    return None


async def test_a_workflow_that_shows_nothing_is_told_from_one_that_does_not_exist(make_app: MakeApp) -> None:
    app = await make_app(silent)
    handle = await app.start(silent)

    assert await handle.state() is None
    with pytest.raises(InstanceNotFoundError):
        await app.handle("unknown").state()


@workflow
async def shows_nonsense() -> None:
    await set_state(object())


@activity(retry=NO_RETRY)
async def shows_too_much() -> None:
    await set_state(1)


@workflow
async def shows_from_an_activity() -> None:
    await shows_too_much()


@pytest.mark.databases("sqlite")
async def test_what_cannot_be_stored_or_is_no_body_is_told_so(make_app: MakeApp) -> None:
    app = await make_app(shows_nonsense, shows_from_an_activity)
    for mistaken, error in ((shows_nonsense, SerializationError), (shows_from_an_activity, InActivityError)):
        with pytest.raises(WorkflowFailedError, match=error.__name__):
            await (await app.start(mistaken)).result(10)


@pytest.mark.databases("sqlite")
async def test_a_state_of_another_shape_than_asked_for_is_an_error(make_app: MakeApp) -> None:
    app = await make_app(silent)
    handle = await app.start(silent, id="odd")
    await handle.result(10)
    await app.storage.conn().execute("INSERT INTO romancy_states (instance_id, state) VALUES ('odd', '[1]')")
    with pytest.raises(SerializationError, match="the state of odd"):
        await handle.state(type=Progress)
