"""States: what an instance shows of itself while it runs, and after."""

from __future__ import annotations

from ..models import HistoryEvent, Lock
from .checks import check_json, check_key
from .manager import Manager
from .operation import operation
from .statement import sql


class States(Manager):
    """Implements `StateManager`."""

    _change_state = sql("""
        UPDATE romancy_states SET state = :state, updated_at = {now} WHERE instance_id = :instance_id""")

    _add_state = sql("""
        INSERT INTO romancy_states (instance_id, state, updated_at) VALUES (:instance_id, :state, {now})""")

    _state = sql("SELECT state FROM romancy_states WHERE instance_id = :instance_id")

    @operation
    async def set_instance_state(
        self, instance_id: str, state: str, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        shown = {
            "instance_id": check_key("instance_id", instance_id),
            "state": check_json("state", state, self.payload_limit),
        }
        recorded = await self._begin_step(lock, record, instance_id)
        if recorded is not None:
            return recorded
        # The instance's row is ours until commit: nobody adds a state between the two.
        await self._hold_unfinished(instance_id, None, "showing a new state")
        if not await self._change_state.run(**shown):
            await self._add_state.run(**shown)
        return None

    @operation(reads=True, by_key=True)
    async def get_instance_state(self, instance_id: str) -> str | None:
        state = await self._state.value(instance_id=check_key("instance_id", instance_id))
        return None if state is None else str(state)
