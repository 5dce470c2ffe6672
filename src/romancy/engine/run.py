"""One instance's execution: replay what is recorded, go on live, stop wherever it has to wait.

All history of an instance is written by its run while it holds the lock, one write at a time, and each result reaches
the body right after its write. So the order in which the body sees results is the order of history ids, live and on
replay. Whoever writes holds `_writing`; whoever wrote delivers before letting go. Only a result with which the body
will most likely return is delivered before its write, so that the end can be part of it: until that write is back the
body is `_ahead` of its history, and nothing is begun or ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import functools
import logging
import traceback
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any, Final, ParamSpec

import msgspec

from ..errors import NonDeterminismError, RomancyError, SerializationError
from ..hooks import NOBODY, UNWATCHED, WatchedStep
from ..serialization import Signature, StoredError, encode
from ..storage import (
    Appended,
    ChannelWait,
    HistoryEvent,
    HistoryEventType,
    HistoryPage,
    InstanceNotFoundError,
    InstanceWait,
    InvalidJSONError,
    InvalidKeyError,
    InvalidStatusTransitionError,
    Lock,
    LockLostError,
    NotSubscribedError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    SQLStorage,
    StorageClosedError,
    StorageError,
    TimerSubscription,
    TransientStorageError,
    Woken,
    WorkflowInstance,
    WorkflowStatus,
)
from ..storage.models import Wait
from .ambient import CURRENT_RUN
from .clock import DatabaseClock
from .endings import Ended, Ending, Recur, Teardown
from .loop import WorkflowLoop, WorkflowTask
from .steps import ACTIVITY, CALL, Fresh, Kind, Step, recorded_outcome, step_id

P = ParamSpec("P")

log = logging.getLogger("romancy")

CANCELLED = "workflow_cancelled"
LIFE = ("workflow_failed", CANCELLED)
COMPENSATION = "compensation:"
_POLL_SEC = 0.5
_PAGE = 1000
_MOST_LAST_STEPS = 100
"""So many are remembered of a workflow."""
_MOST_TEARDOWNS = 100
"""So often a body is told that it is being unwound."""

INFRASTRUCTURE = (LockLostError, OutcomeUnknownError, StorageClosedError, TransientStorageError)
"""Troubles between us and the database: never errors of a workflow, never attempts of an activity."""

UNSTORABLE = (InvalidJSONError, InvalidKeyError, PayloadTooLargeError)
"""The storage's answer to a value that it will never take."""


_END_WAITS = (
    HistoryEventType.CHANNEL_MESSAGE_RECEIVED,
    HistoryEventType.INSTANCE_FINISHED,
    HistoryEventType.MESSAGE_TIMEOUT,
    HistoryEventType.TIMER_EXPIRED,
)
"""Whatever records one of these also removes the wait for it."""


UNSEEN: Final = object()
"""What stands for the result of a step that is not recorded, or that is not what the body would see next."""


class Attempts(msgspec.Struct):
    """What is recorded of the failed attempts at a step."""

    failed: int = 0
    first_at: datetime | None = None
    retry_at: datetime | None = None
    cut_off: bool = False
    """Whether one of them was stopped half-way."""


class _Unwritten:
    """What a task has to record, and what came of it: somebody else may write it."""

    __slots__ = ("error", "event", "fresh", "settled")

    def __init__(self, event: HistoryEvent, fresh: Fresh | None) -> None:
        self.event = event
        self.fresh = fresh
        self.settled = False
        self.error: BaseException | None = None


