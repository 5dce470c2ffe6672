"""The flusher: callers of a server share statements and commits, each still waiting for its own.

What piles up while flushes are under way goes into the next one. Its operations are driven in step: each is asked for
its next query, equal statements go to the server in one message, everybody gets the answer, and so on; one commit ends
them all. That is only right for operations that touch nothing in common (`Touches`), so those that do follow each other
within the flush, and wait while others touch it.

Nobody suffers from the company. An operation that is refused before it has written anything is answered so by itself;
anything worse, a row that somebody else holds included, rolls the flush back, and each operation runs alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Any

from ..operation import Call, Hint, Touches
from ..statement import Query
from .job import Job
from .pool import Connection, Pool
from .trouble import Failure

if TYPE_CHECKING:
    from .server import ServerRunner

LANES = 2
"""Flushes under way at once: while the server is at one, the next is put together."""
_LARGEST_FLUSH = 256
_LANE_PATIENCE_SEC = 0.05
"""A flush that has not come back by then waits for somebody, and others may start meanwhile."""


class Apart(Exception):
    """Nothing was done: the operation is to run by itself."""


class SharedJob(Job):
    """A job that knows what it touches, and whether it has written anything yet."""

    __slots__ = ("_coroutine", "touches", "wrote")

    def __init__(self, call: Call[Any], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(call, loop)
        self.touches = call.touches()

    def begin(self) -> Query[Any] | None:
        """Start it, from its arguments; its first query."""
        self.start_over()
        self.wrote = False
        self._coroutine: Coroutine[Any, Any, Any] = self.call.start()
        return self.go_on(None)

    def go_on(self, answer: Any) -> Query[Any] | None:
        """Its next query; None when it is done, with a result or with an error of its own."""
        try:
            while isinstance(asked := self._coroutine.send(answer), Hint):
                self.hints.append(asked)
                answer = None
        except StopIteration as end:
            self.result = end.value
            return None
        except Exception as error:
            if self.wrote:
                raise Apart from error  # only a transaction of its own can take back what it has written
            self.fail(error)
            return None
        return asked  # type: ignore[no-any-return]


class Busy:
    """What is being touched."""

    def __init__(self) -> None:
        self._changing: Counter[str] = Counter()
        self._sharing: Counter[str] = Counter()

    def __contains__(self, touches: Touches) -> bool:
        """Whether somebody is in the way of an operation that touches this."""
        for name in touches.changes:
            if name in self._changing or name in self._sharing:
                return True
        return any(name in self._changing for name in touches.shares)

    def add(self, touches: Touches) -> None:
        self._changing.update(touches.changes)
        self._sharing.update(touches.shares)

    def remove(self, touches: Touches) -> None:
        for counter, names in ((self._changing, touches.changes), (self._sharing, touches.shares)):
            for name in names:
                counter[name] -= 1
                if not counter[name]:
                    del counter[name]


class Flusher:
    """Puts operations that wait at the same time into common transactions."""

    def __init__(self, runner: ServerRunner, pool: Pool) -> None:
        self._runner = runner
        self._pool = pool
        self.lanes = LANES
        self._forget()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _forget(self) -> None:
        self._queue: list[SharedJob] = []
        self._busy = Busy()
        self._flights = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._called = False

    def put(self, call: Call[Any]) -> SharedJob:
        """Queue an operation; it goes with whatever else is queued when the event loop comes round."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._pool.settle_in()
            self._forget()  # what an event loop that has ended left behind is nobody's any more
            self._loop = loop
        job = SharedJob(call, loop)
        self._queue.append(job)
        if not self._called:
            self._called = True
            loop.call_soon(self._dispatch)
        return job

    @contextmanager
    def keeping_clear(self, job: SharedJob) -> Iterator[None]:
        """No flush touches what an operation touches that runs by itself."""
        self._busy.add(job.touches)
        try:
            yield
        finally:
            self._busy.remove(job.touches)
            self._dispatch()

    def _dispatch(self) -> None:
        """Start flushes of what is queued, as long as there are lanes."""
        self._called = False
        while self._queue and self._flights < self.lanes:
            batch = self._next_batch()
            if not batch:
                return  # what they touch is being touched: whoever does so comes here afterwards
            # In a context of its own: not in the trace of whoever happened to be first.
            task = asyncio.create_task(self._fly(batch, _Lane(self)), context=Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next_batch(self) -> list[SharedJob]:
        """A fair share for each lane that is free, of what nobody is touching."""
        limit = min(-(-len(self._queue) // (self.lanes - self._flights)), _LARGEST_FLUSH)
        batch: list[SharedJob] = []
        left: list[SharedJob] = []
        passed = Busy()  # nobody overtakes one whom it would keep waiting
        for job in self._queue:
            if len(batch) == limit:
                left.append(job)
            elif job.touches in self._busy or job.touches in passed:
                left.append(job)
                passed.add(job.touches)
            else:
                batch.append(job)
        self._queue = left
        for job in batch:
            self._busy.add(job.touches)
        return batch

    async def _fly(self, batch: list[SharedJob], lane: _Lane) -> None:
        """Run a batch and answer its callers."""
        try:
            await (self._run_one(batch[0]) if len(batch) == 1 else self._flush(batch))
        except BaseException as error:
            for job in batch:
                job.fail(Apart() if isinstance(error, Apart) else error)
            if not isinstance(error, Exception):
                raise
        finally:
            for job in batch:
                self._busy.remove(job.touches)
                job.answer()
            lane.leave()
            self._runner.announce([hint for job in batch for hint in job.hints])
            self._dispatch()

    async def _run_one(self, job: SharedJob) -> None:
        """Without company, without the cost of company."""
        job.result = await self._runner.attempt(job.call)

    async def _flush(self, batch: list[SharedJob]) -> None:
        """Run a batch in one transaction."""
        try:
            connection = await self._runner.taken(self._pool.take())
        except Failure as failure:
            raise Apart from failure
        try:
            await self._commit_together(connection, batch)
        except BaseException as error:
            if not isinstance(error, Exception):
                connection.abort()  # the event loop ends
            raise
        finally:
            self._pool.give_back(connection)

    async def _commit_together(self, connection: Connection, batch: list[SharedJob]) -> None:
        try:
            await self._runner.told(connection, connection.begin_impatiently())
            for jobs in in_turns(batch):
                await self._in_step(connection, jobs)
        except Exception as error:  # whoever's it is: nothing is committed yet
            await self._runner.roll_back(connection)
            raise Apart from error
        try:
            await self._runner.commit(connection)
        except Failure as failure:
            if not failure.unsafe:
                raise Apart from failure
            for job in batch:
                if job.wrote:  # each gets an exception of its own: raising one changes it
                    job.fail(Failure(failure.error, failure.kind, unsafe=True))
            return
        for job in batch:
            try:
                self._runner.note("after commit", job.call)
            except Exception as error:
                job.fail(error)

    async def _in_step(self, connection: Connection, jobs: list[SharedJob]) -> None:
        """Run operations that touch nothing in common side by side, query by query."""
        asked = [(job, job.begin()) for job in jobs]
        while asking := [(job, query) for job, query in asked if query is not None]:
            for job, _ in asking:
                self._runner.note("before statement", job.call)
            queries = [query for _, query in asking]
            answers = await self._runner.told(connection, connection.execute_together(queries))
            asked = []
            for (job, query), answer in zip(asking, answers, strict=True):
                job.wrote = job.wrote or (bool(answer) and query.writes)
                asked.append((job, job.go_on(answer)))


class _Lane:
    """A flush's right of way, for a while."""

    def __init__(self, flusher: Flusher) -> None:
        self._flusher = flusher
        self._alarm = asyncio.get_running_loop().call_later(_LANE_PATIENCE_SEC, self._give_way)
        flusher._flights += 1
        self._held = True

    def leave(self) -> None:
        if self._held:
            self._held = False
            self._alarm.cancel()
            self._flusher._flights -= 1

    def _give_way(self) -> None:
        self.leave()
        self._flusher._dispatch()


def in_turns(batch: list[SharedJob]) -> list[list[SharedJob]]:
    """Split a batch so that those who touch something in common follow each other, in the order they came.

    Each turn goes by channel, so that two flushes that meet in the database come to its rows in the same order;
    instances have owners, who do not meet.
    """
    turns: list[tuple[Busy, list[SharedJob]]] = []
    for job in batch:
        behind = next((n for n in reversed(range(len(turns))) if job.touches in turns[n][0]), -1)
        if behind + 1 == len(turns):
            turns.append((Busy(), []))
        busy, jobs = turns[behind + 1]
        busy.add(job.touches)
        jobs.append(job)
    return [sorted(jobs, key=lambda job: job.touches.shares[:1]) for _, jobs in turns]
