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
    group_members,
    join_group,
    leave_group,
    publish,
    publish_to_group,
    receive,
    receive_direct,
    send_to,
    subscribe,
    unsubscribe,
)
from .children import ChildHandle, start_child
from .compensation import compensate_with
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
    WorkerVanishedError,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowMismatchError,
)
from .events import Event, emit, wait_event
from .hooks import Hooks, StepEvent, WorkflowEvent
from .retry import NO_RETRY, Retry
from .state import set_state
from .timers import sleep, sleep_until
from .worker.settings import Retention, Settings
from .workflow import Workflow, recur, workflow

__version__ = "0.1.0"

__all__ = [
    "NO_RETRY",
    "Activity",
    "ActivityError",
    "App",
    "ChildHandle",
    "DuplicateNameError",
    "Event",
    "Hooks",
    "InActivityError",
    "Message",
    "NonDeterminismError",
    "NotInWorkflowError",
    "ReceiveTimeoutError",
    "Retention",
    "Retry",
    "RomancyError",
    "SerializationError",
    "Settings",
    "StepEvent",
    "TerminalError",
    "UnknownWorkflowError",
    "WorkerVanishedError",
    "Workflow",
    "WorkflowCancelledError",
    "WorkflowEvent",
    "WorkflowFailedError",
    "WorkflowHandle",
    "WorkflowMismatchError",
    "activity",
    "activity_context",
    "compensate_with",
    "conn",
    "emit",
    "group_members",
    "instance_id",
    "is_replaying",
    "join_group",
    "leave_group",
    "now",
    "publish",
    "publish_to_group",
    "random",
    "receive",
    "receive_direct",
    "recur",
    "send_to",
    "set_state",
    "sleep",
    "sleep_until",
    "start_child",
    "subscribe",
    "unsubscribe",
    "uuid4",
    "wait_event",
    "workflow",
]
