"""Instances and their locks."""

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from romancy.storage import (
    ANY,
    HistoryEvent,
    InstanceExistsError,
    InstanceNotFoundError,
    InvalidStatusTransitionError,
    ListInstancesOptions,
    Lock,
    LockLostError,
    ResumableWorkflow,
    StaleWorkflowInfo,
    StorageError,
    WorkflowInstance,
    WorkflowNotCancellableError,
    WorkflowStatus,
)
from tests.comparison import FOREVER

from .memory import EPOCH, FINISHED, RUNNABLE, Instance, Setback
from .steps import Steps


class Instances(Steps):
    """Implements `InstanceManager`, but for suspending, and `LockManager`."""

    def create_instance(self, instance: WorkflowInstance, *, lock_timeout_sec: float | None = None) -> Lock | None:
        if instance.continued_from is not None and instance.continued_from not in self.instances:
            raise InstanceNotFoundError(instance.continued_from)
        if instance.instance_id in self.instances:
            raise InstanceExistsError(instance.instance_id)
        lock = None
        if instance.locked_by:
            expires_at = self._in(instance.lock_timeout_seconds or lock_timeout_sec or 60)
            token = instance.lock_token + 1
            lock = Lock(instance.instance_id, token, instance.locked_by, expires_at, instance.status)
        self.definitions.setdefault((instance.workflow_name, instance.source_hash))
        self.instances[instance.instance_id] = Instance(
            **{
                **msgspec.structs.asdict(instance),
                "framework": instance.framework or self.framework,
                "started_at": instance.started_at or self.now,
                "locked_at": self.now if lock else None,
                "lock_expires_at": lock.expires_at if lock else None,
                "lock_token": lock.token if lock else instance.lock_token,
                "runnable_since": self.now,
                "finished_at": self.now if instance.status in FINISHED else None,
            }
        )
        return lock

    def get_instance(self, instance_id: str) -> WorkflowInstance | None:
        return self.instances[instance_id].shown if instance_id in self.instances else None

    def update_instance_status(
        self,
        instance_id: str,
        status: WorkflowStatus,
        error_msg: str = "",
        *,
        output_data: str | None = None,
        lock: Lock | None = None,
    ) -> None:
        self._allow(instance_id, status, lock)
        if error_msg and status in ("failed", "compensating"):
            self._record(instance_id, "workflow_failed", "WorkflowFailed", f'{{"error_message":"{error_msg}"}}')
        if status in FINISHED:
            self._finish(instance_id, status, output_data)
            return
        output = output_data if output_data is not None else self.instances[instance_id].output_data
        self._change(instance_id, status=status, output_data=output, suspended_from=None, runnable_since=self.now)

    def update_instance_activity(self, instance_id: str, activity_id: str, *, lock: Lock | None = None) -> None:
        self._hold_unfinished(instance_id, lock, "updated")
        self._change(instance_id, current_activity_id=activity_id)

    def update_instance_output(
        self,
        instance_id: str,
        output_data: str | None,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> None:
        before = self.snapshot()
        if record is not None:
            self.append_history(record, lock=lock)
        try:
            self._allow(instance_id, WorkflowStatus.COMPLETED, lock)
        except StorageError:
            self.restore(before)
            raise
        self._finish(instance_id, WorkflowStatus.COMPLETED, output_data)

    def cancel_instance(self, instance_id: str, reason: str, *, compensate: bool = False) -> None:
        instance = self.instances.get(instance_id)
        status = None if instance is None else self._standing(instance)
        if status is None or status in FINISHED or status == "compensating":
            raise WorkflowNotCancellableError(instance_id, status)
        details = f'{{"reason":"{reason}","previous_status":"{status}"}}'
        self._record(instance_id, "workflow_cancelled", "WorkflowCancelled", details)
        if not compensate:
            self._finish(instance_id, WorkflowStatus.CANCELLED, None)
            return
        self._forget_waits(instance_id)
        self._change(
            instance_id,
            status=WorkflowStatus.COMPENSATING,
            suspended_from=None,
            parked_until=None,
            parked_reason=None,
            runnable_since=self.now,
        )

    def list_instances(
        self,
        options: ListInstancesOptions,
        *,
        payloads: bool = False,
        framework: Any = None,
    ) -> list[WorkflowInstance]:
        """All pages together."""
        found = [
            instance
            for instance in self.instances.values()
            if framework is ANY or instance.framework == (framework or self.framework)
            if options.status_filter in (None, instance.status)
            and (options.workflow_name_filter or "").lower() in instance.workflow_name.lower()
            and (options.instance_id_filter or "").lower() in instance.instance_id.lower()
            and (options.started_after is None or _started(instance) > options.started_after)
            and (options.started_before is None or _started(instance) < options.started_before)
            and all(_matches(instance, path, value) for path, value in options.input_filters.items())
        ]
        found.sort(key=lambda instance: (_started(instance), instance.instance_id), reverse=True)
        hidden = {} if payloads else {"input_data": None, "output_data": None}
        return [replace(instance.shown, **hidden) for instance in found]

    def find_resumable_workflows(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ResumableWorkflow]:
        found = [
            instance
            for instance in self._ours(self.instances.values(), workflow_names, owner_service)
            if instance.status in RUNNABLE and self.is_free(instance) and not self._is_parked(instance)
        ]
        found.sort(key=lambda instance: (instance.runnable_since or EPOCH, instance.instance_id))
        return [ResumableWorkflow(instance.instance_id, instance.workflow_name) for instance in found[:limit]]

    def park(self, instance_id: str, reason: str, *, until: datetime | None = None, lock: Lock | None = None) -> None:
        self._hold_unfinished(instance_id, lock, "parked")
        self._unlock(instance_id)
        self._change(instance_id, parked_until=until or FOREVER, parked_reason=reason)

    def unpark(self, instance_id: str) -> bool:
        instance = self.instances.get(instance_id)
        if instance is None or instance.parked_until is None:
            return False
        self._change(instance_id, parked_until=None, parked_reason=None, runnable_since=self.now)
        self.setbacks.pop(instance_id, None)
        return True

    def count_takeover(self, instance_id: str, *, lock: Lock) -> int:
        self._hold(instance_id, lock)
        history = [event.id or 0 for key, event in self.history.items() if key[0] == instance_id]
        archive = [event.id for event in self.archive if event.instance_id == instance_id]
        progress = (max(history, default=0), max(archive, default=0))
        before = self.setbacks.get(instance_id, Setback())
        takeovers = before.takeovers + 1 if before.progress == progress else 1
        self.setbacks[instance_id] = replace(before, takeovers=takeovers, progress=progress)
        return takeovers

    def note_refusal(self, instance_id: str, code: str, *, lock: Lock) -> None:
        self._hold(instance_id, lock)
        self.setbacks[instance_id] = replace(self.setbacks.get(instance_id, Setback()), refused_by=code)

    def unpark_refused(
        self, workflow_name: str, code: str, limit: int = 100, *, owner_service: str | None = None
    ) -> list[str]:
        refused = sorted(
            instance.instance_id
            for instance in self._ours(self.instances.values(), [workflow_name], owner_service)
            if instance.status in RUNNABLE
            and instance.parked_until is not None
            and self.setbacks.get(instance.instance_id, Setback()).refused_by not in (None, code)
        )
        for instance_id in refused[:limit]:
            self.unpark(instance_id)
        return refused[:limit]

    def recur_instance(self, instance_id: str, input_data: str, *, lock: Lock) -> None:
        status = self._hold(instance_id, lock).status
        if status != "running":
            raise InvalidStatusTransitionError(instance_id, status, "starting over")
        self._archive(instance_id)
        self._forget_waits(instance_id)
        self.compensations = [entry for entry in self.compensations if entry.instance_id != instance_id]
        self._change(
            instance_id, input_data=input_data, output_data=None, current_activity_id=None, runnable_since=self.now
        )

    def delete_finished_instances(self, older_than: timedelta, limit: int = 100) -> int:
        old = [
            instance
            for instance in self._ours(self.instances.values())
            if instance.finished_at is not None and instance.finished_at < self.now - older_than
        ]
        old.sort(key=lambda instance: instance.finished_at or EPOCH)
        for instance in old[:limit]:
            gone = instance.instance_id
            del self.instances[gone]
            self.states.pop(gone, None)
            self.setbacks.pop(gone, None)
            self.history = {key: event for key, event in self.history.items() if key[0] != gone}
            self.archive = [event for event in self.archive if event.instance_id != gone]
            self.compensations = [entry for entry in self.compensations if entry.instance_id != gone]
            self._forget_waits(gone)
            self._forget_interests(gone)
            for other in self.instances.values():
                if other.continued_from == gone:
                    self._change(other.instance_id, continued_from=None)
        return len(old[:limit])

    def current_time(self) -> datetime:
        return self.now

    # Locks.

    def try_acquire_lock(self, instance_id: str, worker_id: str, timeout_sec: float) -> Lock | None:
        instance = self.instances.get(instance_id)
        if instance is None or instance.status in FINISHED or not self.is_free(instance):
            return None
        expires_at = self._in(instance.lock_timeout_seconds or timeout_sec)
        lock = Lock(instance_id, instance.lock_token + 1, worker_id, expires_at, instance.status)
        self._change(
            instance_id, locked_by=worker_id, locked_at=self.now, lock_expires_at=expires_at, lock_token=lock.token
        )
        return lock

    def claim_resumable_workflows(
        self,
        worker_id: str,
        timeout_sec: float,
        limit: int = 100,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> list[tuple[WorkflowInstance, Lock]]:
        claimed: list[tuple[WorkflowInstance, Lock]] = []
        found = self.find_resumable_workflows(limit, workflow_names=workflow_names, owner_service=owner_service)
        for instance in [self.instances[resumable.instance_id] for resumable in found]:
            lock = self.try_acquire_lock(instance.instance_id, worker_id, timeout_sec)
            assert lock is not None
            claimed.append((instance.shown, lock))
        return claimed

    def release_lock(self, instance_id: str, worker_id: str, *, lock: Lock | None = None) -> None:
        if lock is not None and (lock.instance_id, lock.worker_id) != (instance_id, worker_id):
            return
        if self._owns(instance_id, worker_id, None if lock is None else lock.token):
            self._unlock(instance_id)
            self._change(instance_id, runnable_since=self.now)

    def refresh_lock(self, instance_id: str, worker_id: str, timeout_sec: float, *, lock: Lock | None = None) -> Lock:
        if lock is not None and lock.instance_id != instance_id:
            raise LockLostError(instance_id, lock.worker_id)
        if not self._owns(instance_id, worker_id, None if lock is None else lock.token):
            raise LockLostError(instance_id, worker_id)
        instance = self.instances[instance_id]
        expires_at = self._in(instance.lock_timeout_seconds or timeout_sec)
        self._change(instance_id, lock_expires_at=expires_at)
        return Lock(instance_id, instance.lock_token, worker_id, expires_at, instance.status)

    def refresh_locks(self, locks: Sequence[Lock], timeout_sec: float) -> list[Lock | LockLostError]:
        answers: list[Lock | LockLostError] = []
        for lock in locks:
            try:
                answers.append(self.refresh_lock(lock.instance_id, lock.worker_id, timeout_sec, lock=lock))
            except LockLostError as error:
                answers.append(error)
        return answers

    def cleanup_stale_locks(
        self,
        timeout_sec: float,
        *,
        limit: int = 100,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> list[StaleWorkflowInfo]:
        stale = [
            instance
            for instance in self._ours(self.instances.values(), workflow_names, owner_service)
            if instance.status not in FINISHED and instance.locked_by and self.is_free(instance)
        ]
        stale = sorted(stale, key=lambda instance: instance.instance_id)[:limit]
        for instance in stale:
            self._unlock(instance.instance_id)
        return [StaleWorkflowInfo(instance.instance_id, instance.workflow_name) for instance in stale]


def _matches(instance: Instance, path: str, wanted: Any) -> bool:
    """Whether the input has this value there, of the same JSON type; nothing there is as good as null."""
    value = json.loads(instance.input_data or "{}")
    if not isinstance(value, dict):
        return False
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def _started(instance: Instance) -> datetime:
    assert instance.started_at is not None
    return instance.started_at
