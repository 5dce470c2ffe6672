"""Activities: the steps that touch the world. At least once, recorded exactly once.

    @activity(retry=Retry(max_attempts=5), compensate=refund)
    async def charge(order_id: str, amount: int) -> Receipt: ...

In a workflow's body, awaiting one is a durable step; anywhere else it just runs.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import msgspec

from .compensation import compensation_args, compensator_name, undecorated
from .engine.ambient import (
    CURRENT_ACTIVITY,
    CURRENT_RUN,
    ActivityContext,
    current_activity,
    is_being_cancelled,
)
from .engine.contexts import in_context_of_its_own
from .engine.run import UNSEEN, UNSTORABLE, Run
from .engine.steps import ACTIVITY, COMPLETED, FAILED, Fresh, Step, Success, recorded_input
from .engine.threads import in_thread
from .errors import ActivityError, SerializationError
from .logs import about, log
from .retry import DEFAULT_RETRY, Retry
from .serialization import Signature, StoredError, encode
from .storage import (
    CompensationEntry,
    HistoryEvent,
    LockLostError,
    OutboxEventExistsError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    TransientStorageError,
)

P = ParamSpec("P")
T = TypeVar("T")

SHORT_PAUSE_SEC = 5.0
"""Up to this, a pause between two attempts is waited out in memory; a longer one is a durable timer."""

_FORBIDDEN = "#/:"
_LONGEST_NAME = 120


def check_name(name: str) -> str:
    """A name that can be part of a step's id."""
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"a name must not be longer than {_LONGEST_NAME} characters: {name!r}")
    if not name or any(sign in name for sign in _FORBIDDEN):
        raise ValueError(f"a name must not be empty or contain any of {_FORBIDDEN!r}: {name!r}")
    return name


def refuse_method(function: Callable[..., Any]) -> None:
    """TypeError for what stands in a class and wants an object of it: nobody would give it one."""
    where = getattr(function, "__qualname__", "")
    around = where.rpartition(".")[0]
    first = next(iter(inspect.signature(function).parameters), None)
    if around and not around.endswith("<locals>") and first in ("self", "cls"):
        raise TypeError(
            f"{where} is a method: activities and workflows are functions, and all that they need are their arguments"
        )


