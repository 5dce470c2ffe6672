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
from msgspec.structs import replace

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
from .channels import Channels, pending_broadcast, pending_broadcast_by_id, pending_competing
from .checks import check_key, check_optional_key, page_size
from .envelopes import EDDA, ROMANCY_GO, readable, received_event, timeout_event
from .operation import operation
from .statement import sql
from .timers import Timers

_SETTLED_AT_ONCE = 1000
_FOREIGN_MARK = "foreign_messages"
_FOREIGN_GRACE_SEC = 300.0
_MARK_STEP = 100
_PENDING = "{message_columns}, CASE WHEN m.origin IS NULL THEN 1 ELSE 0 END AS is_foreign"


class News(msgspec.Struct, frozen=True):
    """What a poll has to look at."""

    unsettled: bool
    """Channels of ours."""
    foreign: bool
    """Messages of other frameworks behind the mark."""
    mark: int


class Awaiting(ChannelSubscription, frozen=True):
    """A subscription, and what else is known of the step that waits in it."""

    ours: bool = False
    """Whether it stands in our own table."""
    has_cursor: bool = False
    """Whether there is a cursor besides the subscription's own."""


class Pending(ChannelMessage, frozen=True):
    """A message, and whether another framework has published it."""

    foreign: bool = False


class Delivery(Channels, Timers):
    """Implements the part of `ChannelManager` that wakes instances."""

    _awaiting = sql(
        """
        SELECT s.instance_id, s.channel, s.mode, s.id, {cursor}, COALESCE(w.activity_id, s.activity_id),
               COALESCE(w.timeout_at, s.timeout_at), s.subscribed_at,
               CASE WHEN w.activity_id IS NULL THEN 0 ELSE 1 END,
               CASE WHEN d.instance_id IS NULL THEN 0 ELSE 1 END
          FROM channel_subscriptions s {with_cursor}
          LEFT JOIN romancy_channel_waits w ON w.instance_id = s.instance_id AND w.channel = s.channel
         WHERE s.instance_id = :instance_id AND s.channel = :channel
         ORDER BY w.id LIMIT 1""",
        row=Awaiting,
    )

    _next_broadcast = sql(pending_broadcast(_PENDING, "1"), mysql=pending_broadcast_by_id(_PENDING, "1"), row=Pending)

    _next_competing = sql(pending_competing(_PENDING, "1"), row=Pending)

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
        UPDATE {keys_unchanged} workflow_instances
           SET suspended_from = status, status = :status, {lock_cleared}, has_ties = TRUE, updated_at = {now}
         WHERE instance_id = :instance_id""")

    _framework = sql("SELECT workflow_name, framework FROM workflow_instances WHERE instance_id = :instance_id")

    _add_receipt = sql("""
        INSERT INTO romancy_receipts (instance_id, message_id) VALUES (:instance_id, :message_id)
        {on_conflict_do_nothing:instance_id, message_id}""")

    _waiting_subscribers = sql(
        """
        SELECT instance_id, channel, mode, id, cursor_message_id, activity_id, timeout_at, subscribed_at FROM (
            SELECT s.instance_id, s.channel, s.mode, s.id, {cursor} AS cursor_message_id, w.activity_id, w.timeout_at,
                   s.subscribed_at, w.created_at AS since, w.id AS position
              FROM romancy_channel_waits w
              {then_join} workflow_instances i ON i.instance_id = w.instance_id
              JOIN channel_subscriptions s ON s.instance_id = w.instance_id AND s.channel = w.channel {with_cursor}
             WHERE w.channel = :channel AND i.status IN {waiting}
            UNION ALL
            SELECT s.instance_id, s.channel, s.mode, s.id, {cursor}, s.activity_id, s.timeout_at,
                   s.subscribed_at, s.subscribed_at, s.id
              FROM channel_subscriptions s {with_cursor}
             WHERE s.channel = :channel AND s.activity_id IS NOT NULL) waiting
         ORDER BY since, position LIMIT :limit""",
        row=ChannelSubscription,
    )

    _EXPIRED_WAITS = """
        SELECT w.instance_id, w.channel, s.mode, s.id, {cursor}, w.activity_id, w.timeout_at, s.subscribed_at
          FROM romancy_channel_waits w {through_index:romancy_waits_timeout}
          {then_each:workflow_instances i, i.instance_id = w.instance_id}
          {then_each:channel_subscriptions s, s.instance_id = w.instance_id AND {hidden:s.channel} = w.channel}
          {with_cursor}
         WHERE w.timeout_at IS NOT NULL AND w.timeout_at <= {statement_now}
           AND {ours} AND i.status IN {waiting} AND {not_parked}"""

    # PostgreSQL's index does not hold the id: told by old statistics that hardly any is due, it would sort all of them.
    _expired_waits = sql(
        f"{_EXPIRED_WAITS} ORDER BY w.timeout_at, w.id LIMIT :limit",
        postgres=f"{_EXPIRED_WAITS} ORDER BY w.timeout_at LIMIT :limit",
        row=ChannelSubscription,
    )

    _expired_wait = sql("""
        SELECT 1 FROM romancy_channel_waits
         WHERE instance_id = :instance_id AND channel = :channel AND activity_id = :activity_id
           AND timeout_at <= {now}""")

    # The poll of find_deliverable_subscriptions.

    _anything_new = sql(
        """
        SELECT {any_unsettled}, {any_foreign},
               COALESCE((SELECT value FROM romancy_marks WHERE name = 'foreign_messages'), 0)""",
        row=News,
    )

    _deliverable = sql(
        """
        SELECT w.instance_id, w.channel, s.mode, s.id, {cursor}, w.activity_id, w.timeout_at, s.subscribed_at
          FROM (SELECT channel FROM romancy_channels WHERE unsettled_since IS NOT NULL
                UNION
                SELECT channel FROM channel_messages WHERE origin IS NULL AND id > :mark) c
          JOIN romancy_channel_waits w ON w.channel = c.channel
          {then_join} workflow_instances i ON i.instance_id = w.instance_id
          JOIN channel_subscriptions s ON s.instance_id = w.instance_id AND s.channel = w.channel {with_cursor}
         WHERE {ours} AND i.status IN {waiting} AND {not_parked}
           AND ({has_pending} OR (s.mode = 'broadcast' AND EXISTS (
                SELECT 1 FROM channel_messages m WHERE m.channel = s.channel AND m.id > :mark AND {late})))
         ORDER BY w.id LIMIT :limit""",
        row=ChannelSubscription,
    )

    _unsettled = sql("""
        SELECT channel FROM romancy_channels WHERE unsettled_since IS NOT NULL
         ORDER BY unsettled_since LIMIT :limit {for_update_skip_locked}""")

    # Every wait counts that could become deliverable without another publish: of an instance that is parked, of another
    # name, or running just now; for a message that somebody has claimed and may let go. OFFSET keeps PostgreSQL from
    # joining all subscriptions there are: it looks at one channel after the other.
    _settle = sql("""
        UPDATE romancy_channels SET unsettled_since = NULL
         WHERE {in:channel, channels} AND NOT EXISTS (
               SELECT 1 FROM romancy_channel_waits w
                 JOIN channel_subscriptions s ON s.instance_id = w.instance_id AND s.channel = w.channel {with_cursor}
                WHERE w.channel = romancy_channels.channel
                  AND {newest_id} > CASE s.mode WHEN 'broadcast' THEN {cursor} ELSE 0 END
                LIMIT 1 OFFSET 0)""")

    # The mark behind which other frameworks' messages are of interest. None below it can still become visible: it would
    # have to be older than `seconds`.
    _foreign_ids = sql("""
        SELECT MAX(id), MAX(CASE WHEN published_at < {seconds_ago:seconds} THEN id END) FROM channel_messages
         WHERE origin IS NULL AND id > :mark""")

    _first_awaited = sql("""
        SELECT m.id FROM channel_messages m
          JOIN romancy_channel_waits w ON w.channel = m.channel
          {then_join} workflow_instances i ON i.instance_id = w.instance_id
          JOIN channel_subscriptions s ON s.instance_id = w.instance_id AND s.channel = w.channel {with_cursor}
         WHERE m.origin IS NULL AND m.id > :mark AND m.id <= :old AND i.status NOT IN {finished}
           AND (s.mode = 'competing' OR m.id > {cursor} OR {late})
         ORDER BY m.id LIMIT 1""")

    _move_mark = sql("UPDATE romancy_marks SET value = :value WHERE name = :name AND value < :value")

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
        UPDATE {keys_unchanged} workflow_instances SET {lock_cleared}, runnable_since = {now}, updated_at = {now}
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
        message = await self._next_message(subscription)
        if message is None:
            return None
        event = received_event(instance_id, activity_id, message, self.framework)
        await self._deliver(event, message, subscription.mode, self.framework)
        recorded = await self._recorded_step.one(instance_id=instance_id, activity_id=activity_id)
        assert recorded is not None, "what was just recorded can be read"
        return recorded

    async def _next_message(self, subscription: ChannelSubscription) -> Pending | None:
        message = await self._oldest_pending(subscription)
        if subscription.mode is ChannelMode.COMPETING:
            # Other frameworks take messages without our channel lock: only behind the message's own lock is it ours.
            locked = None
            while message is not None and message.message_id != locked:
                locked = message.message_id
                await self._lock_message.one(message_name=locked)
                message = await self._oldest_pending(subscription)
        return message

    async def _oldest_pending(self, subscription: ChannelSubscription) -> Pending | None:
        key = {"instance_id": subscription.instance_id, "channel": subscription.channel}
        if subscription.mode is ChannelMode.COMPETING:
            return await self._next_competing.one(**key)
        return await self._next_broadcast.one(**key, cursor=subscription.cursor_message_id)

    async def _deliver(
        self,
        event: HistoryEvent,
        message: Pending,
        mode: ChannelMode,
        framework: str,
        *,
        has_cursor: bool = False,
    ) -> HistoryEvent:
        """Record a message as received, count it as such, and end the wait for it: together, or not at all."""
        assert message.id is not None, "a stored message has an id"
        instance_id = event.instance_id
        recorded = await self._record_new(event, stored=True)
        await self._forget_wait.later(instance_id=instance_id, activity_id=event.activity_id)
        if framework in (EDDA, ROMANCY_GO):
            await self._forget_foreign_wait.later(instance_id=instance_id, channel=message.channel)
        if not isinstance(recorded, int):
            return recorded  # it stands there already, and so does what it took
        if mode is ChannelMode.COMPETING:
            await self._unclaim.later(message_name=message.message_id)
            await self._delete_message.later(message_id=message.id)
        else:
            await self._advance(instance_id, message.channel, message.id, has_cursor=has_cursor)
            if message.foreign:
                await self._add_receipt.run(instance_id=instance_id, message_id=message.id)
        return replace(event, id=recorded)

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
        return ChannelDeliveryResult(instance_id, workflow_name, delivered.activity_id)

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
        return ChannelDeliveryResult(instance_id, found[0], delivered.activity_id)

    async def _deliver_to_waiter(
        self, instance_id: str, channel: str, framework: str, now: datetime | None = None
    ) -> HistoryEvent | None:
        """Deliver the oldest pending message to the step that waits for it; what is recorded of it, or None."""
        awaiting = await self._awaiting.one(instance_id=instance_id, channel=channel)
        if awaiting is None or awaiting.activity_id is None:
            return None
        if awaiting.mode is ChannelMode.COMPETING:
            await self._hold_channel(channel)
        message = await self._next_message(awaiting)
        if message is None:
            return None
        shown = message if awaiting.ours else readable(message, framework)
        event = received_event(instance_id, awaiting.activity_id, shown, framework)
        return await self._deliver(
            replace(event, created_at=now), message, awaiting.mode, framework, has_cursor=awaiting.has_cursor
        )

    @operation(reads=True)
    async def get_channel_subscribers_waiting(
        self, channel_name: str, *, limit: int = 100
    ) -> list[ChannelSubscription]:
        return await self._waiting_subscribers.all(channel=check_key("channel", channel_name), limit=page_size(limit))

    # The polls.

    async def find_deliverable_subscriptions(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ChannelSubscription]:
        wanted, ours = page_size(limit), self._ours(workflow_names, owner_service)
        news = await self._anything_new_to_deliver()
        if not (news.unsettled or news.foreign):
            return []
        found = await self._find_deliverable(wanted, news.mark, ours)
        if news.unsettled:
            await self._settle_channels()
        if news.foreign and not found:
            mark = await self._next_foreign_mark(news.mark)
            if mark > news.mark:
                await self._set_foreign_mark(mark)
        return found

    @operation(reads=True)
    async def _anything_new_to_deliver(self) -> News:
        news = await self._anything_new.one()
        assert news is not None, "a SELECT without FROM has a row"
        return news

    @operation(reads=True)
    async def _find_deliverable(self, limit: int, mark: int, ours: dict[str, Any]) -> list[ChannelSubscription]:
        return await self._deliverable.all(limit=limit, mark=mark, **ours)

    @operation
    async def _settle_channels(self) -> None:
        """Take note of the channels in which nobody waits for anything."""
        unsettled = [channel for (channel,) in await self._unsettled.all(limit=_SETTLED_AT_ONCE)]
        if unsettled:
            await self._settle.run(channels=unsettled)

    @operation(reads=True)
    async def _next_foreign_mark(self, mark: int) -> int:
        """How far the mark can move: over what is old, up to what somebody waits for."""
        found = await self._foreign_ids.one(mark=mark, seconds=_FOREIGN_GRACE_SEC)
        newest, old = found if found is not None else (None, None)
        # In steps, so that pollers do not all write the mark with every message; to the end when it is quiet.
        if old is None or (old < mark + _MARK_STEP and old != newest):
            return mark
        awaited = await self._first_awaited.value(mark=mark, old=old)
        return int(old if awaited is None else awaited - 1)

    @operation(idempotent=True)
    async def _set_foreign_mark(self, mark: int) -> None:
        key = {"name": _FOREIGN_MARK, "value": mark}
        if not await self._move_mark.run(**key):
            await self._add_mark.run(**key)

    @operation(reads=True)
    async def find_expired_channel_subscriptions(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ChannelSubscription]:
        return await self._expired_waits.all(limit=page_size(limit), **self._ours(workflow_names, owner_service))

    @operation
    async def expire_channel_receive(self, subscription: ChannelSubscription) -> bool:
        check_key("instance_id", subscription.instance_id)
        check_key("channel", subscription.channel)
        if check_optional_key("activity_id", subscription.activity_id) is None:
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
        if withdrawn:
            await self._wake_unless_waiting(instance_id)

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
