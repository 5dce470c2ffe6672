"""Compensations: how a failed or cancelled workflow undoes what it did, last first, each recorded once."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .engine.ambient import CURRENT_ACTIVITY, ActivityContext, current_run, is_being_cancelled
from .engine.calls import call
from .engine.threads import in_thread
from .errors import ActivityError, RomancyError, SerializationError
from .hooks import NOBODY, Observers, WatchedStep
from .logs import about, log, outlook
from .retry import Retry
from .serialization import Signature, encode, home, locate
from .storage import (
    CompensationEntry,
    HistoryEvent,
    HistoryEventType,
    Lock,
    LockLostError,
    OutboxEvent,
    OutcomeUnknownError,
    SQLStorage,
    TransientStorageError,
    WorkflowStatus,
)

COMPENSATION_RETRY = Retry(max_attempts=8, initial_sec=0.5, longest_sec=30.0)

_LOCAL: dict[str, Callable[..., Any]] = {}
"""Compensating functions by name; those that live in a function cannot be found by importing."""


def compensator_name(function: Callable[..., Any]) -> str:
    """The name under which a compensating function is stored, and found again in another process."""
    plain = undecorated(function)
    if not hasattr(plain, "__qualname__"):
        raise TypeError(f"a compensation must be a function, which has a name: {function!r}")
    name = f"{home(plain)}:{plain.__qualname__}"
    _LOCAL[name] = function
    return name


def find_compensator(name: str) -> Callable[..., Any]:
    """The function of that name, or the activity."""
    if name in _LOCAL:
        return _LOCAL[name]
    module, _, qualified = name.partition(":")
    try:
        found: Callable[..., Any] = locate(module, qualified)
    except (ImportError, AttributeError) as error:
        raise RomancyError(f"the compensating function {name!r} cannot be found: {error}") from error
    return found


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, if it is an activity."""
    plain: Callable[..., Any] = getattr(function, "fn", function)
    return plain


def compensation_args(name: str, input_json: str) -> str:
    """A compensation's stored arguments: those of the step."""
    return f'{{"name": {encode(name, "a name")}, "args": [], "kwargs": {input_json}}}'


class _Stored(msgspec.Struct, frozen=True):
    kwargs: msgspec.Raw
    result: msgspec.Raw | None = None


class _Outcome(msgspec.Struct, frozen=True):
    result: msgspec.Raw = msgspec.Raw(b"null")
    took_effect: bool = False


def took_effect(failed: HistoryEvent) -> bool:
    """Whether a failed step ran to its end all the same, or perhaps did, so that there is something to undo."""
    return msgspec.json.decode(failed.event_data or "{}", type=_Outcome).took_effect


