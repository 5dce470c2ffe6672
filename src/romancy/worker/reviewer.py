"""The reviewer: lets instances be tried again that other code could not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..storage import SQLStorage
from ..workflow import Workflow
from .services import Service

_AT_ONCE = 100
_POLL_SEC = 300.0
"""At its start a worker has the first look; later ones are for workers that run beside others with newer code."""


class Reviewer(Service):
    """Unparks what was refused by other code than this worker's."""

    def __init__(self, storage: SQLStorage, workflows: Mapping[str, Workflow[Any, Any]], owner: str | None) -> None:
        super().__init__(_POLL_SEC)
        self._storage = storage
        self._workflows = workflows
        self._owner = owner

    async def look(self) -> bool:
        unparked = [
            await self._storage.unpark_refused(name, workflow.code_hash, _AT_ONCE, owner_service=self._owner)
            for name, workflow in self._workflows.items()
        ]
        return any(len(some) == _AT_ONCE for some in unparked)
