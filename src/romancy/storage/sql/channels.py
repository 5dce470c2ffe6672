"""Channels: subscribing, publishing, and reading what is there. How messages reach waiting instances: `delivery.py`.

Ids of a channel become visible in order: a publisher locks the channel's row until its commit. Locks are taken in one
order everywhere: instance rows first, then channels by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import msgspec

from ..errors import ChannelModeConflictError, InstanceNotFoundError
from ..models import ChannelMessage, ChannelMode, ChannelSubscription, HistoryEvent, Lock
from ..turn import Turn
from . import touches
from .checks import age_sec, check_batch, check_binary, check_json, check_key, check_optional_json, page_size, row_id
from .ending import Ending
from .fragments import left_to, received_by
from .operation import Hint, operation
from .statement import sql

_LONG_AGO = datetime(1000, 1, 1, tzinfo=UTC)
_LOOKED_AT_PER_DELETED = 10
MESSAGE_TOPIC = "workflow_channel_message"
_RECEIPTS_MARK = "receipts"


# Both look where the next message must be: neither reads through what was received long ago, nor sorts what waits.


def pending_broadcast(columns: str, limit: str = "{limit_of_page:limit}") -> str:
    """What a subscriber of a broadcast has not received, in order."""
    return f"""
        SELECT * FROM (
            SELECT {columns} FROM channel_messages m
             WHERE m.origin IS NULL AND m.id <= :cursor AND m.id > :cursor - 10000 AND m.channel = :channel
               AND NOT {received_by(":instance_id")}
               AND EXISTS (SELECT 1 FROM workflow_instances i WHERE i.instance_id = :instance_id AND {{keeps_receipts}})
             ORDER BY m.id LIMIT {limit}) late
        UNION ALL
        SELECT * FROM (
            SELECT {columns} FROM channel_messages m {{through_index:romancy_messages_queue}}
             WHERE {{key_of_page:m.channel}} AND m.id > :cursor
             ORDER BY {{order_of_page:m.channel, m.id}} LIMIT {limit}) unread
         ORDER BY id LIMIT {limit}"""


def pending_broadcast_by_id(columns: str, limit: str = "{limit_of_page:limit}") -> str:
    """The same for MySQL and MariaDB, which keep what a UNION finds: with payloads, in a table that is made on disk."""
    return f"""
        SELECT {columns}
          FROM ({pending_broadcast("m.id", limit)}) pending
          STRAIGHT_JOIN channel_messages m {{through_index:PRIMARY}} ON m.id = pending.id
         ORDER BY pending.id"""


def pending_competing(columns: str, limit: str = "{limit_of_page:limit}") -> str:
    """What nobody else has claimed, in order."""
    return f"""
        SELECT {columns} FROM channel_messages m {{through_index:romancy_messages_queue}}
         WHERE {{key_of_page:m.channel}} AND {left_to(":instance_id")}
         ORDER BY {{order_of_page:m.channel, m.id}} LIMIT {limit}"""


class Channels(Ending):
    """Implements the part of `ChannelManager` that wakes nobody."""

    # Update first: a failed insert leaves a shared lock behind that two rivals then both try to upgrade (InnoDB 1213).
    _unsettle = sql("""
        UPDATE romancy_channels SET unsettled_since = COALESCE(unsettled_since, {now}) WHERE channel = :channel""")

    _add_channel = sql("""
        INSERT INTO romancy_channels (channel, unsettled_since) VALUES (:channel, :unsettled_at)
        {on_conflict_do_nothing:channel}""")

    _lock_channel = sql("SELECT channel FROM romancy_channels WHERE channel = :channel {for_update}")

    _share_channel = sql("SELECT channel FROM romancy_channels WHERE channel = :channel {for_share}")

    _insert_message = sql("""
        INSERT INTO channel_messages (channel, message_id, data_type, data, data_binary, metadata, published_at, origin)
        VALUES (:channel, :message_id, :data_type, :data, :data_binary, :metadata, {publishing_now}, :framework)
        {returning_id}""")

    _subscription = sql(
        """
        SELECT s.instance_id, s.channel, s.mode, s.id, {cursor},
               COALESCE(s.activity_id, w.activity_id), COALESCE(s.timeout_at, w.timeout_at), s.subscribed_at
          FROM channel_subscriptions s {with_cursor}
          LEFT JOIN romancy_channel_waits w ON w.instance_id = s.instance_id AND w.channel = s.channel
         WHERE s.instance_id = :instance_id AND s.channel = :channel
         ORDER BY w.id LIMIT 1""",
        row=ChannelSubscription,
    )

    _mode = sql("""
        SELECT s.mode FROM channel_subscriptions s JOIN workflow_instances i ON i.instance_id = s.instance_id
         WHERE s.channel = :channel AND i.status NOT IN {finished} ORDER BY s.id LIMIT 1""")

    _subscribe = sql("""
        INSERT INTO channel_subscriptions (instance_id, channel, mode, cursor_message_id, subscribed_at)
        VALUES (:instance_id, :channel, :mode, :cursor, {now})
        {on_conflict_do_nothing:instance_id, channel}""")

    _newest_id = sql("""
        SELECT COALESCE((
               SELECT id FROM channel_messages {through_index:romancy_messages_queue}
                WHERE {key_of_page:channel} ORDER BY {order_of_page:channel, id, DESC} LIMIT 1), 0)""")

    # What another framework published may become visible out of order: note what was there, so that a lower id that
    # appears later can be told from one that was there all along.
    _note_received = sql("""
        INSERT INTO romancy_receipts (instance_id, message_id)
        SELECT {text:instance_id}, m.id FROM channel_messages m
         WHERE m.origin IS NULL AND m.id <= :cursor AND m.id > :cursor - 10000 AND m.channel = :channel
           AND NOT EXISTS (
               SELECT 1 FROM romancy_receipts r WHERE r.instance_id = :instance_id AND r.message_id = m.id)""")

    _unsubscribe = sql("DELETE FROM channel_subscriptions WHERE instance_id = :instance_id AND channel = :channel")

    _forget_cursor = sql("DELETE FROM channel_delivery_cursors WHERE instance_id = :instance_id AND channel = :channel")

    _advance_subscription = sql("""
        UPDATE channel_subscriptions SET cursor_message_id = :message_id
         WHERE instance_id = :instance_id AND channel = :channel
           AND COALESCE(cursor_message_id, 0) < :message_id""")

    _advance_cursor = sql("""
        UPDATE channel_delivery_cursors SET last_delivered_id = :message_id, updated_at = {now}
         WHERE instance_id = :instance_id AND channel = :channel AND last_delivered_id < :message_id""")

    _add_cursor = sql("""
        INSERT INTO channel_delivery_cursors (channel, instance_id, last_delivered_id, updated_at)
        VALUES (:channel, :instance_id, :message_id, {now})
        {on_conflict_do_nothing:channel, instance_id}""")

    _cursor_of_subscription = sql("""
        SELECT COALESCE(cursor_message_id, 0) FROM channel_subscriptions
         WHERE instance_id = :instance_id AND channel = :channel""")

    _cursor_of_delivery = sql("""
        SELECT last_delivered_id FROM channel_delivery_cursors
         WHERE instance_id = :instance_id AND channel = :channel""")

    _messages_after = sql(
        """
        SELECT {message_columns} FROM channel_messages m {through_index:romancy_messages_queue}
         WHERE {key_of_page:m.channel} AND m.id > {any_id:after_id}
         ORDER BY {order_of_page:m.channel, m.id} LIMIT {limit_of_page:limit}""",
        row=ChannelMessage,
    )

    _pending_broadcast = sql(
        pending_broadcast("{message_columns}"), mysql=pending_broadcast_by_id("{message_columns}"), row=ChannelMessage
    )

    _pending_competing = sql(pending_competing("{message_columns}"), row=ChannelMessage)

    _message_name = sql("SELECT channel, message_id FROM channel_messages WHERE id = {any_id:message_id}")

    # Keeps another framework's claim out, that is, its foreign key: this looks at the index of message_id (InnoDB lets
    # it pass if we come by id) and gives way to FOR UPDATE only (PostgreSQL).
    _lock_message = sql(
        "SELECT id FROM channel_messages WHERE message_id = :message_name {for_update}",
        postgres="SELECT id FROM channel_messages WHERE message_id = :message_name FOR UPDATE",
    )

    _claim_owner = sql("""
        SELECT k.instance_id, i.status FROM channel_message_claims k
          LEFT JOIN workflow_instances i ON i.instance_id = k.instance_id AND i.status NOT IN {finished}
         WHERE k.message_id = :message_name""")

    _claim = sql("""
        INSERT INTO channel_message_claims (message_id, instance_id, claimed_at)
        VALUES (:message_name, :instance_id, {now})
        {on_conflict_do_nothing:message_id}""")

    _unclaim = sql("DELETE FROM channel_message_claims WHERE message_id = :message_name")

    _delete_message = sql("DELETE FROM channel_messages WHERE id = {any_id:message_id}")

    # Old messages and channels are gone through a piece at a time: what has to stay is not read again and again.
    _old_messages = sql("""
        SELECT m.id, m.published_at FROM channel_messages m
         WHERE m.published_at < {seconds_ago:seconds} AND m.published_at >= :reached_at
           AND (m.published_at > :reached_at OR m.id > :reached_id)
         ORDER BY m.published_at, m.id LIMIT :limit""")

    _received_by_all = sql("""
        SELECT m.id FROM channel_messages m
         WHERE {in:m.id, message_ids} AND NOT EXISTS (
               SELECT 1 FROM channel_subscriptions s {with_cursor}
                 JOIN workflow_instances i ON i.instance_id = s.instance_id
                WHERE s.channel = m.channel AND i.status NOT IN {finished}
                  AND (s.mode = 'competing' OR m.id > {cursor} OR {late}))""")

    _delete_messages = sql("DELETE FROM channel_messages WHERE {in:id, message_ids}")

    _some_channels = sql("SELECT channel FROM romancy_channels WHERE channel > :reached ORDER BY channel LIMIT :limit")

    _idle_channels = sql("""
        SELECT c.channel FROM romancy_channels c
         WHERE {in:c.channel, channels} AND c.unsettled_since IS NULL
           AND NOT EXISTS (SELECT 1 FROM channel_messages m WHERE m.channel = c.channel)
           AND NOT EXISTS (SELECT 1 FROM channel_subscriptions s WHERE s.channel = c.channel)
         {for_update_skip_locked}""")

    _delete_channels = sql("DELETE FROM romancy_channels WHERE {in:channel, channels} AND unsettled_since IS NULL")

    _receipts_after = sql("""
        SELECT message_id FROM romancy_receipts WHERE message_id > :after_id ORDER BY message_id LIMIT :limit""")

    _still_there = sql("SELECT id FROM channel_messages WHERE {in:id, message_ids}")

    _delete_receipts = sql("DELETE FROM romancy_receipts WHERE {in:message_id, message_ids}")

    _mark = sql("SELECT value FROM romancy_marks WHERE name = :name")

    _set_mark = sql("UPDATE romancy_marks SET value = :value WHERE name = :name")

    _add_mark = sql("""
        INSERT INTO romancy_marks (name, value) VALUES (:name, :value) {on_conflict_do_nothing:name}""")

    # Publishing.

    @operation(touches=touches.of_publication)
    async def publish_to_channel(
        self,
        channel_name: str,
        data: str | bytes,
        metadata: str | None = None,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> int | HistoryEvent:
        message = self._checked_message(channel_name, data, metadata)
        recorded = await self._begin_step(lock, record)
        return recorded if recorded is not None else await self._publish(message)

    @operation
    async def publish_many(self, messages: Sequence[ChannelMessage], *, lock: Lock | None = None) -> list[int]:
        check_batch("messages", len(messages))
        checked = [
            self._checked_message(message.channel, payload_of(message), message.metadata) for message in messages
        ]
        await self._begin_step(lock, None)
        ids: dict[int, int] = {}
        # Channels in order of their names, so that two publishers never wait for each other.
        positions = sorted(range(len(checked)), key=lambda position: checked[position]["channel"].encode())
        for position in positions:
            ids[position] = await self._publish(checked[position])
        return [ids[position] for position in range(len(checked))]

    def _checked_message(self, channel: str, data: str | bytes, metadata: str | None) -> dict[str, Any]:
        self._check_together(data, metadata)
        text = check_json("data", data, self.payload_limit) if isinstance(data, str) else None
        return {
            "channel": check_key("channel", channel),
            "data_type": "binary" if text is None else "json",
            "data": text,
            "data_binary": None if isinstance(data, str) else check_binary("data", data, self.payload_limit),
            "metadata": check_optional_json("metadata", metadata, self.payload_limit),
        }

    async def _publish(self, message: dict[str, Any]) -> int:
        """Store a message behind all visible ones of its channel."""
        channel = message["channel"]
        while not await self._unsettle.run(channel=channel):
            if await self._add_channel.run(channel=channel, unsettled_at=await self._now()):
                break
        name = str(uuid4())
        message_id = await self._insert_message.insert(**message, message_id=name, framework=self.framework)
        assert message_id is not None, "an insert of one row has an id"
        await message_hint(channel, name, message_id)
        return message_id

    async def _hold_channel(self, channel: str, *, share: bool = False) -> None:
        """Keep publishers of the channel out until commit; what they have committed is visible from here on."""
        statement = self._share_channel if share else self._lock_channel
        while await statement.one(channel=channel) is None:
            await self._add_channel.run(channel=channel, unsettled_at=None)

    # Subscribing.

    @operation
    async def subscribe_to_channel(
        self,
        instance_id: str,
        channel_name: str,
        mode: ChannelMode,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> HistoryEvent | None:
        check_key("instance_id", instance_id)
        check_key("channel", channel_name)
        mode = ChannelMode(mode)
        channel = direct_channel(channel_name, instance_id) if mode is ChannelMode.DIRECT else channel_name
        recorded = await self._begin_step(lock, record, instance_id)
        if recorded is not None:
            return recorded
        await self._hold_to_tie(instance_id, None, "subscribed")
        await self._hold_channel(channel)
        stored = ChannelMode.BROADCAST if mode is ChannelMode.DIRECT else mode
        present = await self._mode.value(channel=channel)
        if present is not None and present != stored:
            raise ChannelModeConflictError(channel, present, mode)
        await self._start_subscription(instance_id, channel, stored, from_start=mode is ChannelMode.DIRECT)
        return None

    async def _start_subscription(self, instance_id: str, channel: str, mode: ChannelMode, *, from_start: bool) -> None:
        cursor = None
        if mode is ChannelMode.BROADCAST:
            cursor = 0 if from_start else await self._newest_id.value(channel=channel)
        if not await self._subscribe.run(instance_id=instance_id, channel=channel, mode=mode, cursor=cursor):
            return  # subscribed before: it goes on where it is
        await self._forget_cursor.run(instance_id=instance_id, channel=channel)
        if cursor:
            await self._note_received.run(instance_id=instance_id, channel=channel, cursor=cursor)

    @operation(reads=True, by_key=True)
    async def get_channel_subscription(self, instance_id: str, channel_name: str) -> ChannelSubscription | None:
        check_key("channel", channel_name)
        return await self._subscription.one(instance_id=check_key("instance_id", instance_id), channel=channel_name)

    @operation(reads=True, by_key=True)
    async def get_channel_mode(self, channel_name: str) -> ChannelMode | None:
        mode = await self._mode.value(channel=check_key("channel", channel_name))
        return None if mode is None else ChannelMode(mode)

    # Reading.

    @operation(reads=True)
    async def get_pending_channel_messages(
        self, channel_name: str, after_id: int = 0, limit: int = 100
    ) -> list[ChannelMessage]:
        check_key("channel", channel_name)
        return await self._messages_after.all(channel=channel_name, after_id=row_id(after_id), limit=page_size(limit))

    @operation(reads=True)
    async def get_pending_channel_messages_for_instance(
        self, instance_id: str, channel_name: str, *, limit: int = 100
    ) -> list[ChannelMessage]:
        check_key("channel", channel_name)
        wanted = page_size(limit)
        subscription = await self._subscription.one(
            instance_id=check_key("instance_id", instance_id), channel=channel_name
        )
        return [] if subscription is None else await self._pending(subscription, wanted)

    async def _pending(self, subscription: ChannelSubscription, limit: int) -> list[ChannelMessage]:
        """What the subscriber has not received yet, in order."""
        key = {"instance_id": subscription.instance_id, "channel": subscription.channel, "limit": limit}
        if subscription.mode is ChannelMode.COMPETING:
            return await self._pending_competing.all(**key)
        return await self._pending_broadcast.all(**key, cursor=subscription.cursor_message_id)

    @operation
    async def claim_channel_message(self, message_id: int, instance_id: str) -> bool:
        await self._hold_to_tie(check_key("instance_id", instance_id), None, "the owner of a claim")
        message_id = row_id(message_id)
        found = await self._message_name.one(message_id=message_id)
        if found is None:
            return False
        channel, name = found
        await self._hold_channel(channel)
        if await self._lock_message.one(message_name=name) is None:
            return False
        owner = await self._claim_owner.one(message_name=name)
        if owner is not None:
            if owner[1] is not None:
                return False
            await self._unclaim.run(message_name=name)
        return bool(await self._claim.run(message_name=name, instance_id=instance_id))

    @operation(idempotent=True)
    async def delete_channel_message(self, message_id: int) -> None:
        await self._delete_message.run(message_id=row_id(message_id))

    # Cursors: in two places, since Edda reads one and Romancy the other; the larger counts.

    @operation
    async def update_delivery_cursor(self, instance_id: str, channel_name: str, last_message_id: int) -> None:
        check_key("channel", channel_name)
        if await self._hold.one(instance_id=check_key("instance_id", instance_id)) is None:
            raise InstanceNotFoundError(instance_id)
        await self._tie.run(instance_id=instance_id)
        await self._hold_channel(channel_name, share=True)
        target = min(last_message_id, await self._newest_id.value(channel=channel_name))
        if target > await self._cursor(instance_id, channel_name):
            await self._advance(instance_id, channel_name, target)
            await self._note_received.run(instance_id=instance_id, channel=channel_name, cursor=target)

    async def _cursor(self, instance_id: str, channel: str) -> int:
        key = {"instance_id": instance_id, "channel": channel}
        cursors = await self._cursor_of_subscription.value(**key), await self._cursor_of_delivery.value(**key)
        return max(int(cursor or 0) for cursor in cursors)

    async def _advance(self, instance_id: str, channel: str, message_id: int, *, has_cursor: bool = False) -> None:
        """Move both cursors; whoever holds the instance may know that there is one besides the subscription's."""
        key = {"instance_id": instance_id, "channel": channel, "message_id": message_id}
        await self._advance_subscription.later(**key)
        if has_cursor:
            await self._advance_cursor.later(**key)
        elif not await self._advance_cursor.run(**key):
            await self._add_cursor.run(**key)

    @operation(reads=True, by_key=True)
    async def get_delivery_cursor(self, instance_id: str, channel_name: str) -> int:
        check_key("channel", channel_name)
        return await self._cursor(check_key("instance_id", instance_id), channel_name)

    # Retention.

    _message_reached: tuple[datetime, int] = (_LONG_AGO, 0)
    _channel_reached: str = ""
    """How far retention has looked; when it has seen all, it begins again."""

    @operation
    async def cleanup_old_channel_messages(
        self, older_than: timedelta, *, limit: int = 1000, turn: Turn | None = None
    ) -> int:
        batch = page_size(limit, 1000)
        seconds = age_sec(older_than)
        with turn or Turn():
            await self._forget_idle_channels(batch)
            deleted = await self._delete_received(seconds, batch)
            await self._prune_receipts(batch)
            return deleted

    async def _delete_received(self, seconds: float, batch: int) -> int:
        """Delete up to `batch` of the next old messages, where everybody has received them."""
        moment, message_id = self._message_reached
        looked_at = batch * _LOOKED_AT_PER_DELETED
        old = await self._old_messages.all(seconds=seconds, reached_at=moment, reached_id=message_id, limit=looked_at)
        ids = [row[0] for row in old]
        may_go = {row[0] for row in await self._received_by_all.all(message_ids=ids)} if ids else set()
        received = [message_id for message_id in ids if message_id in may_go][:batch]
        if len(received) < batch:  # all that may go of this piece is going
            more = len(old) == looked_at
            self._message_reached = (self._decoded_time(old[-1][1]), ids[-1]) if more else (_LONG_AGO, 0)
        return await self._delete_messages.run(message_ids=received) if received else 0

    async def _forget_idle_channels(self, limit: int) -> None:
        some = [row[0] for row in await self._some_channels.all(reached=self._channel_reached, limit=limit)]
        self._channel_reached = some[-1] if len(some) == limit else ""
        idle = [row[0] for row in await self._idle_channels.all(channels=some)] if some else []
        if idle:
            await self._delete_channels.run(channels=idle)

    def _decoded_time(self, stored: Any) -> datetime:
        decode = self.runner.driver.decode_time
        moment: datetime = stored if decode is None else decode(stored)
        return moment

    async def _prune_receipts(self, limit: int) -> None:
        """Forget receipts of messages that are gone, whoever deleted them: each call looks at the next few."""
        mark = await self._mark.value(name=_RECEIPTS_MARK)
        looked_at = [message_id for (message_id,) in await self._receipts_after.all(after_id=mark or 0, limit=limit)]
        if looked_at:
            there = {message_id for (message_id,) in await self._still_there.all(message_ids=sorted(set(looked_at)))}
            gone = sorted(set(looked_at) - there)
            if gone:
                await self._delete_receipts.run(message_ids=gone)
        reached = {"name": _RECEIPTS_MARK, "value": looked_at[-1] if len(looked_at) == limit else 0}
        if reached["value"] != (mark or 0) and not await self._set_mark.run(**reached):
            await self._add_mark.run(**reached)


def direct_channel(channel: str, instance_id: str) -> str:
    """The instance's own channel of this name."""
    return check_key("direct channel", f"{channel}:{instance_id}")


def payload_of(message: ChannelMessage) -> str | bytes:
    """What a message carries, JSON text or bytes."""
    if message.data_binary is not None:
        return message.data_binary
    return "null" if message.data is None else message.data


def message_hint(channel: str, name: str, message_id: int) -> Hint:
    """Tell listeners of every framework that a message is visible."""
    payload = {
        "ch": channel,
        "msg_id": name,
        "channel": channel,
        "channel_name": channel,
        "message_id": message_id,
    }
    return Hint(MESSAGE_TOPIC, msgspec.json.encode(payload).decode())
