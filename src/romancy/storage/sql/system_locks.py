"""System locks: background work that only one process should do."""

from __future__ import annotations

from typing import NamedTuple

from .checks import check_key, positive
from .manager import Manager
from .operation import operation
from .statement import sql


class Taken(NamedTuple):
    """A system lock that was got, or got for longer."""

    lock_name: str
    worker_id: str
    renewed: bool


class SystemLocks(Manager):
    """Implements `SystemLockManager`."""

    # Update first: a failed insert leaves a shared lock behind that two rivals then both try to upgrade (InnoDB 1213).
    _renew = sql("""
        UPDATE system_locks SET locked_at = {now}, lock_expires_at = {seconds_from_now:timeout_sec}
         WHERE lock_name = :lock_name AND locked_by = :worker_id AND lock_expires_at > {now}""")

    _take_over = sql("""
        UPDATE system_locks
           SET locked_by = :worker_id, locked_at = {now}, lock_expires_at = {seconds_from_now:timeout_sec}
         WHERE lock_name = :lock_name
           AND (locked_by IS NULL OR locked_by = '' OR lock_expires_at IS NULL OR lock_expires_at <= {now})""")

    _take = sql("""
        INSERT INTO system_locks (lock_name, locked_by, locked_at, lock_expires_at)
        VALUES (:lock_name, :worker_id, {now}, {seconds_from_now:timeout_sec})
        {on_conflict_do_nothing:lock_name}""")

    _let_go = sql("DELETE FROM system_locks WHERE lock_name = :lock_name AND locked_by = :worker_id")

    _expired = sql("SELECT lock_name FROM system_locks WHERE lock_expires_at <= {now} LIMIT 1000")

    _delete_expired = sql("DELETE FROM system_locks WHERE {in:lock_name, names} AND lock_expires_at <= {now}")

    @operation(undo="_give_system_lock_back")
    async def _acquire_system_lock(self, lock_name: str, worker_id: str, timeout_sec: float) -> Taken | None:
        wanted = {"lock_name": lock_name, "worker_id": worker_id, "timeout_sec": timeout_sec}
        if await self._renew.run(**wanted):
            return Taken(lock_name, worker_id, renewed=True)
        if await self._take_over.run(**wanted) or await self._take.run(**wanted):
            return Taken(lock_name, worker_id, renewed=False)
        return None

    async def try_acquire_system_lock(self, lock_name: str, worker_id: str, timeout_sec: float) -> bool:
        check_key("lock_name", lock_name)
        check_key("worker_id", worker_id)
        seconds = positive("timeout_sec", timeout_sec)
        return await self._acquire_system_lock(lock_name, worker_id, seconds) is not None

    async def _give_system_lock_back(self, won: Taken | None) -> None:
        # Not what was only renewed: its holder relies on it, cancelled or not.
        if won is not None and not won.renewed:
            await self._let_go.run(lock_name=won.lock_name, worker_id=won.worker_id)

    @operation(autocommit=True, idempotent=True)
    async def release_system_lock(self, lock_name: str, worker_id: str) -> None:
        check_key("lock_name", lock_name)
        await self._let_go.run(lock_name=lock_name, worker_id=check_key("worker_id", worker_id))

    @operation(idempotent=True)
    async def cleanup_expired_system_locks(self) -> int:
        names = [name for (name,) in await self._expired.all()]
        return await self._delete_expired.run(names=names) if names else 0
