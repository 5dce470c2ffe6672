"""What must not take longer because much is over: every poll, every page that an index holds, and retention."""

from collections.abc import Awaitable, Callable
from datetime import timedelta

import msgspec

from romancy.storage import ANY, ChannelMessage, ListInstancesOptions, SQLStorage, WorkflowStatus

Ask = Callable[[SQLStorage], Awaitable[object]]

DAY = timedelta(days=1)
DECLARED = ("customer", "order.number")
"""The input paths that are indexed."""


def page(**options: object) -> Ask:
    """A page of these options."""
    return lambda storage: storage.list_instances(ListInstancesOptions(**options))  # type: ignore[arg-type]


def late(ask_for: ListInstancesOptions) -> Ask:
    """A page far back."""

    async def ask(storage: SQLStorage) -> object:
        return await storage.list_instances(await further_back(storage, ask_for))

    return ask


async def further_back(storage: SQLStorage, options: ListInstancesOptions) -> ListInstancesOptions:
    """The page behind an instance that is among the oldest of one database, and halfway back in the other."""
    last = await storage.get_instance("i-finished-10000400")
    assert last is not None
    assert last.started_at is not None
    return msgspec.structs.replace(options, page_token=f"{last.started_at.isoformat()}||{last.instance_id}")


async def _between(storage: SQLStorage) -> object:
    middle = await storage.get_instance("i-finished-10000300")
    assert middle is not None
    assert middle.started_at is not None
    options = ListInstancesOptions(started_after=middle.started_at, started_before=middle.started_at + DAY)
    return await storage.list_instances(options)


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
    "stale-locks": (lambda storage: storage.cleanup_stale_locks(60), "romancy_instances_held"),
    "timers": (lambda storage: storage.find_expired_timers(), "romancy_timers_due"),
    "timeouts": (lambda storage: storage.find_expired_channel_subscriptions(), "romancy_waits_timeout"),
    "deliverable": (lambda storage: storage.find_deliverable_subscriptions(), "romancy_channels_unsettled"),
    "outbox": (lambda storage: storage.get_pending_outbox_events(), "romancy_outbox_due"),
    "waiting-on-a-channel": (
        lambda storage: storage.get_channel_subscribers_waiting("channel-10000001"),
        "romancy_(waits|subscriptions)_channel",
    ),
}

OTHERS: dict[str, Ask] = {
    "an-instance": lambda storage: storage.get_instance("i-finished-10000300"),
    "history": lambda storage: storage.get_history_paginated("i-finished-10000300", 0, 100),
    "replay": lambda storage: storage.get_history_to_replay("i-finished-10000300", 0, 100),
    "pending-messages": lambda storage: storage.get_pending_channel_messages("channel-10000001"),
    "deliver": lambda storage: storage.deliver_channel_message_with_lock(
        "i-receiving-10000001", "channel-10000001", ChannelMessage("channel-10000001"), "worker", 60
    ),
    "delete-instances": lambda storage: storage.delete_finished_instances(DAY, 10),
    "delete-events": lambda storage: storage.cleanup_old_outbox_events(DAY, limit=10),
    "delete-messages": lambda storage: storage.cleanup_old_channel_messages(DAY, limit=10),
    "delete-seen-events": lambda storage: storage.cleanup_seen_events(DAY, limit=10),
    "delete-system-locks": lambda storage: storage.cleanup_expired_system_locks(),
}

RUNNING, COMPLETED = WorkflowStatus.RUNNING, WorkflowStatus.COMPLETED
CANCELLED = WorkflowStatus.CANCELLED

PAGES: dict[str, tuple[ListInstancesOptions, str]] = {
    "newest": (ListInstancesOptions(), "romancy_instances_newest"),
    "running": (ListInstancesOptions(status_filter=RUNNING), "romancy_instances_by_status"),
    "completed": (ListInstancesOptions(status_filter=COMPLETED), "romancy_instances_by_status"),
    "cancelled": (ListInstancesOptions(status_filter=CANCELLED), "romancy_instances_by_status"),
    "frequent-name": (ListInstancesOptions(workflow_name_filter="order"), "romancy_instances_by_name"),
    "rare-name": (ListInstancesOptions(workflow_name_filter="AUD"), "romancy_instances_by_name"),
    "several-names": (ListInstancesOptions(workflow_name_filter="i"), "romancy_instances_by_name"),
    "completed-of-a-name": (
        ListInstancesOptions(workflow_name_filter="audit", status_filter=COMPLETED),
        "romancy_instances_by_name",
    ),
}

SEARCHES: dict[str, Ask] = {
    "all-frameworks": lambda storage: storage.list_instances(framework=ANY),
    "all-frameworks-cancelled": lambda storage: storage.list_instances(
        ListInstancesOptions(status_filter=CANCELLED), framework=ANY
    ),
    "between-two-times": _between,
    "exact-id": page(instance_id_prefix="i-finished-10000300"),
    "few-ids": page(instance_id_prefix="i-finished-1000030"),
    "many-ids": page(instance_id_prefix="i-"),
    "input-text": page(input_filters={"customer": "c-3"}),
    "input-number": page(input_filters={"order.number": 123}),
    "input-of-nobody": page(input_filters={"customer": "nobody"}),
    "two-inputs": page(input_filters={"customer": "c-3", "order.number": 123}),
}
