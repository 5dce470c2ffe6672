"""``romancy list``, ``show``, ``cancel`` and ``unpark``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime

import msgspec
from msgspec.structs import replace

from ..storage import (
    CompensationEntry,
    HistoryIterator,
    InstanceNotFoundError,
    ListInstancesOptions,
    PaginationResult,
    SQLStorage,
    WorkflowInstance,
    WorkflowStatus,
)
from ..storage.models import FINISHED, RUNNABLE, WAITING
from ..storage.sql.listing import page_token
from .existing import open_existing
from .printing import escaped
from .telling import Fact, awaited, described, is_parked, leaves_nothing_to_undo, note_on, reason_of, shown

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
    ids = [escaped(instance.instance_id) for instance in page.instances]
    width = max(map(len, ids), default=0)
    for instance_id, instance in zip(ids, page.instances, strict=True):
        print(
            f"{instance_id:<{width}}  {instance.status:<19}  {shown(instance.started_at)}"
            f"  {escaped(instance.workflow_name)}{'  (parked)' if is_parked(instance, now) else ''}"
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
    """An instance, then its steps, then what would be undone."""
    async with open_existing(options.url) as storage:
        instance = await storage.get_instance(options.id)
        if instance is None:
            raise InstanceNotFoundError(options.id)
        cancelled = await storage.get_history_event(options.id, "workflow_cancelled")
        # What it waited for before it ran again may still be registered, but is no longer what keeps it.
        waits = await storage.get_waits(options.id) if instance.status in WAITING else []
        _print_facts(described(instance, await storage.current_time(), payloads=options.payloads))
        _print_facts(reason_of(instance, cancelled))
        _print_facts([awaited(options.id, wait) for wait in waits])
        print()
        left = await _print_history(storage, options.id, payloads=options.payloads)
        if left and instance.status not in FINISHED:
            print()
            _print_facts([("to undo", f"{entry.activity_id} with {entry.activity_name}") for entry in left])
    return 0


def _print_facts(facts: Sequence[Fact]) -> None:
    for name, value in facts:
        print(f"{name:<10} {escaped(value)}")


async def _print_history(storage: SQLStorage, instance_id: str, *, payloads: bool) -> list[CompensationEntry]:
    """Print all steps; the compensations that are left, last first."""
    compensations = {f"compensation:{entry.id}": entry for entry in await storage.get_compensations(instance_id)}
    over: set[str] = set()
    async for event in HistoryIterator(storage, instance_id):
        payload = f"  {event.event_data}" if payloads and event.event_data else ""
        print(f"{shown(event.created_at)}  {escaped(f'{event.event_type:<24}  {event.activity_id}{payload}')}")
        note = note_on(event, compensations)
        if note is not None:
            print(f"{'':19}  {escaped(note)}")
        if leaves_nothing_to_undo(event):
            over.add(event.activity_id)
    return [entry for done, entry in compensations.items() if done not in over and entry.activity_id not in over]


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
