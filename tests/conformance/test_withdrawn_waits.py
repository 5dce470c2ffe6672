"""Waits that a step no longer wants are forgotten when the instance suspends again."""

from datetime import timedelta

import pytest

from romancy.storage import SQLStorage, TimerSubscription
from tests.harness import Harness


@pytest.mark.parametrize("timer_id", ["sleep:1", "reminder"])
async def test_a_withdrawn_step_has_no_timer_whatever_the_timer_is_called(
    harness: Harness, storage: SQLStorage, timer_id: str
) -> None:
    lock = await harness.locked(storage)
    soon = await storage.current_time() + timedelta(seconds=1)
    await storage.register_timer_subscription(
        TimerSubscription(lock.instance_id, timer_id, soon, activity_id="sleep:1"), lock=lock
    )

    later = TimerSubscription(lock.instance_id, "later", soon + timedelta(hours=1))
    await storage.suspend(lock.instance_id, [later], lock=lock, withdrawn=["sleep:1"])

    harness.advance(seconds=2)
    assert await storage.find_expired_timers() == []
