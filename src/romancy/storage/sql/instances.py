"""Instances: created once, guarded through their states, deleted when they are old."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from ..errors import (
    InstanceExistsError,
    InstanceNotFoundError,
    InvalidStatusTransitionError,
    WorkflowNotCancellableError,
)
from ..models import (
    CANCELLABLE,
    FINISHED,
    FRAMEWORK,
    RUNNABLE,
    WAITING,
    HistoryEvent,
    HistoryEventType,
    Lock,
    ResumableWorkflow,
    WorkflowInstance,
    WorkflowStatus,
)
from ..turn import Turn
from . import touches
from .checks import (
    age_sec,
    check_json,
    check_key,
    check_label,
    check_optional_json,
    check_optional_key,
    findable,
    page_size,
    plain_text,
    positive,
)
from .ending import cancelled_hint, resumable_hint
from .fragments import longest_runnable
from .listing import Listing
from .operation import operation
from .statement import Many, Together, by_row, merged, sql

FAILED_ACTIVITY = "workflow_failed"
CANCELLED_ACTIVITY = "workflow_cancelled"
DEFAULT_LOCK_SEC = 60.0
_DELETED_PER_LOOK = 10
"""After so many instances a batch looks at the clock: nobody knows beforehand how long their histories are."""
_AFTER_COMPENSATING = (WorkflowStatus.COMPENSATING, WorkflowStatus.FAILED, WorkflowStatus.CANCELLED)


INSTANCE_TYPES = {
    "instance_id": "text",
    "workflow_name": "text",
    "source_hash": "text",
    "owner_service": "text",
    "framework": "text",
    "status": "text",
    "current_activity_id": "text",
    "continued_from": "text",
    "started_at": "timestamp",
    "updated_at": "timestamp",
    "input_data": "text",
    "output_data": "text",
    "locked_by": "text",
    "locked_at": "timestamp",
    "lock_timeout_seconds": "int",
    "lock_expires_at": "timestamp",
    "lock_token": "bigint",
    "finished_at": "timestamp",
    "has_ties": "boolean",
}
"""The parameters of a new instance."""


def unstamped(*, started_at: str) -> str:
    """What is finished and does not say since when."""
    return f"""
        SELECT i.instance_id FROM workflow_instances i {{through_index:romancy_instances_by_status}}
         WHERE i.framework = :framework AND i.status IN {{finished}} AND {started_at} < {{seconds_ago:seconds}}
           AND i.finished_at IS NULL AND i.updated_at < {{seconds_ago:seconds}}
         ORDER BY {started_at} LIMIT :limit {{for_update_skip_locked}}"""


class Instances(Listing):
    """Implements `InstanceManager`, but for suspending."""

    _define = sql("""
        INSERT INTO workflow_definitions (workflow_name, source_hash, source_code, created_at)
        VALUES (:workflow_name, :source_hash, '', {now})
        {on_conflict_do_nothing:workflow_name, source_hash}""")

    _CREATED = """
        INSERT INTO workflow_instances
               (instance_id, workflow_name, source_hash, owner_service, framework, status, current_activity_id,
                continued_from, started_at, updated_at, input_data, output_data, locked_by, locked_at,
                lock_timeout_seconds, lock_expires_at, lock_token, runnable_since, finished_at, has_ties)
        SELECT :instance_id, d.workflow_name, d.source_hash, :owner_service, :framework, :status, :current_activity_id,
               :continued_from, COALESCE(:started_at, {now}), COALESCE(:updated_at, {now}), :input_data, :output_data,
               :locked_by, :locked_at, :lock_timeout_seconds, :lock_expires_at, :lock_token, {now}, :finished_at,
               :has_ties"""
    _CREATED_TOGETHER = by_row(_CREATED)

    _create = sql(
        f"""
        {_CREATED}
          FROM workflow_definitions d WHERE d.workflow_name = :workflow_name AND d.source_hash = :source_hash
        {{on_conflict_do_nothing:instance_id}}""",
        many=Many(
            columns=INSTANCE_TYPES,
            key=("instance_id",),
            # Who must wait for a rival that is creating the same instance goes alone.
            postgres=f"""
                {_CREATED_TOGETHER}
                  FROM (SELECT set_config('lock_timeout', '100ms', TRUE)) impatience,
                       {{rows}} JOIN workflow_definitions d USING (workflow_name, source_hash)
                {{on_conflict_do_nothing:instance_id}}
                RETURNING 1, instance_id""",
            sqlite=f"""
                {_CREATED_TOGETHER}
                  FROM {{rows}} CROSS JOIN workflow_definitions d
                 WHERE d.workflow_name = r.workflow_name AND d.source_hash = r.source_hash
                {{on_conflict_do_nothing:instance_id}}
                RETURNING 1, instance_id""",
        ),
        together=Together(
            columns=tuple(INSTANCE_TYPES),
            text=f"""
                {_CREATED_TOGETHER}
                  FROM {{rows}} STRAIGHT_JOIN workflow_definitions d
                    ON d.workflow_name = r.workflow_name AND d.source_hash = r.source_hash""",
        ),
    )

    _get = sql(
        "SELECT {instance_columns} FROM workflow_instances i WHERE i.instance_id = :instance_id", row=WorkflowInstance
    )

    _set_status = sql("""
        UPDATE {keys_unchanged} workflow_instances
           SET status = :status, output_data = COALESCE(:output_data, output_data), suspended_from = NULL,
               runnable_since = {now}, updated_at = {now}
         WHERE instance_id = :instance_id""")

    _suspended_from = sql("SELECT suspended_from FROM workflow_instances WHERE instance_id = :instance_id")

    _set_activity = sql("""
        UPDATE {keys_unchanged} workflow_instances SET current_activity_id = :activity_id, updated_at = {now}
         WHERE instance_id = :instance_id""")

    # A live lock is kept: its holder finds out at its next heartbeat or write.
    _start_compensating = sql("""
        UPDATE {keys_unchanged} workflow_instances
           SET status = 'compensating', suspended_from = NULL, parked_until = NULL, parked_reason = NULL,
               runnable_since = {now}, updated_at = {now}
         WHERE instance_id = :instance_id""")

    _resumable = sql(
        longest_runnable("i.instance_id, i.workflow_name"),
        mysql=merged(
            (
                longest_runnable("i.instance_id, i.workflow_name, i.runnable_since", status=f"= '{status}'")
                for status in RUNNABLE
            ),
            columns="instance_id, workflow_name",
            order="runnable_since, instance_id",
        ),
        row=ResumableWorkflow,
    )

    _park = sql("""
        UPDATE {keys_unchanged} workflow_instances
           SET parked_until = COALESCE(:until_at, {forever}), parked_reason = :reason, {lock_cleared},
               updated_at = {now}
         WHERE instance_id = :instance_id""")

    _unpark = sql("""
        UPDATE {keys_unchanged} workflow_instances
           SET parked_until = NULL, parked_reason = NULL, runnable_since = {now}, updated_at = {now}
         WHERE instance_id = :instance_id AND parked_until IS NOT NULL""")

    _forget_setbacks = sql("DELETE FROM romancy_setbacks WHERE instance_id = :instance_id")

    _old = sql("""
        SELECT i.instance_id FROM workflow_instances i
         WHERE i.framework = :framework AND i.finished_at IS NOT NULL AND i.finished_at < {seconds_ago:seconds}
         ORDER BY i.finished_at LIMIT :limit {for_update_skip_locked}""")

    # What was taken over from another framework has no finished_at; there updated_at was written at the end. All others
    # that began long ago are deleted above: few are left to look at.
    _old_and_theirs = sql(
        unstamped(started_at="substr(i.started_at || '.000000', 1, 26)"),
        postgres=unstamped(started_at="i.started_at"),
        mysql=unstamped(started_at="i.started_at"),
    )

    _uncontinue = sql("UPDATE workflow_instances SET continued_from = NULL WHERE {in:continued_from, instance_ids}")

    _delete = sql("DELETE FROM workflow_instances WHERE {in:instance_id, instance_ids}")

    async def create_instance(
        self, instance: WorkflowInstance, *, lock_timeout_sec: float | None = None
    ) -> Lock | None:
        if lock_timeout_sec is None and is_born_dated(instance):
            lock = await self._create_owned(instance)
            if lock is not None:
                return lock
        return await self._create_instance(instance, lock_timeout_sec)

    # How workers create instances: one statement, which needs neither the clock nor a transaction around it.
    @operation(autocommit=True, undo="_give_back_created", touches=touches.of_creation)
    async def _create_owned(self, instance: WorkflowInstance) -> Lock | None:
        """Create an instance of a known definition for its owner; None if the definition is new or the id taken."""
        lock = born_locked(instance, None)
        row = self._checked_instance(instance)
        row |= lock_columns(lock, instance.locked_at)
        return lock if await self._create.run(row) else None

    @operation(undo="_give_back_created", touches=touches.of_creation)
    async def _create_instance(self, instance: WorkflowInstance, lock_timeout_sec: float | None) -> Lock | None:
        row = self._checked_instance(instance)
        lock = None
        if instance.locked_by or instance.status in FINISHED:
            now = await self._now()
            row["finished_at"] = now if instance.status in FINISHED else None
            if instance.locked_by:
                lock = born_locked(instance, lock_timeout_sec, now)
                row |= lock_columns(lock, instance.locked_at or now)
        if instance.continued_from is not None and await self._get.one(instance_id=instance.continued_from) is None:
            raise InstanceNotFoundError(instance.continued_from)
        await self._insert_instance(row)
        if lock is None:
            await resumable_hint(instance.instance_id, instance.workflow_name)
        return lock

    async def _insert_instance(self, row: dict[str, Any]) -> None:
        """Insert the instance, and its definition if it is the first of it."""
        if await self._create.run(row):
            return
        await self._define.run(workflow_name=row["workflow_name"], source_hash=row["source_hash"])
        if not await self._create.run(row):
            raise InstanceExistsError(row["instance_id"])

    def _checked_instance(self, instance: WorkflowInstance) -> dict[str, Any]:
        limit = self.payload_limit
        self._check_together(instance.input_data, instance.output_data)
        framework = check_key("framework", instance.framework or self.framework, 50)
        return {
            "instance_id": check_key("instance_id", instance.instance_id),
            "workflow_name": check_key("workflow_name", instance.workflow_name),
            "source_hash": check_label("source_hash", instance.source_hash, 64),
            "owner_service": check_label("owner_service", instance.owner_service),
            "framework": framework,
            "status": WorkflowStatus(instance.status),
            "current_activity_id": check_optional_key("current_activity_id", instance.current_activity_id),
            "continued_from": check_optional_key("continued_from", instance.continued_from),
            "started_at": instance.started_at,
            "updated_at": instance.updated_at,
            "input_data": check_json("input_data", "{}" if instance.input_data is None else instance.input_data, limit),
            "output_data": check_optional_json("output_data", instance.output_data, limit),
            "locked_by": None,
            "locked_at": None,
            "lock_timeout_seconds": check_lock_timeout(instance.lock_timeout_seconds),
            "lock_expires_at": None,
            "lock_token": instance.lock_token,
            "finished_at": None,
            "has_ties": framework != FRAMEWORK,  # others tie without saying so
        }

    @operation(reads=True, by_key=True)
    async def get_instance(self, instance_id: str) -> WorkflowInstance | None:
        check_key("instance_id", instance_id)
        return await self._get.one(instance_id=instance_id)

    @operation(touches=touches.of_change)
    async def update_instance_status(
        self,
        instance_id: str,
        status: WorkflowStatus,
        error_msg: str = "",
        *,
        output_data: str | None = None,
        lock: Lock | None = None,
    ) -> None:
        target = WorkflowStatus(status)
        output = check_optional_json("output_data", output_data, self.payload_limit)
        await self._allow(instance_id, target, lock)
        if error_msg and target in (WorkflowStatus.FAILED, WorkflowStatus.COMPENSATING):
            await self._note(instance_id, HistoryEventType.WORKFLOW_FAILED, {"error_message": plain_text(error_msg)})
        if target in FINISHED:
            await self._finish(instance_id, target, output)
        else:
            await self._set_status.run(instance_id=instance_id, status=target, output_data=output)

    async def _allow(self, instance_id: str, target: WorkflowStatus, lock: Lock | None) -> WorkflowStatus:
        """Hold the instance if it may become `target`; the status it has."""
        check_key("instance_id", instance_id)
        status = await self._standing(instance_id, await self._hold_instance(instance_id, lock))
        barred = status in FINISHED or target is WorkflowStatus.RECURRED
        if barred or (status is WorkflowStatus.COMPENSATING and target not in _AFTER_COMPENSATING):
            raise InvalidStatusTransitionError(instance_id, status, target)
        return status

    async def _standing(self, instance_id: str, status: WorkflowStatus) -> WorkflowStatus:
        """The status of a held instance, but compensating if it only waits for something in the middle of that."""
        if status in WAITING and await self._suspended_from.value(instance_id=instance_id) == "compensating":
            return WorkflowStatus.COMPENSATING
        return status

    async def _note(self, instance_id: str, event_type: HistoryEventType, data: dict[str, Any]) -> None:
        """Record an event of the instance's life, once."""
        failed = event_type is HistoryEventType.WORKFLOW_FAILED
        await self._record(
            HistoryEvent(
                instance_id=instance_id,
                activity_id=FAILED_ACTIVITY if failed else CANCELLED_ACTIVITY,
                event_type=event_type,
                event_data=msgspec.json.encode(data).decode(),
            )
        )

    @operation(touches=touches.of_change)
    async def update_instance_activity(self, instance_id: str, activity_id: str, *, lock: Lock | None = None) -> None:
        check_key("activity_id", activity_id)
        await self._hold_unfinished(check_key("instance_id", instance_id), lock, "updated")
        await self._set_activity.run(instance_id=instance_id, activity_id=activity_id)

    @operation
    async def cancel_instance(self, instance_id: str, reason: str, *, compensate: bool = False) -> None:
        check_key("instance_id", instance_id)
        held = await self._hold.one(instance_id=instance_id)
        status = None if held is None else await self._standing(instance_id, WorkflowStatus(held[0]))
        if status not in CANCELLABLE:
            raise WorkflowNotCancellableError(instance_id, status)
        details = {"reason": plain_text(reason), "previous_status": status}
        await self._note(instance_id, HistoryEventType.WORKFLOW_CANCELLED, details)
        if not compensate:
            await self._finish(instance_id, WorkflowStatus.CANCELLED)
            return
        await self._start_compensating.run(instance_id=instance_id)
        left = await self._leftovers.one(instance_id=instance_id)
        assert left is not None, "a SELECT without FROM has a row"
        await self._forget_waits(instance_id, left)
        await cancelled_hint(instance_id)
        await resumable_hint(instance_id, await self._workflow_name.value(instance_id=instance_id))

    @operation(reads=True)
    async def find_resumable_workflows(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ResumableWorkflow]:
        return await self._resumable.all(limit=page_size(limit), **self._ours(workflow_names, owner_service))

    def _ours(self, workflow_names: Sequence[str] | None, owner_service: str | None) -> dict[str, Any]:
        """The parameters of ``{ours}``: what a poll may see."""
        return {
            "framework": self.framework,
            "workflow_names": None if workflow_names is None else findable(workflow_names),
            "owners": None if owner_service is None else findable([owner_service]),
        }

    @operation
    async def park(
        self, instance_id: str, reason: str, *, until: datetime | None = None, lock: Lock | None = None
    ) -> None:
        await self._hold_unfinished(check_key("instance_id", instance_id), lock, "parked")
        await self._park.run(instance_id=instance_id, reason=plain_text(reason), until_at=until)

    @operation
    async def unpark(self, instance_id: str) -> bool:
        unparked = await self._unpark.run(instance_id=check_key("instance_id", instance_id))
        if unparked:
            await self._forget_setbacks.run(instance_id=instance_id)
            await resumable_hint(instance_id, await self._workflow_name.value(instance_id=instance_id))
        return bool(unparked)

    @operation
    async def delete_finished_instances(
        self, older_than: timedelta, limit: int = 100, *, turn: Turn | None = None
    ) -> int:
        wanted = page_size(limit)
        which = {"framework": self.framework, "seconds": age_sec(older_than)}
        at_once = wanted if turn is None else _DELETED_PER_LOOK
        with turn or Turn() as turn:
            old = await self._old.all(**which, limit=wanted)
            if len(old) < wanted:
                old = [*old, *await self._old_and_theirs.all(**which, limit=wanted - len(old))]
            deleted = 0
            for start in range(0, len(old), at_once):
                if start and turn.is_over():
                    break
                instance_ids = [instance_id for (instance_id,) in old[start : start + at_once]]
                await self._uncontinue.run(instance_ids=instance_ids)
                deleted += await self._delete.run(instance_ids=instance_ids)
            return deleted

    @operation(reads=True, by_key=True)
    async def current_time(self) -> datetime:
        return await self._now()

    async def _give_back_created(self, lock: Lock | None) -> None:
        if lock is not None:
            await self._release.run(instance_id=lock.instance_id, worker_id=lock.worker_id, token=lock.token)

    _release = sql("""
        UPDATE {keys_unchanged} workflow_instances SET {lock_cleared}, runnable_since = {now}, updated_at = {now}
         WHERE instance_id = :instance_id AND locked_by = :worker_id AND lock_token = :token
           AND lock_expires_at > {now}""")


