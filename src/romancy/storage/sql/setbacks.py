"""Setbacks: workers that vanished while they ran an instance, and code that does not fit its history."""

from __future__ import annotations

import msgspec

from ..models import Lock
from .checks import check_key, page_size
from .ending import resumable_hint
from .locks import Locks
from .operation import operation
from .statement import sql


class Setback(msgspec.Struct, frozen=True):
    """What is known of an instance's vanished workers."""

    takeovers: int
    progress: str


class Setbacks(Locks):
    """Implements `SetbackManager`."""

    _setback = sql(
        "SELECT takeovers, progress FROM romancy_setbacks WHERE instance_id = :instance_id",
        row=Setback,
    )

    # The newest step, in this round or an earlier one: where an instance that gets nowhere still is.
    _progress = sql("""
        SELECT COALESCE((SELECT MAX(h.id) FROM workflow_history h WHERE h.instance_id = :instance_id), 0),
               COALESCE((SELECT MAX(a.id) FROM workflow_history_archive a WHERE a.instance_id = :instance_id), 0)""")

    _add_setback = sql("""
        INSERT INTO romancy_setbacks (instance_id, takeovers, progress) VALUES (:instance_id, 0, '')
        {on_conflict_do_nothing:instance_id}""")

    _count_takeovers = sql("""
        UPDATE romancy_setbacks SET takeovers = :takeovers, progress = :progress WHERE instance_id = :instance_id""")

    _refuse = sql("UPDATE romancy_setbacks SET refused_by = :code WHERE instance_id = :instance_id")

    _refused_by_others = sql("""
        SELECT i.instance_id FROM romancy_setbacks b JOIN workflow_instances i ON i.instance_id = b.instance_id
         WHERE b.refused_by <> :code AND {ours} AND i.status IN {runnable} AND i.parked_until IS NOT NULL
         ORDER BY b.instance_id LIMIT :limit""")

    @operation
    async def count_takeover(self, instance_id: str, *, lock: Lock) -> int:
        check_key("instance_id", instance_id)
        await self._hold_instance(instance_id, lock)
        recorded = await self._progress.one(instance_id=instance_id)
        assert recorded is not None, "a SELECT without FROM has a row"
        progress = f"{recorded[0]}/{recorded[1]}"
        before = await self._setback.one(instance_id=instance_id)
        takeovers = before.takeovers + 1 if before is not None and before.progress == progress else 1
        await self._add_setback.run(instance_id=instance_id)
        await self._count_takeovers.run(instance_id=instance_id, takeovers=takeovers, progress=progress)
        return takeovers

    @operation
    async def note_refusal(self, instance_id: str, code: str, *, lock: Lock) -> None:
        refusal = {"instance_id": check_key("instance_id", instance_id), "code": check_key("code", code, 64)}
        await self._hold_instance(instance_id, lock)
        await self._add_setback.run(instance_id=instance_id)
        await self._refuse.run(**refusal)

    @operation
    async def unpark_refused(
        self, workflow_name: str, code: str, limit: int = 100, *, owner_service: str | None = None
    ) -> list[str]:
        check_key("workflow_name", workflow_name)
        check_key("code", code, 64)
        refused = await self._refused_by_others.all(
            code=code, limit=page_size(limit), **self._ours([workflow_name], owner_service)
        )
        unparked: list[str] = []
        for (instance_id,) in refused:
            if await self._unpark.run(instance_id=instance_id):
                await self._forget_setbacks.run(instance_id=instance_id)
                await resumable_hint(instance_id, workflow_name)
                unparked.append(instance_id)
        return unparked
