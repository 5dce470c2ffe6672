"""Compensations: a stack of what to undo, one entry per step."""

from __future__ import annotations

from ..errors import InstanceNotFoundError
from ..models import CompensationEntry, HistoryEvent, Lock
from .checks import check_json, check_key
from .manager import Manager
from .operation import operation
from .statement import sql

_PAGE = 1000


class Compensations(Manager):
    """Implements `CompensationManager`."""

    # No unique index: another framework repeats its rows. The instance's row is locked, so two of us cannot both pass.
    _push = sql("""
        INSERT INTO workflow_compensations (instance_id, activity_id, activity_name, args, created_at)
        SELECT i.instance_id, {text:activity_id}, :activity_name, :args, COALESCE(:created_at, {now})
          FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND NOT EXISTS (
               SELECT 1 FROM workflow_compensations c
                WHERE c.instance_id = :instance_id AND c.activity_id = :activity_id)""")

    _stack = sql(
        """
        SELECT {compensation_columns} FROM workflow_compensations
         WHERE instance_id = :instance_id AND id < {any_id:before_id}
         ORDER BY id DESC LIMIT :limit""",
        row=CompensationEntry,
    )

    @operation
    async def add_compensation(
        self, entry: CompensationEntry, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        row = {
            "instance_id": check_key("instance_id", entry.instance_id),
            "activity_id": check_key("activity_id", entry.activity_id),
            "activity_name": check_key("activity_name", entry.activity_name),
            "args": check_json("args", entry.args, self.payload_limit),
            "created_at": entry.created_at,
        }
        recorded = await self._begin_step(lock, record, entry.instance_id)
        if recorded is not None:
            return recorded
        if await self._hold.one(instance_id=entry.instance_id) is None:
            raise InstanceNotFoundError(entry.instance_id)
        await self._push.run(**row)
        return None

    @operation(reads=True)
    async def get_compensations(self, instance_id: str) -> list[CompensationEntry]:
        check_key("instance_id", instance_id)
        entries: list[CompensationEntry] = []
        before_id = 2**63 - 1
        while page := await self._stack.all(instance_id=instance_id, before_id=before_id, limit=_PAGE):
            entries += page
            if len(page) < _PAGE or page[-1].id is None:
                break
            before_id = page[-1].id
        return entries
