"""Messages and events: each once to its receiver, in order, from anywhere."""

import asyncio
from datetime import timedelta

import pytest

from romancy import (
    Event,
    ReceiveTimeoutError,
    Retention,
    WorkflowFailedError,
    activity,
    emit,
    group_members,
    join_group,
    publish,
    publish_to_group,
    receive,
    receive_direct,
    send_to,
    subscribe,
    unsubscribe,
    wait_event,
    workflow,
)
from romancy.outbox import InvalidEventError
from romancy.storage import ChannelMode, OutboxEvent, OutboxStatus, SQLStorage, WorkflowStatus
from tests.engine.conftest import MakeApp


async def until(condition: object, timeout: float = 30) -> None:
    """Wait until an async condition holds."""
    async with asyncio.timeout(timeout):
        while not await condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def waits(handle: object) -> None:
    async def waiting() -> bool:
        return await handle.status() is WorkflowStatus.WAITING_FOR_MESSAGE  # type: ignore[attr-defined,no-any-return]

    await until(waiting)


@workflow
async def listener(count: int) -> list[int]:
    await subscribe("news")
    return [(await receive("news")).data["n"] for _ in range(count)]


async def test_a_subscriber_receives_every_message_in_order(make_app: MakeApp) -> None:
    app = await make_app(listener)
    handles = [await app.start(listener, 5) for _ in range(3)]
    for handle in handles:
        await waits(handle)
    for number in range(5):
        await app.publish("news", {"n": number})
    assert [await handle.result(10) for handle in handles] == [[0, 1, 2, 3, 4]] * 3


@workflow
async def competitor() -> int:
    await subscribe("jobs", ChannelMode.COMPETING)
    return int((await receive("jobs")).data)


async def test_competing_receivers_share_the_messages(make_app: MakeApp) -> None:
    app = await make_app(competitor)
    handles = [await app.start(competitor) for _ in range(4)]
    for handle in handles:
        await waits(handle)
    for number in range(4):
        await app.publish("jobs", number)
    assert sorted([await handle.result(10) for handle in handles]) == [0, 1, 2, 3]


@workflow
async def ping(other: str) -> bytes:
    await subscribe("__direct__", ChannelMode.DIRECT)
    await send_to(other, b"\x00ping")
    return bytes((await receive_direct()).data)


@workflow
async def pong(other: str) -> bytes:
    await subscribe("__direct__", ChannelMode.DIRECT)
    message = await receive_direct()
    await send_to(other, message.data + b"pong")
    return bytes(message.data)


async def test_two_workflows_talk_to_each_other_in_bytes(make_app: MakeApp) -> None:
    app = await make_app(ping, pong)
    first = await app.start(ping, "b", id="a")
    second = await app.start(pong, "a", id="b")
    assert (await first.result(10), await second.result(10)) == (b"\x00pingpong", b"\x00ping")


@workflow
async def impatient() -> str:
    await subscribe("silence")
    try:
        await receive("silence", timeout=0.05)
    except ReceiveTimeoutError:
        return "nothing"
    return "something"


async def test_a_receive_times_out_and_that_is_recorded(make_app: MakeApp) -> None:
    app = await make_app(impatient)
    handle = await app.start(impatient)
    assert await handle.result(10) == "nothing"
    assert (await handle.history())[-1].event_type == "MessageTimeout"


@activity
async def busy() -> None:
    await asyncio.sleep(0.6)


async def patient() -> str:
    try:
        async with asyncio.timeout(0.3):
            return f"at once: {(await receive('late')).data}"
    except TimeoutError:
        return f"at last: {(await receive('late')).data}"


@workflow
async def distracted() -> str:
    await subscribe("late")
    _, heard = await asyncio.gather(busy(), patient())
    return heard


async def test_a_message_that_meets_a_timeout_waits_for_the_next_receive(make_app: MakeApp) -> None:
    app = await make_app(distracted)
    handle = await app.start(distracted)

    async def subscribed() -> bool:
        return bool(await app.storage.get_history_count(handle.id))

    await until(subscribed)
    await app.publish("late", "hello")
    assert (await handle.result(10)).endswith("hello")


@workflow
async def takes_the_first() -> list[str]:
    await subscribe("left")
    await subscribe("right")
    await publish("left", "a")
    await publish("right", "b")
    waiting = [asyncio.ensure_future(receive(channel)) for channel in ("left", "right")]
    [first], [other] = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    other.cancel()
    rest = "right" if first is waiting[0] else "left"
    return [first.result().data, (await receive(rest)).data]


async def test_what_a_cancelled_receive_would_have_received_comes_to_the_next_one(make_app: MakeApp) -> None:
    app = await make_app(takes_the_first)
    assert sorted(await (await app.start(takes_the_first)).result(10)) == ["a", "b"]


@workflow
async def stranger(*, direct: bool) -> None:
    await (receive_direct("orders") if direct else receive("orders"))


@pytest.mark.parametrize(
    ("direct", "remedy"),
    [(False, "await subscribe('orders') before"), (True, "await subscribe('orders', 'direct') before")],
)
async def test_a_receive_without_a_subscription_is_the_bodys_error_and_names_the_remedy(
    make_app: MakeApp, direct: bool, remedy: str
) -> None:
    app = await make_app(stranger)
    with pytest.raises(WorkflowFailedError) as failed:
        await (await app.start(stranger, direct=direct)).result(10)
    assert failed.value.error_type == "NotSubscribedError"
    assert "is not subscribed to channel 'orders'" in failed.value.message
    assert remedy in failed.value.message


