"""What a workflow's author can meet, shaped by what to do about it.

    RomancyError
    ├── NotInWorkflowError               call this in a workflow's body
    ├── InActivityError                  call this in a workflow's body, not in an activity
    ├── DuplicateNameError               two definitions of one app share a name
    ├── UnknownWorkflowError             this app does not have the workflow
    ├── WorkflowMismatchError            the id belongs to an instance of another workflow
    ├── SerializationError               a value cannot be stored, or not be read back as its type
    ├── TerminalError                    raise it in an activity: do not try again
    ├── ActivityError                    an activity failed with an error whose type is not at hand
    ├── NonDeterminismError              the code does not do what its history says
    ├── WorkerVanishedError              workers keep dying while they run the instance
    ├── WorkflowFailedError              the awaited workflow failed
    ├── WorkflowCancelledError           the awaited workflow was cancelled
    └── ReceiveTimeoutError (TimeoutError)   no message in time

The storage's errors (`romancy.storage`) are about the infrastructure; they never fail a workflow.
"""

from __future__ import annotations


class RomancyError(Exception):
    """Root of what the engine raises."""


class NotInWorkflowError(RomancyError):
    """This can only be called in the body of a running workflow."""


class InActivityError(NotInWorkflowError):
    """This can only be called in a workflow's body, and an activity is not its body."""


class DuplicateNameError(RomancyError):
    """Two definitions of one app share a name; give one of them another with ``name=``."""


class UnknownWorkflowError(RomancyError):
    """This app was not given a workflow of that name."""


class WorkflowMismatchError(RomancyError):
    """The instance id is taken by an instance of another workflow."""


class SerializationError(RomancyError):
    """A value cannot be stored as JSON, or what is stored does not fit the type hint."""


class TerminalError(RomancyError):
    """Raised in an activity: it has failed for good, and is not tried again."""


class ActivityError(RomancyError):
    """An activity failed; its error's own type could not be made again."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(f"{error_type}: {message}")
        self.error_type = error_type
        self.message = message


class NonDeterminismError(RomancyError):
    """The workflow's code asks for another step than its history has recorded."""

    def __init__(self, message: str, values: str = "") -> None:
        super().__init__(message + values)
        self.without_values = message
        """What may be logged."""


class WorkerVanishedError(RomancyError):
    """Workers keep dying while they run the instance, without a new step of it; why it is parked, never raised."""


class WorkflowFailedError(RomancyError):
    """The workflow failed; `error_type` and `message` say with what."""

    def __init__(self, instance_id: str, error_type: str, message: str) -> None:
        super().__init__(f"workflow {instance_id!r} failed: {error_type}: {message}")
        self.instance_id = instance_id
        self.error_type = error_type
        self.message = message


class WorkflowCancelledError(RomancyError):
    """The workflow was cancelled."""

    def __init__(self, instance_id: str, reason: str) -> None:
        super().__init__(f"workflow {instance_id!r} was cancelled: {reason}")
        self.instance_id = instance_id
        self.reason = reason


class ReceiveTimeoutError(RomancyError, TimeoutError):
    """No message arrived in time."""
