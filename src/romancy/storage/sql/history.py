"""History: each step of an instance is recorded once, and only by whoever owns the instance."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from ..errors import HistoryConflictError, InstanceNotFoundError, LockLostError, StorageError, TransientStorageError
from ..models import Appended, HistoryEvent, HistoryPage, Lock
from . import touches
from .checks import check_batch, check_key, page_size, row_id
from .manager import Manager, check_lock, same_record
from .operation import operation
from .statement import Many, Statement, sql

_ATTEMPTS = 5

APPENDED_TYPES = {
    "instance_id": "text",
    "activity_id": "text",
    "event_type": "text",
    "data_type": "text",
    "event_data": "text",
    "event_data_binary": "bytea",
    "created_at": "timestamp",
    "token": "bigint",
    "worker_id": "text",
}
"""The parameters of a fenced append."""


class History(Manager):
    """Implements `HistoryManager`."""

    _APPENDED = """
        INSERT INTO workflow_history
               (instance_id, activity_id, event_type, data_type, event_data, event_data_binary, created_at,
                lock_token)
        SELECT i.instance_id, r.activity_id, r.event_type, r.data_type, r.event_data, r.event_data_binary,
               COALESCE(r.created_at, {now}), i.lock_token"""
    _WHILE_OWNED = "i.lock_token = r.token AND i.locked_by = r.worker_id AND i.lock_expires_at > {now}"

    # The row lock matters: at READ COMMITTED a comparison alone lets a zombie's row through while a rival's theft of
    # the lock commits.
    _append_fenced = sql(
        """
        INSERT INTO workflow_history
               (instance_id, activity_id, event_type, data_type, event_data, event_data_binary, created_at,
                lock_token)
        SELECT i.instance_id, :activity_id, :event_type, :data_type, :event_data, :event_data_binary,
               COALESCE(:created_at, {now}), i.lock_token
          FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND {lock_is_ours}
        {for_share}
        {on_conflict_do_nothing:instance_id, activity_id}
        {returning_id}""",
        many=Many(
            columns=APPENDED_TYPES,
            key=("instance_id", "activity_id"),
            inserted_by=("lock_token", "token"),
            table="workflow_history",
            # Row by row: with a join, the plan that is made while the table is small reads all of it for good. A step
            # that is recorded already makes all of them run alone: to look for it first would cost each of them more.
            postgres=f"""
                {_APPENDED}
                  FROM {{rows}} CROSS JOIN LATERAL (
                       SELECT i.instance_id, i.lock_token FROM workflow_instances i
                        WHERE i.instance_id = r.instance_id AND {_WHILE_OWNED}
                       FOR SHARE SKIP LOCKED) i
                 ORDER BY r.number
                RETURNING id, instance_id, activity_id""",
            mysql=f"""
                {_APPENDED} FROM {{rows}} STRAIGHT_JOIN workflow_instances i ON i.instance_id = r.instance_id
                 WHERE {_WHILE_OWNED} ORDER BY r.number
                LOCK IN SHARE MODE""",
            sqlite=f"""
                {_APPENDED} FROM {{rows}} CROSS JOIN workflow_instances i
                 WHERE i.instance_id = r.instance_id AND {_WHILE_OWNED}
                ON CONFLICT (instance_id, activity_id) DO NOTHING
                RETURNING id, instance_id, activity_id""",
        ),
    )

    _append_unfenced = sql("""
        INSERT INTO workflow_history
               (instance_id, activity_id, event_type, data_type, event_data, event_data_binary, created_at)
        SELECT i.instance_id, :activity_id, :event_type, :data_type, :event_data, :event_data_binary,
               COALESCE(:created_at, {now})
          FROM workflow_instances i
         WHERE i.instance_id = :instance_id
        {for_share}
        {on_conflict_do_nothing:instance_id, activity_id}
        {returning_id}""")

    _owner = sql("""
        SELECT CASE WHEN {lock_is_ours} THEN 1 ELSE 0 END
          FROM workflow_instances i WHERE i.instance_id = :instance_id""")

    _recorded_under = sql("SELECT lock_token FROM workflow_history WHERE id = :history_id")

    _exists = sql("SELECT 1 FROM workflow_instances WHERE instance_id = :instance_id")

    _page = sql(
        """
        SELECT {history_columns} FROM workflow_history {through_index:romancy_history_pages}
         WHERE {key_of_page:instance_id} AND id > {any_id:after_id}
         ORDER BY {order_of_page:instance_id, id} LIMIT {limit_of_page:limit}""",
        row=HistoryEvent,
    )

    # To read a time costs a tenth of what replaying a step does, and of a completed one nobody wants to know it.
    _page_to_replay = sql(
        """
        SELECT {replayed_columns} FROM workflow_history {through_index:romancy_history_pages}
         WHERE {key_of_page:instance_id} AND id > {any_id:after_id}
         ORDER BY {order_of_page:instance_id, id} LIMIT {limit_of_page:limit}""",
        row=HistoryEvent,
    )

    _count = sql("SELECT COUNT(*) FROM workflow_history WHERE instance_id = :instance_id")

    def append_history(self, event: HistoryEvent, *, lock: Lock | None = None) -> Coroutine[Any, Any, Appended]:
        strict = self.runner.transactions.active()
        if lock is None:
            return self._append(event, strict)
        return self._append_with_lock(event, lock, strict)

    # Not coroutines of their own: the one they start is enough, and every step of every workflow comes this way.

    @operation(autocommit=True, touches=touches.of_append)
    def _append(self, event: HistoryEvent, strict: bool) -> Coroutine[Any, Any, Appended]:
        return self._append_one(event, None, strict)

    @operation(autocommit=True, idempotent=True, touches=touches.of_append)
    def _append_with_lock(self, event: HistoryEvent, lock: Lock, strict: bool) -> Coroutine[Any, Any, Appended]:
        return self._append_one(event, lock, strict)

    async def append_history_many(
        self, events: Sequence[HistoryEvent], *, lock: Lock | None = None
    ) -> list[Appended | StorageError]:
        check_batch("events", len(events))
        return await self._append_many(list(events), lock, self.runner.transactions.active())

    @operation
    async def _append_many(
        self, events: list[HistoryEvent], lock: Lock | None, strict: bool
    ) -> list[Appended | StorageError]:
        results: list[Appended | StorageError] = []
        if lock is not None:
            await self._hold_instance(lock.instance_id, lock)
        for event in events:
            try:
                results.append(await self._append_one(event, lock, strict))
            except (HistoryConflictError, InstanceNotFoundError) as error:
                results.append(error)
        return results

    async def _append_one(self, event: HistoryEvent, lock: Lock | None, strict: bool) -> Appended:
        row = self._checked_event(event)
        if lock is not None:
            check_lock(event.instance_id, lock)
            row["token"] = lock.token
            row["worker_id"] = lock.worker_id
        append = self._append_unfenced if lock is None else self._append_fenced
        for _ in range(_ATTEMPTS):
            recorded_id = await append.insert(row)
            if recorded_id is not None:
                return Appended(recorded_id, already_recorded=False)
            recorded = await self._why_not_appended(event, lock)
            if recorded is not None:
                return await self._appended_before(recorded, event, lock, strict)
            # What was in the way has been archived or rolled back since: the place is free.
        raise TransientStorageError(f"others keep recording and removing step {event.activity_id!r}; try again")

    async def _appended_before(
        self, recorded: HistoryEvent, event: HistoryEvent, lock: Lock | None, strict: bool
    ) -> Appended:
        """Accept a step that is recorded already, if the same acquisition has recorded the same."""
        if lock is None or strict or recorded.id is None or not same_record(recorded, event):
            raise HistoryConflictError(recorded)
        if await self._recorded_under.value(history_id=recorded.id) != lock.token:
            raise HistoryConflictError(recorded)
        return Appended(recorded.id, already_recorded=True)

    async def _why_not_appended(self, event: HistoryEvent, lock: Lock | None) -> HistoryEvent | None:
        """Nothing was written: complain of a missing instance or lock, or say what stands in the place by now."""
        if lock is None:
            owned = await self._exists.value(instance_id=event.instance_id)
        else:
            owned = await self._owner.value(instance_id=event.instance_id, token=lock.token, worker_id=lock.worker_id)
        if owned is None:
            raise InstanceNotFoundError(event.instance_id)
        recorded = await self._recorded_step.one(instance_id=event.instance_id, activity_id=event.activity_id)
        if lock is not None and not owned:
            raise LockLostError(event.instance_id, lock.worker_id)
        return recorded

    @operation(reads=True)
    async def get_history_paginated(self, instance_id: str, after_id: int = 0, limit: int = 100) -> HistoryPage:
        return await self._read_page(self._page, instance_id, after_id, limit)

    # By key: in another thread, SQLite would take the interpreter from the body row by row, and the body from it.
    @operation(reads=True, by_key=True)
    async def get_history_to_replay(self, instance_id: str, after_id: int = 0, limit: int = 100) -> HistoryPage:
        return await self._read_page(self._page_to_replay, instance_id, after_id, limit)

    @staticmethod
    async def _read_page(page: Statement[HistoryEvent], instance_id: str, after_id: int, limit: int) -> HistoryPage:
        wanted = page_size(limit)
        check_key("instance_id", instance_id)
        events = await page.all(instance_id=instance_id, after_id=row_id(after_id), limit=wanted + 1)
        return HistoryPage(events[:wanted], has_more=len(events) > wanted)

    @operation(reads=True, by_key=True)
    async def get_history_event(self, instance_id: str, activity_id: str) -> HistoryEvent | None:
        check_key("activity_id", activity_id)
        return await self._recorded_step.one(instance_id=check_key("instance_id", instance_id), activity_id=activity_id)

    @operation(reads=True)
    async def get_history_count(self, instance_id: str) -> int:
        check_key("instance_id", instance_id)
        return int(await self._count.value(instance_id=instance_id))
