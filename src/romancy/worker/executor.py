"""The executor: runs the instances whose locks this worker holds, and keeps some suspended ones warm."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import msgspec

from ..compensation import Compensator
from ..engine.clock import DatabaseClock
from ..engine.endings import Ended, Ending
from ..engine.run import INFRASTRUCTURE, Run
from ..errors import NonDeterminismError, WorkerVanishedError
from ..hooks import NOBODY, UNWATCHED_WORKFLOW
from ..logs import about, log, outlook
from ..storage import (
    Lock,
    LockLostError,
    SQLStorage,
    Woken,
    WorkflowInstance,
    WorkflowStatus,
)
from ..storage.models import FINISHED
from ..workflow import Workflow
from .settings import Settings

_TRIES_BEFORE_PARKING = 5
_LONGEST_BACKOFF_SEC = 300.0
_LONGEST_TROUBLE_SEC = 5.0
_MOST_COUNTED = 10_000
_INNOCENT_TAKEOVERS = 2
"""So often a worker may die with an instance before that is taken for a sign."""


class Execution:
    """One acquisition of an instance's lock, and what is done with it."""

    def __init__(
        self, instance: WorkflowInstance, lock: Lock, *, newborn: bool = False, woken: Woken | None = None
    ) -> None:
        self.instance = instance
        self.instance_id = instance.instance_id
        self.lock = lock
        self.newborn = newborn
        self.woken = woken
        self.run: Run | None = None
        self.task: asyncio.Task[None] | None = None
        self.ended: Ended | None = None
        """How the instance ended, if it did."""
        self.watched = UNWATCHED_WORKFLOW
        self.abandoned = False
        """Whether its lock was lost; it looks when it begins, and is told otherwise from then on."""
        self.begun = False
        """Whether it has, after what an earlier execution of the instance still had to do."""
        self.renewed_at = time.monotonic()
        """When its lock was taken, or last asked for and renewed."""
        self.doubted_at = -math.inf
        """When somebody told that its instance was cancelled: a heartbeat asks, and only what is asked later counts."""
        self._over = False
        self._waiting: list[asyncio.Future[None]] = []
        """Those who want to know when it is over."""

    async def rest(self) -> None:
        """Wait until this execution is over, or was abandoned: from then on others may go on with the instance.

        Only in the event loop in which it runs; elsewhere nothing is waited for.
        """
        loop = asyncio.get_running_loop()
        if self._over or self.abandoned or self.task is None or self.task.get_loop() is not loop:
            return
        told: asyncio.Future[None] = loop.create_future()
        self._waiting.append(told)
        try:
            await told
        finally:
            self._waiting.remove(told)

    def end(self) -> None:
        """Tell those who wait for it that it is over."""
        self._over = True
        self._tell()

    def abandon(self) -> None:
        """Stop what is being done with a lock that is no longer ours: another worker may be doing the same already."""
        self.abandoned = True
        if self.run is not None:
            self.run.stop(Ending.LOST)
        elif self.task is not None and self.begun:
            self.task.cancel()  # it compensates
        self._tell()

    def _tell(self) -> None:
        for told in self._waiting:
            if not told.done():
                told.set_result(None)

    def drop_run(self) -> None:
        """Unwind the body, if there is one."""
        if self.run is not None:
            self.run.tear_down()
            self.run = None


