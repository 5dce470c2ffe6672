"""What all managers share: the runner, the fence, and recording a step once."""

from __future__ import annotations

from ..errors import InstanceNotFoundError, InvalidStatusTransitionError, LockLostError
from ..models import FINISHED, HistoryEvent, HistoryEventType, Lock, WorkflowStatus
from . import fragments  # noqa: F401 (the statements below use them)
from .checks import check_binary, check_json, check_key, check_size, size_of
from .runners.runner import BaseRunner
from .statement import Together, sql


class Manager:
    """The part of a storage that one file answers for; the parts are joined in `SQLStorage`."""

    runner: BaseRunner
    framework: str
    max_payload_bytes: int

    _hold_fenced = sql("""
        SELECT i.status FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND {lock_is_ours}
        {for_update}""")

    _hold_fenced_by_worker = sql("""
        SELECT i.status FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND i.locked_by = :worker_id AND i.lock_expires_at > {now}
        {for_update}""")

    _hold = sql("SELECT i.status FROM workflow_instances i WHERE i.instance_id = :instance_id {for_update}")

    # Before any other table has a row about the instance: one without ties ends without a look at those tables.
    _tie = sql("""
        UPDATE {keys_unchanged} workflow_instances SET has_ties = TRUE
         WHERE instance_id = :instance_id AND NOT has_ties""")

    _record_step = sql(
        """
        INSERT INTO workflow_history
               (instance_id, activity_id, event_type, data_type, event_data, event_data_binary, created_at)
        VALUES (:instance_id, :activity_id, :event_type, :data_type, :event_data, :event_data_binary,
                COALESCE(:created_at, {now}))
        {on_conflict_do_nothing:instance_id, activity_id}
        {returning_id}""",
        together=Together(
            columns=(
                "instance_id",
                "activity_id",
                "event_type",
                "data_type",
                "event_data",
                "event_data_binary",
                "created_at",
            ),
            text="""
                INSERT INTO workflow_history
                       (instance_id, activity_id, event_type, data_type, event_data, event_data_binary, created_at)
                SELECT r.instance_id, r.activity_id, r.event_type, r.data_type, r.event_data, r.event_data_binary,
                       COALESCE(r.created_at, {now}) FROM {rows} ORDER BY r.number""",
            key=("instance_id", "activity_id"),
            table="workflow_history",
        ),
    )

    _recorded_step = sql(
        """
        SELECT {history_columns} FROM workflow_history
         WHERE instance_id = :instance_id AND activity_id = :activity_id""",
        row=HistoryEvent,
    )

    @property
    def payload_limit(self) -> int:
        """How many bytes a payload may have: what is configured, or less if the server accepts less."""
        server = self.runner.payload_limit
        return self.max_payload_bytes if server is None else min(self.max_payload_bytes, server)

    def _check_together(self, first: str | bytes | None, second: str | bytes | None) -> None:
        """Two payloads of one statement must also fit into what the server accepts at once."""
        server = self.runner.payload_limit
        if server is not None and first is not None and second is not None:
            check_size("two payloads of one statement", size_of(first) + size_of(second), server)

    async def _hold_instance(self, instance_id: str, lock: Lock | None = None) -> WorkflowStatus:
        """Lock the instance's row until commit, fenced by `lock` if given; its status."""
        if lock is None:
            held = await self._hold.one(instance_id=instance_id)
            if held is None:
                raise InstanceNotFoundError(instance_id)
        else:
            check_lock(instance_id, lock)
            held = await self._hold_fenced.one(instance_id=instance_id, token=lock.token, worker_id=lock.worker_id)
            if held is None:
                raise LockLostError(instance_id, lock.worker_id)
        return WorkflowStatus(held[0])

    async def _hold_unfinished(self, instance_id: str, lock: Lock | None, purpose: str) -> WorkflowStatus:
        """The same, refusing a finished instance."""
        status = await self._hold_instance(instance_id, lock)
        if status in FINISHED:
            raise InvalidStatusTransitionError(instance_id, status, purpose)
        return status

    async def _hold_to_tie(self, instance_id: str, lock: Lock | None, purpose: str) -> None:
        """The same, for an instance of which another table is to have a row that must not outlive it."""
        await self._hold_unfinished(instance_id, lock, purpose)
        await self._tie.run(instance_id=instance_id)

    async def _hold_owned(self, instance_id: str, worker_id: str, lock: Lock | None) -> WorkflowStatus:
        """The same for a caller that must own the lock but may only know its own name."""
        if lock is not None:
            return await self._hold_instance(instance_id, lock)
        held = await self._hold_fenced_by_worker.one(instance_id=instance_id, worker_id=worker_id)
        if held is None:
            raise LockLostError(instance_id, worker_id)
        return WorkflowStatus(held[0])

    def _checked_event(self, event: HistoryEvent) -> dict[str, object]:
        """The parameters of a history event, checked."""
        check_key("instance_id", event.instance_id)
        check_key("activity_id", event.activity_id)
        if type(event.event_type) is not HistoryEventType:
            check_key("event_type", event.event_type, 100)
        if event.event_data is not None:
            check_json("event_data", event.event_data, self.payload_limit)
        row = event_row(event)
        if event.event_data_binary is not None:
            row["event_data_binary"] = check_binary("event_data_binary", event.event_data_binary, self.payload_limit)
        return row

    async def _record(self, event: HistoryEvent, *, stored: bool = False) -> HistoryEvent | None:
        """Record a step; if it is recorded already nothing happens and what stands there is returned.

        What was `stored` before is not measured again: the envelope of a message is larger than the message.
        """
        recorded = await self._record_new(event, stored=stored)
        return None if isinstance(recorded, int) else recorded

    async def _record_new(self, event: HistoryEvent, *, stored: bool = False) -> int | HistoryEvent:
        """The same, with the id of what was recorded just now."""
        row = event_row(event) if stored else self._checked_event(event)
        recorded_id = await self._record_step.insert(row)
        if recorded_id is not None:
            return recorded_id
        recorded = await self._recorded_step.one(instance_id=event.instance_id, activity_id=event.activity_id)
        if recorded is None:
            raise InstanceNotFoundError(event.instance_id)
        return recorded

    async def _recorded(self, event: HistoryEvent) -> HistoryEvent:
        """Record a step unless it is recorded already; what stands there, with its id."""
        recorded = await self._record(event)
        if recorded is None:
            recorded = await self._recorded_step.one(instance_id=event.instance_id, activity_id=event.activity_id)
        assert recorded is not None, "what was just recorded can be read"
        return recorded

    async def _begin_step(
        self, lock: Lock | None, record: HistoryEvent | None, instance_id: str | None = None
    ) -> HistoryEvent | None:
        """Fence a step of a run (that writes to `instance_id`) and record it; what was recorded, if it was before."""
        if lock is not None:
            await self._hold_instance(instance_id or lock.instance_id, lock)
        if record is None:
            return None
        if lock is None:
            await self._hold_instance(record.instance_id)
        else:
            check_lock(record.instance_id, lock)
        return await self._record(record)


def check_lock(instance_id: str, lock: Lock) -> None:
    """The lock of one instance proves nothing for another."""
    if lock.instance_id != instance_id:
        raise LockLostError(instance_id, lock.worker_id)


def event_row(event: HistoryEvent) -> dict[str, object]:
    """The parameters of a history event."""
    return {
        "instance_id": event.instance_id,
        "activity_id": event.activity_id,
        "event_type": event.event_type,
        "data_type": event.data_type,
        "event_data": event.event_data,
        "event_data_binary": event.event_data_binary,
        "created_at": event.created_at,
    }


def same_record(recorded: HistoryEvent, event: HistoryEvent) -> bool:
    """Whether a step stands recorded exactly as it is being recorded again."""
    return (
        recorded.event_type == event.event_type
        and recorded.event_data == event.event_data
        and recorded.event_data_binary == event.event_data_binary
    )
