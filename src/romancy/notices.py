"""Listening for hints for as long as the process lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from .storage import SQLStorage
from .storage.notifications import CATCH_UP
from .storage.sql.operation import Hint

log = logging.getLogger("romancy")


async def hear(storage: SQLStorage, handlers: Mapping[str, Callable[[Hint], None]]) -> None:
    """Pass hints on, each to whom its topic concerns: at once, so handlers must be quick."""

    def pass_on(hints: list[Hint]) -> None:
        for hint in hints:
            handle = handlers.get(hint.topic)
            if handle is None:
                continue
            try:
                handle(hint)
            except Exception:
                log.exception("a hint of %s could not be followed; polls find what it announced", hint.topic)

    await storage.wakeups.join(pass_on)
    try:
        pass_on([CATCH_UP])  # what was said before we listened
        await asyncio.get_running_loop().create_future()  # until we are cancelled
    finally:
        await storage.wakeups.leave(pass_on)
