"""Compare two states of a database, or two answers, that may differ in ids, names of messages and times.

Ids and names are compared by what they stand for: the first time that two of them meet they are taken as each other's
counterpart, and must stay so. Times are compared by how far they are from the start of their side.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from romancy.storage import Appended, SQLStorage, StorageError

FOREVER = datetime(9999, 12, 31, tzinfo=UTC)

TABLES = {
    "definitions": "SELECT workflow_name, source_hash FROM workflow_definitions ORDER BY workflow_name, source_hash",
    "instances": """
        SELECT instance_id, workflow_name, source_hash, owner_service, framework, status, current_activity_id,
               continued_from, started_at, input_data, output_data, locked_by, locked_at, lock_timeout_seconds,
               lock_expires_at, lock_token, suspended_from, parked_until, parked_reason, runnable_since, finished_at
          FROM workflow_instances ORDER BY instance_id""",
    "history": """
        SELECT id, instance_id, activity_id, event_type, data_type, event_data, event_data_binary, created_at
          FROM workflow_history ORDER BY id""",
    "archive": """
        SELECT id, original_id, instance_id, activity_id, event_type, data_type, event_data, event_data_binary,
               created_at, archived_at
          FROM workflow_history_archive ORDER BY id""",
    "compensations": """
        SELECT id, instance_id, activity_id, activity_name, args, created_at FROM workflow_compensations ORDER BY id""",
    "timers": """
        SELECT id, instance_id, timer_id, expires_at, activity_id, created_at
          FROM workflow_timer_subscriptions ORDER BY id""",
    "channel_waits": "SELECT instance_id, channel, activity_id, timeout_at FROM romancy_channel_waits ORDER BY id",
    "instance_waits": "SELECT instance_id, activity_id, awaited_id FROM romancy_instance_waits ORDER BY id",
    "messages": """
        SELECT id, channel, message_id, data_type, data, data_binary, metadata, published_at, origin
          FROM channel_messages ORDER BY id""",
    "claims": """
        SELECT m.id AS message, k.instance_id
          FROM channel_message_claims k JOIN channel_messages m ON m.message_id = k.message_id ORDER BY m.id""",
    "subscriptions": """
        SELECT id, instance_id, channel, mode, activity_id, timeout_at, subscribed_at
          FROM channel_subscriptions ORDER BY id""",
    # It may stand in two places; the larger counts.
    "cursors": """
        SELECT instance_id, channel, MAX(reached) AS message FROM (
               SELECT instance_id, channel, cursor_message_id AS reached FROM channel_subscriptions
               UNION ALL SELECT instance_id, channel, last_delivered_id FROM channel_delivery_cursors) c
         WHERE reached > 0 GROUP BY instance_id, channel ORDER BY instance_id, channel""",
    "groups": "SELECT instance_id, group_name FROM workflow_group_memberships ORDER BY id",
    "outbox": """
        SELECT event_id, event_type, event_source, data_type, event_data, event_data_binary, content_type, created_at,
               published_at, status, retry_count, last_error,
               CASE WHEN status <> 'published' THEN lease_owner END AS lease_owner, lease_until, next_attempt_at
          FROM outbox_events ORDER BY event_id""",
    "states": "SELECT instance_id, state FROM romancy_states ORDER BY instance_id",
    "setbacks": "SELECT instance_id, takeovers, refused_by FROM romancy_setbacks ORDER BY instance_id",
    "seen_events": "SELECT event_key, seen_at FROM romancy_seen_events ORDER BY event_key",
    "system_locks": "SELECT lock_name, locked_by, locked_at, lock_expires_at FROM system_locks ORDER BY lock_name",
}

IDS = {
    "HistoryEvent": "history",
    "Appended": "history",
    "ArchivedHistoryEvent": "archive",
    "CompensationEntry": "compensations",
    "TimerSubscription": "timers",
    "ChannelMessage": "messages",
    "ChannelSubscription": "subscriptions",
}
"""Of what a model's `id` is the id; in a table, of its rows."""
OTHER_IDS = {"original_id": "history", "after_id": "history", "cursor_message_id": "messages", "message": "messages"}
_VARYING = re.compile(
    r"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})|(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00)"
)


