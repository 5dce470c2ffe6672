"""``romancy list``, ``show``, ``cancel`` and ``unpark``"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime

import msgspec
from msgspec.structs import replace

from ..errors import NonDeterminismError
from ..serialization import StoredError
from ..storage import (
    HistoryEvent,
    HistoryIterator,
    InstanceNotFoundError,
    ListInstancesOptions,
    PaginationResult,
    SQLStorage,
    WorkflowInstance,
    WorkflowStatus,
)
from ..storage.models import RUNNABLE
from ..storage.sql.listing import page_token
from .existing import open_existing

_PAYLOADS = ("input_data", "output_data")
_PAGE = 1000
_MOST_LOOKED_AT = 100_000
"""So many instances of a status are searched for parked ones."""


async def list_them(options: argparse.Namespace) -> int:
    """One line per instance, newest first."""
    wanted = ListInstancesOptions(
        limit=options.limit,
        status_filter=WorkflowStatus(options.status) if options.status else None,
        workflow_name_filter=options.workflow,
        instance_id_filter=options.id,
    )
    async with open_existing(options.url) as storage:
        now = await storage.current_time()
        page = await (parked(storage, wanted, now) if options.parked else storage.list_instances(wanted))
    if options.json:
        for instance in page.instances:
            listed = msgspec.structs.asdict(instance)
            print(msgspec.json.encode({name: listed[name] for name in listed if name not in _PAYLOADS}).decode())
        return 0
    width = max((len(instance.instance_id) for instance in page.instances), default=0)
    for instance in page.instances:
        print(
            f"{instance.instance_id:<{width}}  {instance.status:<19}  {shown(instance.started_at)}"
            f"  {instance.workflow_name}{'  (parked)' if is_parked(instance, now) else ''}"
        )
    if page.has_more:
        print(f"hint: there are more; --limit shows more than {options.limit}", file=sys.stderr)
    return 0


async def parked(storage: SQLStorage, wanted: ListInstancesOptions, now: datetime) -> PaginationResult:
    """The newest that are parked. No index knows them, but workers park what runs or compensates only."""
    found: list[WorkflowInstance] = []
    for status in RUNNABLE if wanted.status_filter is None else (wanted.status_filter,):
        found += await _parked_of(storage, replace(wanted, status_filter=status), now)
    found.sort(key=page_token, reverse=True)
    return PaginationResult(found[: wanted.limit], has_more=len(found) > wanted.limit)


async def _parked_of(storage: SQLStorage, wanted: ListInstancesOptions, now: datetime) -> list[WorkflowInstance]:
    """The newest of one status that are parked, one more than wanted at most."""
    found: list[WorkflowInstance] = []
    looked_at = 0
    at = replace(wanted, limit=_PAGE)
    while looked_at < _MOST_LOOKED_AT:
        page = await storage.list_instances(at)
        found += [instance for instance in page.instances if is_parked(instance, now)]
        if not page.has_more or len(found) > wanted.limit:
            return found[: wanted.limit + 1]
        looked_at += len(page.instances)
        at = replace(at, page_token=page.next_page_token)
    print(
        f"hint: only the newest {looked_at:,} that are {wanted.status_filter} were looked at; --workflow narrows them",
        file=sys.stderr,
    )
    return found


async def show(options: argparse.Namespace) -> int:
    """An instance, then its steps."""
    async with open_existing(options.url) as storage:
        instance = await storage.get_instance(options.id)
        if instance is None:
            raise InstanceNotFoundError(options.id)
        cancelled = await storage.get_history_event(options.id, "workflow_cancelled")
        facts = described(instance, await storage.current_time(), payloads=options.payloads)
        for name, value in [*facts, *reason_of(instance, cancelled)]:
            print(f"{name:<10} {value}")
        print()
        async for event in HistoryIterator(storage, options.id):
            payload = f"  {event.event_data}" if options.payloads and event.event_data else ""
            print(f"{shown(event.created_at)}  {event.event_type:<24}  {event.activity_id}{payload}")
    return 0


async def cancel(options: argparse.Namespace) -> int:
    """Cancel, compensations included."""
    async with open_existing(options.url) as storage:
        await storage.cancel_instance(options.id, options.reason, compensate=True)
    print(f"{options.id} is being cancelled; a worker undoes what it did", file=sys.stderr)
    return 0


async def unpark(options: argparse.Namespace) -> int:
    """Let workers see the instance again."""
    async with open_existing(options.url) as storage:
        was_parked = await storage.unpark(options.id)
        if not was_parked and await storage.get_instance(options.id) is None:
            raise InstanceNotFoundError(options.id)
    print(f"{options.id} {'can be picked up again' if was_parked else 'was not parked'}", file=sys.stderr)
    return 0 if was_parked else 1


def is_parked(instance: WorkflowInstance, now: datetime) -> bool:
    """Whether no worker will pick the instance up for the time being."""
    return instance.parked_until is not None and instance.parked_until > now


def described(instance: WorkflowInstance, now: datetime, *, payloads: bool) -> list[tuple[str, str]]:
    """The facts worth a line."""
    facts = [
        ("id", instance.instance_id),
        ("workflow", instance.workflow_name),
        ("status", str(instance.status)),
        ("started", shown(instance.started_at)),
        ("updated", shown(instance.updated_at)),
    ]
    if instance.locked_by:
        facts.append(("worker", f"{instance.locked_by} until {shown(instance.lock_expires_at)}"))
    if is_parked(instance, now):
        for_good = instance.parked_until is not None and instance.parked_until.year == 9999
        until = "it is unparked" if for_good else shown(instance.parked_until)
        if for_good and (instance.parked_reason or "").startswith(NonDeterminismError.__name__):
            until = "a worker has other code for it"
        facts.append(("parked", f"until {until}: {instance.parked_reason}"))
    if payloads:
        facts += [("input", str(instance.input_data)), ("output", str(instance.output_data))]
    return facts


def reason_of(instance: WorkflowInstance, cancelled: HistoryEvent | None) -> list[tuple[str, str]]:
    """Why an instance has ended other than well, as far as it is told in our words."""
    try:
        if instance.status is WorkflowStatus.FAILED:
            error = msgspec.json.decode(instance.output_data or "", type=StoredError)
            return [("failed", f"{error.error_type}: {error.error_message}")]
        if cancelled is not None:
            return [("cancelled", msgspec.json.decode(cancelled.event_data or "", type=_Cancelled).reason)]
    except msgspec.MsgspecError:
        pass  # another framework's words
    return []


class _Cancelled(msgspec.Struct):
    reason: str


def shown(moment: datetime | None) -> str:
    """A moment, to the second, UTC."""
    return "-" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"
