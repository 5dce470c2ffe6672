"""Messages: published, subscribed to, delivered."""

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from msgspec.structs import replace

from romancy.storage import (
    ChannelDeliveryResult,
    ChannelMessage,
    ChannelMode,
    ChannelModeConflictError,
    ChannelSubscription,
    ChannelWait,
    HistoryEvent,
    Lock,
    NotSubscribedError,
)

from .memory import EPOCH, WAITING, Memory, Message, iso


class Channels(Memory):
    """Implements `ChannelManager`."""

    def publish_to_channel(
        self,
        channel_name: str,
        data: str | bytes,
        metadata: str | None = None,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> int | HistoryEvent:
        recorded = self._begin_step(lock, record)
        return recorded if recorded is not None else self._publish(channel_name, data, metadata, self.framework)

    def publish_many(self, messages: Sequence[ChannelMessage], *, lock: Lock | None = None) -> list[int]:
        self._begin_step(lock, None)
        ids = {
            position: self._publish(
                messages[position].channel, _payload(messages[position]), messages[position].metadata, self.framework
            )
            for position in sorted(range(len(messages)), key=lambda position: (messages[position].channel, position))
        }
        return [ids[position] for position in range(len(messages))]

    def publish_once(
        self, event_key: str, channel_name: str, data: str | bytes, metadata: str | None = None
    ) -> int | None:
        if event_key in self.seen_events:
            return None
        self.seen_events[event_key] = self.now
        return self._publish(channel_name, data, metadata, self.framework)

    def cleanup_seen_events(self, older_than: timedelta, *, limit: int = 1000) -> int:
        old = [key for key, seen_at in self.seen_events.items() if seen_at < self.now - older_than]
        for key in old[:limit]:
            del self.seen_events[key]
        return len(old[:limit])

    def publish_foreign(self, channel_name: str, data: str, reserved_id: int | None = None) -> int:
        """A framework that knows nothing of us publishes; with an id that it drew earlier, it committed late."""
        return self._publish(channel_name, data, None, None, reserved_id)

    def reserve_foreign(self) -> int:
        """Another framework draws an id for a message that it will commit later."""
        return self._id()

    def _publish(
        self, channel: str, data: str | bytes, metadata: str | None, origin: str | None, given_id: int | None = None
    ) -> int:
        message_id = self._id() if given_id is None else given_id
        self.messages[message_id] = Message(
            channel,
            data=data if isinstance(data, str) else None,
            data_binary=data if isinstance(data, bytes) else None,
            metadata=metadata,
            id=message_id,
            message_id=str(UUID(int=message_id)),
            published_at=self.now,
            origin=origin,
        )
        self.messages = dict(sorted(self.messages.items()))
        return message_id

    def subscribe_to_channel(
        self,
        instance_id: str,
        channel_name: str,
        mode: ChannelMode,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record, instance_id)
        if recorded is not None:
            return recorded
        self._hold_unfinished(instance_id, None, "subscribed")
        direct = mode == "direct"
        channel = f"{channel_name}:{instance_id}" if direct else channel_name
        stored = ChannelMode.BROADCAST if direct else mode
        present = self.get_channel_mode(channel)
        if present is not None and present != stored:
            raise ChannelModeConflictError(channel, present, mode)
        if (instance_id, channel) in self.subscriptions:
            return None
        self.subscriptions[instance_id, channel] = ChannelSubscription(
            instance_id, channel, stored, id=self._id(), subscribed_at=self.now
        )
        self.cursors.pop((instance_id, channel), None)
        if stored == "broadcast" and not direct:
            self._advance(instance_id, channel, self._newest(channel))
        return None

    def unsubscribe_from_channel(
        self,
        instance_id: str,
        channel_name: str,
        *,
        lock: Lock | None = None,
        record: HistoryEvent | None = None,
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record, instance_id)
        if recorded is not None:
            return recorded
        self.clear_channel_waiting_state(instance_id, channel_name)
        self.subscriptions.pop((instance_id, channel_name), None)
        self.cursors.pop((instance_id, channel_name), None)
        return None

    def get_channel_subscription(self, instance_id: str, channel_name: str) -> ChannelSubscription | None:
        waiting = self._waits_on(instance_id, channel_name)
        return self._subscription(instance_id, channel_name, waiting[0] if waiting else None)

    def get_channel_mode(self, channel_name: str) -> ChannelMode | None:
        modes = [subscription.mode for key, subscription in self.subscriptions.items() if key[1] == channel_name]
        return modes[0] if modes else None

    def get_pending_channel_messages(
        self, channel_name: str, after_id: int = 0, limit: int = 100
    ) -> list[ChannelMessage]:
        after = [m.shown for m in self.messages.values() if m.channel == channel_name and (m.id or 0) > after_id]
        return after[:limit]

    def get_pending_channel_messages_for_instance(
        self, instance_id: str, channel_name: str, *, limit: int = 100
    ) -> list[ChannelMessage]:
        return [message.shown for message in self.pending(instance_id, channel_name)[:limit]]

    def claim_channel_message(self, message_id: int, instance_id: str) -> bool:
        self._hold_unfinished(instance_id, None, "the owner of a claim")
        if message_id not in self.messages or message_id in self.claims:
            return False
        self.claims[message_id] = instance_id
        return True

    def delete_channel_message(self, message_id: int) -> None:
        self.messages.pop(message_id, None)
        self.claims.pop(message_id, None)

    def update_delivery_cursor(self, instance_id: str, channel_name: str, last_message_id: int) -> None:
        self._hold(instance_id)
        self._advance(instance_id, channel_name, min(last_message_id, self._newest(channel_name)))

    def get_delivery_cursor(self, instance_id: str, channel_name: str) -> int:
        return self.cursors.get((instance_id, channel_name), 0)

    def get_channel_subscribers_waiting(self, channel_name: str, *, limit: int = 100) -> list[ChannelSubscription]:
        found = [
            self._subscription(instance_id, channel_name, wait)
            for (instance_id, _), wait in self.channel_waits.items()
            if wait.channel == channel_name and self.instances[instance_id].status in WAITING
        ]
        return [subscription for subscription in found if subscription is not None][:limit]

    def clear_channel_waiting_state(self, instance_id: str, channel_name: str) -> None:
        withdrawn = [
            key for key, wait in self.channel_waits.items() if key[0] == instance_id and wait.channel == channel_name
        ]
        for key in withdrawn:
            del self.channel_waits[key]
        if withdrawn:
            self._wake_unless_waiting(instance_id)

    def deliver_channel_message(
        self, instance_id: str, message: ChannelMessage, *, lock: Lock | None = None
    ) -> ChannelDeliveryResult | None:
        if self._hold(instance_id, lock).status not in WAITING:
            return None
        return self._deliver_to_waiter(instance_id, message.channel, keep_lock=True)

    def deliver_channel_message_with_lock(
        self,
        instance_id: str,
        channel_name: str,
        message: ChannelMessage,
        worker_id: str,
        lock_timeout_sec: float,
    ) -> ChannelDeliveryResult | None:
        if not self._can_wake(instance_id, worker_id):
            return None
        return self._deliver_to_waiter(instance_id, channel_name, keep_lock=False)

    def find_deliverable_subscriptions(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ChannelSubscription]:
        found = [
            self._subscription(instance_id, wait.channel, wait)
            for (instance_id, _), wait in self.channel_waits.items()
            if self._polled(instance_id, workflow_names, owner_service) and self.pending(instance_id, wait.channel)
        ]
        return [subscription for subscription in found if subscription is not None][:limit]

    def find_expired_channel_subscriptions(
        self, limit: int = 100, *, workflow_names: Sequence[str] | None = None, owner_service: str | None = None
    ) -> list[ChannelSubscription]:
        due = [
            (wait.timeout_at, self._subscription(instance_id, wait.channel, wait))
            for (instance_id, _), wait in self.channel_waits.items()
            if self.is_past(wait.timeout_at) and self._polled(instance_id, workflow_names, owner_service)
        ]
        due.sort(key=lambda found: found[0] or EPOCH)
        return [subscription for _, subscription in due if subscription is not None][:limit]

    def expire_channel_receive(self, subscription: ChannelSubscription) -> bool:
        key = (subscription.instance_id, subscription.activity_id or "")
        wait = self.channel_waits.get(key)
        if wait is None or wait.channel != subscription.channel or not self.is_past(wait.timeout_at):
            return False
        if not self._can_wake(subscription.instance_id, ""):
            return False
        del self.channel_waits[key]
        self._record_timeout(subscription.instance_id, replace(wait, timeout_at=subscription.timeout_at))
        self._wake(subscription.instance_id)
        return True

    def cleanup_old_channel_messages(self, older_than: timedelta, *, limit: int = 1000) -> int:
        old = [
            message
            for message in self.messages.values()
            if (message.published_at or EPOCH) < self.now - older_than
            and not any(
                key[1] == message.channel and (subscription.mode == "competing" or message in self.pending(*key))
                for key, subscription in self.subscriptions.items()
            )
        ]
        old = sorted(old, key=lambda message: (message.published_at, message.id))[:limit]
        for message in old:
            self.delete_channel_message(message.id or 0)
        return len(old)

    def _newest(self, channel: str) -> int:
        return max((key for key, message in self.messages.items() if message.channel == channel), default=0)

    def _advance(self, instance_id: str, channel: str, message_id: int) -> None:
        """Count everything visible up to a message as received."""
        if message_id <= self.cursors.get((instance_id, channel), 0):
            return
        self.cursors[instance_id, channel] = message_id
        visible = [key for key, m in self.messages.items() if m.channel == channel and key <= message_id]
        self.received |= {(instance_id, key) for key in visible}

    def _subscription(self, instance_id: str, channel: str, wait: ChannelWait | None) -> ChannelSubscription | None:
        subscription = self.subscriptions.get((instance_id, channel))
        if subscription is None:
            return None
        return replace(
            subscription,
            cursor_message_id=self.cursors.get((instance_id, channel), 0),
            activity_id=wait and wait.activity_id,
            timeout_at=wait and wait.timeout_at,
        )

    def _waits_on(self, instance_id: str, channel: str) -> list[ChannelWait]:
        return [wait for key, wait in self.channel_waits.items() if key[0] == instance_id and wait.channel == channel]

    def pending(self, instance_id: str, channel: str) -> list[Message]:
        """What the subscriber has yet to receive, or could take."""
        subscription = self.subscriptions.get((instance_id, channel))
        messages = [message for message in self.messages.values() if message.channel == channel]
        if subscription is None:
            return []
        if subscription.mode == "competing":
            return [message for message in messages if self.claims.get(message.id or 0, instance_id) == instance_id]
        cursor = self.cursors.get((instance_id, channel), 0)
        return [
            message
            for message in messages
            if (message.id or 0) > cursor or (message.origin is None and (instance_id, message.id) not in self.received)
        ]

    def _receive_now(self, instance_id: str, channel: str, activity_id: str) -> HistoryEvent | None:
        """Deliver a pending message to a step, unless that step is recorded already; None without a message."""
        if (instance_id, channel) not in self.subscriptions:
            raise NotSubscribedError(instance_id, channel)
        recorded = self.history.get((instance_id, activity_id))
        if recorded is None and not self.pending(instance_id, channel):
            return None
        return self._receive(instance_id, channel, activity_id)

    def _receive(self, instance_id: str, channel: str, activity_id: str) -> HistoryEvent:
        """End the wait of a step with the oldest message, or with what is recorded for the step already."""
        self.channel_waits.pop((instance_id, activity_id), None)
        recorded = self.history.get((instance_id, activity_id))
        if recorded is not None:
            return recorded
        message = self.pending(instance_id, channel)[0]
        assert message.id is not None
        if self.subscriptions[instance_id, channel].mode == "competing":
            self.delete_channel_message(message.id)
        else:
            # Only this one: a smaller id may still appear.
            self.received.add((instance_id, message.id))
            self.cursors[instance_id, channel] = max(message.id, self.cursors.get((instance_id, channel), 0))
        data = (
            f'{{"id": "{message.message_id}", "channel": "{channel}", "data": {message.data or "null"},'
            f' "metadata": {message.metadata or "{}"}, "published_at": "{iso(message.published_at)}"}}'
        )
        return self._record(instance_id, activity_id, "ChannelMessageReceived", data, message.data_binary)

    def _deliver_to_waiter(self, instance_id: str, channel: str, *, keep_lock: bool) -> ChannelDeliveryResult | None:
        waits = self._waits_on(instance_id, channel)
        if not waits or not self.pending(instance_id, channel):
            return None
        self._receive(instance_id, channel, waits[0].activity_id)
        self._wake(instance_id, keep_lock=keep_lock)
        return ChannelDeliveryResult(instance_id, self.instances[instance_id].workflow_name, waits[0].activity_id)


def _payload(message: ChannelMessage) -> str | bytes:
    if message.data_binary is not None:
        return message.data_binary
    return "null" if message.data is None else message.data
