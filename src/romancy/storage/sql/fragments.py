"""Conditions and select lists that several statements share, each said once; statements use them as hooks.

Tables go by the same letters everywhere: i instances, s subscriptions, m messages, w our channel waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..models import (
    CANCELLABLE,
    FINISHED,
    RUNNABLE,
    WAITING,
    ChannelMessage,
    CompensationEntry,
    HistoryEvent,
    OutboxEvent,
    TimerSubscription,
    WorkflowInstance,
    WorkflowStatus,
)
from .statement import FRAGMENTS, columns


def literals(values: Iterable[str]) -> str:
    """A list of literals: SQLite's planner matches partial indexes to literals only, not to parameters."""
    return "(" + ", ".join(f"'{value}'" for value in values) + ")"


def longest_runnable(columns: str, *, status: str = "IN {runnable}", locking: str = "") -> str:
    """What can run and has been waiting for it longest."""
    return f"""
        SELECT {columns} FROM workflow_instances i
         WHERE {{ours}} AND i.status {status} AND {{lock_is_free}} AND {{not_parked}}
         ORDER BY i.runnable_since, i.instance_id LIMIT :limit {locking}"""


def left_to(instance: str) -> str:
    """Not claimed by anybody else who can still work on it; a finished or deleted owner has let go."""
    # For NOT EXISTS, PostgreSQL and MySQL may read all claims first; for IS NULL, PostgreSQL expects hardly any message
    # to be left, and reads and sorts the whole channel to find one.
    return f"""COALESCE((
        SELECT 1 FROM channel_message_claims k JOIN workflow_instances o ON o.instance_id = k.instance_id
         WHERE k.message_id = m.message_id AND k.instance_id <> {instance} AND o.status NOT IN {{finished}}
         LIMIT 1), 0) <> 1"""


def received_by(instance: str) -> str:
    """Whether the message of another framework has been received."""
    return f"EXISTS (SELECT 1 FROM romancy_receipts r WHERE r.instance_id = {instance} AND r.message_id = m.id)"


FRAGMENTS.update(
    finished=literals(FINISHED),
    unfinished=literals(status for status in WorkflowStatus if status not in FINISHED),
    waiting=literals(WAITING),
    runnable=literals(RUNNABLE),
    cancellable=literals(CANCELLABLE),
    # '' is Romancy's way to write "free"; a lock without expiry is held until cleanup_stale_locks frees it.
    lock_is_free="(i.locked_by IS NULL OR i.locked_by = '' OR i.lock_expires_at <= {now})",
    lock_is_ours="i.lock_token = :token AND i.locked_by = :worker_id AND i.lock_expires_at > {now}",
    lock_cleared="locked_by = NULL, locked_at = NULL, lock_expires_at = NULL",
    not_parked="(i.parked_until IS NULL OR i.parked_until <= {now})",
    ours="i.framework = :framework AND {among:i.workflow_name, workflow_names} AND {among:i.owner_service, owners}",
    woken="""status = COALESCE(suspended_from, 'running'), suspended_from = NULL,
        runnable_since = {now}, updated_at = {now}""",
    cursor="{greatest:COALESCE(s.cursor_message_id, 0), COALESCE(d.last_delivered_id, 0)}",
    with_cursor="LEFT JOIN channel_delivery_cursors d ON d.channel = s.channel AND d.instance_id = s.instance_id",
    left_to_subscriber=left_to("s.instance_id"),
    received=received_by("s.instance_id"),
    # A lower id of another framework may appear late. Our receivers have receipts to tell it from what they have had;
    # the others' receivers have only their cursor.
    keeps_receipts="i.framework NOT IN ('python', 'go')",
    late="(m.origin IS NULL AND m.id <= {cursor} AND m.id > {cursor} - 10000 AND NOT {received} AND {keeps_receipts})",
    # Read backwards, one step in the index tells whether a broadcast channel has anything new. MySQL does so only when
    # the order names the index's first column too.
    newest_id="""(
        SELECT m.id FROM channel_messages m {through_index:romancy_messages_queue}
         WHERE {same_key:m.channel, s.channel} ORDER BY m.channel DESC, m.id DESC LIMIT 1)""",
    oldest_left_id="""(
        SELECT m.id FROM channel_messages m {through_index:romancy_messages_queue}
         WHERE {same_key:m.channel, s.channel} AND {left_to_subscriber} ORDER BY m.channel, m.id LIMIT 1)""",
    has_pending="""(
        (s.mode = 'broadcast' AND {newest_id} > {cursor})
        OR (s.mode = 'competing' AND {oldest_left_id} IS NOT NULL))""",
    any_unsettled="EXISTS (SELECT 1 FROM romancy_channels WHERE unsettled_since IS NOT NULL)",
    any_foreign="""EXISTS (
        SELECT 1 FROM channel_messages
         WHERE origin IS NULL
           AND id > COALESCE((SELECT value FROM romancy_marks WHERE name = 'foreign_messages'), 0))""",
    instance_columns=columns(WorkflowInstance, "i", locked_by="NULLIF(i.locked_by, '')"),
    judged_columns=columns(WorkflowInstance, "i", locked_by="NULLIF(i.locked_by, '')", output_data="NULL"),
    listed_columns=columns(
        WorkflowInstance, "i", locked_by="NULLIF(i.locked_by, '')", input_data="NULL", output_data="NULL"
    ),
    not_anothers="({text:owner} IS NULL OR lease_owner IS NULL OR lease_owner = :owner OR lease_until <= {now})",
    history_columns=columns(HistoryEvent),
    replayed_columns=columns(
        HistoryEvent, created_at="CASE WHEN event_type = 'ActivityCompleted' THEN NULL ELSE created_at END"
    ),
    timer_columns=columns(TimerSubscription, "t"),
    compensation_columns=columns(CompensationEntry),
    message_columns=columns(ChannelMessage, "m"),
    outbox_columns=columns(
        OutboxEvent,
        retry_count="COALESCE(retry_count, 0)",
        updated_at="COALESCE(updated_at, published_at, created_at)",
    ),
)
