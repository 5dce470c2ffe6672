"""The storage contract as plain Python: one caller at a time, and a clock that is told.

Each method has the name, the arguments and the answer of the storage's. It may raise in the middle: whoever calls it
takes a `snapshot` before and goes back to it.
"""

from typing import Any

import msgspec

from .groups import Groups
from .memory import EPOCH, FINISHED, NEIGHBOUR, OURS, RUNNABLE, WAITING
from .work import Looking

__all__ = ["EPOCH", "FINISHED", "NEIGHBOUR", "OURS", "RUNNABLE", "WAITING", "Oracle", "tables"]


class Oracle(Looking, Groups):
    """What a storage should answer."""


def tables(oracle: Oracle) -> dict[str, list[dict[str, Any]]]:
    """What the tables should hold, by the names and columns of `comparison.TABLES`."""
    return {
        "definitions": [
            {"workflow_name": name, "source_hash": source_hash} for name, source_hash in sorted(oracle.definitions)
        ],
        "instances": [msgspec.structs.asdict(instance) for _, instance in sorted(oracle.instances.items())],
        "history": [
            {**msgspec.structs.asdict(event), "data_type": event.data_type} for event in oracle.history.values()
        ],
        "archive": [
            {**msgspec.structs.asdict(event), "data_type": event.data_type, "created_at": event.original_created_at}
            for event in oracle.archive
        ],
        "compensations": [msgspec.structs.asdict(entry) for entry in oracle.compensations],
        "timers": [msgspec.structs.asdict(timer) for timer in oracle.timers.values()],
        "channel_waits": [
            {**msgspec.structs.asdict(wait), "instance_id": key[0]} for key, wait in oracle.channel_waits.items()
        ],
        "instance_waits": [
            {"instance_id": key[0], "activity_id": key[1], "awaited_id": wait.instance_id}
            for key, wait in oracle.instance_waits.items()
        ],
        "messages": [
            {**msgspec.structs.asdict(message), "data_type": message.data_type} for message in oracle.messages.values()
        ],
        "claims": [
            {"message": message_id, "instance_id": owner} for message_id, owner in sorted(oracle.claims.items())
        ],
        "subscriptions": [msgspec.structs.asdict(subscription) for subscription in oracle.subscriptions.values()],
        "cursors": [
            {"instance_id": instance_id, "channel": channel, "message": message_id}
            for (instance_id, channel), message_id in sorted(oracle.cursors.items())
        ],
        "groups": [{"instance_id": instance_id, "group_name": name} for instance_id, name in oracle.groups],
        "outbox": [
            {**msgspec.structs.asdict(event), "data_type": event.data_type}
            for _, event in sorted(oracle.outbox.items())
        ],
        "states": [{"instance_id": name, "state": state} for name, state in sorted(oracle.states.items())],
        "setbacks": [
            {"instance_id": name, "takeovers": setback.takeovers, "refused_by": setback.refused_by}
            for name, setback in sorted(oracle.setbacks.items())
        ],
        "seen_events": [{"event_key": key, "seen_at": seen_at} for key, seen_at in sorted(oracle.seen_events.items())],
        "system_locks": [
            {"lock_name": name, **msgspec.structs.asdict(lock)} for name, lock in sorted(oracle.system_locks.items())
        ],
    }
