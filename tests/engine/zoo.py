"""Ten workflows that together use every feature, and a log of their effects.

Each takes a key that is unique to its run, so that many runs can share a database. `EFFECTS[key]` counts what really
happened; a crash may repeat an effect of a plain activity, and must never lose or reorder one.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from romancy import (
    App,
    ReceiveTimeoutError,
    Retry,
    Workflow,
    activity,
    compensate_with,
    conn,
    emit,
    group_members,
    instance_id,
    join_group,
    leave_group,
    now,
    publish,
    random,
    receive,
    receive_direct,
    recur,
    send_to,
    set_state,
    sleep,
    start_child,
    subscribe,
    unsubscribe,
    uuid4,
    wait_event,
    workflow,
)
from romancy.storage import ChannelMode

EFFECTS: defaultdict[str, Counter[str]] = defaultdict(Counter)


async def undo(key: str, name: str, result: str | None = None) -> None:
    EFFECTS[key][f"undo {name}"] += 1


@activity(retry=Retry(max_attempts=3, initial_sec=0.001), compensate=undo)
async def act(key: str, name: str) -> str:
    EFFECTS[key][name] += 1
    return name


@activity
def act_in_thread(key: str, name: str) -> str:
    EFFECTS[key][name] += 1
    return name


@activity(retry=Retry(max_attempts=4, initial_sec=0.001))
async def flaky(key: str) -> int:
    EFFECTS[key]["flaky"] += 1
    if EFFECTS[key]["flaky"] < 3:
        raise ConnectionError("not yet")
    return 3


@activity(transactional=True)
async def transfer(key: str, amount: int) -> int:
    await conn().execute("INSERT INTO transfers (name, amount) VALUES (:name, :amount)", name=key, amount=amount)
    await emit("transferred", {"amount": amount}, event_id=f"{key}-{amount}")
    return amount


@activity
async def announce(key: str) -> None:
    EFFECTS[key]["announce"] += 1
    await emit("announced", {"key": key}, event_id=f"{key}-announced")


@workflow
async def in_a_row(key: str) -> list[str]:
    return [await act(key, "a"), await act_in_thread(key, "b"), await act(key, "c")]


@workflow
async def side_by_side(key: str) -> list[Any]:
    first = await asyncio.gather(act(key, "a"), act_in_thread(key, "b"), nap(key))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(act(key, f"t{number}")) for number in range(2)]
    return [*first, *(task.result() for task in tasks)]


async def nap(key: str) -> str:
    await sleep(0.01)
    return await act(key, "napped")


@workflow
async def stubborn(key: str) -> int:
    return await flaky(key)


@activity(transactional=True)
async def transfer_back(key: str, amount: int) -> None:
    await conn().execute("INSERT INTO transfers (name, amount) VALUES (:name, :amount)", name=key, amount=-amount)
    await emit("transferred back", {"amount": amount}, event_id=f"{key}-back-{amount}")


@activity(compensate=announce)
async def act_in_public(key: str) -> None:
    EFFECTS[key]["public"] += 1


@workflow
async def undone(key: str) -> None:
    await act(key, "a")
    await compensate_with(undo, key, "by hand")
    await compensate_with(transfer_back, key, 5)
    await act_in_public(key)
    await act(key, "b")
    raise ValueError("on purpose")


@workflow
async def banking(key: str) -> int:
    total = await transfer(key, 1) + await transfer(key, 2)
    await announce(key)
    await emit("done", {}, event_id=f"{key}-done")
    return total


@workflow
async def chance(key: str) -> bool:
    moment, number, chance = await now(), await random(), await uuid4()
    await act(key, "a")
    return moment is not None and 0 <= number < 1 and chance.version == 4


@workflow
async def listening(key: str) -> list[Any]:
    await subscribe(f"{key}-news")
    await subscribe(f"{key}-self", ChannelMode.COMPETING)
    await publish(f"{key}-self", {"n": 2**53 + 1})
    heard = [(await receive(f"{key}-self")).data]
    await publish(f"{key}-news", b"\x00bytes")
    heard.append((await receive(f"{key}-news")).data == b"\x00bytes")
    try:
        heard.append((await receive(f"{key}-news", timeout=0.01)).data)
    except ReceiveTimeoutError:
        heard.append("silence")
    await unsubscribe(f"{key}-news")
    return heard


@workflow
async def sociable(key: str) -> list[Any]:
    await subscribe("__direct__", ChannelMode.DIRECT)
    await join_group(f"{key}-group")
    await send_to(instance_id(), "hello me")
    heard = (await receive_direct()).data
    members = await group_members(f"{key}-group")
    await leave_group(f"{key}-group")
    try:
        async with asyncio.timeout(0.01):
            await wait_event(f"{key}-event")
    except TimeoutError:
        return [heard, len(members), "no event"]
    return [heard, len(members), "event"]


@workflow
async def child(key: str, number: int) -> int:
    await act(key, f"child {number}")
    return number


@workflow
async def family(key: str) -> list[int]:
    children = [await start_child(child, key, number) for number in (1, 2)]
    return [await one.result() for one in children]


@workflow
async def rounds(key: str, left: int = 2) -> str:
    await act(key, f"round {left}")
    await set_state({"left": left})
    if left:
        recur(key, left - 1)
    return "done"


ZOO: list[Workflow[Any, Any]] = [
    in_a_row,
    side_by_side,
    stubborn,
    undone,
    banking,
    chance,
    listening,
    sociable,
    family,
    rounds,
]
ALL = [*ZOO, child]

Prepare = Callable[[App], Awaitable[None]]
