"""An operation that is cut at a statement leaves nothing; one that is cut after its commit leaves all."""

import asyncio

import pytest

from romancy.storage import SQLStorage
from romancy.storage.sql.operation import OPERATIONS
from tests.harness import Harness, contents, empty

from .cutting import Cut, Cutter, Outcome, cut_at
from .scenarios import HARD, SCENARIOS, Scenario


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_cut_leaves_nothing_before_the_commit_and_all_after_it(
    harness: Harness, storage: SQLStorage, name: str
) -> None:
    scenario = SCENARIOS[name]
    await _cut_at_each_statement(harness, storage, scenario)

    undisturbed = await Outcome.of(harness, storage, scenario)
    cutter = Cutter(None)
    left = await Outcome.of(harness, storage, scenario, cutter)
    assert cutter.struck
    left.must_equal(undisturbed)


async def _cut_at_each_statement(harness: Harness, storage: SQLStorage, scenario: Scenario) -> None:
    await scenario.arrange(harness, storage)
    before = await contents(storage)
    number, operation = 1, ""
    while (cutter := await cut_at(storage, number, scenario.act)).struck:
        single = operation in ("", cutter.seen[-1])
        if not single:  # some calls are several operations, one after the other
            before = await contents(storage)
        if len(set(cutter.seen)) == 1:
            # The same in a transaction whose owner goes on and commits.
            async with storage.transaction():
                assert (await cut_at(storage, number, scenario.act)).struck
        assert await contents(storage) == before, f"cut at statement {number}"
        number, operation = number + 1, cutter.seen[-1]
    assert number > 1
    assert await contents(storage) != before


@pytest.mark.databases("sqlite")
async def test_every_operation_that_writes_has_a_scenario(harness: Harness, storage: SQLStorage) -> None:
    seen: set[str] = set()
    for scenario in SCENARIOS.values():
        await empty(storage)
        await scenario.arrange(harness, storage)
        seen.update((await cut_at(storage, 0, scenario.act)).seen)

    assert {name for name, traits in OPERATIONS.items() if not traits.reads} <= seen


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("name", HARD)
async def test_operations_that_share_a_commit_with_a_cut_one_are_not_harmed(
    harness: Harness, storage: SQLStorage, name: str
) -> None:
    await SCENARIOS[name].arrange(harness, storage)
    before = await contents(storage)
    number, struck = 0, True
    while struck:
        number += 1
        cutter = Cutter(number, spare="_acquire_system_lock")
        neighbours = [storage.try_acquire_system_lock(f"{number}-{other}", "w", 60) for other in range(4)]
        with cutter.at(storage):
            *won, answer = await asyncio.gather(*neighbours, SCENARIOS[name].act(storage), return_exceptions=True)
        assert won == [True] * 4
        struck = cutter.struck
        if struck:
            assert isinstance(answer, Cut)
            left = await contents(storage)
            assert len(left.pop("system_locks")) == 4 * number
            assert left == {table: rows for table, rows in before.items() if table != "system_locks"}
    assert number > 1
