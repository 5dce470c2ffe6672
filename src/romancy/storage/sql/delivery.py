"""Delivery: how messages reach the instances that wait for them, once each and in order.

Our receivers wait in a table of ours, where no other framework looks; other frameworks' receivers wait in
`channel_subscriptions`, and get their messages in their own format. A channel stays *unsettled* from a publish until a
poll has seen, under the channel's lock, that nobody waits for anything in it: so the poll's cost does not grow with the
number of waiters.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from ..errors import InvalidStatusTransitionError, NotSubscribedError
from ..models import (
    RUNNABLE,
    WAITING,
    ChannelDeliveryResult,
    ChannelMessage,
    ChannelMode,
    ChannelSubscription,
    HistoryEvent,
    Lock,
    WorkflowStatus,
)
from .channels import Channels
from .checks import check_key, page_size
from .envelopes import can_read, received_event, timeout_event
from .operation import operation
from .statement import sql
from .timers import Timers

_SETTLED_AT_ONCE = 1000
_FOREIGN_MARK = "foreign_messages"
_FOREIGN_GRACE_SEC = 300.0
_MARK_STEP = 100


class Foreign(msgspec.Struct, frozen=True):
    """A waiting subscription, and the message of another framework that it can have."""

    instance_id: str
    channel: str
    mode: ChannelMode
    id: int | None
    cursor_message_id: int
    activity_id: str | None
    timeout_at: datetime | None
    subscribed_at: datetime | None
    message_id: int

    @property
    def subscription(self) -> ChannelSubscription:
        return ChannelSubscription(
            self.instance_id,
            self.channel,
            self.mode,
            self.id,
            self.cursor_message_id,
            self.activity_id,
            self.timeout_at,
            self.subscribed_at,
        )


class Delivery(Channels, Timers):
    """Implements the part of `ChannelManager` that wakes instances."""

    _our_wait = sql("""
        SELECT w.activity_id FROM romancy_channel_waits w
         WHERE w.instance_id = :instance_id AND w.channel = :channel ORDER BY w.id LIMIT 1""")

    _foreign_wait = sql("""
        SELECT activity_id FROM channel_subscriptions
         WHERE instance_id = :instance_id AND channel = :channel AND activity_id IS NOT NULL""")

    _register_wait = sql("""
        INSERT INTO romancy_channel_waits (instance_id, channel, activity_id, timeout_at, created_at)
        VALUES (:instance_id, :channel, :activity_id, :timeout_at, {now})
        {on_conflict_do_nothing:instance_id, activity_id}""")

    _forget_wait = sql("""
        DELETE FROM romancy_channel_waits WHERE instance_id = :instance_id AND activity_id = :activity_id""")

    _forget_waits_on = sql("DELETE FROM romancy_channel_waits WHERE instance_id = :instance_id AND channel = :channel")

    _forget_foreign_wait = sql("""
        UPDATE channel_subscriptions SET activity_id = NULL, timeout_at = NULL
         WHERE instance_id = :instance_id AND channel = :channel AND activity_id IS NOT NULL""")

    _suspend_instance = sql("""
        UPDATE workflow_instances
           SET suspended_from = status, status = :status, {lock_cleared}, updated_at = {now}
         WHERE instance_id = :instance_id""")

    _still_waits = sql("""
        SELECT 1 FROM workflow_instances i
         WHERE i.instance_id = :instance_id AND (
               EXISTS (SELECT 1 FROM workflow_timer_subscriptions t WHERE t.instance_id = i.instance_id)
               OR EXISTS (SELECT 1 FROM romancy_channel_waits w WHERE w.instance_id = i.instance_id)
               OR EXISTS (SELECT 1 FROM romancy_instance_waits w WHERE w.instance_id = i.instance_id)
               OR EXISTS (SELECT 1 FROM channel_subscriptions s
                           WHERE s.instance_id = i.instance_id AND s.activity_id IS NOT NULL))""")

    _framework = sql("SELECT workflow_name, framework FROM workflow_instances WHERE instance_id = :instance_id")

    _origin = sql("SELECT 1 FROM channel_messages WHERE id = :message_id AND origin IS NULL")

    _add_receipt = sql("""
        INSERT INTO romancy_receipts (instance_id, message_id) VALUES (:instance_id, :message_id)
        {on_conflict_do_nothing:instance_id, message_id}""")

    # What keeps another framework's claim out: its foreign key locks the index of message_id (InnoDB, which would let it
    # pass if we came by id) and conflicts with FOR UPDATE only (PostgreSQL).
    _lock_message = sql(
        "SELECT id FROM channel_messages WHERE message_id = :message_name {for_update}",
        postgres="SELECT id FROM channel_messages WHERE message_id = :message_name FOR UPDATE",
    )

    _waiting_subscribers = sql(
        """
        SELECT instance_id, channel, mode, id, cursor_message_id, activity_id, timeout_at, subscribed_at FROM (
            SELECT s.instance_id, s.channel, s.mode, s.id, {cursor} AS cursor_message_id, w.activity_id, w.timeout_at,
                   s.subscribed_at, w.created_at AS since
              FROM romancy_channel_waits w
              JOIN channel_subscriptions s ON s.instance_id = w.instance_id AND s.channel = w.channel {with_cursor}
             WHERE w.channel = :channel
            UNION ALL
            SELECT s.instance_id, s.channel, s.mode, s.id, {cursor}, s.activity_id, s.timeout_at,
                   s.subscribed_at, s.subscribed_at
              FROM channel_subscriptions s {with_cursor}
             WHERE s.channel = :channel AND s.activity_id IS NOT NULL) waiting
         ORDER BY since, id LIMIT :limit""",
        row=ChannelSubscription,
    )

    _expired_waits = sql(
        """
        SELECT w.instance_id, w.channel, s.mode, s.id, {cursor}, w.activity_id, w.timeout_at, s.subscribed_at
          FROM romancy_channel_waits w
          JOIN workflow_instances i ON i.instance_id = w.instance_id
          JOIN channel_subscriptions s ON s.instance_id = w.instance_id AND s.channel = w.channel {with_cursor}
         WHERE w.timeout_at IS NOT NULL AND w.timeout_at <= {now} AND {ours} AND i.status IN {waiting} AND {not_parked}
         ORDER BY w.timeout_at, w.id LIMIT :limit""",
        row=ChannelSubscription,
    )

    _expired_wait = sql("""
        SELECT 1 FROM romancy_channel_waits
         WHERE instance_id = :instance_id AND channel = :channel AND activity_id = :activity_id
           AND timeout_at <= {now}""")

    # The poll of find_deliverable_subscriptions.

    _anything_new = sql("""
        SELECT EXISTS (SELECT 1 FROM romancy_channels WHERE unsettled_since IS NOT NULL),
               EXISTS (SELECT 1 FROM channel_messages
                        WHERE origin IS NULL
                          AND id > COALESCE((SELECT value FROM romancy_marks WHERE name = 'foreign_messages'), 0))""")

    _deliverable = sql(
        """
        SELECT w.instance_id, w.channel, s.mode, s.id, {cursor}, w.activity_id, w.timeout_at, s.subscribed_at
          FROM romancy_channels c
          JOIN romancy_channel_waits w ON w.channel = c.channel
          JOIN workflow_instances i ON i.instance_id = w.instance_id
          JOIN channel_subscriptions s ON s.instance_id = w.instance_id AND s.channel = w.channel {with_cursor}
         WHERE c.unsettled_since IS NOT NULL AND {ours} AND i.status IN {waiting} AND {not_parked}
           AND EXISTS (SELECT 1 FROM channel_messages m WHERE m.channel = w.channel AND {pending})
         ORDER BY w.id LIMIT :limit""",
        row=ChannelSubscription,
    )

    _unsettled = sql("""
        SELECT channel FROM romancy_channels WHERE unsettled_since IS NOT NULL
         ORDER BY unsettled_since LIMIT :limit {for_update_skip_locked}""")

    # Whoever waits counts, parked or of another name too: their channel must not be forgotten.
    _settle = sql("""
        UPDATE romancy_channels SET unsettled_since = NULL
         WHERE {in:channel, channels} AND NOT EXISTS (
               SELECT 1 FROM romancy_channel_waits w
                 JOIN workflow_instances i ON i.instance_id = w.instance_id
                 JOIN channel_subscriptions s ON s.instance_id = w.instance_id AND s.channel = w.channel {with_cursor}
                WHERE w.channel = romancy_channels.channel AND i.status IN {waiting}
                  AND EXISTS (SELECT 1 FROM channel_messages m WHERE m.channel = w.channel AND {pending}))""")

    _mark = sql("SELECT value FROM romancy_marks WHERE name = :name")

    _move_mark = sql("UPDATE romancy_marks SET value = :value WHERE name = :name AND value < :value")

    _add_mark = sql("""
        INSERT INTO romancy_marks (name, value) VALUES (:name, :value) {on_conflict_do_nothing:name}""")

    _foreign_deliverable = sql(
        """
        SELECT w.instance_id, w.channel, s.mode, s.id, {cursor}, w.activity_id, w.timeout_at, s.subscribed_at, m.id
          FROM channel_messages m
          JOIN romancy_channel_waits w ON w.channel = m.channel
          JOIN workflow_instances i ON i.instance_id = w.instance_id
          JOIN channel_subscriptions s ON s.instance_id = w.instance_id AND s.channel = w.channel {with_cursor}
         WHERE m.origin IS NULL AND m.id > :mark AND i.status IN {waiting} AND {ours} AND {not_parked} AND {pending}
         ORDER BY m.id, w.id LIMIT :limit""",
        row=Foreign,
    )

    # Behind this id nothing of another framework can still become visible: it would have to be that old.
    _old_foreign = sql("""
        SELECT MAX(m.id) FROM channel_messages m
         WHERE m.origin IS NULL AND m.id > :mark AND m.published_at < {seconds_ago:seconds}
           AND NOT EXISTS (
               SELECT 1 FROM channel_messages f
                 JOIN romancy_channel_waits w ON w.channel = f.channel
                 JOIN workflow_instances i ON i.instance_id = w.instance_id
                WHERE f.origin IS NULL AND f.id > :mark AND f.id <= m.id AND i.status IN {waiting})""")

    # Waiting.

    @operation
    async def register_channel_receive_and_release_lock(
        self,
        instance_id: str,
        channel_name: str,
        worker_id: str,
        activity_id: str,
        timeout_at: datetime | None = None,
        *,
        lock: Lock | None = None,
        keep_lock: bool = False,
    ) -> ChannelDeliveryResult | None:
        check_key("instance_id", instance_id)
        check_key("channel", channel_name)
        check_key("activity_id", activity_id)
        status = await self._hold_owned(instance_id, check_key("worker_id", worker_id), lock)
        self._must_run(instance_id, status)
        delivered = await self._receive_now(instance_id, channel_name, activity_id)
        if delivered is None:
            await self._register_wait.run(
                instance_id=instance_id, channel=channel_name, activity_id=activity_id, timeout_at=timeout_at
            )
            await self._suspend_instance.run(instance_id=instance_id, status=WorkflowStatus.WAITING_FOR_MESSAGE)
            return None
        if not keep_lock:
            await self._release_held.run(instance_id=instance_id)
        name = await self._workflow_name.value(instance_id=instance_id)
        return ChannelDeliveryResult(instance_id, name, activity_id)

    _release_held = sql("""
        UPDATE workflow_instances SET {lock_cleared}, runnable_since = {now}, updated_at = {now}
         WHERE instance_id = :instance_id""")

    def _must_run(self, instance_id: str, status: WorkflowStatus) -> None:
        if status not in RUNNABLE:
            raise InvalidStatusTransitionError(instance_id, status, "waiting")

    async def _receive_now(self, instance_id: str, channel: str, activity_id: str) -> HistoryEvent | None:
        """Deliver a pending message to a step of a held instance; None when there is none yet.

        The channel stays locked until commit: a message published from here on finds the wait that is registered now.
        """
        subscription = await self._subscription.one(instance_id=instance_id, channel=channel)
        if subscription is None:
            raise NotSubscribedError(instance_id, channel)
        recorded = await self._recorded_step.one(instance_id=instance_id, activity_id=activity_id)
        if recorded is not None:
            await self._forget_wait.run(instance_id=instance_id, activity_id=activity_id)
            return recorded
        await self._hold_channel(channel, share=subscription.mode is not ChannelMode.COMPETING)
        message = await self._next_message(instance_id, channel, subscription.mode)
        if message is None:
            return None
        return await self._deliver(instance_id, activity_id, message, subscription.mode, self.framework)

    async def _next_message(self, instance_id: str, channel: str, mode: ChannelMode) -> ChannelMessage | None:
        message = await self._oldest_pending(instance_id, channel)
        if mode is ChannelMode.COMPETING:
            # Other frameworks take messages without our channel lock: only behind the message's own lock is it ours.
            locked = None
            while message is not None and message.message_id != locked:
                locked = message.message_id
                await self._lock_message.one(message_name=locked)
                message = await self._oldest_pending(instance_id, channel)
        return message

    async def _oldest_pending(self, instance_id: str, channel: str) -> ChannelMessage | None:
        pending = await self._pending_messages.all(instance_id=instance_id, channel=channel, limit=1)
        return pending[0] if pending else None

    async def _deliver(
        self, instance_id: str, activity_id: str, message: ChannelMessage, mode: ChannelMode, framework: str
    ) -> HistoryEvent:
        """Record a message as received, count it as such, and end the wait for it: together, or not at all."""
        assert message.id is not None, "a stored message has an id"
        event = received_event(instance_id, activity_id, message, framework)
        recorded = await self._record(event)
        await self._forget_wait.run(instance_id=instance_id, activity_id=activity_id)
        await self._forget_foreign_wait.run(instance_id=instance_id, channel=message.channel)
        if recorded is not None:
            return recorded
        if mode is ChannelMode.COMPETING:
            await self._unclaim.run(message_name=message.message_id)
            await self._delete_message.run(message_id=message.id)
        else:
            await self._advance(instance_id, message.channel, message.id)
            if await self._origin.value(message_id=message.id):
                await self._add_receipt.run(instance_id=instance_id, message_id=message.id)
        return await self._recorded(event)

    # Delivering to those who wait.

    @operation
    async def deliver_channel_message_with_lock(
        self,
        instance_id: str,
        channel_name: str,
        message: ChannelMessage,
        worker_id: str,
        lock_timeout_sec: float,
    ) -> ChannelDeliveryResult | None:
        check_key("instance_id", instance_id)
        check_key("channel", channel_name)
        waiting = await self._take_waiting.one(instance_id=instance_id, worker_id=check_key("worker_id", worker_id))
        if waiting is None:
            return None
        workflow_name, _, framework = waiting
        delivered = await self._deliver_to_waiter(instance_id, channel_name, framework)
        if delivered is None:
            return None
        await self._wake_instance(instance_id, workflow_name)
        return ChannelDeliveryResult(instance_id, workflow_name, delivered)

    @operation
    async def deliver_channel_message(
        self, instance_id: str, message: ChannelMessage, *, lock: Lock | None = None
    ) -> ChannelDeliveryResult | None:
        check_key("instance_id", instance_id)
        status = await self._hold_instance(instance_id, lock)
        if status not in WAITING:
            return None
        found = await self._framework.one(instance_id=instance_id)
        assert found is not None, "a held instance exists"
        delivered = await self._deliver_to_waiter(instance_id, check_key("channel", message.channel), found[1])
        if delivered is None:
            return None
        await self._wake_and_keep_lock.run(instance_id=instance_id)
        return ChannelDeliveryResult(instance_id, found[0], delivered)

    _wake_and_keep_lock = sql("UPDATE workflow_instances SET {woken} WHERE instance_id = :instance_id")

    async def _deliver_to_waiter(self, instance_id: str, channel: str, framework: str) -> str | None:
        """Deliver the oldest pending message to the step that waits for it; that step, or None."""
        activity_id = await self._our_wait.value(instance_id=instance_id, channel=channel)
        if activity_id is None:
            activity_id = await self._foreign_wait.value(instance_id=instance_id, channel=channel)
        subscription = await self._subscription.one(instance_id=instance_id, channel=channel)
        if activity_id is None or subscription is None:
            return None
        if subscription.mode is ChannelMode.COMPETING:
            await self._hold_channel(channel)
        message = await self._next_message(instance_id, channel, subscription.mode)
        if message is None or not can_read(message, framework):
            return None
        await self._deliver(instance_id, activity_id, message, subscription.mode, framework)
        return str(activity_id)

    @operation(reads=True)
    async def get_channel_subscribers_waiting(
        self, channel_name: str, *, limit: int = 100
    ) -> list[ChannelSubscription]:
        return await self._waiting_subscribers.all(channel=check_key("channel", channel_name), limit=page_size(limit))

    # The polls.

    async def find_deliverable_subscriptions(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ChannelSubscription]:
        unsettled, foreign = await self._anything_new_to_deliver()
        if not (unsettled or foreign):
            return []
        return await self._find_deliverable(page_size(limit), self._ours(workflow_names, owner_service))

    @operation(reads=True)
    async def _anything_new_to_deliver(self) -> tuple[bool, bool]:
        found = await self._anything_new.one()
        assert found is not None, "a SELECT without FROM has a row"
        return bool(found[0]), bool(found[1])

    @operation
    async def _find_deliverable(self, limit: int, ours: dict[str, Any]) -> list[ChannelSubscription]:
        found = await self._deliverable.all(limit=limit, **ours)
        unsettled = [channel for (channel,) in await self._unsettled.all(limit=_SETTLED_AT_ONCE)]
        if unsettled:
            await self._settle.run(channels=unsettled)
        known = {(subscription.instance_id, subscription.activity_id) for subscription in found}
        for foreign in await self._sweep_foreign(limit, ours):
            if (foreign.instance_id, foreign.activity_id) not in known:
                known.add((foreign.instance_id, foreign.activity_id))
                found.append(foreign.subscription)
        return found[:limit]

    async def _sweep_foreign(self, limit: int, ours: dict[str, Any]) -> list[Foreign]:
        """Waiters for what other frameworks published since the mark; the mark moves up behind old messages."""
        mark = int(await self._mark.value(name=_FOREIGN_MARK) or 0)
        found = await self._foreign_deliverable.all(mark=mark, limit=limit, **ours)
        if not found:
            old = await self._old_foreign.value(mark=mark, seconds=_FOREIGN_GRACE_SEC)
            if old is not None and old >= mark + _MARK_STEP:
                key = {"name": _FOREIGN_MARK, "value": old}
                if not await self._move_mark.run(**key):
                    await self._add_mark.run(**key)
        return found

    @operation(reads=True)
    async def find_expired_channel_subscriptions(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ChannelSubscription]:
        return await self._expired_waits.all(limit=page_size(limit), **self._ours(workflow_names, owner_service))

    @operation
    async def expire_channel_receive(self, subscription: ChannelSubscription) -> bool:
        if subscription.activity_id is None:
            return False
        waiting = await self._take_waiting.one(instance_id=subscription.instance_id, worker_id="")
        if waiting is None or not await self._expired_wait.value(
            instance_id=subscription.instance_id, channel=subscription.channel, activity_id=subscription.activity_id
        ):
            return False
        await self._record(timeout_event(subscription))
        await self._forget_wait.run(instance_id=subscription.instance_id, activity_id=subscription.activity_id)
        await self._wake_instance(subscription.instance_id, waiting[0])
        return True

    # No longer waiting.

    @operation
    async def clear_channel_waiting_state(self, instance_id: str, channel_name: str) -> None:
        check_key("channel", channel_name)
        if await self._hold.one(instance_id=check_key("instance_id", instance_id)) is not None:
            await self._stop_waiting(instance_id, channel_name)

    async def _stop_waiting(self, instance_id: str, channel: str) -> None:
        """Withdraw the waits for a channel; an instance left without any wait runs again."""
        key = {"instance_id": instance_id, "channel": channel}
        withdrawn = await self._forget_waits_on.run(**key) + await self._forget_foreign_wait.run(**key)
        if not withdrawn or await self._still_waits.value(instance_id=instance_id):
            return
        waiting = await self._hold_waiting.one(instance_id=instance_id)
        if waiting is not None:
            await self._wake_instance(instance_id, waiting[0])

    @operation
    async def unsubscribe_from_channel(
        self,
        instance_id: str,
        channel_name: str,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> HistoryEvent | None:
        check_key("instance_id", instance_id)
        check_key("channel", channel_name)
        recorded = await self._begin_step(lock, record, instance_id)
        if recorded is not None:
            return recorded
        if await self._hold.one(instance_id=instance_id) is not None:
            await self._stop_waiting(instance_id, channel_name)
            await self._unsubscribe.run(instance_id=instance_id, channel=channel_name)
            await self._forget_cursor.run(instance_id=instance_id, channel=channel_name)
        return None
