"""Flushes that break in the middle: each caller learns what became of its own write, and nothing is lost or doubled."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from romancy.storage import (
    Appended,
    Lock,
    OutboxEvent,
    OutboxEventExistsError,
    OutcomeUnknownError,
    SQLStorage,
    WorkflowInstance,
    open_storage,
)
from romancy.storage.sql.operation import Touches
from romancy.storage.sql.runners.postgres import PostgresConnection
from romancy.storage.sql.statement import Query
from tests.faults.proxy import Proxy, proxied
from tests.harness import Harness, history_of, step

pytestmark = pytest.mark.databases("postgres", "mariadb", "mysql")

CUTS = pytest.mark.parametrize("cut", ["cut_when_sent", "cut_when_answered"])
MANY = 12


@dataclass
class Company:
    """Owners of instances who write at the same time, behind a proxy; and a storage that sees the truth."""

    proxy: Proxy
    behind: SQLStorage
    truth: SQLStorage
    locks: list[Lock]
    commit: bytes

    async def append(self, name: str) -> list[Appended | BaseException]:
        return await asyncio.gather(
            *(self.behind.append_history(step(lock.instance_id, name), lock=lock) for lock in self.locks),
            return_exceptions=True,
        )


@pytest.fixture
async def company(harness: Harness, storage: SQLStorage) -> AsyncIterator[Company]:
    locks = [await harness.locked(storage) for _ in range(MANY)]
    async with proxied(harness.url) as proxy, open_storage(proxy.url) as behind:
        commit = b"COMMIT\0" if harness.name == "postgres" else b"\3COMMIT"
        company = Company(proxy, behind, storage, locks, commit)
        await company.append("first:1")  # both lanes have their connections
        yield company


@CUTS
async def test_fenced_steps_are_recorded_once_when_the_commit_is_cut(company: Company, cut: str) -> None:
    setattr(company.proxy, cut, company.commit)
    # Steps alone would be one statement, and commit with it.
    others = [asyncio.create_task(company.behind.publish_to_channel(f"news-{n}", "{}")) for n in range(MANY)]

    answers = await company.append("charge:1")

    await asyncio.wait(others)
    assert company.proxy.cuts == 1
    for lock, answer in zip(company.locks, answers, strict=True):
        recorded = await history_of(company.truth, lock.instance_id)
        assert [event.activity_id for event in recorded] == ["first:1", "charge:1"]
        assert isinstance(answer, Appended)
        assert answer.id == recorded[1].id


@CUTS
async def test_what_cannot_be_repeated_says_that_its_outcome_is_unknown(company: Company, cut: str) -> None:
    setattr(company.proxy, cut, company.commit)
    names = [f"new-{number}" for number in range(80)]  # enough for both lanes

    answers = await asyncio.gather(
        *(company.behind.create_instance(WorkflowInstance(name, "order")) for name in names), return_exceptions=True
    )

    assert company.proxy.cuts == 1
    unknown = [name for name, answer in zip(names, answers, strict=True) if isinstance(answer, OutcomeUnknownError)]
    created = [name for name in names if await company.truth.get_instance(name) is not None]
    assert 0 < len(unknown) < len(names)  # the other lane's flush went through
    assert all(answer is None for name, answer in zip(names, answers, strict=True) if name not in unknown)
    assert set(created) == set(names) if cut == "cut_when_answered" else set(created) == set(names) - set(unknown)


@CUTS
async def test_steps_that_commit_with_one_statement_are_recorded_once_when_it_is_cut(
    company: Company, cut: str
) -> None:
    setattr(company.proxy, cut, company.locks[0].instance_id.encode())

    answers = await company.append("charge:1")

    assert company.proxy.cuts == 1
    for lock, answer in zip(company.locks, answers, strict=True):
        recorded = await history_of(company.truth, lock.instance_id)
        assert [event.activity_id for event in recorded] == ["first:1", "charge:1"]
        assert isinstance(answer, Appended)
        assert answer.id == recorded[1].id


async def test_a_flush_that_is_cut_before_its_commit_is_done_all_the_same(company: Company) -> None:
    company.proxy.cut_when_sent = company.locks[0].instance_id.encode()
    others = [asyncio.create_task(company.behind.publish_to_channel(f"news-{n}", "{}")) for n in range(MANY)]

    answers = await company.append("charge:1")

    await asyncio.gather(*others)
    assert company.proxy.cuts == 1
    assert all(isinstance(answer, Appended) for answer in answers)
    counts = [await company.truth.get_history_count(lock.instance_id) for lock in company.locks]
    assert counts == [2] * MANY


async def test_an_operation_that_fails_after_writing_leaves_nothing_and_harms_nobody(
    harness: Harness, storage: SQLStorage
) -> None:
    locks = [await harness.locked(storage) for _ in range(MANY)]
    event = OutboxEvent("event-1", "paid", "shop", event_data="{}")
    await storage.add_outbox_event(event)
    emitted = step(locks[0].instance_id, "emit:1")

    answers = await asyncio.gather(
        storage.add_outbox_event(event, lock=locks[0], record=emitted),  # records its step, and then finds the event
        *(storage.append_history(step(lock.instance_id), lock=lock) for lock in locks[1:]),
        return_exceptions=True,
    )

    assert isinstance(answers[0], OutboxEventExistsError)
    assert await history_of(storage, locks[0].instance_id) == []
    assert all(isinstance(answer, Appended) for answer in answers[1:])


@pytest.mark.parametrize("turns", [1, 2])
async def test_flushes_that_are_cancelled_before_they_begin_keep_nobody_waiting(
    harness: Harness, storage: SQLStorage, turns: int
) -> None:
    lock = await harness.locked(storage)
    await asyncio.sleep(0.2)  # until nobody looks after flushes any more
    flusher = storage.runner.flusher  # type: ignore[attr-defined]  # all servers have one
    callers = [
        asyncio.create_task(storage.append_history(step(lock.instance_id, f"charge:{number}"), lock=lock))
        for number in range(40)
    ]
    for _ in range(turns):  # after one of them a flush is about to depart, after two the second one is
        await asyncio.sleep(0)
    about_to_begin = [
        task for task in flusher._tasks if inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_CREATED
    ]
    for task in about_to_begin:
        task.cancel()

    async with asyncio.timeout(10):
        await asyncio.gather(*callers)
    assert about_to_begin
    assert len(await history_of(storage, lock.instance_id)) == 40
    assert flusher._flights == flusher._busy == []
    await storage.append_history(step(lock.instance_id, "after:1"), lock=lock)


async def test_a_soloist_is_served_in_its_own_task_and_others_keep_clear_of_it(
    harness: Harness, storage: SQLStorage
) -> None:
    lock = await harness.locked(storage)
    for number in range(2):
        await storage.append_history(step(lock.instance_id, f"charge:{number}"), lock=lock)
    flusher = storage.runner.flusher  # type: ignore[attr-defined]
    soloist, served_in = asyncio.current_task(), []
    storage.runner.probe = lambda point, name: served_in.append(asyncio.current_task())
    other = asyncio.create_task(storage.append_history(step(lock.instance_id, "ship:1"), lock=lock))

    mine = await storage.append_history(step(lock.instance_id, "ship:1"), lock=lock)

    assert served_in[0] is soloist
    assert not mine.already_recorded
    assert await other == Appended(mine.id, already_recorded=True)
    assert flusher._flights == flusher._busy == []


async def test_an_operation_that_its_event_loop_has_left_behind_is_forgotten_once(storage: SQLStorage) -> None:
    flusher = storage.runner.flusher  # type: ignore[attr-defined]
    left_behind = flusher.keeping_clear(Touches(changes=("order-1",)))
    left_behind.__enter__()
    flusher._forget()  # as when the storage is used in another event loop
    with flusher.keeping_clear(Touches(changes=("order-2",))):
        left_behind.__exit__(None, None, None)  # as when Python destroys what never went on
        assert [crowd.changes for crowd in flusher._busy] == [{"order-2"}]
    assert flusher._busy == []


async def test_those_who_come_together_after_a_soloist_go_together(harness: Harness, storage: SQLStorage) -> None:
    locks = [await harness.locked(storage) for _ in range(MANY)]
    served_in: list[asyncio.Task[None] | None] = []
    storage.runner.probe = lambda point, name: served_in.append(asyncio.current_task())

    await asyncio.gather(*(storage.append_history(step(lock.instance_id), lock=lock) for lock in locks))

    assert len(set(served_in)) == 1


@CUTS
async def test_a_soloists_step_is_recorded_once_when_it_is_cut(company: Company, cut: str) -> None:
    lock = company.locks[0]
    for number in range(2):
        await company.behind.append_history(step(lock.instance_id, f"alone:{number}"), lock=lock)
    assert company.behind.runner.flusher.plays_solo(Touches())  # type: ignore[attr-defined]
    setattr(company.proxy, cut, lock.instance_id.encode())

    appended = await company.behind.append_history(step(lock.instance_id, "charge:1"), lock=lock)

    assert company.proxy.cuts == 1
    recorded = await history_of(company.truth, lock.instance_id)
    assert [event.activity_id for event in recorded] == ["first:1", "alone:0", "alone:1", "charge:1"]
    assert appended.id == recorded[-1].id


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The instances of each flush on PostgreSQL; the first two come back at the same moment."""
    flights: list[set[str]] = []
    both_are_back = asyncio.Event()
    write_at_once = PostgresConnection.write_at_once

    async def together(self: PostgresConnection, queries: Sequence[Query[Any]]) -> list[Any]:
        answers = await write_at_once(self, queries)
        flights.append({query.params["instance_id"] for query in queries})
        if len(flights) == 2:
            both_are_back.set()
        await both_are_back.wait()
        return answers

    monkeypatch.setattr(PostgresConnection, "write_at_once", together)
    return flights


