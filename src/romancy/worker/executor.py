"""The executor: runs the instances whose locks this worker holds, and keeps some suspended ones warm."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from ..compensation import Compensator
from ..engine.run import Ending, Run
from ..errors import NonDeterminismError
from ..storage import (
    Lock,
    LockLostError,
    OutcomeUnknownError,
    SQLStorage,
    TransientStorageError,
    WorkflowInstance,
    WorkflowStatus,
)
from ..workflow import Workflow

log = logging.getLogger("romancy")

_TRIES_BEFORE_PARKING = 5
_LONGEST_BACKOFF_SEC = 300.0


class Executor:
    """Runs instances until they finish or wait."""

    def __init__(
        self,
        storage: SQLStorage,
        workflows: Mapping[str, Workflow[Any, Any]],
        worker_id: str,
        *,
        warm: int,
        on_idle: Callable[[], None],
        on_due: Callable[[datetime], None],
    ) -> None:
        self._storage = storage
        self._workflows = workflows
        self._worker_id = worker_id
        self._warm_limit = warm
        self._warm: OrderedDict[str, Run] = OrderedDict()
        self._on_idle = on_idle
        self._on_due = on_due
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, Run] = {}
        self._tries: dict[str, int] = {}
        self.locks: dict[str, Lock] = {}

    @property
    def busy(self) -> int:
        """How many instances are running."""
        return len(self._tasks)

    def start(self, instance: WorkflowInstance, lock: Lock) -> None:
        """Run an instance whose lock was just taken."""
        self.locks[instance.instance_id] = lock
        task = asyncio.create_task(self._execute(instance, lock), name=f"romancy:{instance.instance_id}")
        self._tasks[instance.instance_id] = task
        task.add_done_callback(lambda _: self._on_end(instance.instance_id, task))

    def _on_end(self, instance_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(instance_id) is task:
            del self._tasks[instance_id]
        self._on_idle()

    async def _execute(self, instance: WorkflowInstance, lock: Lock) -> None:
        try:
            await self._until_it_rests(instance, lock)
        except LockLostError:
            log.info("instance %s: the lock is another worker's now", instance.instance_id)
        except NonDeterminismError as error:
            log.error("instance %s is parked: %s", instance.instance_id, error)
            await self._quietly(self._storage.park(instance.instance_id, f"NonDeterminismError: {error}", lock=lock))
        except (TransientStorageError, OutcomeUnknownError) as error:
            # The infrastructure's trouble, never the workflow's: somebody goes on when it is over.
            log.warning("instance %s is given back: %s", instance.instance_id, error)
            await self._quietly(self._storage.release_lock(instance.instance_id, self._worker_id, lock=lock))
        except asyncio.CancelledError:
            await self._quietly(self._storage.release_lock(instance.instance_id, self._worker_id, lock=lock))
            raise
        except Exception as error:
            log.exception("instance %s could not be run", instance.instance_id)
            await self._quietly(self._back_off(instance.instance_id, error, lock))
        finally:
            self.locks.pop(instance.instance_id, None)
            run = self._runs.pop(instance.instance_id, None)
            if run is not None:
                run.tear_down()

    async def _until_it_rests(self, instance: WorkflowInstance, lock: Lock) -> None:
        while True:
            if instance.status is WorkflowStatus.COMPENSATING:
                await Compensator(self._storage, lock).run()
                return
            ending = await self._advance(instance, lock)
            match ending:
                case Ending.SUSPENDED:
                    self._keep_warm(self._runs.pop(instance.instance_id))
                    return
                case Ending.FINISHED | Ending.LOST:
                    self._tries.pop(instance.instance_id, None)
                    return
                case Ending.RECURRED | Ending.COMPENSATE:
                    self._runs.pop(instance.instance_id).tear_down()
                    found = await self._storage.get_instance(instance.instance_id)
                    if found is None:
                        return
                    instance = found
                case Ending.PARKED:
                    return

    async def _advance(self, instance: WorkflowInstance, lock: Lock) -> Ending:
        warm = self._warm.pop(instance.instance_id, None)
        db_now = await self._storage.current_time()
        if warm is not None and warm.lock.token + 1 == lock.token:
            self._runs[instance.instance_id] = warm
            return await warm.resume(lock, db_now)
        if warm is not None:
            warm.tear_down()
        definition = self._workflows[instance.workflow_name]
        body = definition.body(instance.input_data or "{}")
        run = Run(self._storage, instance, lock, body, definition.signature, db_now)
        self._runs[instance.instance_id] = run
        return await run.execute()

    def _keep_warm(self, run: Run) -> None:
        due = run.next_due()
        if due is not None:
            self._on_due(due)
        self._warm[run.instance_id] = run
        while len(self._warm) > self._warm_limit:
            _, oldest = self._warm.popitem(last=False)
            oldest.tear_down()

    async def _back_off(self, instance_id: str, error: Exception, lock: Lock) -> None:
        """Set a poisoned instance aside, longer each time, and in the end for good: visible, never a crash loop."""
        tries = self._tries[instance_id] = self._tries.get(instance_id, 0) + 1
        until = None
        if tries < _TRIES_BEFORE_PARKING:
            pause = min(2.0**tries, _LONGEST_BACKOFF_SEC)
            until = await self._storage.current_time() + timedelta(seconds=pause)
        await self._storage.park(instance_id, f"{type(error).__name__}: {error}", until=until, lock=lock)

    @staticmethod
    async def _quietly(cleanup: Any) -> None:
        try:
            await cleanup
        except Exception as error:
            log.info("clean-up has to wait for the lock's expiry: %s", error)

    def heard(self, lock: Lock) -> None:
        """A heartbeat's answer: the lock goes on, or its instance was cancelled meanwhile."""
        run = self._runs.get(lock.instance_id)
        self.locks[lock.instance_id] = lock
        if run is not None and lock.status is WorkflowStatus.COMPENSATING:
            run.stop(Ending.COMPENSATE)

    def lost(self, instance_id: str) -> None:
        """A heartbeat's answer: another worker has the instance."""
        self.locks.pop(instance_id, None)
        run = self._runs.get(instance_id)
        if run is not None:
            run.stop(Ending.LOST)

    async def stop(self, drain_sec: float) -> None:
        """Let running instances come to rest for a while, then hand back what still runs."""
        if self._tasks and drain_sec > 0:
            await asyncio.wait(self._tasks.values(), timeout=drain_sec)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for run in self._warm.values():
            run.tear_down()
        self._warm.clear()
