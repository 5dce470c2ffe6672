"""Child workflows: started once by their parent, awaited without holding anything, cancelled with it or left alone."""

from __future__ import annotations

import hashlib
from typing import Any, Generic, TypeVar

import msgspec

from .compensation import compensation_args, compensator_name
from .engine.ambient import current_activity, current_run
from .engine.calls import Record, call
from .engine.steps import LONGEST_ID, Kind
from .errors import WorkflowCancelledError, WorkflowFailedError, WorkflowMismatchError
from .serialization import StoredError, encode
from .storage import (
    CompensationEntry,
    InstanceExistsError,
    InstanceNotFoundError,
    InstanceWait,
    SQLStorage,
    WorkflowInstance,
    WorkflowNotCancellableError,
    WorkflowStatus,
)
from .workflow import Workflow

T = TypeVar("T")


class _Output(msgspec.Struct, frozen=True):
    result: msgspec.Raw = msgspec.Raw(b"null")


class ChildHandle(Generic[T]):
    """A child of the running workflow."""

    def __init__(self, instance_id: str, workflow: Workflow[..., T]) -> None:
        self.id = instance_id
        self._workflow = workflow

    def __repr__(self) -> str:
        return f"<child workflow {self.id}>"

    async def result(self) -> T:
        """Wait for the child's end: its result, or WorkflowFailedError, WorkflowCancelledError.

        InstanceNotFoundError if it has been deleted since.
        """
        run = current_run("result")
        step_id = run.next_step_id("child")
        wait = InstanceWait(instance_id=self.id, activity_id=step_id)
        await run.ask(Kind.CHILD, "child", step_id, wait=wait).future

        async def keep(record: Record) -> None:
            # The child's row may be deleted some day: what it ended with becomes part of our own history.
            child = await run.storage.get_instance(self.id)
            if child is None:
                raise InstanceNotFoundError(self.id)  # it was before we looked: what it ended with, nobody knows
            ended = f'{{"status": "{child.status}", "output": {child.output_data or "null"}}}'
            await run.storage.append_history(record(ended), lock=run.lock)

        ended = await call("child_result", {"id": self.id}, keep)
        return self._outcome(ended)

    def _outcome(self, ended: Any) -> T:
        text = msgspec.json.encode(ended["output"])
        match ended["status"]:
            case WorkflowStatus.COMPLETED:
                result: T = self._workflow.signature.decode_result(msgspec.json.decode(text, type=_Output).result)
                return result
            case WorkflowStatus.CANCELLED:
                raise WorkflowCancelledError(self.id, "")
        error = msgspec.json.decode(text, type=StoredError)
        raise WorkflowFailedError(self.id, error.error_type, error.error_message)


async def start_child(
    workflow: Workflow[..., T], *args: Any, id: str | None = None, cancel_with_parent: bool = True, **kwargs: Any
) -> ChildHandle[T]:
    """Start another workflow from this one; without an id of its own, it has one made of its parent's."""
    run = current_run("start_child")
    arguments = workflow.signature.encode_checked(args, kwargs)

    async def start(record: Record) -> None:
        step_id = record("null").activity_id
        child = WorkflowInstance(
            instance_id=child_id(run.instance_id, step_id) if id is None else id,
            workflow_name=workflow.name,
            source_hash=workflow.source_hash,
            owner_service=run.instance.owner_service,
            input_data=arguments,
        )
        async with run.storage.transaction():
            try:
                await run.storage.create_instance(child)
            except InstanceExistsError:  # the id is what makes it the same child
                await _check_same(run.storage, child)
            if cancel_with_parent:
                await run.storage.add_compensation(_cancelling(run.instance_id, step_id, child.instance_id))
            await run.storage.append_history(record(encode(child.instance_id, "an id")), lock=run.lock)

    given = {"workflow": workflow.name, "id": id, "arguments": msgspec.Raw(arguments.encode())}
    return ChildHandle(await call("start_child", given, start), workflow)


async def _check_same(storage: SQLStorage, child: WorkflowInstance) -> None:
    existing = await storage.get_instance(child.instance_id)
    if existing is not None and existing.workflow_name != child.workflow_name:
        raise WorkflowMismatchError(
            f"instance {child.instance_id!r} is of workflow {existing.workflow_name!r}, not of {child.workflow_name!r}"
        )


def child_id(parent_id: str, step_id: str) -> str:
    """The id of a child that was given none."""
    whole = f"{parent_id}/{step_id}"
    if len(whole) <= LONGEST_ID:
        return whole
    return f"{parent_id[:150]}/{hashlib.blake2b(whole.encode(), digest_size=20).hexdigest()}"


def _cancelling(parent_id: str, step_id: str, child_instance_id: str) -> CompensationEntry:
    name = compensator_name(cancel_child)
    arguments = encode({"child_instance_id": child_instance_id}, "an id")
    return CompensationEntry(
        instance_id=parent_id, activity_id=step_id, activity_name=name, args=compensation_args(name, arguments)
    )


async def cancel_child(child_instance_id: str) -> None:
    """The compensation of having started a child: cancel it, unless it has ended."""
    storage = current_activity("cancel_child").storage
    try:
        await storage.cancel_instance(child_instance_id, "its parent ended", compensate=True)
    except WorkflowNotCancellableError:
        return
