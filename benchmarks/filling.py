"""Many instances at once, made by the database itself: running them all first would take longer than measuring."""

from __future__ import annotations

from typing import Any

from romancy import Workflow
from romancy.storage import SQLStorage
from tests.numbers import joined, numbers


async def sleeping(storage: SQLStorage, workflow: Workflow[[], Any], count: int, *, due_in_sec: float) -> None:
    """Instances of a workflow that begins with `sleep`, as they are while they sleep."""
    driver = storage.runner.driver
    conn = storage.conn()
    name = joined(driver, "'sleeping-'", "(10000000 + n)")
    due = driver.seconds_after(driver.now(), str(due_in_sec))
    async with storage.transaction(deadline_sec=600):
        await conn.execute(
            "INSERT INTO workflow_definitions (workflow_name, source_hash, source_code)"
            f" VALUES ('{workflow.name}', '{workflow.source_hash}', '')"
        )
        await conn.execute(f"""
            INSERT INTO workflow_instances
                   (instance_id, workflow_name, source_hash, owner_service, framework, status, suspended_from,
                    input_data, lock_token)
            SELECT {name}, '{workflow.name}', '{workflow.source_hash}', '', 'romancy-py',
                   'waiting_for_timer', 'running', '{{}}', 1
              FROM {numbers(count)} ORDER BY n""")
        await conn.execute(f"""
            INSERT INTO workflow_timer_subscriptions (instance_id, timer_id, expires_at)
            SELECT {name}, 'sleep:1', {due} FROM {numbers(count)} ORDER BY n""")
