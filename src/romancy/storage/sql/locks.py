"""Locks: one worker runs an instance at a time, and each acquisition has a token that fences its writes."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

import msgspec

from ..errors import LockLostError
from ..models import RUNNABLE, Lock, StaleWorkflowInfo, WorkflowInstance, WorkflowStatus
from . import touches
from .checks import check_batch, check_key, not_negative, page_size, positive
from .demands import Claim, dealt, limit_of_all
from .fragments import longest_runnable
from .instances import Instances
from .manager import check_lock
from .operation import operation
from .statement import columns, merged, sql

_REFRESHED_AT_ONCE = 1000


class Held(msgspec.Struct, frozen=True):
    """What a lock needs to know of an instance's row."""

    instance_id: str
    lock_token: int
    status: WorkflowStatus
    lock_timeout_seconds: int | None
    now: datetime

    def lock(self, worker_id: str, token: int, now: datetime, timeout_sec: float) -> Lock:
        """A lock on it from `now` on; what is set on the instance beats the caller's timeout."""
        expires_at = now + timedelta(seconds=self.lock_timeout_seconds or timeout_sec)
        return Lock(self.instance_id, token, worker_id, expires_at, self.status)


class Locks(Instances):
    """Implements `LockManager`."""

    # A row locked by an open transaction is passed over: it is being written by its owner, or being taken by a rival.
    _take_free = sql(
        """
        SELECT i.instance_id, i.lock_token, i.status, i.lock_timeout_seconds, {now} FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND i.status NOT IN {finished} AND {lock_is_free}
        {for_update_skip_locked}""",
        row=Held,
    )

    _acquire = sql("""
        UPDATE {keys_unchanged} workflow_instances
           SET locked_by = :worker_id, locked_at = {now}, lock_expires_at = :expires_at, lock_token = lock_token + 1
         WHERE {in:instance_id, instance_ids}""")

    _take_ours = sql(
        """
        SELECT i.instance_id, i.lock_token, i.status, i.lock_timeout_seconds, {now} FROM workflow_instances i
         WHERE {in:i.instance_id, instance_ids} AND i.locked_by = :worker_id AND i.lock_expires_at > {now}
         ORDER BY i.instance_id {for_update_skip_locked}""",
        row=Held,
    )

    # What could not be taken above: still ours (its row is only busy), or lost?
    _still_ours = sql("""
        SELECT i.instance_id, i.lock_token FROM workflow_instances i
         WHERE {in:i.instance_id, instance_ids} AND i.locked_by = :worker_id AND i.lock_expires_at > {now}""")

    _extend = sql("""
        UPDATE {keys_unchanged} workflow_instances SET lock_expires_at = :expires_at
         WHERE {in:instance_id, instance_ids}""")

    _stale = sql(
        """
        SELECT i.instance_id, i.workflow_name
          FROM workflow_instances i {through_index:romancy_instances_held}
         WHERE {ours} AND i.status IN {unfinished} AND i.locked_by <> ''
           AND (i.lock_expires_at <= {now}
                OR (i.lock_expires_at IS NULL AND i.locked_at <= {seconds_ago:timeout_sec}))
         ORDER BY {hidden:i.instance_id} LIMIT :limit {for_update_skip_locked}""",
        row=StaleWorkflowInfo,
    )

    _free = sql("""
        UPDATE {keys_unchanged} workflow_instances SET {lock_cleared}, updated_at = {now}
         WHERE {in:instance_id, instance_ids}""")

    @operation(undo="_give_back_lock", touches=touches.of_change)
    async def try_acquire_lock(self, instance_id: str, worker_id: str, timeout_sec: float) -> Lock | None:
        check_key("instance_id", instance_id)
        check_key("worker_id", worker_id)
        positive("timeout_sec", timeout_sec)
        free = await self._take_free.one(instance_id=instance_id)
        if free is None:
            return None
        lock = free.lock(worker_id, free.lock_token + 1, free.now, timeout_sec)
        await self._acquire.run(instance_ids=[instance_id], worker_id=worker_id, expires_at=lock.expires_at)
        return lock

    _claimable = sql(
        longest_runnable("{instance_columns}", locking="{for_update_skip_locked}"),
        mysql=merged(
            (
                longest_runnable(
                    "{instance_columns}, i.runnable_since", status=f"= '{status}'", locking="{for_update_skip_locked}"
                )
                for status in RUNNABLE
            ),
            columns=columns(WorkflowInstance),
            order="runnable_since, instance_id",
        ),
        row=WorkflowInstance,
    )

    def claim_resumable_workflows(
        self,
        worker_id: str,
        timeout_sec: float,
        limit: int = 100,
        *,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> Coroutine[Any, Any, list[tuple[WorkflowInstance, Lock]]]:
        return self._claim_runnable(Claim(worker_id, timeout_sec, limit, workflow_names, owner_service))

    @operation(undo="_give_back_claims", touches=touches.of_claim, as_one="_claim_for_all")
    async def _claim_runnable(self, claim: Claim) -> list[tuple[WorkflowInstance, Lock]]:
        (claims,) = await self._claim_for_all([claim])
        return claims

    async def _claim_for_all(self, demands: Sequence[Claim]) -> list[list[tuple[WorkflowInstance, Lock]]]:
        """Claim for several who look for the same; what each of them gets."""
        for demand in demands:
            demand.check()
        ours = self._ours(demands[0].workflow_names, demands[0].owner_service)
        found = await self._claimable.all(limit=limit_of_all(demands), **ours)
        if not found:
            return [[] for _ in demands]
        now = await self._now()
        claims = [
            [(instance, _claimed(instance, demand, now)) for instance in hand]
            for demand, hand in zip(demands, dealt(found, demands), strict=True)
        ]
        locks = sorted((lock for hand in claims for _, lock in hand), key=_holder)
        for (worker_id, expires_at), held in groupby(locks, key=_holder):
            instance_ids = [lock.instance_id for lock in held]
            await self._acquire.run(instance_ids=instance_ids, worker_id=worker_id, expires_at=expires_at)
        return claims

    async def _give_back_claims(self, claims: list[tuple[WorkflowInstance, Lock]]) -> None:
        for _, lock in claims:
            await self._give_back_created(lock)

    async def _give_back_lock(self, lock: Lock | None) -> None:
        await self._give_back_created(lock)

    _release_any = sql("""
        UPDATE {keys_unchanged} workflow_instances SET {lock_cleared}, runnable_since = {now}, updated_at = {now}
         WHERE instance_id = :instance_id AND locked_by = :worker_id AND lock_expires_at > {now}""")

    @operation(autocommit=True, idempotent=True, touches=touches.of_change)
    async def release_lock(self, instance_id: str, worker_id: str, *, lock: Lock | None = None) -> None:
        check_key("instance_id", instance_id)
        check_key("worker_id", worker_id)
        if lock is None:
            await self._release_any.run(instance_id=instance_id, worker_id=worker_id)
        elif (lock.instance_id, lock.worker_id) == (instance_id, worker_id):
            await self._release.run(instance_id=instance_id, worker_id=worker_id, token=lock.token)

    @operation(idempotent=True, urgent=True)
    async def refresh_lock(
        self, instance_id: str, worker_id: str, timeout_sec: float, *, lock: Lock | None = None
    ) -> Lock | None:
        check_key("instance_id", instance_id)
        check_key("worker_id", worker_id)
        if lock is not None:
            check_lock(instance_id, lock)
        tokens = {instance_id: None if lock is None else lock.token}
        outcome = (await self._refresh(tokens, worker_id, timeout_sec))[instance_id]
        if isinstance(outcome, LockLostError):
            raise outcome
        return outcome

    @operation(idempotent=True, urgent=True)
    async def refresh_locks(self, locks: Sequence[Lock], timeout_sec: float) -> list[Lock | LockLostError | None]:
        check_batch("locks", len(locks))
        # Of two acquisitions by one worker only the newer can be live.
        newest: dict[str, dict[str, int | None]] = {}
        for lock in sorted(locks, key=lambda lock: (lock.worker_id, lock.token)):
            newest.setdefault(lock.worker_id, {})[lock.instance_id] = lock.token
        refreshed: dict[str, dict[str, Lock | LockLostError | None]] = {}
        for worker_id, tokens in newest.items():
            outcomes = refreshed[worker_id] = {}
            owned = list(tokens.items())
            for start in range(0, len(owned), _REFRESHED_AT_ONCE):  # a statement has a largest size on MariaDB
                outcomes |= await self._refresh(dict(owned[start : start + _REFRESHED_AT_ONCE]), worker_id, timeout_sec)
        return [
            refreshed[lock.worker_id][lock.instance_id]
            if newest[lock.worker_id][lock.instance_id] == lock.token
            else LockLostError(lock.instance_id, lock.worker_id)
            for lock in locks
        ]

    async def _refresh(
        self, tokens: dict[str, int | None], worker_id: str, timeout_sec: float
    ) -> dict[str, Lock | LockLostError | None]:
        """Extend what is ours; by instance: the extended lock, None for a busy row, or the loss."""
        positive("timeout_sec", timeout_sec)

        def matches(instance_id: str, token: int) -> bool:
            return tokens[instance_id] in (None, token)

        held = await self._take_ours.all(instance_ids=list(tokens), worker_id=worker_id)
        now = min((row.now for row in held), default=None)  # the clock goes on from row to row
        locks = [
            row.lock(worker_id, row.lock_token, now, timeout_sec)
            for row in held
            if now is not None and matches(row.instance_id, row.lock_token)
        ]
        for expires_at, instance_ids in by_expiry(locks).items():
            await self._extend.run(instance_ids=instance_ids, expires_at=expires_at)
        outcomes: dict[str, Lock | LockLostError | None] = {lock.instance_id: lock for lock in locks}
        missing = [instance_id for instance_id in tokens if instance_id not in outcomes]
        if missing:
            ours = dict(await self._still_ours.all(instance_ids=missing, worker_id=worker_id))
            for instance_id in missing:
                busy = instance_id in ours and matches(instance_id, ours[instance_id])
                outcomes[instance_id] = None if busy else LockLostError(instance_id, worker_id)
        return outcomes

    @operation
    async def cleanup_stale_locks(
        self,
        timeout_sec: float,
        *,
        limit: int = 100,
        workflow_names: Sequence[str] | None = None,
        owner_service: str | None = None,
    ) -> list[StaleWorkflowInfo]:
        ours = self._ours(workflow_names, owner_service)
        stale = await self._stale.all(
            timeout_sec=not_negative("timeout_sec", timeout_sec), limit=page_size(limit), **ours
        )
        if stale:
            await self._free.run(instance_ids=[info.instance_id for info in stale])
        return stale


def _claimed(instance: WorkflowInstance, claim: Claim, now: datetime) -> Lock:
    """The lock on an instance from `now` on; what is set on the instance beats the caller's timeout."""
    expires_at = now + timedelta(seconds=instance.lock_timeout_seconds or claim.timeout_sec)
    return Lock(instance.instance_id, instance.lock_token + 1, claim.worker_id, expires_at, instance.status)


def _holder(lock: Lock) -> tuple[str, datetime]:
    """What one statement can say of several locks."""
    return lock.worker_id, lock.expires_at


def by_expiry(locks: Iterable[Lock]) -> dict[datetime, list[str]]:
    """The instances that are locked until the same moment: one statement each."""
    instance_ids: dict[datetime, list[str]] = {}
    for lock in locks:
        instance_ids.setdefault(lock.expires_at, []).append(lock.instance_id)
    return instance_ids