@workflow
async def forwards() -> int:
    await subscribe("in")
    message = await receive("in")
    await publish("out", message.data, metadata={"via": "forwards"})
    await unsubscribe("in")
    return int(message.data)


@workflow
async def hears_out() -> tuple[int, str]:
    await subscribe("out")
    message = await receive("out")
    return message.data, message.metadata["via"]


async def test_a_workflow_publishes_to_another(make_app: MakeApp) -> None:
    app = await make_app(forwards, hears_out)
    end = await app.start(hears_out)
    begin = await app.start(forwards)
    await waits(end)
    await waits(begin)
    await app.publish("in", 7)
    assert await end.result(10) == (7, "forwards")
    assert await begin.result(10) == 7


@workflow
async def member() -> str:
    await subscribe("__direct__", ChannelMode.DIRECT)
    await join_group("team")
    return str((await receive_direct()).data)


@workflow
async def captain() -> tuple[list[str], int]:
    return await group_members("team"), await publish_to_group("team", "go")


async def test_a_message_to_a_group_reaches_every_member(make_app: MakeApp) -> None:
    app = await make_app(member, captain)
    members = [await app.start(member, id=f"member-{number}") for number in range(3)]
    for handle in members:
        await waits(handle)
    named, count = await (await app.start(captain)).result(10)
    assert (sorted(named), count) == (["member-0", "member-1", "member-2"], 3)
    assert [await handle.result(10) for handle in members] == ["go", "go", "go"]


@workflow
async def expects() -> Event:
    return await wait_event("payment.received", timeout=10)


async def test_an_event_reaches_the_workflow_that_waits_for_its_type(make_app: MakeApp) -> None:
    app = await make_app(expects)
    handle = await app.start(expects)
    await waits(handle)
    await app.publish("payment.received", {"amount": 5}, metadata={"ce_source": "bank", "ce_id": "1"})
    event = await handle.result(10)
    assert (event.type, event.data, event.source, event.id) == ("payment.received", {"amount": 5}, "bank", "1")


@activity
async def announces(name: str) -> str:
    await emit("announced", {"name": name}, event_id=f"event-{name}")
    return name


@workflow
async def announcing(name: str) -> str:
    await emit("started", {"name": name}, event_id=f"started-{name}")
    return await announces(name)


async def test_emitted_events_are_relayed_once_each(make_app: MakeApp) -> None:
    sent: list[OutboxEvent] = []

    async def publisher(event: OutboxEvent) -> None:
        sent.append(event)

    app = await make_app(announcing, outbox=publisher)
    await (await app.start(announcing, "x")).result(10)

    async def both() -> bool:
        return len(sent) >= 2

    await until(both)
    assert [event.event_id for event in sent] == ["started-x", "event-x"]


async def test_an_invalid_event_is_set_aside_and_a_failed_one_tried_again(make_app: MakeApp) -> None:
    tries: dict[str, int] = {}

    async def publisher(event: OutboxEvent) -> None:
        tries[event.event_type] = tries.get(event.event_type, 0) + 1
        if event.event_type == "announced":
            raise InvalidEventError("no such topic")
        if tries[event.event_type] == 1:
            raise ConnectionError("broker away")

    app = await make_app(announcing, outbox=publisher)
    await (await app.start(announcing, "y")).result(10)

    async def settled() -> bool:
        rows = await app.storage.conn().fetch_all("SELECT event_type, status FROM outbox_events ORDER BY event_type")
        return dict(map(tuple, rows)) == {"announced": OutboxStatus.INVALID, "started": OutboxStatus.PUBLISHED}

    await until(settled)
    assert tries == {"announced": 1, "started": 2}


@pytest.mark.parametrize(
    ("retention", "worker", "left"),
    [
        (Retention(events=None), False, 1),
        (None, False, 1),
        (Retention(events=timedelta(days=1)), False, 0),
        (Retention(events=timedelta(days=1)), True, 1),  # it is for the worker's sweeper to delete
    ],
)
async def test_the_relayer_keeps_events_for_as_long_as_it_is_told(
    make_app: MakeApp, storage: SQLStorage, retention: Retention | None, worker: bool, left: int
) -> None:
    await storage.add_outbox_event(OutboxEvent("old", "paid", "shop"))
    await storage.mark_outbox_event_sent("old")
    await storage.conn().execute("UPDATE outbox_events SET published_at = '2020-02-02 00:00:00'")
    sent: list[str] = []

    async def send(event: OutboxEvent) -> None:
        sent.append(event.event_id)

    await make_app(worker=worker, outbox=send, retention=retention)
    await asyncio.sleep(0.3)  # it tidies up when there is nothing to send
    await storage.add_outbox_event(OutboxEvent("new", "paid", "shop"))

    async def went_out() -> bool:
        return sent == ["new"]

    await until(went_out)
    assert await storage.conn().fetch_value("SELECT COUNT(*) FROM outbox_events WHERE event_id = 'old'") == left
