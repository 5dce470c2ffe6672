"""Durable execution on the database you already have.

    @activity
    async def charge(order_id: str, amount: int) -> str: ...

    @workflow
    async def fulfil(order_id: str) -> str:
        receipt = await charge(order_id, amount=42)
        await sleep(timedelta(days=1))
        return receipt

    async with App("sqlite:///orders.db", workflows=[fulfil]) as app:
        handle = await app.start(fulfil, "17", id="order-17")
        print(await handle.result())
"""

from .activity import Activity, activity, activity_context
from .app import App, WorkflowHandle
from .channels import (
    join_group,
    leave_group,
    publish,
    receive,
    receive_direct,
    send_to,
    subscribe,
    unsubscribe,
)
from .context import conn, instance_id, is_replaying, now, random, uuid4
from .engine.steps import Message
from .errors import (
    ActivityError,
    DuplicateNameError,
    InActivityError,
    NonDeterminismError,
    NotInWorkflowError,
    ReceiveTimeoutError,
    RomancyError,
    SerializationError,
    TerminalError,
    UnknownWorkflowError,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowMismatchError,
)
from .retry import NO_RETRY, Retry
from .timers import sleep, sleep_until
from .worker.settings import Settings
from .workflow import Workflow, recur, workflow

__version__ = "0.1.0"

__all__ = [
    "NO_RETRY",
    "Activity",
    "ActivityError",
    "App",
    "DuplicateNameError",
    "InActivityError",
    "Message",
    "NonDeterminismError",
    "NotInWorkflowError",
    "ReceiveTimeoutError",
    "Retry",
    "RomancyError",
    "SerializationError",
    "Settings",
    "TerminalError",
    "UnknownWorkflowError",
    "Workflow",
    "WorkflowCancelledError",
    "WorkflowFailedError",
    "WorkflowHandle",
    "WorkflowMismatchError",
    "activity",
    "activity_context",
    "conn",
    "instance_id",
    "is_replaying",
    "join_group",
    "leave_group",
    "now",
    "publish",
    "random",
    "receive",
    "receive_direct",
    "recur",
    "send_to",
    "sleep",
    "sleep_until",
    "subscribe",
    "unsubscribe",
    "uuid4",
    "workflow",
]