class Difference(Exception):
    """The database answered or holds something else than the oracle."""


class Comparison:
    """What stands for what. Times are compared in whole units since the start of either side."""

    def __init__(self, expected_start: datetime, actual_start: datetime, unit: timedelta) -> None:
        self.expected_start = expected_start
        self.actual_start = actual_start
        self.unit = unit
        self.known: dict[tuple[str, str, Any], Any] = {}

    def check(self, expected: Any, actual: Any, kind: str = "", where: str = "answer") -> None:
        """Raise Difference unless the two are the same, but for what may differ."""
        if isinstance(expected, datetime) and isinstance(actual, datetime):
            same = self._units(expected, self.expected_start) == self._units(actual, self.actual_start)
        elif isinstance(expected, StorageError) and type(expected) is type(actual):
            self.check(vars(expected), vars(actual), where=where)
            same = True
        elif isinstance(expected, msgspec.Struct | Appended) and type(expected) is type(actual):
            names = expected.__struct_fields__ if isinstance(expected, msgspec.Struct) else expected._fields
            left, right = ({name: getattr(side, name) for name in names} for side in (expected, actual))
            self.check(left, right, IDS.get(type(expected).__name__, ""), where)
            same = True
        elif isinstance(expected, dict) and isinstance(actual, dict):
            same = expected.keys() >= actual.keys()
            for name in actual if same else ():
                if name != "updated_at":
                    self.check(expected[name], actual[name], self._kind(name, kind), f"{where}.{name}")
        elif isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
            same = len(expected) == len(actual)
            for number, pair in enumerate(zip(expected, actual, strict=True) if same else ()):
                self.check(*pair, kind, f"{where}[{number}]")
        elif kind and expected and actual and not isinstance(expected, bool):
            same = self._counterparts(kind, expected, actual)
        elif isinstance(expected, str) and isinstance(actual, str):
            same = self._same_text(str(expected), str(actual))
        else:
            same = bool(expected == actual)
        if not same:
            raise Difference(f"{where}: expected {expected!r}, got {actual!r}")

    @staticmethod
    def _kind(name: str, kind: str) -> str:
        if name in TABLES:
            return name
        return kind if name == "id" else OTHER_IDS.get(name, "")

    def _counterparts(self, kind: str, expected: Any, actual: Any) -> bool:
        if ("expected", kind, expected) not in self.known and ("actual", kind, actual) not in self.known:
            self.known["expected", kind, expected] = actual
            self.known["actual", kind, actual] = expected
        return bool(self.known.get(("expected", kind, expected)) == actual)

    def _same_text(self, expected: str, actual: str) -> bool:
        """The same text, but for names of messages and times in it."""
        pieces, other = _VARYING.split(expected), _VARYING.split(actual)
        if len(pieces) != len(other) or pieces[::3] != other[::3]:
            return False
        for name, other_name in zip(pieces[1::3], other[1::3], strict=True):
            if (name or other_name) and not self._counterparts("message name", name, other_name):
                return False
        for moment, other_moment in zip(pieces[2::3], other[2::3], strict=True):
            if moment and other_moment:
                self.check(datetime.fromisoformat(moment), datetime.fromisoformat(other_moment))
        return True

    def _units(self, moment: datetime, start: datetime) -> int:
        # A millisecond more: what was computed from the start should not fall short of it where times are rounded.
        return -1 if moment == FOREVER else (moment - start + timedelta(milliseconds=1)) // self.unit


async def read_tables(storage: SQLStorage, queries: Mapping[str, str] = TABLES) -> dict[str, list[dict[str, Any]]]:
    """The rows of each query, by name of column; times as aware datetimes."""
    decode: Any = storage.runner.driver.decode_time
    found: dict[str, list[dict[str, Any]]] = {}
    for table, query in queries.items():
        rows: list[Any] = await storage.conn().fetch_all(query)
        found[table] = [
            {
                name: decode(value) if value is not None and name.endswith(("_at", "_until", "_since")) else value
                for name, value in zip(row.columns, row, strict=True)
            }
            for row in rows
        ]
    return found
