"""Completing: how an instance ends that its owner has run to the end of its code.

Most have nothing tied to them, and end with one statement that compares the lock and needs no look at the row before.
With the step that an instance completes with, its record and the end of the instance are one write.
"""

from __future__ import annotations

from typing import Any

from ..errors import (
    InvalidStatusTransitionError,
    LockLostError,
    OutcomeUnknownError,
    StorageClosedError,
    TransientStorageError,
)
from ..models import HistoryEvent, Lock, WorkflowStatus
from . import touches
from .checks import check_key, check_optional_json
from .ending import Ending, finished_hint
from .history import APPENDED_TYPES, History
from .instances import Instances
from .manager import check_lock
from .operation import operation
from .statement import Many, Together, by_row, sql

COMPLETION_TYPES = {
    "instance_id": "text",
    "status": "text",
    "output_data": "text",
    "token": "bigint",
    "worker_id": "text",
}
"""The parameters of a completion."""


class Completing(Instances, History):
    """Implements the part of `InstanceManager` that completes."""

    _SET_FINISHED = Ending._SET_FINISHED
    _RUNNING = "i.status = 'running' AND {lock_is_ours}"
    _JOINED = "{rows} STRAIGHT_JOIN workflow_instances i ON i.instance_id = r.instance_id"
    _RUNNING_JOINED = """
        i.status = 'running' AND i.lock_token = r.token AND i.locked_by = r.worker_id AND i.lock_expires_at > {now}"""
    _SET_FINISHED_TOGETHER = f"""
        UPDATE {{keys_unchanged}} {_JOINED}
           SET i.status = r.status, i.output_data = COALESCE(r.output_data, i.output_data), {{lock_cleared}},
               suspended_from = NULL, parked_until = NULL, parked_reason = NULL,
               finished_at = {{now}}, updated_at = {{now}}"""

    _finish_running = sql(
        f"{_SET_FINISHED} WHERE i.instance_id = :instance_id AND {_RUNNING}",
        together=Together(columns=tuple(COMPLETION_TYPES), text=f"{_SET_FINISHED_TOGETHER} WHERE {_RUNNING_JOINED}"),
    )

    # Not i.status = 'running': PostgreSQL would look through the index of all that is running. And not the fragment
    # about the lock: `by_row` cannot see its parameters.
    _HELD = """
        SELECT i.ctid FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND COALESCE(i.status, '') = 'running' AND NOT i.has_ties
           AND i.lock_token = :token AND i.locked_by = :worker_id AND i.lock_expires_at > {now}
        {for_update_skip_locked}"""
    _HELD_BY_ROW = f"""
        held AS MATERIALIZED (
        SELECT r.*, i.ctid AS place FROM {{rows}} CROSS JOIN LATERAL ({by_row(_HELD)}) i)"""

    # Whoever ties something to the instance changes its row, so this one statement cannot miss it.
    _finish_untied = sql(
        f"{_SET_FINISHED} WHERE i.instance_id = :instance_id AND {_RUNNING} AND NOT i.has_ties",
        postgres=f"{_SET_FINISHED} WHERE i.instance_id = :instance_id AND i.ctid = ({_HELD})",
        many=Many(
            columns=COMPLETION_TYPES,
            key=("instance_id",),
            left_out=0,
            postgres=f"""
                WITH {_HELD_BY_ROW}
                {by_row(_SET_FINISHED)}
                  FROM held r WHERE i.ctid = r.place
                RETURNING 1, i.instance_id""",
        ),
        together=Together(
            columns=tuple(COMPLETION_TYPES),
            text=f"{_SET_FINISHED_TOGETHER} WHERE {_RUNNING_JOINED} AND NOT i.has_ties",
        ),
    )

    _APPENDED_TO = """
        INSERT INTO workflow_history
               (instance_id, activity_id, event_type, data_type, event_data, event_data_binary, created_at,
                lock_token)"""
    _LAST = """
        :instance_id, :activity_id, :event_type, :data_type, :event_data, :event_data_binary,
        COALESCE(:created_at, {now}), :token"""

    # A step that is recorded already lets nobody through. Alone nothing is written then, among many the key that is
    # taken makes all of them run alone. What follows has nothing to compare: the row is held. On PostgreSQL both
    # writes look for the row as it was when the statement began: if it was changed before it was locked, neither finds
    # it.
    _finish_untied_recording = sql(
        f"""
        {_APPENDED_TO}
        SELECT {_LAST} FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND {_RUNNING} AND NOT i.has_ties
        {{for_update}}
        {{on_conflict_do_nothing:instance_id, activity_id}}""",
        then=Ending._finish_instance,
        postgres=f"""
            WITH held AS MATERIALIZED ({_HELD}),
                 recorded AS (
                 {_APPENDED_TO} SELECT {_LAST} FROM workflow_instances i
                  WHERE i.instance_id = :instance_id AND i.ctid = (SELECT h.ctid FROM held h)
                 ON CONFLICT (instance_id, activity_id) DO NOTHING RETURNING 1)
            {_SET_FINISHED} WHERE i.instance_id = :instance_id AND i.ctid = (SELECT h.ctid FROM held h, recorded)""",
        many=Many(
            columns=COMPLETION_TYPES | APPENDED_TYPES,
            key=("instance_id",),
            left_out=0,
            postgres=f"""
                WITH {_HELD_BY_ROW},
                     finished AS (
                     {by_row(_SET_FINISHED)} FROM held r WHERE i.ctid = r.place RETURNING r.*)
                {_APPENDED_TO} SELECT {by_row(_LAST)} FROM finished r ORDER BY r.number
                RETURNING 1, instance_id""",
        ),
        together=Together(
            columns=tuple(APPENDED_TYPES),
            text=f"""
                {_APPENDED_TO}
                SELECT {by_row(_LAST)} FROM {_JOINED}
                 WHERE {_RUNNING_JOINED} AND NOT i.has_ties ORDER BY r.number
                FOR UPDATE""",
            then=Together(columns=("instance_id", "status", "output_data"), text=_SET_FINISHED_TOGETHER),
        ),
    )

    _completed_as = sql("""
        SELECT 1 FROM workflow_instances
         WHERE instance_id = :instance_id AND status = :status AND lock_token = :token
           AND ({text:output_data} IS NULL OR output_data = :output_data)""")

    async def update_instance_output(
        self,
        instance_id: str,
        output_data: str | None,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> None:
        if record is not None and record.instance_id != instance_id:
            raise ValueError(f"a step of {record.instance_id!r} cannot be recorded with the end of {instance_id!r}")
        strict = self.runner.transactions.active()
        # Of an instance that never gave its first lock back, most likely no other table knows anything.
        if lock is None or lock.token > 1:
            await self._complete(instance_id, output_data, lock, record, strict)
            return
        try:
            if record is None:
                completed = await self._complete_untied(instance_id, output_data, lock)
            elif self._fit_together(output_data, record):
                completed = await self._complete_recording(instance_id, output_data, lock, record)
            else:
                completed = False
            if not completed:
                await self._complete(instance_id, output_data, lock, record, strict)
        except OutcomeUnknownError as unknown:
            try:
                await self._complete_again(instance_id, output_data, lock, record)
            except (TransientStorageError, StorageClosedError):
                raise unknown from None  # that nothing was written would be said of the second attempt only

    def _fit_together(self, output_data: str | None, record: HistoryEvent) -> bool:
        """Whether both go into one message, however long they may be after quoting."""
        length = len(output_data or "") + len(record.event_data or "") + len(record.event_data_binary or b"")
        return length * 4 <= self.payload_limit

    async def _complete_again(
        self, instance_id: str, output_data: str | None, lock: Lock, record: HistoryEvent | None
    ) -> None:
        """After an attempt of which nobody knows what came of it: perhaps it is completed already, as it should be."""
        try:
            await self._complete(instance_id, output_data, lock, record, strict=False)
        except (LockLostError, InvalidStatusTransitionError):
            if not await self._is_completed(instance_id, output_data, lock):
                raise

    @operation(reads=True, by_key=True)
    async def _is_completed(self, instance_id: str, output_data: str | None, lock: Lock) -> bool:
        return bool(await self._completed_as.value(**completion(instance_id, output_data, lock)))

    @operation(autocommit=True, touches=touches.of_change)
    async def _complete_untied(self, instance_id: str, output_data: str | None, lock: Lock) -> bool:
        """Complete an instance that its owner runs, if nothing is tied to it: with one statement."""
        output = check_optional_json("output_data", output_data, self.payload_limit)
        completed = await self._finish_untied.run(completion(instance_id, output, lock))
        if completed:
            await finished_hint(instance_id)
        return bool(completed)

    @operation(autocommit=True, twofold=True, touches=touches.of_change)
    async def _complete_recording(
        self, instance_id: str, output_data: str | None, lock: Lock, record: HistoryEvent
    ) -> bool:
        """The same, and the record of its last step by the same write."""
        output = check_optional_json("output_data", output_data, self.payload_limit)
        row = self._checked_event(record) | completion(instance_id, output, lock)
        completed = await self._finish_untied_recording.run(row)
        if completed:
            await finished_hint(instance_id)
        return bool(completed)

    @operation(touches=touches.of_change)
    async def _complete(
        self,
        instance_id: str,
        output_data: str | None,
        lock: Lock | None,
        record: HistoryEvent | None,
        strict: bool,
    ) -> None:
        output = check_optional_json("output_data", output_data, self.payload_limit)
        check_key("instance_id", instance_id)
        if record is not None:
            await self._append_one(record, lock, strict)
        if lock is not None and await self._complete_running(instance_id, output, lock):
            return
        await self._allow(instance_id, WorkflowStatus.COMPLETED, lock)
        await self._finish(instance_id, WorkflowStatus.COMPLETED, output)

    async def _complete_running(self, instance_id: str, output: str | None, lock: Lock) -> bool:
        """Complete an instance that its owner runs; False if it is not, or not that owner's."""
        completed = await self._finish_running.run(completion(instance_id, output, lock))
        if completed:
            await self._clear_away(instance_id, WorkflowStatus.COMPLETED)
        return bool(completed)


def completion(instance_id: str, output: str | None, lock: Lock) -> dict[str, Any]:
    """The parameters with which its owner completes an instance."""
    check_lock(instance_id, lock)
    return {
        "instance_id": check_key("instance_id", instance_id),
        "status": WorkflowStatus.COMPLETED,
        "output_data": output,
        "token": lock.token,
        "worker_id": lock.worker_id,
    }
