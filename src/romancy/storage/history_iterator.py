"""Reading a long history without holding it in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

from .models import HistoryEvent, HistoryIteratorOptions
from .protocols import HistoryManager


class HistoryIterator(AsyncIterator[HistoryEvent]):
    """``async for event in HistoryIterator(storage, instance_id):`` reads one batch at a time, in order."""

    def __init__(
        self, storage: HistoryManager, instance_id: str, options: HistoryIteratorOptions | None = None
    ) -> None:
        self._storage = storage
        self._instance_id = instance_id
        self._batch_size = (options or HistoryIteratorOptions()).batch_size or 1000
        if self._batch_size < 0:
            raise ValueError(f"batch_size must not be negative: {self._batch_size}")
        self._batch: list[HistoryEvent] = []
        self._position = 0
        self._after_id = 0
        self._more = True

    def __aiter__(self) -> HistoryIterator:
        return self

    async def __anext__(self) -> HistoryEvent:
        if self._position == len(self._batch):
            await self._next_batch()
        event = self._batch[self._position]
        self._position += 1
        return event

    async def _next_batch(self) -> None:
        """Read on; StopAsyncIteration at the end, without asking for a page that is known to be empty."""
        if self._more:
            self._batch, self._more = await self._storage.get_history_paginated(
                self._instance_id, self._after_id, self._batch_size
            )
            self._position = 0
        if self._position == len(self._batch):
            raise StopAsyncIteration
        self._after_id = self._batch[-1].id or 0

    async def collect(self) -> list[HistoryEvent]:
        """All remaining events; for histories that fit into memory."""
        return [event async for event in self]

    async def aclose(self) -> None:
        """Stop: nothing more is read."""
        self._batch, self._position, self._more = [], 0, False
