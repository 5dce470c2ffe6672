"""Each of us keeps to its own instances; the outbox, and the right to look and to cancel, belong to both."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from romancy.storage import (
    ChannelMode,
    ChannelWait,
    CompensationEntry,
    OutboxEvent,
    SQLStorage,
    TimerSubscription,
    WorkflowNotCancellableError,
    WorkflowStatus,
)
from tests.harness import Harness, step

from .neighbour import Edda

pytestmark = pytest.mark.databases("sqlite", "postgres", "mariadb")

TABLES = (
    "workflow_history",
    "workflow_compensations",
    "workflow_timer_subscriptions",
    "workflow_group_memberships",
    "channel_subscriptions",
    "channel_delivery_cursors",
)


async def rows_of(storage: SQLStorage, framework: str) -> list[list[Any]]:
    """Every row of a framework's instances."""
    conn = storage.conn()
    instances = "SELECT * FROM workflow_instances WHERE framework = :framework ORDER BY instance_id"
    children = (
        "SELECT t.* FROM {} t JOIN workflow_instances i ON i.instance_id = t.instance_id"
        " WHERE i.framework = :framework ORDER BY t.id"
    )
    found = await conn.fetch_all(instances, framework=framework)
    for table in TABLES:
        found += await conn.fetch_all(children.format(table), framework=framework)
    return [list(row) for row in found]


async def test_eddas_loops_leave_our_instances_alone(storage: SQLStorage, edda: Edda, ours: Harness) -> None:
    ours.advance(seconds=-3600)  # an hour ago, so that everything below is overdue when Edda looks
    soon = datetime.now(UTC) - timedelta(minutes=59)
    await ours.instance(storage)
    abandoned = await ours.locked(storage)
    await storage.append_history(step(abandoned.instance_id), lock=abandoned)
    await storage.add_compensation(CompensationEntry(abandoned.instance_id, "charge:1", "refund"), lock=abandoned)
    await storage.join_group(abandoned.instance_id, "customers")
    waiting = await ours.locked(storage)
    await storage.subscribe_to_channel(waiting.instance_id, "news", ChannelMode.BROADCAST)
    timer = TimerSubscription(waiting.instance_id, "timeout", soon, "sleep:1")
    await storage.suspend(waiting.instance_id, [timer, ChannelWait("news", "receive:1", soon)], lock=waiting)
    await storage.publish_to_channel("news", '{"n": 1}')
    before = await rows_of(storage, "romancy-py")

    for _ in range(2):
        await edda.ask("cycle")

    assert await rows_of(storage, "romancy-py") == before
    ours.advance(seconds=3600)
    assert [timer.instance_id for timer in await storage.find_expired_timers()] == [waiting.instance_id]
    assert [found.instance_id for found in await storage.find_deliverable_subscriptions()] == [waiting.instance_id]


async def test_our_polls_leave_eddas_instances_alone(storage: SQLStorage, edda: Edda, ours: Harness) -> None:
    await edda.start("sleeper", seconds=60)
    await edda.start("receiver", channel="news", timeout=60)
    assert await edda.ask("lock", instance_id=await edda.start("sleeper", seconds=60), worker="an-edda-that-died")
    before = await rows_of(storage, "python")
    assert len(before) > 5

    ours.advance(seconds=3600)
    await storage.publish_to_channel("news", '{"n": 1}')
    for _ in range(2):
        assert await storage.find_resumable_workflows() == []
        assert await storage.find_expired_timers() == []
        assert await storage.find_deliverable_subscriptions() == []
        assert await storage.find_expired_channel_subscriptions() == []
        assert await storage.cleanup_stale_locks(1) == []
        assert await storage.cleanup_old_channel_messages(timedelta(0)) == 0
        assert await storage.delete_finished_instances(timedelta(0)) == 0

    assert await rows_of(storage, "python") == before


async def test_each_outbox_event_leaves_once_through_either_relayer(
    storage: SQLStorage, edda: Edda, ours: Harness
) -> None:
    made = {f"event-{number}" for number in range(15)}
    for event_id in made:
        await storage.add_outbox_event(OutboxEvent(event_id, "order.created", "us", '{"n": 1}'))
    for _ in range(5):
        made.add(await edda.result(await edda.start("emitter", event_type="order.paid", data={"n": 2})))

    async def relay() -> list[str]:
        leased = await storage.get_pending_outbox_events(5)
        for event in leased:
            assert await storage.mark_outbox_event_sent(event.event_id)
        return [event.event_id for event in leased]

    by_us: list[str] = []
    by_edda: list[str] = []
    for _ in range(3):
        sent = await asyncio.gather(edda.ask("relay"), relay())
        by_edda += sent[0]
        by_us += sent[1]

    assert by_us
    assert by_edda
    assert sorted(by_us + by_edda) == sorted(made)
    unpublished = "SELECT COUNT(*) FROM outbox_events WHERE status <> 'published'"
    assert await storage.conn().fetch_value(unpublished) == 0


async def test_an_edda_instance_that_we_cancel_stays_cancelled(storage: SQLStorage, edda: Edda) -> None:
    receiving = await edda.start("receiver", channel="news")
    sleeping = await edda.start("sleeper", seconds=60)

    for instance_id in (receiving, sleeping):
        await storage.cancel_instance(instance_id, "no longer needed")
    await storage.conn().execute("UPDATE workflow_timer_subscriptions SET expires_at = '2001-01-01 00:00:00'")
    await edda.ask("publish", channel="news", data={"n": 1})
    await edda.ask("cycle")

    for instance_id in (receiving, sleeping):
        assert await edda.ask("status", instance_id=instance_id) == WorkflowStatus.CANCELLED
        with pytest.raises(WorkflowNotCancellableError):
            await storage.cancel_instance(instance_id, "again")
