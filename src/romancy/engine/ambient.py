"""What surrounds running code: the run whose body it is, or the activity it is part of."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING

import msgspec

from ..errors import InActivityError, NotInWorkflowError, RomancyError

if TYPE_CHECKING:
    from ..storage import OutboxEvent, SQLStorage
    from .run import Run

CURRENT_RUN: ContextVar[Run | None] = ContextVar("romancy_run", default=None)


class ActivityContext(msgspec.Struct, eq=False):
    """What an activity may know of the step it is."""

    storage: SQLStorage
    instance_id: str
    step_id: str
    attempt: int
    transactional: bool
    emitted: list[OutboxEvent] = []

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt at this step: give it to services that can tell a repetition."""
        return f"{self.instance_id}/{self.step_id}"


CURRENT_ACTIVITY: ContextVar[ActivityContext | None] = ContextVar("romancy_activity", default=None)


def current_run(function: str) -> Run:
    """The run whose body is calling; a clear error anywhere else."""
    run = CURRENT_RUN.get()
    if run is not None:
        return run
    if CURRENT_ACTIVITY.get() is not None:
        raise InActivityError(f"{function}() belongs in a workflow's body, not in an activity")
    raise NotInWorkflowError(f"{function}() can only be called in a running workflow")


def is_being_cancelled() -> bool:
    """Whether a CancelledError is meant for the running task, and not the outcome of something it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def current_activity(function: str) -> ActivityContext:
    """The activity that is calling; a clear error anywhere else."""
    context = CURRENT_ACTIVITY.get()
    if context is None:
        raise RomancyError(f"{function}() can only be called in an activity that a workflow has called")
    return context
