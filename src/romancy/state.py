"""Published state: what a workflow shows of itself, to whoever holds its handle."""

from __future__ import annotations

from typing import Any

import msgspec

from .engine.ambient import current_run
from .engine.calls import call
from .serialization import encode


async def set_state(value: Any) -> None:
    """Show this value from now on, instead of what was shown before; `WorkflowHandle.state` reads it anywhere."""
    run = current_run("set_state")
    state = encode(value, "a state")
    await call(
        "set_state",
        {"value": msgspec.Raw(state.encode())},
        lambda record: run.storage.set_instance_state(run.instance_id, state, lock=run.lock, record=record("null")),
    )
