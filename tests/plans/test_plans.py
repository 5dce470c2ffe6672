"""Polls, pages and retention cost the same in a database with 100,000 finished instances as in one with 1,000.

How much a statement reads is counted by the database itself; that it goes through the index made for it is read in its
plan.
"""

import re
from collections.abc import Awaitable, Callable
from datetime import timedelta

import msgspec
import pytest

from romancy.storage import ChannelMessage, ListInstancesOptions, SQLStorage, WorkflowStatus

from .conftest import Storages
from .filling import RUNNING, WAITING
from .looking import LOOKERS, Look, statements_sent

Ask = Callable[[SQLStorage], Awaitable[object]]

DAY = timedelta(days=1)
UNFINISHED = 3 * RUNNING + 2 * WAITING

# What each poll asks for, and the index that takes it there.
POLLS: dict[str, tuple[Ask, str]] = {
    "resumable": (lambda storage: storage.find_resumable_workflows(), "romancy_instances_runnable"),
    "resumable-of-a-name": (
        lambda storage: storage.find_resumable_workflows(workflow_names=["order"], owner_service=""),
        "romancy_instances_runnable",
    ),
    "work": (
        lambda storage: storage.look_for_work(2.0, workflow_names=["order"]),
        "romancy_instances_(by_status|runnable)",
    ),
    "claimable": (lambda storage: storage.claim_resumable_workflows("worker", 60, 10), "romancy_instances_runnable"),
    "stale-locks": (lambda storage: storage.cleanup_stale_locks(60), "romancy_instances_(by_status|runnable)"),
    "timers": (lambda storage: storage.find_expired_timers(), "romancy_timers_due"),
    "timeouts": (lambda storage: storage.find_expired_channel_subscriptions(), "romancy_waits_timeout"),
    "deliverable": (lambda storage: storage.find_deliverable_subscriptions(), "romancy_channels_unsettled"),
    "outbox": (lambda storage: storage.get_pending_outbox_events(), "romancy_outbox_due"),
}

OTHERS: dict[str, Ask] = {
    "deliver": lambda storage: storage.deliver_channel_message_with_lock(
        "receiving-1000001", "channel-1000001", ChannelMessage("channel-1000001"), "worker", 60
    ),
    "delete-instances": lambda storage: storage.delete_finished_instances(DAY, 10),
    "delete-events": lambda storage: storage.cleanup_old_outbox_events(DAY, limit=10),
}

GROWING = {"stale-locks"}
"""It looks at all that is unfinished: who holds a lock is in no index, which every acquisition would have to write."""

PAGES = {
    "newest": (ListInstancesOptions(), "romancy_instances_newest"),
    "running": (ListInstancesOptions(status_filter=WorkflowStatus.RUNNING), "romancy_instances_by_status"),
    "completed": (ListInstancesOptions(status_filter=WorkflowStatus.COMPLETED), "romancy_instances_by_status"),
    "cancelled": (ListInstancesOptions(status_filter=WorkflowStatus.CANCELLED), "romancy_instances_by_status"),
}


@pytest.mark.parametrize("name", [name for name in [*POLLS, *OTHERS] if name not in GROWING])
async def test_its_cost_does_not_grow(storages: Storages, name: str) -> None:
    ask = OTHERS[name] if name in OTHERS else POLLS[name][0]
    assert_no_growth(*[await looks(storage, ask) for storage in storages])


async def test_finding_stale_locks_reads_no_more_than_what_is_unfinished(storages: Storages) -> None:
    for name, look in (await looks(storages.large, POLLS["stale-locks"][0])).items():
        assert look.read < 2 * UNFINISHED, f"{name} reads {look.read}:\n{look.plan}"


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
    assert all(re.search(rf"\b{index}\b", look.plan) for look in large.values()), large


async def further_back(storage: SQLStorage, options: ListInstancesOptions) -> ListInstancesOptions:
    """The page behind an instance that is among the oldest of one database, and halfway back in the other."""
    last = await storage.get_instance("finished-1000400")
    assert last is not None
    assert last.started_at is not None
    return msgspec.structs.replace(options, page_token=f"{last.started_at.isoformat()}||{last.instance_id}")


async def looks(storage: SQLStorage, ask: Ask) -> dict[str, Look]:
    """What the database does for each statement of an operation, of which nothing remains."""
    looker = LOOKERS[storage.runner.driver.driver_name()](storage)
    await storage.begin_transaction()
    with statements_sent() as statements:
        await ask(storage)
    await storage.rollback_transaction()
    return {statement.name: await looker.look(statement) for statement in statements}


def assert_no_growth(large: dict[str, Look], small: dict[str, Look]) -> None:
    """An index may be a level deeper and a plan another one, but not more."""
    assert large.keys() == small.keys()
    for name, look in large.items():
        little = small[name].read
        assert look.read <= 2 * little + 100, f"{name} reads {look.read}, not {little}:\n{look.plan}"