class Run:
    """The execution of one instance by one holder of its lock."""

    # More than thirty: without slots Python would keep them in a dictionary, made anew for each instance.
    __slots__ = (
        "__weakref__",
        "_ahead",
        "_beside",
        "_body",
        "_calls_outside",
        "_doing",
        "_encode_result",
        "_ending",
        "_failure",
        "_history_time",
        "_last_steps",
        "_new",
        "_payload_limit",
        "_pending",
        "_performing",
        "_progress",
        "_registered",
        "_root",
        "_teardowns",
        "_tearing_down",
        "_unwritten",
        "_upcoming",
        "_withdrawn",
        "_writing",
        "attempts",
        "encode_arguments",
        "ended",
        "event_types",
        "instance",
        "instance_id",
        "last_id",
        "live",
        "lock",
        "loop",
        "now",
        "observers",
        "perhaps_begun",
        "stopped",
        "storage",
        "timestamp",
    )

    def __init__(
        self,
        storage: SQLStorage,
        instance: WorkflowInstance,
        lock: Lock,
        body: Callable[[], Coroutine[Any, Any, Any]],
        signature: Signature,
        clock: DatabaseClock,
        last_steps: set[str],
    ) -> None:
        self.storage = storage
        self.instance = instance
        self.instance_id = instance.instance_id
        self.lock = lock
        self._payload_limit = storage.payload_limit
        self._encode_result = signature.encode_result
        self.encode_arguments = signature.encode_arguments
        # Weakly: a run is freed at its end, and not when the garbage collector comes round.
        self.loop = WorkflowLoop(weakref.proxy(self), self.instance_id)  # type: ignore[abstract]  # it refuses the rest
        self._body = body
        self._last_steps = last_steps
        self._root: WorkflowTask | None = None
        self._pending: dict[str, Step] = {}
        self._new: dict[str, Step] = {}
        """What the body has asked for and nobody has looked at yet, in order."""
        self._doing: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Attempts that were given up and have yet to end."""
        self._withdrawn: set[str] = set()
        self._upcoming: deque[HistoryEvent] = deque()
        """What was recorded and read, and has yet to reach the body."""
        self._calls_outside: dict[str, int] = {}
        """How often steps of a name were asked for by no task."""
        self._registered: set[str] | None = set() if lock.token == 1 else None
        """The waits that the database has of this instance; None if an earlier acquisition may have left some."""
        self.attempts: dict[str, Attempts] = {}
        self.perhaps_begun: set[str] = set()
        """Steps without a record that an earlier holder of the lock may have begun."""
        self.event_types: set[str] = set()
        """The types of events that the body has subscribed to by waiting for one."""
        self._writing = asyncio.Lock()
        self._ahead = False
        """Whether the body has seen a result that is being written."""
        self._unwritten: list[_Unwritten] = []
        self._progress = asyncio.Event()
        """Set when `_go_on` has to look again at what there is to do."""
        self._performing = False
        """Whether activities may be started: neither while history is read nor when the run ends."""
        self._beside: list[Wait] = []
        """What `_go_on` waits for beside activities."""
        self._failure: BaseException | None = None
        self._tearing_down = False
        self._teardowns = 0
        """How often the body has asked for something since it is being unwound."""
        self.live = False
        self.last_id = 0
        self.now = clock.now
        self.timestamp = clock.timestamp
        self._history_time = (instance.started_at or clock.now()).timestamp()
        self.stopped: Ending | None = None
        self.observers = NOBODY
        self.ended: Ended | None = None
        """How the instance ended, once that is stored."""

    def watch(self, step: Step, attempt: int = 1) -> WatchedStep:
        """Tell hooks of an attempt at a step."""
        if not self.observers.anybody:  # before its details are put together, for nobody
            return UNWATCHED
        return self.observers.step(
            instance_id=self.instance_id,
            workflow_name=self.instance.workflow_name,
            step_id=step.id,
            name=step.name,
            kind=str(step.kind),
            attempt=attempt,
        )

    def time(self) -> float:
        """The time of the loop: when what the body saw last was recorded, so that it is the same on every replay."""
        return self._history_time

    # Running.

    async def execute(self, *, newborn: bool = False, woken: Woken | None = None) -> Ending:
        """Run the body as far as it gets; a newborn instance has no history to replay."""
        try:
            if self._root is None:
                self._start_body()
                if not newborn:
                    await self._replay_rest(woken)
                if self.lock.token > 1:
                    self.perhaps_begun.update(self._pending)
            self.live = True
            return await self._until_it_ends()
        finally:
            await self._stop_doing()

    async def resume(self, lock: Lock, woken: Woken | None = None) -> Ending:
        """Go on after a suspension that this process has kept in memory: only what was recorded since is read."""
        self.lock = lock
        self.stopped = None
        try:
            await self._replay_rest(woken)
            return await self._until_it_ends()
        finally:
            await self._stop_doing()

    def _start_body(self) -> None:
        context = contextvars.copy_context()
        context.run(CURRENT_RUN.set, self)
        self._root = self.loop.create_task(self._body(), context=context)
        self.loop.run_until_blocked()

    async def _replay_rest(self, woken: Woken | None = None) -> None:
        """Take what is recorded, and was not seen yet, to the body; a page at a time.

        If what has woken the instance is known to be all, there is nothing to read.
        """
        if woken is not None and woken.after_id == self.last_id < (woken.event.id or 0):
            self._replay(woken.event)
            return
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                self._upcoming.extend(page.events)
                while self._upcoming:
                    self._replay(self._upcoming.popleft())

    async def _pages(self) -> AsyncGenerator[HistoryPage, None]:
        """What is recorded and was not seen yet; while one page is replayed, the database is at the next."""
        page = await self._read_page(self.last_id)
        while page.has_more:
            following = asyncio.ensure_future(self._read_page(page.events[-1].id or 0))
            try:
                await asyncio.sleep(0)  # it has been asked for
                yield page
                page = await following
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
                if not following.cancelled():
                    following.exception()  # seen: whoever gave up before it came has told why
        yield page

    def _read_page(self, after_id: int) -> Coroutine[Any, Any, HistoryPage]:
        return self.storage.get_history_to_replay(self.instance_id, after_id, _PAGE)

    def replayed(self, step_id: str, name: str, input_json: str, decode: Callable[[msgspec.Raw], Any]) -> Any:
        """The recorded result of a step that the body asks for, if it would see that next anyway; else `UNSEEN`.

        It would, if the record is the next one in history and no other task could go on before it is handed in: then
        the body need not even stop to wait for it.
        """
        if not self._upcoming or self.loop.ready:
            return UNSEEN
        event = self._upcoming[0]
        if event.activity_id != step_id:
            return UNSEEN
        outcome = recorded_outcome(event, name, input_json)
        if outcome is None:
            return UNSEEN
        try:
            result = decode(outcome.result)
        except SerializationError:
            return UNSEEN  # the body must not see that, nor go on: whoever hands the record in tells of it
        self._upcoming.popleft()
        self.last_id = event.id or self.last_id
        if outcome.at > self._history_time:
            self._history_time = outcome.at
        return result

    def _replay(self, event: HistoryEvent) -> None:
        """Take one recorded event to where the body waits for it."""
        self._has_seen(event.id)
        if event.activity_id in LIFE or event.activity_id.startswith(COMPENSATION):
            return
        step, hash_sign, attempt = event.activity_id.partition("#")
        if hash_sign:
            self._note_attempt(step, attempt, event)
            return
        self.deliver(event)

    def _note_attempt(self, step: str, attempt: str, event: HistoryEvent) -> None:
        noted = self.attempts.setdefault(step, Attempts())
        if not attempt.isdigit():
            self._end_pause(step)
            return
        noted.failed = max(noted.failed, int(attempt))
        noted.first_at = noted.first_at or event.created_at or self.now()  # we have just written what has no time yet
        stored = msgspec.json.decode(event.event_data or "{}")
        noted.cut_off |= stored.get("cut_off", False)
        retry_at = stored.get("retry_at")
        noted.retry_at = datetime.fromisoformat(retry_at) if retry_at else None

    def deliver(self, event: HistoryEvent) -> None:
        """Hand a recorded result to the step that waits for it, and let the body go on."""
        self._has_seen(event.id)
        if self._registered and event.event_type in _END_WAITS:
            self._registered.discard(event.activity_id)
        if "#" in event.activity_id:
            self._end_pause(event.activity_id.partition("#")[0])
            return
        step = self._awaited(event)
        if step is not None:
            step.check(event)
            self._hand_over(step, event, step.recorded_at(event))

    def _deliver_own(self, event: HistoryEvent, fresh: Fresh) -> None:
        """The same for whoever has just made the record of a success: there is nothing to read or to check."""
        step = self._awaited(event)
        if step is not None:
            self._hand_over(step, event, fresh.at, fresh)

    def _awaited(self, event: HistoryEvent) -> Step | None:
        """The step whose result this is, which is not waited for any longer; None if the body has given it up."""
        step = self._pending.pop(event.activity_id, None)
        if step is None and event.activity_id not in self._withdrawn:
            raise self._unexpected(event)
        return step

    def _hand_over(self, step: Step, event: HistoryEvent, recorded_at: float, fresh: Fresh | None = None) -> None:
        self._new.pop(step.id, None)  # a replay would else keep every step it has ever seen
        self._doing.pop(step.id, None)
        if recorded_at > self._history_time:
            self._history_time = recorded_at
        step.settle(event, fresh)
        self.loop.run_until_blocked()

    def _has_seen(self, history_id: int | None) -> None:
        """Remember how far history was read; what was only just made has no id yet."""
        if history_id is not None and history_id > self.last_id:
            self.last_id = history_id

    def pause(self, step: Step, attempt: int, until: datetime) -> None:
        """Let a step wait durably for its next attempt: neither lock nor memory is held meanwhile."""
        step.wait = TimerSubscription(
            instance_id=self.instance_id, timer_id=f"{step.id}#{attempt}-pause", expires_at=until
        )
        self._progress.set()

    def _end_pause(self, step_id: str) -> None:
        step = self._pending.get(step_id)
        if step is not None and step.wait is not None:
            step.wait = None
            self._new[step.id] = step

    def _unexpected(self, event: HistoryEvent) -> NonDeterminismError:
        waiting = ", ".join(repr(step) for step in self._pending) or "nothing: it has ended"
        message = (
            f"history has recorded step {event.activity_id!r} ({event.event_type}), and the code does not ask for it;"
            f" at this point the code waits for {waiting}"
        )
        root = self._root
        error = root.exception() if root is not None and root.done() and not root.cancelled() else None
        if error is None:
            return NonDeterminismError(message)
        return NonDeterminismError(f"{message} with {type(error).__qualname__}", f": {error}")

    async def _until_it_ends(self) -> Ending:
        """Go on; a write that is refused because the lock is lost or the instance was cancelled is an end, too."""
        self._performing = True
        try:
            return await self._go_on()
        except LockLostError:
            return Ending.LOST
        except InvalidStatusTransitionError as error:
            if error.status is not WorkflowStatus.COMPENSATING:
                raise
            return Ending.COMPENSATE

    async def _go_on(self) -> Ending:
        """Do what the body asks for until it ends or everything it asks for takes its time."""
        assert self._root is not None, "the body has been started"
        while True:
            self._progress.clear()
            await self._catch_up()
            if self.ended is not None:
                return Ending.FINISHED
            if self.stopped is not None:
                return self.stopped
            if self._failure is not None:
                raise self._failure
            if self._root.done():
                return await self._finish(self._root)
            call = self._start_activities()
            if call is not None:
                assert call.perform is not None, "a call can be made"
                async with self._writing:
                    await call.perform(self, call)
            elif self._doing:
                await self._wait_for_progress()
            elif not await self._suspend():
                return Ending.SUSPENDED

    async def _catch_up(self) -> None:
        """Wait until what the body has seen is recorded."""
        if self._ahead:
            async with self._writing:
                pass

    def _start_activities(self) -> Step | None:
        """Start what the body has asked for, in order; a call is returned, to be made before anything else."""
        while self._new:
            step = self._new.pop(next(iter(self._new)))
            if step.id not in self._pending or step.perform is None:
                continue
            if step.kind is CALL:
                return step
            self._start(step)
        return None

    def _start(self, step: Step) -> None:
        self._doing[step.id] = asyncio.create_task(self._perform(step), name=f"{self.instance_id}:{step.id}")

    async def _perform(self, step: Step) -> None:
        """Perform an activity, and whatever single activity the body wants next: most bodies want one at a time."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        following: Step | None = step
        try:
            while following is not None:
                step = following
                assert step.perform is not None, "an activity can be performed"
                success = await step.perform(self, step)
                if success is not None:
                    try:
                        await self.record(success.event, success.fresh)
                    except UNSTORABLE as error:
                        await success.refused(self, step, error)
                self._doing.pop(step.id, None)
                following = self._follow(task)
        except asyncio.CancelledError:
            if self._performing and step.id in self._pending:  # not by us, and nobody would ever do the step
                self._failure = self._failure or RomancyError(f"step {step.id!r} was cancelled by what it called")
            raise
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._doing.pop(step.id, None)
            self._progress.set()

    def _follow(self, task: asyncio.Task[None]) -> Step | None:
        """Take on the next activity in the running task; None if there is more to look at than that."""
        if len(self._new) != 1 or self._beside or not self._performing:
            return None
        over = self.ended is not None or self.stopped is not None or self._failure is not None
        if over or task.cancelling():
            return None
        (step,) = self._new.values()
        if step.kind is not ACTIVITY:
            return None
        self._new.clear()
        self._doing[step.id] = task
        return step

    async def _wait_for_progress(self) -> None:
        """Wait for a running activity, or for a wait beside it that is due."""
        waits = self._beside = self._waits()
        if not waits:
            await self._progress.wait()
            return
        due = [wait.expires_at for wait in waits if isinstance(wait, TimerSubscription)]
        pause = min([max(0.0, (moment - self.now()).total_seconds()) for moment in due] + [_POLL_SEC])
        try:
            async with asyncio.timeout(pause):
                await self._progress.wait()
        except TimeoutError:
            async with self._writing:
                await self._take_what_is_due(waits, keep_lock=True)

    async def _suspend(self) -> bool:
        """Register what the body waits for and give the lock back; True if something was due already instead."""
        waits = self._waits()
        if not waits:
            raise RomancyError(
                "the workflow's body waits for something that nothing durable will ever bring about"
                " (a future, event or queue that no step of it fulfils)"
            )
        async with self._writing:
            current = {step.wait_id for step in self._pending.values() if step.wait is not None}
            if self._registered is None:
                self._registered = set(await self.storage.get_awaited_steps(self.instance_id))
            due = await self._take_what_is_due(waits, withdrawn=sorted(self._registered - current))
            self._registered = self._registered & current if due else current
        return due

    async def _take_what_is_due(self, waits: list[Wait], **options: Any) -> bool:
        """Suspend, unless something is due or cannot be waited for: then the body is told, and True."""
        try:
            due = await self.storage.suspend(
                self.instance_id, waits, lock=self.lock, one_message=True, only_running=True, **options
            )
        except (NotSubscribedError, InstanceNotFoundError) as error:
            await self._fail_waits(error)
            return True
        for event in due:
            self.deliver(event)
        return bool(due)

    async def _fail_waits(self, error: NotSubscribedError | InstanceNotFoundError) -> None:
        """A receive without a subscription, or a child that is gone: the body is told, and that is recorded."""
        stored = encode(StoredError.of(error), "an error")
        for step in list(self._pending.values()):
            match step.wait:
                case ChannelWait() as wait:
                    hopeless = isinstance(error, NotSubscribedError) and wait.channel == error.channel
                case InstanceWait() as wait:
                    hopeless = isinstance(error, InstanceNotFoundError) and wait.instance_id == error.instance_id
                case _:
                    hopeless = False
            if hopeless:
                event = self.event(step.id, HistoryEventType.ACTIVITY_FAILED, stored)
                appended = await self.storage.append_history(event, lock=self.lock)
                self._recorded(event, appended.id)

    def _waits(self) -> list[Wait]:
        return [step.wait for step in self._pending.values() if step.wait is not None]

    def next_due(self) -> datetime | None:
        """When the first timer or timeout of a suspended run is due."""
        moments = [
            wait.expires_at if isinstance(wait, TimerSubscription) else wait.timeout_at
            for wait in self._waits()
            if not isinstance(wait, InstanceWait)
        ]
        return min((moment for moment in moments if moment is not None), default=None)

    # The end.

    async def _finish(self, root: WorkflowTask) -> Ending:
        if self._tearing_down:
            return Ending.LOST
        if root.cancelled():
            return await self._fail(asyncio.CancelledError("the workflow's body cancelled itself"))
        error = _only_recur(root.exception())
        if error is not None and not isinstance(error, Recur):
            return await self._fail(error)
        try:
            return await self._complete(root.result()) if error is None else await self._start_over(error.input_json)
        except (SerializationError, *UNSTORABLE) as unstorable:
            return await self._fail(unstorable)

    async def _complete(self, result: Any) -> Ending:
        async with self._writing:
            await self._store_result(result)
        return Ending.FINISHED

    async def _store_result(self, result: Any, record: HistoryEvent | None = None) -> None:
        output = f'{{"result": {self._encode_result(result)}}}'
        await self.storage.update_instance_output(self.instance_id, output, lock=self.lock, record=record)
        self.ended = Ended(WorkflowStatus.COMPLETED, output)

    async def _start_over(self, input_json: str) -> Ending:
        await self._stop_doing()  # what still runs belongs to the round that ends
        async with self._writing:
            await self.storage.recur_instance(self.instance_id, input_json, lock=self.lock)
        return Ending.RECURRED

    async def _fail(self, error: BaseException) -> Ending:
        await self._stop_doing()  # a step that began after we looked would be left without its compensation
        trace = "".join(traceback.format_exception(error, limit=-20))
        stored = StoredError.of(error, trace)
        output = encode(stored, "the workflow's error")
        if not self.fits(output):
            output = encode(stored.brief(), "the workflow's error")
        message = f"{stored.error_type}: {stored.error_message}"
        async with self._writing:
            undo = await self.storage.get_compensations(self.instance_id)
            cancelled = await self.storage.get_history_event(self.instance_id, CANCELLED) is not None
            status = WorkflowStatus.COMPENSATING if undo or cancelled else WorkflowStatus.FAILED
            await self.storage.update_instance_status(
                self.instance_id, status, message, output_data=output, lock=self.lock
            )
        if status is WorkflowStatus.COMPENSATING:
            return Ending.COMPENSATE
        self.ended = Ended(status, output, stored.error_type)
        return Ending.FINISHED

    def fits(self, text: str) -> bool:
        """Whether a text is small enough to be stored as one payload."""
        return len(text) * 4 <= self._payload_limit or len(text.encode()) <= self._payload_limit

    def stop(self, ending: Ending) -> None:
        """Stop at the next opportunity: the lock is lost, or the instance was cancelled."""
        self.stopped = ending
        self._progress.set()

    async def _stop_doing(self) -> None:
        """End running attempts and wait for their end: nothing of this run goes on behind its back."""
        self._performing = False
        doing = [*self._doing.values(), *self._ending]
        for task in doing:
            task.cancel()
        if doing:
            await asyncio.wait(doing)
        await self._catch_up()
        self._doing.clear()

    def tear_down(self) -> None:
        """Unwind the body without recording anything; what it returns or raises from here on is ignored."""
        self._tearing_down = True
        self._upcoming.clear()
        if self.loop.tasks or self._pending or self.loop.ready:
            self._unwind()
        self._root = None
        self.loop.close()

    def _unwind(self) -> None:
        spins = 0
        for _ in range(_MOST_TEARDOWNS):
            for step in list(self._pending.values()):
                if not step.future.done():
                    step.future.set_exception(Teardown())
                    step.future.exception()  # seen: the task that waits for it raises it
            self._pending.clear()
            try:
                self.loop.run_until_blocked()
            except RomancyError:  # it spins
                spins += 1
            if not self.loop.tasks or spins > 1:
                break
            for task in list(self.loop.tasks):
                task.cancel()
        if self.loop.tasks:
            log.warning(
                "instance %s: its body cannot be unwound; let it catch Exception rather than BaseException",
                self.instance_id,
                extra={"instance": self.instance_id, "step": None},
            )
            for task in self.loop.tasks:
                # Kept for ever: Python would unwind the task before forgetting it, and never come to an end either.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))

    # What the body calls; these run on the workflow's own loop.

    def next_step_id(self, name: str) -> str:
        """The id of the step that the running task asks for now."""
        task = asyncio.current_task(self.loop)
        if not isinstance(task, WorkflowTask):  # in a callback of the loop
            number = self._calls_outside[name] = self._calls_outside.get(name, 0) + 1
            return step_id((0,), name, number)
        number = task.calls[name] = task.calls.get(name, 0) + 1
        return step_id(task.path, name, number)

    def ask(
        self,
        kind: Kind,
        name: str,
        step: str | None = None,
        *,
        input_json: str = "{}",
        decode: Callable[[msgspec.Raw], Any] = msgspec.json.decode,
        wait: Wait | None = None,
        fire: Callable[[], None] | None = None,
    ) -> Step:
        """Ask for a step; its future is what the body waits for."""
        if self._tearing_down:
            self._teardowns += 1
            if self._teardowns <= _MOST_TEARDOWNS:
                raise Teardown
        future: asyncio.Future[Any] = asyncio.Future(loop=self.loop)
        asked = Step(step or self.next_step_id(name), kind, name, future, input_json, decode, wait, fire)
        if self._tearing_down:
            return asked  # it is never settled: a body that swallows every Teardown would else never come to rest
        if kind is not ACTIVITY:  # which is never awaited but in its call: that notices, and every step costs less
            asked.on_done = functools.partial(self._on_done, asked)
            future.add_done_callback(asked.on_done)
        self._pending[asked.id] = asked
        self._new[asked.id] = asked
        return asked

    def _on_done(self, step: Step, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self.withdraw(step)

    def withdraw(self, step: Step) -> None:
        """The body no longer waits for the step: whatever comes of it is not recorded, or ignored."""
        self._pending.pop(step.id, None)
        self._new.pop(step.id, None)
        self._withdrawn.add(step.id)
        doing = self._doing.pop(step.id, None)
        if doing is not None:
            doing.cancel()
            self._ending.add(doing)
            doing.add_done_callback(self._ending.discard)

    def start_timer(self, delay_sec: float, fire: Callable[[], None]) -> Callable[[], None]:
        timer_id = self.next_step_id("timer")
        wait = TimerSubscription(
            instance_id=self.instance_id, timer_id=timer_id, expires_at=self.now() + timedelta(seconds=delay_sec)
        )
        step = self.ask(Kind.TIMER, "timer", timer_id, wait=wait, fire=fire)
        return lambda: self.withdraw(step)

    # Writing.

    async def record(self, event: HistoryEvent, fresh: Fresh | None = None) -> None:
        """Write an activity's end and hand it to the body; what ends while somebody writes is written together."""
        if self._writing.locked():
            await self._record_in_company(_Unwritten(event, fresh))
            return
        await self._writing.acquire()
        try:
            if not self._is_wanted(event):
                return
            if fresh is not None and self._may_end_with(event):
                await self._record_and_end(event, fresh)
                return
            appended = await self.storage.append_history(event, lock=self.lock)
            self._recorded(event, appended.id, fresh)
            if fresh is not None and self._has_returned() and len(self._last_steps) < _MOST_LAST_STEPS:
                self._last_steps.add(event.activity_id)
        finally:
            self._writing.release()

    def _may_end_with(self, event: HistoryEvent) -> bool:
        """Whether the body may return with this result, as others did, and nothing else goes on.

        Of an instance that was taken over each result is recorded first: perhaps its body is what killed the worker.
        """
        if event.activity_id not in self._last_steps or self.lock.token > 1:
            return False
        alone = len(self._pending) == len(self._doing) == len(self.loop.tasks) == 1 and not self._ending
        return alone and self.fits(event.event_data or "")

    def _has_returned(self) -> bool:
        root = self._root
        return root is not None and root.done() and not root.cancelled() and root.exception() is None

    async def _record_and_end(self, event: HistoryEvent, fresh: Fresh) -> None:
        """Let the body see the result first: if it returns, that is recorded by the same write.

        Otherwise what it asks for has to wait until the result is recorded, as always.
        """
        self._ahead = True
        try:
            self._deliver_own(event, fresh)
        finally:
            try:
                if not await self._end_with(event):
                    await self._record_seen(event)
            finally:
                self._ahead = False

    async def _end_with(self, event: HistoryEvent) -> bool:
        """Complete the instance and record its last step; False if the body has not returned, or that was refused."""
        assert self._root is not None, "the body has been started"
        if not self._has_returned():
            return False
        try:
            await self._store_result(self._root.result(), record=event)
        except INFRASTRUCTURE:
            raise
        except Exception:
            return False  # `_finish` tries again, without the step, and knows what to do then
        return True

    async def _record_seen(self, event: HistoryEvent) -> None:
        """Record a result that the body has seen."""
        try:
            appended = await self.storage.append_history(event, lock=self.lock)
        except UNSTORABLE as error:
            # It fits, so this hardly ever happens. Next time it is recorded before the body sees it.
            raise RomancyError(f"step {event.activity_id!r}: the body has seen what cannot be stored") from error
        self._has_seen(appended.id)

    async def _record_in_company(self, mine: _Unwritten) -> None:
        self._unwritten.append(mine)
        async with self._writing:
            if not mine.settled:
                await self._write_together()
        if mine.error is not None:
            raise mine.error

    async def _write_together(self) -> None:
        """Write all that is unwritten; each of its writers finds its own outcome."""
        batch, self._unwritten = self._unwritten, []
        for one in batch:
            one.settled = True
        wanted = [one for one in batch if self._is_wanted(one.event)]
        try:
            outcomes = await self._append_many([one.event for one in wanted])
        except BaseException as error:
            for one in wanted:
                one.error = error
            if not isinstance(error, StorageError):
                raise
            return
        for one, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, StorageError):
                one.error = outcome
            else:
                self._recorded(one.event, outcome.id, one.fresh)

    async def _append_many(self, events: list[HistoryEvent]) -> list[Appended | StorageError]:
        if len(events) > 1:
            try:
                return await self.storage.append_history_many(events, lock=self.lock)
            except UNSTORABLE:  # one of them: one by one, it fails alone
                pass
        return [await self._append_one(event) for event in events]

    async def _append_one(self, event: HistoryEvent) -> Appended | StorageError:
        try:
            return await self.storage.append_history(event, lock=self.lock)
        except UNSTORABLE as error:
            return error

    def _is_wanted(self, event: HistoryEvent) -> bool:
        return event.activity_id in self._pending or event.activity_id.partition("#")[0] in self._pending

    def _recorded(self, event: HistoryEvent, history_id: int, fresh: Fresh | None = None) -> None:
        self._has_seen(history_id)
        if fresh is not None:
            self._deliver_own(event, fresh)
        elif "#" in event.activity_id:
            step, _, attempt = event.activity_id.partition("#")
            self._note_attempt(step, attempt, event)
        else:
            self.deliver(event)

    async def in_turn(self, write: Callable[P, Awaitable[HistoryEvent]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a transaction of this run that records a step itself, while nobody else of it writes."""
        async with self._writing:
            self.deliver(await write(*args, **kwargs))

    def event(self, step: str, event_type: HistoryEventType, data: str, at: float | None = None) -> HistoryEvent:
        """A history event of this instance, with the time at which the body sees it."""
        stamp = msgspec.json.encode(self.timestamp() if at is None else at).decode()  # a fifth of what repr() takes
        stamped = f'{data[:-1]}, "at": {stamp}}}'
        return HistoryEvent(instance_id=self.instance_id, activity_id=step, event_type=event_type, event_data=stamped)


def _only_recur(error: BaseException | None) -> BaseException | None:
    """An error as it is; but groups in which there is nothing but the wish to start over are that wish."""
    while isinstance(error, BaseExceptionGroup) and error.split(Recur)[1] is None:
        error = error.exceptions[0]
    return error
