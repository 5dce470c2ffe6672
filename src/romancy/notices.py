"""Listening for hints for as long as the process lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from .storage import SQLStorage
from .storage.notifications import CATCH_UP
from .storage.sql.operation import Hint

log = logging.getLogger("romancy")


async def hear(storage: SQLStorage, on_hint: Callable[[Hint], None]) -> None:
    """Pass every hint on; a listener that cannot be opened is tried again, since polls find everything anyway."""
    while True:
        try:
            async with storage.listen() as hints:
                on_hint(CATCH_UP)  # what was said before we listened
                async for hint in hints:
                    on_hint(hint)
        except Exception as error:
            log.warning("cannot listen for hints yet: %s", error)
            await asyncio.sleep(1.0)
