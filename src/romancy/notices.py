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
    """Pass hints on, each to whom its topic concerns.

    A listener that cannot be opened is tried again, since polls find everything anyway.
    """
    while True:
        try:
            async with storage.listen(handlers) as hints:
                handlers[CATCH_UP.topic](CATCH_UP)  # what was said before we listened
                async for hint in hints:
                    handlers[hint.topic](hint)
        except Exception as error:
            log.warning("cannot listen for hints yet: %s", error)
            await asyncio.sleep(1.0)
