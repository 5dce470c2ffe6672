"""Calls: what a body does through the storage itself, one transaction with its record, never repeated on replay."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ..errors import WorkflowMismatchError
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
    OutboxEventExistsError,
    PayloadTooLargeError,
)
from .ambient import current_run
from .run import UNSEEN, Run
from .steps import Kind, Step, recorded_input

THE_BODYS_FAULT = (
    ChannelModeConflictError,
    InstanceNotFoundError,
    InvalidJSONError,
    InvalidKeyError,
    InvalidStatusTransitionError,
    NotSubscribedError,
    OutboxEventExistsError,
    PayloadTooLargeError,
    WorkflowMismatchError,
)
"""Errors that are answers to the body; all others are troubles of the infrastructure."""

Record = Callable[[str], HistoryEvent]
Perform = Callable[[Record], Awaitable[Any]]


async def call(function: str, arguments: dict[str, Any], perform: Perform) -> Any:
    """Do something once through the storage.

    `perform` is given a function that makes the step's record of a result (JSON text), and writes that record in the
    same transaction as the effect.
    """
    run = current_run(function)
    input_json = encode(arguments, f"an argument of {function}")
    step_id = run.next_step_id(function)
    result = run.replayed(step_id, function, input_json, msgspec.json.decode)
    if result is not UNSEEN:
        return result
    step = run.ask(Kind.CALL, function, step_id, input_json=input_json)

    def record(result: str) -> HistoryEvent:
        data = f'{{"activity_name": "{function}", "result": {result}, "input": {recorded_input(input_json)}}}'
        return run.event(step.id, HistoryEventType.ACTIVITY_COMPLETED, data)

    async def make(run: Run, step: Step) -> None:
        with run.watch(step) as watched:
            try:
                await perform(record)
            except THE_BODYS_FAULT as error:
                watched.failed(error)
                failed = {**msgspec.structs.asdict(StoredError.of(error)), "activity_name": function}
                failure = run.event(step.id, HistoryEventType.ACTIVITY_FAILED, encode(failed, "an error"))
                await run.storage.append_history(failure, lock=run.lock)
        recorded = await run.storage.get_history_event(run.instance_id, step.id)
        assert recorded is not None, "what was just recorded can be read"
        run.deliver(recorded)

    step.perform = make
    return await step.future


async def note(function: str, result: str) -> Any:
    """Record a value that must be the same on every replay."""
    run = current_run(function)
    return await call(function, {}, lambda record: run.storage.append_history(record(result), lock=run.lock))
