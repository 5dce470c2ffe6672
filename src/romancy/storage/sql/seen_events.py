"""Events that may come in more than once, published once."""

from __future__ import annotations

from datetime import timedelta

from ..turn import Turn
from .channels import Channels
from .checks import age_sec, check_key, page_size
from .operation import operation
from .statement import sql


class SeenEvents(Channels):
    """Implements `publish_once` of `ChannelManager`."""

    _note_event = sql("""
        INSERT INTO romancy_seen_events (event_key, seen_at) VALUES (:event_key, {now})
        {on_conflict_do_nothing:event_key}""")

    _seen_long_ago = sql("""
        SELECT event_key FROM romancy_seen_events
         WHERE seen_at < {seconds_ago:seconds} ORDER BY seen_at LIMIT :limit""")

    _forget_events = sql("DELETE FROM romancy_seen_events WHERE {in:event_key, event_keys}")

    @operation
    async def publish_once(
        self, event_key: str, channel_name: str, data: str | bytes, metadata: str | None = None
    ) -> int | None:
        check_key("event_key", event_key)
        message = self._checked_message(channel_name, data, metadata)
        # A rival with the same key waits here until we have committed, or takes our place if we have not.
        if not await self._note_event.run(event_key=event_key):
            return None
        return await self._publish(message)

    @operation
    async def cleanup_seen_events(self, older_than: timedelta, *, limit: int = 1000, turn: Turn | None = None) -> int:
        with turn or Turn():
            old = await self._seen_long_ago.all(seconds=age_sec(older_than), limit=page_size(limit, 1000))
            return await self._forget_events.run(event_keys=[key for (key,) in old]) if old else 0