class Executor:
    """Runs instances until they finish or wait."""

    def __init__(
        self,
        storage: SQLStorage,
        workflows: Mapping[str, Workflow[Any, Any]],
        worker_id: str,
        clock: DatabaseClock,
        *,
        settings: Settings,
        on_idle: Callable[[], None],
        on_due: Callable[[datetime], None],
        on_cancelled: Callable[[], None],
    ) -> None:
        self._storage = storage
        self.observers = NOBODY
        self._workflows = workflows
        self._worker_id = worker_id
        self._clock = clock
        self._settings = settings
        self._warm: OrderedDict[str, Run] = OrderedDict()
        self._on_idle = on_idle
        self._on_due = on_due
        self._on_cancelled = on_cancelled
        self._cancelled_lately: dict[str, None] = {}
        """Instances that do not run here, but that we may just be taking."""
        self._executions: dict[str, Execution] = {}
        self._tries: dict[str, int] = {}
        """How often in a row an instance could not be run."""
        self._troubles: dict[str, int] = {}
        """How often in a row the infrastructure kept an instance from going on."""
        self._reserved: Counter[str] = Counter()
        """Places kept, by workflow, for instances that are just being created or claimed."""
        self._stopping = False
        self._context = contextvars.copy_context()
        """In which instances run: nothing of whoever starts one, an activity perhaps, may reach into it."""

    def room_for(self, name: str) -> int:
        """How many more instances of a workflow may run now."""
        if self._stopping:
            return 0
        room = self._settings.concurrency - len(self._executions) - self._reserved.total()
        limit = self._workflows[name].max_concurrent
        if limit is None:
            return room
        running = sum(execution.instance.workflow_name == name for execution in self._executions.values())
        return min(room, limit - running - self._reserved[name])

    @contextmanager
    def reserve(self, places: int, name: str) -> Iterator[None]:
        """Keep places for instances of a workflow, so that nobody else takes them meanwhile."""
        self._reserved[name] += places
        try:
            yield
        finally:
            self._reserved[name] -= places

    def locks_to_renew(self, heartbeat_sec: float) -> list[Lock]:
        """The locks that have to be kept alive; those that are new, and last long enough, can wait for a heartbeat."""
        now = time.monotonic()
        soon = self._clock.now() + timedelta(seconds=3 * heartbeat_sec)
        return [
            execution.lock
            for execution in self._executions.values()
            if now - execution.renewed_at >= heartbeat_sec / 2
            or execution.doubted_at >= execution.renewed_at
            or execution.lock.expires_at <= soon
        ]

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What is running."""
        return [execution.task for execution in self._executions.values() if execution.task is not None]

    def execution_of(self, instance_id: str) -> Execution | None:
        """What is being done with the instance; None if it does not run here."""
        return self._executions.get(instance_id)

    def start(
        self, instance: WorkflowInstance, lock: Lock, *, newborn: bool = False, woken: Woken | None = None
    ) -> None:
        """Run an instance whose lock was just taken, by creating it (then it has no history) or by waking it."""
        before = self._executions.get(instance.instance_id)
        if before is not None:
            before.abandon()  # its lock is gone, and it may be long until a write of its own tells it
        execution = self._executions[instance.instance_id] = Execution(instance, lock, newborn=newborn, woken=woken)
        if instance.instance_id in self._cancelled_lately:
            self.cancelled(instance.instance_id)
        self._watch(execution, resumed=lock.token > 1)  # here, where hooks still see who starts it
        execution.task = asyncio.create_task(
            self._execute(execution, before),
            name=f"romancy:{instance.instance_id}",
            context=self._context.copy(),
        )

    async def _execute(self, execution: Execution, before: Execution | None) -> None:
        try:
            await self._attempt(execution, before)
        finally:
            execution.drop_run()
            if self._executions.get(execution.instance_id) is execution:
                del self._executions[execution.instance_id]
            execution.end()
            self._on_idle()

    async def _attempt(self, execution: Execution, before: Execution | None) -> None:
        """Run until the instance rests; whatever goes wrong, its lock is given back or the instance set aside."""
        instance_id = execution.instance_id
        try:
            if before is not None and before.task is not None:
                # We lost this lock and got it back: what the earlier execution still does must end first.
                await asyncio.wait({before.task})
            execution.begun = True
            if execution.abandoned:
                raise LockLostError(instance_id, self._worker_id)
            if await self._backs_off(execution):
                return
            await self._until_it_rests(execution)
            self._tries.pop(instance_id, None)
            self._troubles.pop(instance_id, None)
        except LockLostError:
            log.info("instance %s: the lock is another worker's now", instance_id, extra=about(instance_id))
            execution.watched.suspended("lock lost")
        except NonDeterminismError as error:
            log.error(
                "instance %s is parked: %s; it goes on when a worker with other code starts, or after"
                " `romancy unpark %s`",
                instance_id,
                error.without_values,
                instance_id,
                extra=about(instance_id),
            )
            await self._quietly(self._refuse(execution, error))
        except INFRASTRUCTURE as error:
            # The infrastructure's trouble, never the workflow's: somebody goes on when it is over.
            log.warning("instance %s is given back: %s", instance_id, error, extra=about(instance_id))
            await self._give_back_later(execution)
        except asyncio.CancelledError:
            await self._give_back(execution)
            raise
        except Exception as error:
            tries = _count(self._tries, instance_id)
            pause = min(2.0**tries, _LONGEST_BACKOFF_SEC) if tries < _TRIES_BEFORE_PARKING else None
            log.exception(
                "instance %s could not be run; %s",
                instance_id,
                outlook(instance_id, pause),
                extra=about(instance_id),
            )
            await self._quietly(self._set_aside(execution, error, pause))

    def _watch(self, execution: Execution, *, resumed: bool) -> None:
        execution.watched = self.observers.workflow(
            execution.instance_id, execution.instance.workflow_name, resumed=resumed
        )

    async def _backs_off(self, execution: Execution) -> bool:
        """Whether an instance was set aside because workers keep dying with it, one after the other."""
        # A lock that was given back names nobody. Our own counts, too: we stood still until it had run out.
        if execution.newborn or execution.instance.locked_by is None:
            return False
        takeovers = await self._storage.count_takeover(execution.instance_id, lock=execution.lock)
        if takeovers <= _INNOCENT_TAKEOVERS:
            return False
        error = WorkerVanishedError(
            f"{takeovers} workers in a row vanished while they ran it, without a new step;"
            " or they stood still for longer than their locks last (a blocking call in an async function?)"
        )
        pause = None
        if takeovers < self._settings.takeovers:
            # At random, because others may only have been there when it happened: each soon runs without the culprit.
            pause = min(2.0 ** (takeovers - _INNOCENT_TAKEOVERS), _LONGEST_BACKOFF_SEC) * random.uniform(0.2, 1.0)
        log.error(
            "instance %s is parked: %s; %s",
            execution.instance_id,
            error,
            outlook(execution.instance_id, pause),
            extra=about(execution.instance_id),
        )
        await self._set_aside(execution, error, pause)
        return True

    async def _refuse(self, execution: Execution, error: NonDeterminismError) -> None:
        """Park an instance until there is other code."""
        code = self._workflows[execution.instance.workflow_name].code_hash
        await self._storage.note_refusal(execution.instance_id, code, lock=execution.lock)
        await self._set_aside(execution, error, None)

    async def _give_back_later(self, execution: Execution) -> None:
        """Give an instance back; if that happens again and again, not at once, so that nobody runs in circles."""
        try:
            troubles = _count(self._troubles, execution.instance_id)
            if troubles > 1:
                await asyncio.sleep(min(0.05 * 2.0 ** min(troubles, 16), _LONGEST_TROUBLE_SEC))
        finally:
            await self._give_back(execution)

    async def _give_back(self, execution: Execution) -> None:
        execution.watched.suspended("given back")
        await self._quietly(self._storage.release_lock(execution.instance_id, self._worker_id, lock=execution.lock))

    async def _until_it_rests(self, execution: Execution) -> None:
        while True:
            if execution.instance.status is WorkflowStatus.COMPENSATING:
                await self._compensate(execution)
                return
            match await self._advance(execution):
                case Ending.SUSPENDED:
                    self._keep_warm(execution)
                    execution.watched.suspended("waiting")
                    return
                case Ending.FINISHED:
                    assert execution.run is not None, "what has finished has run"
                    ended = execution.ended = execution.run.ended
                    assert ended is not None, "what has finished has ended somehow"
                    execution.watched.finished(ended.status, ended.error_type)
                    if ended.status is WorkflowStatus.FAILED:
                        _tell_of_failure(execution, ended.error_type)
                    return
                case Ending.LOST:
                    execution.watched.suspended("lock lost")
                    return
                case Ending.RECURRED | Ending.COMPENSATE as ending:
                    if ending is Ending.RECURRED:
                        execution.watched.suspended("starting over")
                        self._watch(execution, resumed=False)
                    execution.drop_run()
                    found = await self._storage.get_instance(execution.instance_id)
                    if found is None or found.status in FINISHED:
                        execution.watched.suspended("lock lost")
                        return
                    execution.instance = found
                    execution.lock = msgspec.structs.replace(execution.lock, status=found.status)

    async def _compensate(self, execution: Execution) -> None:
        compensator = Compensator(
            self._storage,
            execution.lock,
            workflow_name=execution.instance.workflow_name,
            observers=self.observers,
        )
        warm = self._warm.pop(execution.instance_id, None)
        if warm is not None:
            warm.tear_down()
        status = await compensator.run()
        if status is None:
            execution.watched.parked("a compensation keeps failing")
        else:
            failed = status is WorkflowStatus.FAILED
            error_type = _error_type(execution.instance) if failed else None
            execution.watched.finished(status, error_type)
            if failed:
                _tell_of_failure(execution, error_type)

    async def _advance(self, execution: Execution) -> Ending:
        """Run the body as far as it gets, from memory if that is still true."""
        instance, lock = execution.instance, execution.lock
        if lock.status is WorkflowStatus.COMPENSATING:
            return Ending.COMPENSATE  # it was cancelled before it began, as a heartbeat has told
        woken, execution.woken = execution.woken, None  # true once: it may start over
        warm = self._warm.pop(instance.instance_id, None)
        if warm is not None and warm.lock.token + 1 == lock.token:
            execution.run = warm
            return await warm.resume(lock, woken)
        if warm is not None:
            warm.tear_down()
        definition = self._workflows[instance.workflow_name]
        body = definition.body(instance.input_data or "{}")
        execution.run = Run(
            self._storage, instance, lock, body, definition.signature, self._clock, definition.last_steps
        )
        execution.run.observers = self.observers
        newborn, execution.newborn = execution.newborn, False
        return await execution.run.execute(newborn=newborn, woken=woken)

    def _keep_warm(self, execution: Execution) -> None:
        run, execution.run = execution.run, None
        assert run is not None, "what was suspended has run"
        due = run.next_due()
        if due is not None:
            self._on_due(due)
        self._warm[run.instance_id] = run
        while len(self._warm) > self._settings.warm:
            _, oldest = self._warm.popitem(last=False)
            oldest.tear_down()

    async def _set_aside(self, execution: Execution, error: Exception, pause_sec: float | None) -> None:
        """Park an instance that cannot be run, for a while or for good: visible, never failed, never a crash loop."""
        until = None
        if pause_sec is not None:
            until = self._clock.now() + timedelta(seconds=pause_sec)
        reason = f"{type(error).__name__}: {error}"
        execution.drop_run()  # before anybody hears of it: who takes the instance next must not meet our body
        execution.watched.parked(reason, type(error).__name__)
        await self._storage.park(execution.instance_id, reason, until=until, lock=execution.lock)

    @staticmethod
    async def _quietly(cleanup: Awaitable[object]) -> None:
        try:
            await cleanup
        except Exception as error:
            log.info("clean-up has to wait for the lock's expiry: %s", error)

    def heard(self, lock: Lock, asked_at: float) -> None:
        """A heartbeat's answer: the lock goes on, or its instance was cancelled meanwhile."""
        execution = self._executions.get(lock.instance_id)
        if execution is None or execution.lock.token != lock.token:
            return
        execution.lock = lock
        execution.renewed_at = asked_at
        if lock.status is WorkflowStatus.COMPENSATING and execution.run is not None:
            execution.run.stop(Ending.COMPENSATE)

    def cancelled(self, instance_id: str) -> None:
        """Somebody has cancelled an instance: whoever runs it is to be told, also one who is only about to."""
        execution = self._executions.get(instance_id)
        if execution is not None:
            self._cancelled_lately.pop(instance_id, None)
            execution.doubted_at = time.monotonic()
            self._on_cancelled()
        else:
            forget_oldest(self._cancelled_lately, _MOST_COUNTED)
            self._cancelled_lately[instance_id] = None

    def some_cancelled(self) -> None:
        """Somebody has cancelled more instances than were named."""
        for instance_id in list(self._executions):
            self.cancelled(instance_id)

    def lost(self, lock: Lock) -> None:
        """A heartbeat's answer: another worker has the instance."""
        execution = self._executions.get(lock.instance_id)
        if execution is not None and execution.lock.token == lock.token:
            execution.abandon()

    def lost_touch(self) -> None:
        """No heartbeat is answered: stop what others may have taken over by now."""
        now = self._clock.now()
        for execution in self._executions.values():
            if execution.lock.expires_at <= now:
                log.warning(
                    "instance %s: its lock has run out", execution.instance_id, extra=about(execution.instance_id)
                )
                execution.abandon()

    async def stop(self, drain_sec: float) -> None:
        """Let running instances come to rest for a while, then hand back what still runs."""
        self._stopping = True
        if self.tasks and drain_sec > 0:
            await asyncio.wait(self.tasks, timeout=drain_sec)
        await asyncio.sleep(0)  # a task that is cancelled before its first step never takes it: no lock is given back
        tasks = self.tasks
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for run in self._warm.values():
            run.tear_down()
        self._warm.clear()


def forget_oldest(known: dict[str, Any], most: int) -> None:
    """Make room for one more."""
    if len(known) >= most:
        known.pop(next(iter(known)))


def _count(counts: dict[str, int], instance_id: str) -> int:
    """Once more for this instance; a count that is not ended here, but elsewhere, is not kept for ever."""
    forget_oldest(counts, _MOST_COUNTED)
    counts[instance_id] = counts.get(instance_id, 0) + 1
    return counts[instance_id]


class _Failed(msgspec.Struct, frozen=True):
    error_type: str | None = None


def _error_type(instance: WorkflowInstance) -> str | None:
    """With which type of error the body of a failed instance ended."""
    return msgspec.json.decode(instance.output_data or "{}", type=_Failed).error_type


def _tell_of_failure(execution: Execution, error_type: str | None) -> None:
    """In the log, by its type: what an error says may not be meant for it."""
    log.warning(
        "instance %s of %s has failed with %s; `romancy show` tells more",
        execution.instance_id,
        execution.instance.workflow_name,
        error_type,
        extra=about(execution.instance_id),
    )
