"""A worker: claims, runs and wakes instances of the workflows it knows. Any number of them share a database."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from ..engine.clock import DatabaseClock
from ..hooks import NOBODY, Observers
from ..notices import hear
from ..storage import Lock, SQLStorage, Work, WorkflowInstance
from ..storage.notifications import told
from ..storage.sql.operation import Hint
from ..workflow import Workflow
from .executor import Executor
from .reviewer import Reviewer
from .services import Courier, Heart, Lookout, Resumer, Service, Timekeeper
from .settings import Retention, Settings
from .sweeper import Sweeper
from .waker import Waker


class Worker:
    """Runs the workflows of one app in this process."""

    def __init__(
        self,
        storage: SQLStorage,
        workflows: Mapping[str, Workflow[Any, Any]],
        settings: Settings,
        owner: str | None,
        observers: Observers = NOBODY,
        on_events: Callable[[], None] = lambda: None,
        retention: Retention | None = None,
    ) -> None:
        self.id = f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid4().hex[:12]}"
        self._storage = storage
        self._settings = settings
        self.clock = DatabaseClock(storage)
        names = sorted(workflows)
        self.executor = Executor(
            storage,
            workflows,
            self.id,
            self.clock,
            settings=settings,
            on_idle=self._room_made,
            on_due=lambda due: self._timekeeper.note(due),
            on_cancelled=lambda: self._heart.wake(),
        )
        self.executor.observers = observers
        self._resumer = Resumer(storage, self.executor, self.id, shares(workflows), owner, settings)
        self._waker = Waker(storage, self.executor, self._resumer, self.id, unlimited(workflows), owner, settings)
        self._reviewer = Reviewer(storage, workflows, owner)
        self._timekeeper = Timekeeper(storage, self.clock, names, owner, self._waker.fire)
        self._courier = Courier(storage, names, owner, self._waker.deliver)
        self._heart = Heart(storage, self.executor, settings)
        self._lookout = Lookout(storage, names, owner, settings.poll_sec, self._on_work)
        self._on_events = on_events
        self.sweeper = None if retention is None else Sweeper(storage, self.id, retention)
        self._tasks: list[asyncio.Task[None]] = []

    def has_room(self, workflow_name: str) -> bool:
        """Whether one more instance of the workflow may run now."""
        return self.executor.room_for(workflow_name) > 0

    def adopt(self, instance: WorkflowInstance, lock: Lock) -> None:
        """Run an instance that was born with our lock."""
        self.executor.start(instance, lock, newborn=True)

    async def start(self) -> None:
        """Start the services."""
        await self.clock.read()
        services: list[Service] = [
            self._lookout,
            self._resumer,
            self._reviewer,
            self._timekeeper,
            self._courier,
            self._heart,
        ]
        if self.sweeper is not None:
            services.append(self.sweeper)
        self._tasks = [asyncio.create_task(service.run(), name=type(service).__name__) for service in services]
        self._tasks.append(asyncio.create_task(hear(self._storage, self._handlers()), name="Listener"))

    def _room_made(self) -> None:
        self._resumer.room_made()
        self._waker.room_made()

    def _on_work(self, work: Work) -> None:
        """What the lookout has seen."""
        self.clock.told(work.now)
        if work.runnable:
            self._resumer.wake()
        if work.messages:
            self._courier.wake()
        if work.events:
            self._on_events()
        for due in (work.next_timer, work.next_timeout):
            if due is None:
                continue
            if due <= work.now:
                self._timekeeper.wake()
            else:
                self._timekeeper.note(due)

    def _handlers(self) -> dict[str, Callable[[Hint], None]]:
        return {
            "workflow_resumable": lambda hint: self._resumer.wake(),
            "workflow_channel_message": lambda hint: self._courier.tell(told(hint).channel),
            "workflow_cancelled": self._on_cancelled,
            "catch_up": lambda hint: self._catch_up(),
        }

    def _on_cancelled(self, hint: Hint) -> None:
        said = told(hint)
        if said.more:
            self.executor.some_cancelled()
        else:
            self.executor.cancelled(said.instance_id)

    def _catch_up(self) -> None:
        """Hints may have been missed."""
        self._resumer.wake()
        self._timekeeper.wake()
        self._courier.wake()

    async def stop(self) -> None:
        """Stop claiming, let running steps end, hand the rest back."""
        claiming, heart = [task for task in self._tasks if task.get_name() != "Heart"], self._tasks
        for task in claiming:
            task.cancel()
        if claiming:
            await asyncio.wait(claiming)
        await self.executor.stop(self._settings.drain_sec)
        for task in heart:
            task.cancel()
        if heart:
            await asyncio.wait(heart)


def shares(workflows: Mapping[str, Workflow[Any, Any]]) -> list[list[str]]:
    """Names to be claimed together: those with a limit of their own alone, all others at once."""
    others = unlimited(workflows)
    return [[name] for name in sorted(set(workflows) - set(others))] + ([others] if others else [])


def unlimited(workflows: Mapping[str, Workflow[Any, Any]]) -> list[str]:
    """Names of those without a limit of their own."""
    return sorted(name for name, workflow in workflows.items() if workflow.max_concurrent is None)
