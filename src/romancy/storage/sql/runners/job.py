"""An operation that waits its turn beside others, and the caller who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ..operation import Call, Hint
from ..statement import Query


class Job:
    """A queued operation; whoever runs it sets `result`, `error` and `hints`, and then answers.

    It can be run beside others, query by query: `begin` it, and `go_on` with the answer to what it `asks`.
    """

    __slots__ = ("_coroutine", "asks", "call", "error", "future", "hints", "loop", "result", "settled")

    asks: Query[Any] | None
    _coroutine: Coroutine[Any, Any, Any] | None

    def __init__(self, call: Call[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.call = call
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.settled = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.hints: list[Hint] = []
        self._coroutine = None

    def start_over(self) -> None:
        """Forget what an earlier attempt has brought."""
        self.result, self.error, self.hints = None, None, []

    def fail(self, error: BaseException) -> None:
        """Nothing came of it."""
        self.result, self.error, self.hints = None, error, []

    def begin(self) -> None:
        """Start it, from its arguments."""
        self._coroutine = self.call.start()
        self.go_on(None)

    def go_on(self, answer: Any) -> None:
        """Hear what it asks next; nothing when it is done, with a result or with an error of its own."""
        self.asks = None
        assert self._coroutine is not None, "it has begun"
        try:
            while isinstance(asked := self._coroutine.send(answer), Hint):
                self.hints.append(asked)
                answer = None
            self.asks = asked
        except StopIteration as end:
            self.result = end.value
        except Exception as error:
            self._raised(error)

    def _raised(self, error: Exception) -> None:
        self.fail(error)

    def leave_off(self) -> None:
        """Forget that it has begun."""
        if self._coroutine is not None:
            self._coroutine.close()
        self.start_over()

    def answer(self) -> None:
        """Tell the caller, in its own loop."""
        self.settled = True
        if self.future.done():
            return  # cancelled: the caller looks at `settled`
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)

    async def settle(self) -> None:
        """Wait until the outcome is known, for a caller who was cancelled: only then is he told so."""
        if not self.future.cancelled():
            self.future.exception()  # seen: the cancellation is the answer
        while not self.settled:
            self.future = self.loop.create_future()
            try:
                await self.future
            except asyncio.CancelledError:
                continue
            except Exception:
                break
