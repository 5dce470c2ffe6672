"""How a run ends, and what unwinds a body that has not come to its end."""

from __future__ import annotations

from enum import Enum

import msgspec

from ..storage import WorkflowStatus


class Ending(Enum):
    """How a run ended."""

    FINISHED = "finished"
    SUSPENDED = "suspended"
    COMPENSATE = "compensate"
    RECURRED = "recurred"
    LOST = "lost"


class Ended(msgspec.Struct, frozen=True):
    """What has become of an instance."""

    status: WorkflowStatus
    output_data: str | None
    error_type: str | None = None


class Teardown(BaseException):
    """Unwinds a body that is suspended; not an Exception, so that the body's own handlers let it pass."""


class Recur(BaseException):
    """Unwinds a body that starts over with new input."""

    def __init__(self, input_json: str) -> None:
        self.input_json = input_json