def check_lock_timeout(seconds: int | None) -> int | None:
    """Accept whole seconds that the shared column can hold."""
    if seconds is not None and seconds >= 2**31:
        raise ValueError(f"lock_timeout_seconds must be less than 2^31, not {seconds}")
    return None if seconds is None else int(positive("lock_timeout_sec", seconds))


def is_born_dated(instance: WorkflowInstance) -> bool:
    """Whether a new instance has an owner who says until when, so that nobody has to ask the clock."""
    dated = instance.locked_by and instance.locked_at is not None and instance.lock_expires_at is not None
    return bool(dated) and instance.status not in FINISHED and instance.continued_from is None


def born_locked(instance: WorkflowInstance, lock_timeout_sec: float | None, now: datetime | None = None) -> Lock:
    """The lock of an instance that is created for the worker that will run it."""
    expires_at = instance.lock_expires_at
    if lock_timeout_sec is not None or expires_at is None:
        assert now is not None, "from when on"
        seconds = instance.lock_timeout_seconds or lock_timeout_sec or DEFAULT_LOCK_SEC
        expires_at = now + timedelta(seconds=positive("lock_timeout_sec", seconds))
    return Lock(
        instance_id=instance.instance_id,
        token=instance.lock_token + 1,
        worker_id=check_key("locked_by", str(instance.locked_by)),
        expires_at=expires_at,
        status=instance.status,
    )


def lock_columns(lock: Lock, locked_at: datetime | None) -> dict[str, Any]:
    """What a lock is in the row of its instance."""
    return {
        "locked_by": lock.worker_id,
        "locked_at": locked_at,
        "lock_expires_at": lock.expires_at,
        "lock_token": lock.token,
    }