@pytest.mark.databases("postgres")
async def test_callers_of_one_flush_ask_for_more_before_those_of_the_next_are_answered(
    harness: Harness, storage: SQLStorage, flights: list[set[str]]
) -> None:
    """So that we work for one while the server is at the other, and do not wait for both."""
    locks = [await harness.locked(storage) for _ in range(32)]
    diary: list[tuple[str, str]] = []

    async def two_steps(lock: Lock) -> None:
        await storage.append_history(step(lock.instance_id, "first:1"), lock=lock)
        diary.append(("answered", lock.instance_id))
        await asyncio.sleep(0)  # as who has to start something
        diary.append(("asks", lock.instance_id))
        await storage.append_history(step(lock.instance_id, "second:1"), lock=lock)

    await asyncio.gather(*map(two_steps, locks))

    earlier = next(flight for flight in flights[:2] if diary[0][1] in flight)
    assert [len(flight) for flight in flights[:2]] == [16, 16]
    assert {instance_id for _, instance_id in diary[:32]} == earlier
    assert [what for what, _ in diary[:32]] == ["answered"] * 16 + ["asks"] * 16
    for lock in locks:
        assert await storage.get_history_count(lock.instance_id) == 2


@pytest.mark.databases("postgres")
async def test_who_asks_for_no_more_keeps_nobody_waiting(
    harness: Harness, storage: SQLStorage, flights: list[set[str]]
) -> None:
    locks = [await harness.locked(storage) for _ in range(32)]

    async def one_step(lock: Lock) -> None:
        await storage.append_history(step(lock.instance_id, "only:1"), lock=lock)

    async with asyncio.timeout(10):
        await asyncio.gather(*map(one_step, locks))

    assert [len(flight) for flight in flights] == [16, 16]