class Compensator:
    """Undoes what an instance did, and ends it as failed or cancelled."""

    def __init__(
        self,
        storage: SQLStorage,
        lock: Lock,
        retry: Retry | None = None,
        *,
        workflow_name: str = "",
        observers: Observers = NOBODY,
    ) -> None:
        self._storage = storage
        self._lock = lock
        self._workflow_name = workflow_name
        self._observers = observers
        self._retry = retry or COMPENSATION_RETRY

    async def run(self) -> WorkflowStatus | None:
        """Run all compensations that are due, then end the instance; None if one keeps failing and it was parked."""
        instance_id = self._lock.instance_id
        for entry in await self._storage.get_compensations(instance_id):
            if not await self._compensate(entry):
                return None
        cancelled = await self._storage.get_history_event(instance_id, "workflow_cancelled") is not None
        status = WorkflowStatus.CANCELLED if cancelled else WorkflowStatus.FAILED
        await self._storage.update_instance_status(instance_id, status, lock=self._lock)
        return status

    async def _compensate(self, entry: CompensationEntry) -> bool:
        """Undo one step, once; False if that keeps failing and the instance was parked."""
        done_id = f"compensation:{entry.id}"
        if await self._storage.get_history_event(entry.instance_id, done_id) is not None:
            return True
        step = await self._storage.get_history_event(entry.instance_id, entry.activity_id)
        if step is not None and step.event_type == HistoryEventType.ACTIVITY_FAILED and not took_effect(step):
            return True  # it failed for good: there is nothing to undo
        attempt = 1
        while True:
            with self._watch(entry, done_id, attempt) as watched:
                error = await self._attempt(entry, done_id, attempt, step)
                if error is None:
                    break
                watched.failed(error)
            log.warning(
                "compensation %s of %s failed: %s",
                entry.activity_name,
                entry.instance_id,
                error,
                extra=about(entry.instance_id, done_id),
            )
            if not self._retry.allows(error, attempt, 0.0):
                await self._park(entry, error)
                return False
            await asyncio.sleep(self._retry.pause_sec(attempt))
            attempt += 1
        return True

    async def _park(self, entry: CompensationEntry, error: Exception) -> None:
        reason = f"compensation {entry.activity_name} of step {entry.activity_id} keeps failing"
        log.error(
            "instance %s is parked: %s; %s",
            entry.instance_id,
            reason,
            outlook(entry.instance_id),
            extra=about(entry.instance_id),
        )
        await self._storage.park(entry.instance_id, f"{reason}: {error}", lock=self._lock)

    def _watch(self, entry: CompensationEntry, step_id: str, attempt: int) -> WatchedStep:
        return self._observers.step(
            instance_id=entry.instance_id,
            workflow_name=self._workflow_name,
            step_id=step_id,
            name=entry.activity_name,
            kind="compensation",
            attempt=attempt,
        )

    async def _attempt(
        self, entry: CompensationEntry, done_id: str, attempt: int, step: HistoryEvent | None
    ) -> Exception | None:
        """Undo a step and record that; else the error with which it failed."""
        token = None
        try:
            undo = find_compensator(entry.activity_name)
            context = ActivityContext(
                self._storage, entry.instance_id, done_id, attempt, transactional=getattr(undo, "transactional", False)
            )
            token = CURRENT_ACTIVITY.set(context)
            call = functools.partial(undecorated(undo), **self._arguments(undecorated(undo), entry, step))
            if context.transactional:
                async with self._storage.transaction():
                    await _invoke(call)
                    await self._record(entry, done_id)
            else:
                await _invoke(call)
                await self._record(entry, done_id, context.emitted)
        except (LockLostError, OutcomeUnknownError, TransientStorageError):
            raise  # the infrastructure's trouble, not the compensation's
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            return ActivityError("CancelledError", str(error))
        except Exception as error:
            return error
        finally:
            if token is not None:
                CURRENT_ACTIVITY.reset(token)
        return None

    def _arguments(
        self, undo: Callable[..., Any], entry: CompensationEntry, step: HistoryEvent | None
    ) -> dict[str, Any]:
        """Those of the step that the function has parameters for, and the step's result."""
        signature = Signature(undo, entry.activity_name)
        stored = msgspec.json.decode(entry.args, type=_Stored)
        given = signature.decode_by_parameter(bytes(stored.kwargs).decode())
        if signature.takes("result"):
            given["result"] = _as_hinted(signature, _result(step, stored))
        return given

    async def _record(self, entry: CompensationEntry, done_id: str, emitted: Sequence[OutboxEvent] = ()) -> None:
        """Write that a step is undone, and what was emitted meanwhile."""
        executed = self._executed(entry, done_id)
        if not emitted:
            await self._storage.append_history(executed, lock=self._lock)
            return
        async with self._storage.transaction():
            for event in emitted:
                await self._storage.add_outbox_event(event)
            await self._storage.append_history(executed, lock=self._lock)

    def _executed(self, entry: CompensationEntry, done_id: str) -> HistoryEvent:
        data: dict[str, Any] = {"activity_name": entry.activity_name, "compensation_id": entry.id}
        arguments = {"args": [], "kwargs": msgspec.json.decode(entry.args, type=_Stored).kwargs}
        text = encode(data | arguments, "a compensation")
        if len(text.encode()) > self._storage.payload_limit:  # what was undone must be recorded, with them or without
            text = encode(data, "a compensation")
        return HistoryEvent(
            instance_id=entry.instance_id,
            activity_id=done_id,
            event_type=HistoryEventType.COMPENSATION_EXECUTED,
            event_data=text,
        )


async def _invoke(call: functools.partial[Any]) -> None:
    """Call a compensating function; `sys.exit()` in it is its error, and does not end the worker."""
    try:
        if inspect.iscoroutinefunction(call.func):
            await call()
            return
        thread = in_thread(call)
        try:
            await asyncio.wait({thread})
        except asyncio.CancelledError:
            await asyncio.wait({thread})  # it cannot be stopped, and whoever is next must not undo beside it
            raise
        thread.result()
    except SystemExit as error:
        raise ActivityError("SystemExit", str(error)) from error


def _result(step: HistoryEvent | None, stored: _Stored) -> msgspec.Raw:
    """The step's recorded result; null if it may never have happened."""
    if step is None or step.event_data is None:
        return stored.result or msgspec.Raw(b"null")
    return msgspec.json.decode(step.event_data, type=_Outcome).result


def _as_hinted(signature: Signature, result: msgspec.Raw) -> Any:
    """A step's result as `result` is hinted; as plain JSON if it does not fit, since undone the step must be."""
    plain = msgspec.json.decode(result)
    if plain is None:
        return None
    try:
        return signature.decode_parameter("result", result)
    except SerializationError:
        return plain


async def compensate_with(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """From here on, should the workflow fail or be cancelled, undo with `function` and these arguments."""
    run = current_run("compensate_with")
    _must_be_found_again(undecorated(function))
    name = compensator_name(function)
    arguments = Signature(undecorated(function), name).encode_arguments(args, kwargs)
    await call(
        "compensate_with",
        {"function": name, "arguments": msgspec.Raw(arguments.encode())},
        lambda record: run.storage.add_compensation(
            CompensationEntry(
                instance_id=run.instance_id,
                activity_id=record("null").activity_id,
                activity_name=name,
                args=compensation_args(name, arguments),
            ),
            lock=run.lock,
            record=record("null"),
        ),
    )


def _must_be_found_again(function: Callable[..., Any]) -> None:
    """RomancyError for what only this run has at hand: it would be missed later, or mistaken for another run's."""
    name = getattr(function, "__qualname__", repr(function))
    bound_to = getattr(function, "__self__", None)
    if "<locals>" in name or not (bound_to is None or isinstance(bound_to, type)):
        raise RomancyError(
            f"compensate_with() cannot use {name}: any process must be able to find the function by its name;"
            " define it at the top level of a module, and give it what it needs as arguments"
        )
