"""Polls, pages and retention cost the same in a database with 100,000 finished instances as in one with 1,000.

How much a statement reads is counted by the database itself; that it goes through the index made for it is read in its
plan.
"""

import re

import pytest

from romancy.storage import ListInstancesOptions, SQLStorage

from .asking import OTHERS, PAGES, POLLS, SEARCHES, Ask, further_back
from .conftest import Storages
from .filling import DUE
from .looking import LOOKERS, Look, statements_sent


@pytest.mark.parametrize("name", [*POLLS, *OTHERS, *SEARCHES])
async def test_its_cost_does_not_grow(storages: Storages, name: str) -> None:
    ask = POLLS[name][0] if name in POLLS else (OTHERS | SEARCHES)[name]
    assert_no_growth(*[await looks(storage, ask) for storage in storages])


async def test_settling_channels_reads_those_that_are_unsettled(storages: Storages) -> None:
    for storage in storages:
        for name, look in (await looks(storage, POLLS["deliverable"][0])).items():
            if "settle" in name:
                assert look.read < 20 * DUE, f"{name} reads {look.read}:\n{look.plan}"


@pytest.mark.parametrize(("ask", "index"), POLLS.values(), ids=POLLS)
async def test_a_poll_goes_through_its_index(storages: Storages, ask: Ask, index: str) -> None:
    plans = "\n".join(look.plan for look in (await looks(storages.large, ask)).values())
    assert re.search(rf"\b{index}\b", plans), plans


@pytest.mark.parametrize(("options", "index"), PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("late", [False, True], ids=["first", "late"])
async def test_a_page_is_read_from_where_it_starts(
    storages: Storages, options: ListInstancesOptions, index: str, late: bool
) -> None:
    found = []
    for storage in storages:
        wanted = await further_back(storage, options) if late else options
        found.append(await looks(storage, lambda storage, wanted=wanted: storage.list_instances(wanted)))
    large, small = found
    assert_no_growth(large, small)
    assert re.search(rf"\b{index}\b", list(large.values())[-1].plan), large


async def looks(storage: SQLStorage, ask: Ask) -> dict[str, Look]:
    """What the database does for each statement of an operation, of which nothing remains."""
    looker = LOOKERS[storage.runner.driver.driver_name()](storage)
    await storage.begin_transaction()
    with statements_sent() as statements:
        await ask(storage)
    await storage.rollback_transaction()
    return {f"{number}: {statement.name}": await looker.look(statement) for number, statement in enumerate(statements)}


def assert_no_growth(large: dict[str, Look], small: dict[str, Look]) -> None:
    """An index may be a level deeper and a plan another one, but not more."""
    assert large.keys() == small.keys()
    for name, look in large.items():
        little = small[name].read
        assert look.read <= 2 * little + 100, f"{name} reads {look.read}, not {little}:\n{look.plan}"
