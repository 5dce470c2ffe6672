"""Groups and system locks."""

from romancy.storage import (
    HistoryEvent,
    Lock,
)

from .memory import Memory, SystemLock


class Groups(Memory):
    """Implements `GroupManager` and `SystemLockManager`."""

    def join_group(
        self, instance_id: str, group_name: str, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record, instance_id)
        if recorded is None:
            self._hold_unfinished(instance_id, None, "a group member")
            self.groups.setdefault((instance_id, group_name))
        return recorded

    def leave_group(
        self, instance_id: str, group_name: str, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record, instance_id)
        if recorded is None:
            self.groups.pop((instance_id, group_name), None)
        return recorded

    def get_group_members(self, group_name: str) -> list[str]:
        return [instance_id for instance_id, name in self.groups if name == group_name]

    def leave_all_groups(self, instance_id: str) -> None:
        self.groups = {key: None for key in self.groups if key[0] != instance_id}

    # System locks.

    def try_acquire_system_lock(self, lock_name: str, worker_id: str, timeout_sec: float) -> bool:
        held = self.system_locks.get(lock_name)
        if held is not None and held.locked_by != worker_id and not self.is_past(held.lock_expires_at):
            return False
        self.system_locks[lock_name] = SystemLock(worker_id, self.now, self._in(timeout_sec))
        return True

    def release_system_lock(self, lock_name: str, worker_id: str) -> None:
        if lock_name in self.system_locks and self.system_locks[lock_name].locked_by == worker_id:
            del self.system_locks[lock_name]

    def cleanup_expired_system_locks(self) -> int:
        expired = [name for name, lock in self.system_locks.items() if self.is_past(lock.lock_expires_at)]
        for name in expired:
            del self.system_locks[name]
        return len(expired)
