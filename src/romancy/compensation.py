"""Compensations: how a failed or cancelled workflow undoes what it did, last first, each recorded once."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from .engine.ambient import CURRENT_ACTIVITY, ActivityContext, current_run, is_being_cancelled
from .engine.calls import call
from .errors import ActivityError, RomancyError
from .hooks import NOBODY, Observers, WatchedStep
from .logs import about, log
from .retry import Retry
from .serialization import Signature, encode, home, locate
from .storage import (
    CompensationEntry,
    HistoryEvent,
    HistoryEventType,
    Lock,
    LockLostError,
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
    plain = getattr(function, "fn", function)
    name = f"{home(plain)}:{plain.__qualname__}"
    _LOCAL[name] = plain
    return name


def find_compensator(name: str) -> Callable[..., Any]:
    """The function of that name."""
    if name in _LOCAL:
        return _LOCAL[name]
    module, _, qualified = name.partition(":")
    try:
        found = locate(module, qualified)
    except (ImportError, AttributeError) as error:
        raise RomancyError(f"the compensating function {name!r} cannot be found: {error}") from error
    plain: Callable[..., Any] = getattr(found, "fn", found)
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
    """Whether a failed step ran to its end all the same, so that there is something to undo."""
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
                watched.error = error = await self._attempt(entry, step)
            if error is None:
                break
            log.warning(
                "compensation %s of %s failed: %s",
                entry.activity_name,
                entry.instance_id,
                error,
                extra=about(entry.instance_id, done_id),
            )
            if not self._retry.allows(error, attempt, 0.0):
                await self._storage.park(
                    entry.instance_id,
                    f"compensation {entry.activity_name} of step {entry.activity_id} keeps failing: {error}",
                    lock=self._lock,
                )
                return False
            await asyncio.sleep(self._retry.pause_sec(attempt))
            attempt += 1
        await self._storage.append_history(self._executed(entry, done_id), lock=self._lock)
        return True

    def _watch(self, entry: CompensationEntry, step_id: str, attempt: int) -> WatchedStep:
        return self._observers.step(
            instance_id=entry.instance_id,
            workflow_name=self._workflow_name,
            step_id=step_id,
            name=entry.activity_name,
            kind="compensation",
            attempt=attempt,
        )

    async def _attempt(self, entry: CompensationEntry, step: HistoryEvent | None) -> Exception | None:
        context = ActivityContext(self._storage, entry.instance_id, f"compensation:{entry.id}", 1, transactional=False)
        token = CURRENT_ACTIVITY.set(context)
        try:
            function = find_compensator(entry.activity_name)
            signature = Signature(function, entry.activity_name)
            stored = msgspec.json.decode(entry.args, type=_Stored)
            kwargs: dict[str, msgspec.Raw] = msgspec.json.decode(stored.kwargs, type=dict[str, msgspec.Raw])
            call = signature.decode_arguments(bytes(stored.kwargs).decode())
            given = {name: value for name, value in call.arguments.items() if name in kwargs}
            if signature.takes("result"):
                given["result"] = self._result(step, stored)
            if inspect.iscoroutinefunction(function):
                await function(**given)
            else:
                await asyncio.to_thread(function, **given)
        except (LockLostError, OutcomeUnknownError, TransientStorageError):
            raise  # the infrastructure's trouble, not the compensation's
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            return ActivityError("CancelledError", str(error))
        except Exception as error:
            return error
        finally:
            CURRENT_ACTIVITY.reset(token)
        return None

    @staticmethod
    def _result(step: HistoryEvent | None, stored: _Stored) -> Any:
        """The step's recorded result; None if it may never have happened."""
        if step is None or step.event_data is None:
            return None if stored.result is None else msgspec.json.decode(stored.result)
        return msgspec.json.decode(msgspec.json.decode(step.event_data, type=_Outcome).result)

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


async def compensate_with(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """From here on, should the workflow fail or be cancelled, undo with `function` and these arguments."""
    run = current_run("compensate_with")
    name = compensator_name(function)
    arguments = Signature(find_compensator(name), name).encode_arguments(args, kwargs)
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
