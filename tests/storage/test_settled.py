"""Work that is not cut in half when its caller is cancelled: in a task of its own, or in the caller's."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from romancy.storage.sql.runners.settled import settled, unbroken

Whole = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.parametrize("whole", [settled, unbroken])


class Work:
    """Two waits, and a note of how far it came."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[str] = loop.create_future()
        self.second: asyncio.Future[str] = loop.create_future()
        self.done: list[str] = []

    async def run(self) -> str:
        self.done.append(await self.first)
        await asyncio.sleep(0)
        self.done.append(await self.second)
        return "won"

    def end(self) -> None:
        self.first.set_result("first")
        self.second.set_result("second")


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def begun(whole: Whole, *args: Any) -> asyncio.Task[Any]:
    async def caller() -> Any:
        return await whole(*args)

    return asyncio.ensure_future(caller())


async def test_it_answers_with_the_result(whole: Whole) -> None:
    work = Work()
    work.end()

    assert await whole(work.run()) == "won"


async def test_it_raises_what_the_work_raises(whole: Whole) -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        await whole(fails())


async def test_the_work_sees_the_error_of_what_it_waits_for(whole: Whole) -> None:
    work = Work()
    work.second.set_result("second")
    work.first.set_exception(ConnectionError("gone"))

    with pytest.raises(ConnectionError):
        await whole(work.run())
    assert work.done == []


async def test_a_cancelled_caller_is_told_when_the_work_is_done(whole: Whole) -> None:
    work = Work()
    caller = begun(whole, work.run())
    await turns()

    caller.cancel()
    await turns()
    caller.cancel()
    await turns()
    assert not caller.done()

    work.end()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.done == ["first", "second"]


async def test_what_a_cancelled_caller_has_won_is_given_back(whole: Whole) -> None:
    work = Work()
    given_back: list[str] = []

    async def undo(result: str) -> None:
        await asyncio.sleep(0)
        given_back.append(result)

    caller = begun(whole, work.run(), undo)
    await turns()
    caller.cancel()
    await turns()
    work.end()
    await turns(3)
    caller.cancel()  # while it is being given back

    with pytest.raises(asyncio.CancelledError):
        await caller
    assert given_back == ["won"]


async def test_nothing_is_given_back_by_who_was_not_cancelled(whole: Whole) -> None:
    work = Work()
    work.end()

    def undo(result: str) -> Coroutine[Any, Any, None]:
        raise AssertionError("it is the caller's")

    assert await whole(work.run(), undo) == "won"


async def test_a_cancelled_caller_hears_of_no_other_error(whole: Whole) -> None:
    work = Work()
    caller = begun(whole, work.run())
    await turns()
    caller.cancel()
    await turns()
    work.first.set_exception(ConnectionError("gone"))

    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_a_caller_runs_out_of_time_when_the_outcome_is_known(whole: Whole) -> None:
    work = Work()
    asyncio.get_running_loop().call_later(0.05, work.end)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await whole(work.run())
    assert work.done == ["first", "second"]


async def test_work_may_meet_what_somebody_else_has_cancelled(whole: Whole) -> None:
    work = Work()

    async def copes() -> str:
        try:
            return await work.run()
        except asyncio.CancelledError:
            return "went without"

    caller = begun(whole, copes())
    await turns()
    work.first.cancel()

    assert await caller == "went without"
