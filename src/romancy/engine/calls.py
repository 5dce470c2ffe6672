"""Calls: what a body does through the storage itself, one transaction with its record, never repeated on replay."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ..serialization import StoredError, encode
from ..storage import (
    ChannelModeConflictError,
    HistoryEvent,
    HistoryEventType,
    InstanceNotFoundError,
    InvalidJSONError,
    InvalidKeyError,
    InvalidStatusTransitionError,
    NotSubscribedError,
    PayloadTooLargeError,
)
from .ambient import current_run
from .steps import Kind

THE_BODYS_FAULT = (
    ChannelModeConflictError,
    InstanceNotFoundError,
    InvalidJSONError,
    InvalidKeyError,
    InvalidStatusTransitionError,
    NotSubscribedError,
    PayloadTooLargeError,
)
"""Errors of the storage that are answers to the body; all others are troubles of the infrastructure."""

Perform = Callable[[HistoryEvent], Awaitable[Any]]


async def call(function: str, arguments: dict[str, Any], perform: Perform, result: str = "null") -> Any:
    """Do something once through the storage; `perform` writes the given record in the same transaction."""
    run = current_run(function)
    step = run.ask(Kind.CALL, function, input_json=encode(arguments, f"an argument of {function}"))

    async def make() -> None:
        data = (
            f'{{"activity_name": "{function}", "result": {result},'
            f' "input": {{"args": [], "kwargs": {step.input_json}}}, "input_hash": "{step.input_hash}"}}'
        )
        record = run.event(step.id, HistoryEventType.ACTIVITY_COMPLETED, data)
        try:
            await perform(record)
        except THE_BODYS_FAULT as error:
            failed = {**msgspec.structs.asdict(StoredError.of(error)), "activity_name": function}
            record = run.event(step.id, HistoryEventType.ACTIVITY_FAILED, encode(failed, "an error"))
            await run.storage.append_history(record, lock=run.lock)
        stored = await run.storage.get_history_event(run.instance_id, step.id)
        run.deliver(stored or record)

    step.perform = make
    return await step.future


async def note(function: str, result: str) -> Any:
    """Record a value that must be the same on every replay."""
    run = current_run(function)
    return await call(function, {}, lambda record: run.storage.append_history(record, lock=run.lock), result)