def _seconds(name: str, timeout: timedelta | float | None) -> float | None:
    """A timeout in seconds; TypeError or ValueError if it is none."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, timedelta | int | float):
        raise TypeError(f"{name}: a timeout is a timedelta or a number of seconds, not {timeout!r}")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not seconds > 0:
        raise ValueError(f"{name}: a timeout must be longer than {seconds:g} s")
    return seconds


class Activity(Generic[P, T]):
    """A function that a workflow calls as a durable step."""

    def __init__(
        self,
        function: Callable[P, Any],
        *,
        name: str | None = None,
        retry: Retry = DEFAULT_RETRY,
        timeout: timedelta | float | None = None,
        transactional: bool = False,
        compensate: Callable[..., Any] | None = None,
    ) -> None:
        self.fn = function
        self.name = check_name(name or str(getattr(function, "__name__", "")))
        refuse_method(function)
        self._name_json = encode(self.name, "a name")
        if not isinstance(retry, Retry):
            raise TypeError(f"{self.name}: retry must be a Retry, such as Retry(max_attempts=3), not {retry!r}")
        self.retry = retry
        self.timeout_sec = _seconds(self.name, timeout)
        self.transactional = transactional
        self.compensate = compensate
        self._is_async = inspect.iscoroutinefunction(function)
        if transactional and not self._is_async:
            raise TypeError(
                f"{self.name}: transactional=True needs an async function; a thread cannot join the transaction"
            )
        self.signature = Signature(function, self.name)
        self._compensator: str | None = None
        if compensate is not None:
            if getattr(undecorated(compensate), "__name__", "") == "<lambda>":
                raise TypeError(f"{self.name}: a compensation must have a name, by which other processes find it")
            self._compensator = compensator_name(compensate)
            self._undo = Signature(undecorated(compensate), self._compensator)
            unknown = self._undo.required() - {"result"}
            if unknown and not self.signature.takes_all(unknown):
                raise TypeError(
                    f"{self.name}: its compensation needs {', '.join(sorted(unknown))}; it is given the activity's own"
                    " arguments, by name, and `result`"
                )
        self.__doc__ = function.__doc__
        self.__name__ = self.name

    def __repr__(self) -> str:
        return f"<activity {self.name}>"

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        run = CURRENT_RUN.get()
        result: T
        if run is None:
            result = await self._invoke(args, kwargs)
            return result
        input_json = self.signature.encode_arguments(args, kwargs)
        step_id = run.next_step_id(self.name)
        result = run.replayed(step_id, self.name, input_json, self.signature.decode_result)
        if result is not UNSEEN:
            return result
        step = run.ask(ACTIVITY, self.name, step_id, input_json=input_json, decode=self.signature.decode_result)
        step.perform = self._perform
        try:
            result = await step.future
        except asyncio.CancelledError:
            if step.future.cancelled():
                run.withdraw(step)
            raise
        return result

    def _invoke(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[Any]:
        """Call the function, in a thread if it is not async."""
        call: Awaitable[Any] = self.fn(*args, **kwargs) if self._is_async else in_thread(self.fn, *args, **kwargs)
        return call

    # Live, on the worker's own loop.

    async def _perform(self, run: Run, step: Step) -> Success | None:
        """Attempt until there is an outcome, or until the pause before the next attempt is a long one.

        A success that nothing has to be recorded with is returned: its record is waited for by whoever called.
        """
        noted = run.attempts.get(step.id)
        attempt = noted.failed + 1 if noted else 1
        first_at = noted.first_at.timestamp() if noted and noted.first_at else run.timestamp()
        cut_off = noted is not None and noted.cut_off
        if noted and noted.retry_at is not None and not await self._pause(run, step, attempt - 1, noted.retry_at):
            return None
        try:
            if not run.fits(step.input_json):  # before anything happens, not after
                size, limit = len(step.input_json.encode()), run.storage.payload_limit
                raise PayloadTooLargeError(f"the arguments of {self.name}", size, limit)
            if self._compensator is not None:
                cut_off |= await self._was_begun(run, step)
                await self._register_compensation(run, step, self._compensator)
        except (SerializationError, *UNSTORABLE) as unstorable:
            await run.record(self._failed(run, step, unstorable))
            return None
        attempt_once = self._attempt_watched if run.observers.anybody else self._attempt
        while True:
            ended = await attempt_once(run, step, attempt)
            if not isinstance(ended, Failure):
                return ended
            error, elapsed_sec = ended.error, run.timestamp() - first_at
            cut_off |= ended.cut_off
            if ended.took_effect or not self.retry.allows(error, attempt, elapsed_sec):
                await self._fail(run, step, attempt, error, took_effect=ended.took_effect or cut_off)
                return None
            pause_sec = self.retry.pause_sec(attempt)
            self._tell_of_failure(run, step, attempt, error, f"the next follows in {pause_sec:.1f} s")
            retry_at = run.now() + timedelta(seconds=pause_sec)
            details = {"retry_at": retry_at.isoformat(), "cut_off": cut_off}
            await run.record(self._failed(run, step, error, attempt=attempt, **details))
            if not await self._pause(run, step, attempt, retry_at):
                return None
            attempt += 1

    async def _fail(self, run: Run, step: Step, attempt: int, error: Exception, *, took_effect: bool) -> None:
        self._tell_of_failure(run, step, attempt, error, "for good")
        await run.record(self._failed(run, step, error, took_effect=took_effect))

    async def _refused(self, run: Run, step: Step, error: Exception) -> None:
        """What a successful attempt brought about cannot be stored."""
        noted = run.attempts.get(step.id)
        await self._fail(run, step, noted.failed + 1 if noted else 1, error, took_effect=True)

    @staticmethod
    def _tell_of_failure(run: Run, step: Step, attempt: int, error: Exception, outlook: str) -> None:
        """In the log, by its type: what an error says may not be meant for it."""
        log.warning(
            "instance %s: attempt %d at step %s has failed with %s, %s",
            run.instance_id,
            attempt,
            step.id,
            type(error).__qualname__,
            outlook,
            extra=about(run.instance_id, step.id),
        )

    @staticmethod
    async def _pause(run: Run, step: Step, attempt: int, until: Any) -> bool:
        """Wait in memory if that is short; else False, and a durable timer goes on with the step."""
        seconds = (until - run.now()).total_seconds()
        if seconds > SHORT_PAUSE_SEC:
            run.pause(step, attempt, until)
            return False
        await asyncio.sleep(max(0.0, seconds))
        return True

    @staticmethod
    async def _was_begun(run: Run, step: Step) -> bool:
        """Whether an earlier holder of the lock has begun the step; how far it came, nobody knows."""
        if step.id not in run.perhaps_begun:
            return False
        return any(entry.activity_id == step.id for entry in await run.storage.get_compensations(run.instance_id))

    async def _register_compensation(self, run: Run, step: Step, compensator: str) -> None:
        """Before the first attempt: an effect must never be left without its compensation."""
        arguments = self.signature.with_defaults(step.input_json, self._undo)
        entry = CompensationEntry(
            instance_id=run.instance_id,
            activity_id=step.id,
            activity_name=compensator,
            args=compensation_args(compensator, arguments),
        )
        await run.storage.add_compensation(entry, lock=run.lock)

    async def _attempt_watched(self, run: Run, step: Step, attempt: int) -> Failure | None:
        """Try once, record success, and tell hooks of it."""
        with run.watch(step, attempt) as watched:
            ended = await self._attempt(run, step, attempt)
            if isinstance(ended, Success):
                try:
                    await run.record(ended.event, ended.fresh)
                    return None
                except UNSTORABLE as error:
                    ended = Failure(error, took_effect=True)
            if ended is not None:
                watched.failed(ended.error)
            return ended

    async def _attempt(self, run: Run, step: Step, attempt: int) -> Success | Failure | None:
        """Try once: what is to be recorded, or how it failed; nothing if it was recorded together with something else.

        What is the infrastructure's trouble is raised.
        """
        context = ActivityContext(run.storage, run.instance_id, step.id, attempt, self.transactional)
        token = CURRENT_ACTIVITY.set(context)
        try:
            if self.transactional:
                await run.in_turn(self._in_transaction, run, step, context)
                return None
            value = await self._timed(step)
        except (LockLostError, OutcomeUnknownError, TransientStorageError):
            raise
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            return Failure(ActivityError("CancelledError", str(error)))
        except SystemExit as error:  # it ends the activity, and not the worker with all else that it runs
            return Failure(ActivityError("SystemExit", str(error)))
        except CutOff as late:
            return Failure(TimeoutError(str(late)), cut_off=not self.transactional)
        except Exception as error:
            return Failure(error)
        finally:
            CURRENT_ACTIVITY.reset(token)
        try:
            result, seen = self._encoded(run, value)
            if context.emitted:
                await run.in_turn(self._write_together, run, step, result, context)
                return None
        except (SerializationError, OutboxEventExistsError, *UNSTORABLE) as error:
            return Failure(error, took_effect=True)
        at = run.timestamp()
        return Success(self._completed(run, step, result, at), Fresh(seen, at), self._refused)

    def _encoded(self, run: Run, value: Any) -> tuple[str, Any]:
        """A result as it is recorded, and as the body sees it; an error if one of them cannot be."""
        result, seen = self.signature.encode_and_decode_result(value)
        if not run.fits(result):
            raise PayloadTooLargeError(f"the result of {self.name}", len(result.encode()), run.storage.payload_limit)
        return result, seen

    def _timed(self, step: Step) -> Awaitable[Any]:
        """Call the function, within its timeout."""
        args, kwargs = self.signature.decode_arguments(step.input_json)
        if not self._is_async:
            return self._in_thread(args, kwargs)
        call = in_context_of_its_own(self.fn(*args, **kwargs))
        return call if self.timeout_sec is None else self._within(self.timeout_sec, call)

    async def _within(self, seconds: float, call: Awaitable[Any]) -> Any:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await call
        except TimeoutError:
            if limit.expired():
                raise self._too_late() from None
            raise

    async def _in_thread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A thread cannot be stopped: past its timeout it is left to itself, but a cancelled one is waited for."""
        thread = in_thread(self.fn, *args, **kwargs)
        thread.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # seen, even if too late
        try:
            done, _ = await asyncio.wait({thread}, timeout=self.timeout_sec)
        except asyncio.CancelledError:
            await asyncio.wait({thread})  # so that no compensation runs beside it
            raise
        if not done:
            raise self._too_late()
        return thread.result()

    def _too_late(self) -> CutOff:
        return CutOff(f"{self.name} has not ended within {self.timeout_sec:g} s")

    async def _in_transaction(self, run: Run, step: Step, context: ActivityContext) -> HistoryEvent:
        """The user's SQL, its outbox events and the history row: one transaction."""
        async with run.storage.transaction():
            result, _ = self._encoded(run, await self._timed(step))
            return await self._write(run, step, result, context)

    async def _write_together(self, run: Run, step: Step, result: str, context: ActivityContext) -> HistoryEvent:
        """The outbox events and the history row: one transaction."""
        async with run.storage.transaction():
            return await self._write(run, step, result, context)

    async def _write(self, run: Run, step: Step, result: str, context: ActivityContext) -> HistoryEvent:
        for event in context.emitted:
            await run.storage.add_outbox_event(event)
        completed = self._completed(run, step, result, run.timestamp())
        appended = await run.storage.append_history(completed, lock=run.lock)
        return msgspec.structs.replace(completed, id=appended.id)

    def _completed(self, run: Run, step: Step, result: str, at: float) -> HistoryEvent:
        about = f'"activity_name": {self._name_json}, "result": {result}'
        completed = run.event(step.id, COMPLETED, f'{{{about}, "input": {recorded_input(step.input_json)}}}', at)
        if run.fits(completed.event_data or ""):
            return completed
        return run.event(step.id, COMPLETED, f'{{{about}, "input_hash": "{step.input_hash}"}}', at)

    def _failed(
        self, run: Run, step: Step, error: Exception, *, attempt: int | None = None, **details: Any
    ) -> HistoryEvent:
        """The record of a failed attempt, or of the step's failure; as much of it as can be stored."""
        stored = StoredError.of(error, "".join(traceback.format_exception(error, limit=-10)))
        told = {"activity_name": self.name, "input_hash": step.input_hash, **details}
        given = {"input": {"args": [], "kwargs": msgspec.Raw(step.input_json.encode())}}
        step_id = step.id if attempt is None else f"{step.id}#{attempt}"
        for data in (msgspec.structs.asdict(stored) | given, msgspec.structs.asdict(stored)):
            event = run.event(step_id, FAILED, encode(data | told, "an activity's error"))
            if run.fits(event.event_data or ""):
                return event
        brief = msgspec.structs.asdict(stored.brief()) | told
        return run.event(step_id, FAILED, encode(brief, "an activity's error"))


