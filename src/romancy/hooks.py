"""Hooks: be told what a worker does. They watch, and cannot change an outcome.

    class Slow(Hooks):
        def on_step_finished(self, event: StepEvent) -> None:
            if event.duration_sec > 10:
                print(event.workflow_name, event.name, event.duration_sec)

    App(url, workflows=[…], hooks=[Slow()])

They are called on the worker's event loop, so they must be quick, and never while a workflow only replays what is
recorded. What a hook raises is logged and goes no further.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import msgspec

log = logging.getLogger("romancy")


class WorkflowEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to an instance in this worker."""

    instance_id: str
    workflow_name: str
    resumed: bool = False
    """Whether some worker had begun with it before."""
    duration_sec: float = 0.0
    """How long this worker has been at it, without the time in which it waited."""
    status: str = ""
    """Finished: completed, failed or cancelled."""
    reason: str = ""
    """Suspended: waiting, starting over, given back or lock lost. Parked: why."""
    error_type: str | None = None


class StepEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to an attempt at a step."""

    instance_id: str
    workflow_name: str
    step_id: str
    name: str
    """Of the activity, of the function that the body called, or of the compensating function."""
    kind: str
    """activity, call or compensation."""
    attempt: int = 1
    duration_sec: float = 0.0
    error_type: str | None = None
    error: str = ""


class Hooks:
    """Override what you want to be told of. Each start is followed by exactly one end, unless the process dies."""

    def on_workflow_started(self, event: WorkflowEvent) -> None:
        """This worker begins with an instance, or goes on with it (`resumed`)."""

    def on_workflow_finished(self, event: WorkflowEvent) -> None:
        """The instance has ended, as `status` says."""

    def on_workflow_suspended(self, event: WorkflowEvent) -> None:
        """This worker lets go of the instance, which will go on: here or elsewhere, as `reason` says."""

    def on_workflow_parked(self, event: WorkflowEvent) -> None:
        """The instance cannot be run, and is set aside for a while or for good."""

    def on_step_started(self, event: StepEvent) -> None:
        """An attempt at a step begins."""

    def on_step_finished(self, event: StepEvent) -> None:
        """The attempt succeeded, and its result is recorded."""

    def on_step_failed(self, event: StepEvent) -> None:
        """The attempt ended without a result: it failed, was cancelled, or its result could not be recorded."""


class Observers:
    """All hooks of an app."""

    def __init__(self, hooks: Iterable[Hooks] = ()) -> None:
        self._hooks = tuple(hooks)
        self.anybody = bool(self._hooks)
        """Whether anybody wants to hear anything."""
        for hook in self._hooks:
            for name in (name for name in dir(Hooks) if name.startswith("on_")):
                method = getattr(hook, name, None)
                if not callable(method) or inspect.iscoroutinefunction(method):
                    raise TypeError(f"{type(hook).__name__}.{name} must be a plain method (derive from romancy.Hooks)")

    def tell(self, name: str, event: WorkflowEvent | StepEvent) -> None:
        """Call this method of every hook."""
        for hook in self._hooks:
            try:
                getattr(hook, name)(event)
            except (Exception, asyncio.CancelledError):  # it is no coroutine: nobody can have cancelled it
                about = {"instance": event.instance_id, "step": getattr(event, "step_id", None)}
                log.exception("%s of %s failed", name, type(hook).__name__, extra=about)

    def workflow(self, instance_id: str, workflow_name: str, *, resumed: bool) -> WatchedWorkflow:
        """Tell that a worker begins with an instance."""
        if not self.anybody:
            return UNWATCHED_WORKFLOW
        return WatchedWorkflow(self, instance_id=instance_id, workflow_name=workflow_name, resumed=resumed)

    def step(self, **about: Any) -> WatchedStep:
        """Tell of an attempt: ``with observers.step(…) as watched:`` around it."""
        return WatchedStep(self, about) if self.anybody else UNWATCHED


class WatchedWorkflow:
    """A worker's time with an instance; ended by the first of its methods that is called."""

    def __init__(self, observers: Observers, **about: Any) -> None:
        self._observers = observers
        self._about = about
        self._since = time.monotonic()
        self._ended = False
        observers.tell("on_workflow_started", WorkflowEvent(**about))

    def finished(self, status: str, error_type: str | None = None) -> None:
        self._end("on_workflow_finished", status=status, error_type=error_type)

    def suspended(self, reason: str) -> None:
        self._end("on_workflow_suspended", reason=reason)

    def parked(self, reason: str, error_type: str | None = None) -> None:
        self._end("on_workflow_parked", reason=reason, error_type=error_type)

    def _end(self, name: str, **how: Any) -> None:
        if not self._ended:
            self._ended = True
            event = WorkflowEvent(**self._about, **how, duration_sec=time.monotonic() - self._since)
            self._observers.tell(name, event)


class _UnwatchedWorkflow(WatchedWorkflow):
    """A worker's time with an instance that nobody wants to hear of."""

    def __init__(self) -> None: ...

    def finished(self, status: str, error_type: str | None = None) -> None: ...

    def suspended(self, reason: str) -> None: ...

    def parked(self, reason: str, error_type: str | None = None) -> None: ...


class WatchedStep:
    """An attempt at a step; tell it if that `failed` without raising."""

    __slots__ = ("_about", "_error", "_observers", "_since")

    def __init__(self, observers: Observers, about: dict[str, Any]) -> None:
        self._observers = observers
        self._about = about
        self._since = 0.0
        self._error: BaseException | None = None

    def failed(self, error: BaseException) -> None:
        self._error = error

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        self._observers.tell("on_step_started", StepEvent(**self._about))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        duration = time.monotonic() - self._since
        error = raised or self._error
        if error is None:
            self._observers.tell("on_step_finished", StepEvent(**self._about, duration_sec=duration))
            return
        failed = StepEvent(**self._about, duration_sec=duration, error_type=type(error).__qualname__, error=str(error))
        self._observers.tell("on_step_failed", failed)


class _UnwatchedStep(WatchedStep):
    """An attempt at a step that nobody wants to hear of."""

    __slots__ = ()

    def failed(self, error: BaseException) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None: ...


NOBODY = Observers()
UNWATCHED_WORKFLOW: WatchedWorkflow = _UnwatchedWorkflow()
UNWATCHED = _UnwatchedStep(NOBODY, {})
