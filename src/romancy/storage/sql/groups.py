"""Groups: named sets of instances, for messages to all of them."""

from __future__ import annotations

from ..models import HistoryEvent, Lock
from .checks import check_key
from .manager import Manager
from .operation import operation
from .statement import sql

_PAGE = 1000


class Groups(Manager):
    """Implements `GroupManager`."""

    _join = sql("""
        INSERT INTO workflow_group_memberships (instance_id, group_name, joined_at)
        VALUES (:instance_id, :group_name, {now})
        {on_conflict_do_nothing:instance_id, group_name}""")

    _leave = sql("""
        DELETE FROM workflow_group_memberships WHERE instance_id = :instance_id AND group_name = :group_name""")

    _leave_all = sql("DELETE FROM workflow_group_memberships WHERE instance_id = :instance_id")

    _members = sql("""
        SELECT g.id, g.instance_id
          FROM workflow_group_memberships g JOIN workflow_instances i ON i.instance_id = g.instance_id
         WHERE g.group_name = :group_name AND g.id > :after_id AND i.status NOT IN {finished}
         ORDER BY g.id LIMIT :limit""")

    @operation
    async def join_group(
        self, instance_id: str, group_name: str, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        check_key("instance_id", instance_id)
        check_key("group_name", group_name)
        recorded = await self._begin_step(lock, record, instance_id)
        if recorded is not None:
            return recorded
        await self._hold_to_tie(instance_id, None, "a group member")
        await self._join.run(instance_id=instance_id, group_name=group_name)
        return None

    @operation
    async def leave_group(
        self, instance_id: str, group_name: str, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        check_key("instance_id", instance_id)
        check_key("group_name", group_name)
        recorded = await self._begin_step(lock, record, instance_id)
        if recorded is not None:
            return recorded
        await self._leave.run(instance_id=instance_id, group_name=group_name)
        return None

    @operation(reads=True)
    async def get_group_members(self, group_name: str) -> list[str]:
        check_key("group_name", group_name)
        members: list[str] = []
        after_id = 0
        while page := await self._members.all(group_name=group_name, after_id=after_id, limit=_PAGE):
            members += [instance_id for _, instance_id in page]
            if len(page) < _PAGE:
                break
            after_id = page[-1][0]
        return members

    @operation(idempotent=True)
    async def leave_all_groups(self, instance_id: str) -> None:
        await self._leave_all.run(instance_id=check_key("instance_id", instance_id))
