"""The app: a database, some workflows, and (unless it is only a client) a worker that runs them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from difflib import get_close_matches
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast, overload

import msgspec

from .channels import DIRECT, direct, metadata_text, payload
from .engine.ambient import CURRENT_RUN
from .engine.endings import Ended
from .errors import (
    DuplicateNameError,
    RomancyError,
    UnknownWorkflowError,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowMismatchError,
)
from .hooks import Hooks, Observers
from .logs import about
from .notices import hear
from .outbox import Publisher, Relayer
from .serialization import Signature, StoredError, decode
from .storage import (
    HistoryIterator,
    InstanceExistsError,
    InstanceNotFoundError,
    Lock,
    OutcomeUnknownError,
    SQLStorage,
    WorkflowInstance,
    WorkflowStatus,
    open_storage,
)
from .storage.models import FINISHED, HistoryEvent
from .storage.notifications import told
from .storage.sql.operation import Hint
from .storage.urls import parse_url
from .worker.settings import Retention, Settings
from .worker.worker import Worker
from .workflow import Workflow

S = TypeVar("S")
T = TypeVar("T")

log = logging.getLogger("romancy")

_FIRST_LOOK_SEC = 0.05
_LONGEST_LOOK_SEC = 1.0


class _Output(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"null")


_outputs = msgspec.json.Decoder(_Output)


class WorkflowHandle(Generic[T]):
    """An instance, from any process: wait for its result, look at it, cancel it."""

    def __init__(self, app: App, instance_id: str, signature: Signature | None) -> None:
        self._app = app
        self.id = instance_id
        self._signature = signature

    def __repr__(self) -> str:
        return f"<workflow instance {self.id}>"

    async def result(self, timeout: timedelta | float | None = None) -> T:
        """Wait for the end: the result, or WorkflowFailedError, WorkflowCancelledError, TimeoutError."""
        if timeout is None:
            return cast(T, await self._outcome(await self._app._finished(self.id)))
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                ended = await self._app._finished(self.id)
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"instance {self.id} has not finished within {seconds:g} s") from None
        return cast(T, await self._outcome(ended))

    async def _outcome(self, ended: Ended) -> Any:
        match ended.status:
            case WorkflowStatus.COMPLETED:
                raw = _outputs.decode(ended.output_data or "{}").result
                return msgspec.json.decode(raw) if self._signature is None else self._signature.decode_result(raw)
            case WorkflowStatus.CANCELLED:
                raise WorkflowCancelledError(self.id, await self._cancel_reason())
        error = msgspec.json.decode(
            ended.output_data or '{"error_type": "unknown", "error_message": ""}', type=StoredError
        )
        failed = WorkflowFailedError(self.id, error.error_type, error.error_message)
        if error.stack_trace:
            failed.add_note(f"\nWhere it failed, in the worker:\n\n{error.stack_trace.rstrip()}")
        raise failed

    async def _cancel_reason(self) -> str:
        event = await self._app.storage.get_history_event(self.id, "workflow_cancelled")
        if event is None or event.event_data is None:
            return ""
        return str(msgspec.json.decode(event.event_data).get("reason", ""))

    async def instance(self) -> WorkflowInstance:
        """The stored instance."""
        found = await self._app.storage.get_instance(self.id)
        if found is None:
            raise InstanceNotFoundError(self.id)
        return found

    async def status(self) -> WorkflowStatus:
        """Where the instance stands."""
        return (await self.instance()).status

    async def history(self) -> list[HistoryEvent]:
        """What is recorded of this round."""
        recorded = await HistoryIterator(self._app.storage, self.id).collect()
        if not recorded:
            await self.instance()  # InstanceNotFoundError rather than the silence of one that has done nothing
        return recorded

    @overload
    async def state(self) -> Any: ...
    @overload
    async def state(self, *, type: type[S]) -> S | None: ...
    async def state(self, *, type: Any = Any) -> Any:
        """What the workflow has shown of itself last (`set_state`), read as `type`; None if nothing yet."""
        shown = await self._app.storage.get_instance_state(self.id)
        if shown is None:
            await self.instance()  # InstanceNotFoundError rather than the silence of one that shows nothing
            return None
        return decode(shown, type, f"the state of {self.id}")

    async def cancel(self, reason: str = "") -> None:
        """Stop the instance wherever it is, undo what it did, and end it as cancelled."""
        await self._app.storage.cancel_instance(self.id, reason, compensate=True)


class App:
    """Durable workflows on one database.

    ``async with App(url, workflows=[…]) as app:`` brings the schema up to date and runs a worker; with
    ``worker=False`` it is only a client. With ``outbox=`` it also relays events to that publisher.
    """

    def __init__(
        self,
        url: str,
        *,
        workflows: Iterable[Workflow[Any, Any]] = (),
        worker: bool = True,
        service: str | None = None,
        settings: Settings | None = None,
        retention: Retention | None = Retention(),  # noqa: B008 (it is frozen)
        outbox: Publisher | None = None,
        hooks: Iterable[Hooks] = (),
        **storage_options: Any,
    ) -> None:
        if not isinstance(url, str):  # its value is not shown: there may be a password in it
            raise TypeError(f"url must be text, such as 'sqlite:///orders.db', and not of type {type(url).__name__}")
        if not isinstance(settings, Settings | None):
            raise TypeError(f"settings must be Settings or None, not {settings!r}")
        if not isinstance(retention, Retention | None):
            raise TypeError(f"retention must be a Retention or None, not {retention!r}")
        self._storage = _opened(url, storage_options)
        self.shown_url = parse_url(url).shown
        """The database's URL without its password."""
        self.workflows = _by_name(workflows)
        self._service = service
        self._settings = settings or Settings()
        self._retention = retention
        self._wants_worker = worker
        self._publisher = outbox
        self._observers = Observers(hooks)
        self._relaying: asyncio.Task[None] | None = None
        self.worker: Worker | None = None
        self._left_to_others: set[str] = set()
        """Workflows that were started here, and that only others can run."""
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._listening: asyncio.Task[None] | None = None

    @property
    def storage(self) -> SQLStorage:
        """The database, for everybody but a workflow's body: what that does must be recorded."""
        if CURRENT_RUN.get() is not None:
            raise RomancyError(
                "an app and its handles cannot be used in a workflow's body: use publish(), start_child() and the like,"
                " or do it in an activity"
            )
        return self._storage

    async def __aenter__(self) -> Self:
        if self.storage.runner.closed:
            raise RomancyError("this app has been closed: make a new App")
        await self.storage.initialize()
        self._listening = asyncio.create_task(hear(self.storage, self._handlers()))
        if self._wants_worker:
            self.worker = Worker(
                self.storage,
                self.workflows,
                self._settings,
                self._service,
                self._observers,
                self._on_events,
                self._retention,
            )
            await self.worker.start()
        if self._publisher is not None:
            # A worker's lookout sees events, too, and its sweeper deletes those that are old.
            poll_sec = None if self._wants_worker else self._settings.poll_sec
            keep = None if self._wants_worker or self._retention is None else self._retention.events
            self._relayer = Relayer(self.storage, self._publisher, poll_sec=poll_sec, keep=keep)
            self._relaying = asyncio.create_task(self._relayer.run(), name="Relayer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.worker is not None:
            await self.worker.stop()
        for task in (self._listening, self._relaying):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        await self.storage.close()

    async def start(
        self, workflow: Workflow[..., T], *args: Any, id: str | None = None, **kwargs: Any
    ) -> WorkflowHandle[T]:
        """Store a new instance, to be run by any worker; an id that exists is that instance, whatever its input."""
        self._check_startable(workflow)
        instance = WorkflowInstance(
            instance_id=f"{workflow.name}-{_new_id()}" if id is None else id,
            workflow_name=workflow.name,
            source_hash=workflow.source_hash,
            owner_service=self._service or "",
            input_data=workflow.signature.encode_checked(args, kwargs),
        )
        await self._create(instance)
        return WorkflowHandle(self, instance.instance_id, workflow.signature)

    def _check_startable(self, workflow: Any) -> None:
        if inspect.iscoroutine(workflow):
            workflow.close()
            raise TypeError("give the workflow and its arguments, not a call of it: app.start(workflow, …)")
        if not isinstance(workflow, Workflow):
            raise TypeError(f"not a workflow (is @workflow missing?): {workflow!r}")
        self._check_open()
        if self.workflows.get(workflow.name, workflow) is not workflow:
            raise UnknownWorkflowError(f"this app's {workflow.name!r} is another workflow")
        if (
            self.worker is not None
            and workflow.name not in self.workflows
            and workflow.name not in self._left_to_others
        ):
            self._left_to_others.add(workflow.name)
            log.warning("workflow %r is not one of this app's: it waits for another worker to run it", workflow.name)

    def _check_open(self) -> None:
        if self._listening is None:
            raise RomancyError("the app is not running yet: use it inside `async with app:`")

    async def _create(self, instance: WorkflowInstance) -> None:
        worker, name = self.worker, instance.workflow_name
        if worker is None or name not in self.workflows or not worker.has_room(name) or self.storage.in_transaction():
            await self._create_once(instance)
            return
        now = worker.clock.now()
        born = msgspec.structs.replace(
            instance,
            started_at=now,
            locked_by=worker.id,
            locked_at=now,
            lock_expires_at=now + timedelta(seconds=self._settings.lock_timeout_sec),
        )
        with worker.executor.reserve(1, name):
            lock = await self._create_once(born)
            if lock is not None:
                worker.adopt(born, lock)

    async def _create_once(self, instance: WorkflowInstance) -> Lock | None:
        """Store an instance unless there is one with its id; its lock if it was born with one."""
        try:
            return await self.storage.create_instance(instance)
        except OutcomeUnknownError:
            return await self._create_again(instance)
        except InstanceExistsError:
            pass
        await self._check_same(instance)
        return None

    async def _create_again(self, instance: WorkflowInstance) -> Lock | None:
        """After an attempt of which nobody knows what came of it: perhaps the instance that is there is ours."""
        try:
            return await self.storage.create_instance(instance)
        except InstanceExistsError:
            pass
        found = await self._check_same(instance)
        if found is None or found.locked_by is None or found.lock_expires_at is None:
            return None
        if (found.locked_by, found.lock_expires_at) != (instance.locked_by, instance.lock_expires_at):
            return None
        return Lock(found.instance_id, found.lock_token, found.locked_by, found.lock_expires_at, found.status)

    async def _check_same(self, instance: WorkflowInstance) -> WorkflowInstance | None:
        """The instance that has the id; WorkflowMismatchError if it is of another workflow."""
        existing = await self.storage.get_instance(instance.instance_id)
        if existing is not None and existing.workflow_name != instance.workflow_name:
            raise WorkflowMismatchError(
                f"instance {instance.instance_id!r} is of workflow {existing.workflow_name!r},"
                f" not of {instance.workflow_name!r}"
            )
        return existing

    def handle(self, instance_id: str, workflow: Workflow[..., T] | None = None) -> WorkflowHandle[T]:
        """An instance by its id; its result is typed if the workflow is given."""
        return WorkflowHandle(self, instance_id, None if workflow is None else workflow.signature)

    async def publish(self, channel: str, data: Any, *, metadata: dict[str, Any] | None = None) -> None:
        """Send a message to the channel's subscribers."""
        await self.storage.publish_to_channel(channel, payload(data), metadata_text(metadata))

    async def send_to(
        self, instance_id: str, data: Any, *, channel: str = DIRECT, metadata: dict[str, Any] | None = None
    ) -> None:
        """Send a message to one instance."""
        await self.publish(direct(channel, instance_id), data, metadata=metadata)

    async def _finished(self, instance_id: str) -> Ended:
        """Wait until an instance has finished: told by our own worker or by a hint, else by looking."""
        storage = self.storage  # before anything waits: it is refused in a workflow's body
        self._check_open()
        ended = await self._ended_here(instance_id)
        if ended is not None:
            return ended
        told = asyncio.Event()
        parked = False
        self._waiting.setdefault(instance_id, set()).add(told)
        pause = _FIRST_LOOK_SEC
        try:
            while True:
                told.clear()
                instance = await storage.get_instance(instance_id)
                if instance is None:
                    raise InstanceNotFoundError(instance_id)
                if instance.status in FINISHED:
                    return Ended(instance.status, instance.output_data)
                if instance.parked_reason is not None and not parked:
                    parked = True
                    log.warning(
                        "instance %s is parked, and waited for; `romancy show` tells why",
                        instance_id,
                        extra=about(instance_id),
                    )
                try:
                    async with asyncio.timeout(pause):
                        await told.wait()
                except TimeoutError:
                    pause = min(2 * pause, _LONGEST_LOOK_SEC)
                ended = await self._ended_here(instance_id)
                if ended is not None:
                    return ended
        finally:
            self._waiting[instance_id].discard(told)
            if not self._waiting[instance_id]:
                del self._waiting[instance_id]

    async def _ended_here(self, instance_id: str) -> Ended | None:
        """How an instance that our own worker runs ends: before it rests, asking for that would be in vain."""
        running = None if self.worker is None else self.worker.executor.execution_of(instance_id)
        if running is None:
            return None
        await running.rest()
        return running.ended

    def _handlers(self) -> dict[str, Callable[[Hint], None]]:
        return {
            "workflow_finished": self._on_finished,
            "workflow_outbox_pending": lambda hint: self._on_events(),
            "catch_up": lambda hint: self._on_events(),
        }

    def _on_finished(self, hint: Hint) -> None:
        if not self._waiting:
            return
        said = told(hint)
        finished = list(self._waiting) if said.more else [said.instance_id, *said.instance_ids]
        for instance_id in finished:
            for event in self._waiting.get(instance_id, ()):
                event.set()

    def _on_events(self) -> None:
        """Events are waiting to be sent."""
        if self._relaying is not None:
            self._relayer.wake()


def _opened(url: str, options: dict[str, Any]) -> SQLStorage:
    """The storage; TypeError for an option that neither it nor the app has."""
    try:
        return open_storage(url, **options)
    except TypeError as error:
        for name in options:
            if "unexpected keyword argument" in str(error) and repr(name) in str(error):
                alike = get_close_matches(name, inspect.signature(App).parameters, 1)
                hint = f"; did you mean {alike[0]!r}?" if alike else ""
                raise TypeError(f"App has no argument {name!r}{hint}") from None
        raise


def _new_id() -> str:
    """Nobody else's, and in order of time: new rows then lie side by side in every index, a third of the pages."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def _by_name(workflows: Iterable[Workflow[Any, Any]]) -> dict[str, Workflow[Any, Any]]:
    named: dict[str, Workflow[Any, Any]] = {}
    for workflow in workflows:
        if not isinstance(workflow, Workflow):
            raise TypeError(f"not a workflow (is @workflow missing?): {workflow!r}")
        if named.setdefault(workflow.name, workflow) is not workflow:
            raise DuplicateNameError(f"two workflows are named {workflow.name!r}")
    return named
