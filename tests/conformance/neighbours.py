"""Rows as Edda (framework 'python') and Romancy (framework 'go') write them: shared columns only, in plain SQL."""

from typing import Any
from uuid import uuid4

from romancy.storage import SQLStorage

EDDA, ROMANCY = "python", "go"


async def neighbour(
    storage: SQLStorage,
    instance_id: str,
    framework: str = EDDA,
    *,
    status: str = "waiting_for_message",
    locked_by: str | None = None,
    workflow_name: str = "neighbourly",
) -> str:
    """An instance of another framework."""
    conn = storage.conn()
    named = {"name": workflow_name}
    if not await conn.fetch_value("SELECT 1 FROM workflow_definitions WHERE workflow_name = :name", **named):
        await conn.execute(
            "INSERT INTO workflow_definitions (workflow_name, source_hash, source_code)"
            " VALUES (:name, 'abc', 'def f()')",
            **named,
        )
    await conn.execute(
        "INSERT INTO workflow_instances"
        " (instance_id, workflow_name, source_hash, owner_service, framework, status, input_data, locked_by)"
        " VALUES (:id, :name, 'abc', 'service', :framework, :status, '{}', :locked_by)",
        id=instance_id,
        framework=framework,
        status=status,
        locked_by=locked_by,
        **named,
    )
    return instance_id


async def neighbour_subscribes(
    storage: SQLStorage,
    instance_id: str,
    channel: str,
    mode: str = "broadcast",
    *,
    activity_id: str | None = None,
    cursor: int | None = 0,
) -> None:
    """Its subscription; it waits there when `activity_id` is given."""
    await storage.conn().execute(
        "INSERT INTO channel_subscriptions (instance_id, channel, mode, activity_id, cursor_message_id)"
        " VALUES (:id, :channel, :mode, :activity_id, :cursor)",
        id=instance_id,
        channel=channel,
        mode=mode,
        activity_id=activity_id,
        cursor=cursor,
    )


async def neighbour_waits(
    storage: SQLStorage,
    instance_id: str,
    channel: str = "orders",
    mode: str = "broadcast",
    *,
    framework: str = EDDA,
    cursor: int | None = 0,
) -> str:
    """An instance of another framework in its `receive`; its id."""
    await neighbour(storage, instance_id, framework)
    await neighbour_subscribes(storage, instance_id, channel, mode, activity_id=f"receive_{channel}:1", cursor=cursor)
    return instance_id


async def neighbour_publishes(
    storage: SQLStorage, channel: str = "orders", data: str = '{"n": 1}', *, message_id: int | None = None
) -> str:
    """A message of another framework; its uuid. `message_id` sets the number, for one that comes late."""
    name = str(uuid4())
    columns = "channel, message_id, data_type, data, metadata"
    values = ":channel, :name, 'json', :data, '{\"source_instance_id\": \"e1\"}'"
    given: dict[str, Any] = {"channel": channel, "name": name, "data": data}
    if message_id is not None:
        columns, values, given = f"id, {columns}", f":id, {values}", {**given, "id": message_id}
    await storage.conn().execute(f"INSERT INTO channel_messages ({columns}) VALUES ({values})", **given)
    return name


async def leave_a_gap(storage: SQLStorage, channel: str = "orders") -> int:
    """A message number that nobody uses, below all that come: for a message that becomes visible late."""
    number = await storage.publish_to_channel(channel, "{}")
    assert isinstance(number, int)
    await storage.delete_channel_message(number)
    return number


async def row(storage: SQLStorage, query: str, **named: Any) -> tuple[Any, ...] | None:
    """One row of the shared tables."""
    found = await storage.conn().fetch_one(query, **named)
    return None if found is None else tuple(found)
