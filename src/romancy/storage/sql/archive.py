"""The archive: what a recurring instance did in earlier rounds."""

from __future__ import annotations

from ..models import ArchivedHistoryEvent, Lock
from .checks import check_key
from .ending import Ending
from .operation import operation
from .statement import columns, sql

_PAGE = 1000
_COLUMNS = columns(ArchivedHistoryEvent, original_id="COALESCE(original_id, id)", original_created_at="created_at")


class Archive(Ending):
    """Implements `HistoryArchiveManager`."""

    _copy_history = sql("""
        INSERT INTO workflow_history_archive
               (instance_id, activity_id, event_type, data_type, event_data, event_data_binary, created_at, archived_at,
                original_id)
        SELECT instance_id, activity_id, event_type, data_type, event_data, event_data_binary, created_at, {now}, id
          FROM workflow_history WHERE instance_id = :instance_id ORDER BY id""")

    _delete_history = sql("DELETE FROM workflow_history WHERE instance_id = :instance_id")

    _archived = sql(
        f"""
        SELECT {_COLUMNS} FROM workflow_history_archive
         WHERE instance_id = :instance_id AND id > :after_id ORDER BY id LIMIT :limit""",
        row=ArchivedHistoryEvent,
    )

    @operation
    async def archive_history(self, instance_id: str, *, lock: Lock | None = None) -> int:
        await self._hold_instance(check_key("instance_id", instance_id), lock)
        return await self._archive(instance_id)

    async def _archive(self, instance_id: str) -> int:
        moved = await self._copy_history.run(instance_id=instance_id)
        if moved:
            await self._delete_history.run(instance_id=instance_id)
        return moved

    @operation(reads=True)
    async def get_archived_history(self, instance_id: str) -> list[ArchivedHistoryEvent]:
        check_key("instance_id", instance_id)
        events: list[ArchivedHistoryEvent] = []
        after_id = 0
        while page := await self._archived.all(instance_id=instance_id, after_id=after_id, limit=_PAGE):
            events += page
            if len(page) < _PAGE:
                break
            after_id = page[-1].id
        return events

    @operation(idempotent=True)
    async def cleanup_instance_subscriptions(self, instance_id: str) -> None:
        held = await self._hold.one(instance_id=check_key("instance_id", instance_id))
        if held is None:
            return
        left = await self._leftovers.one(instance_id=instance_id)
        assert left is not None, "a SELECT without FROM has a row"
        await self._forget_waits(instance_id, left)
        await self._forget_interests(instance_id, left)
        waiting = await self._hold_waiting.one(instance_id=instance_id)
        if waiting is not None:  # nothing is left that could wake it
            await self._wake_instance(instance_id, waiting[0], keep_lock=True)