class Failure(msgspec.Struct, frozen=True):
    """How an attempt failed."""

    error: Exception
    took_effect: bool = False
    """It ran to its end, and what came of it cannot be stored: it is not done again, but undone if need be."""
    cut_off: bool = False
    """It was stopped half-way: perhaps it has taken effect, and then it must be undone."""


class CutOff(Exception):
    """An attempt has not ended within its timeout."""


class Decorator(Protocol):
    """What ``@activity(…)`` is."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, T]], /) -> Activity[P, T]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> Activity[P, T]: ...


@overload
def activity(function: Callable[P, Coroutine[Any, Any, T]], /) -> Activity[P, T]: ...
@overload
def activity(function: Callable[P, T], /) -> Activity[P, T]: ...
@overload
def activity(
    *,
    name: str | None = None,
    retry: Retry = DEFAULT_RETRY,
    timeout: timedelta | float | None = None,
    transactional: bool = False,
    compensate: Callable[..., Any] | None = None,
) -> Decorator: ...
def activity(function: Any = None, /, **options: Any) -> Any:
    """Make a function, async or sync, a durable step of workflows."""
    if function is not None:
        return Activity(function, **options)
    return lambda decorated: Activity(decorated, **options)


def activity_context() -> ActivityContext:
    """The step that the running activity is: instance, attempt, idempotency key."""
    return current_activity("activity_context")
