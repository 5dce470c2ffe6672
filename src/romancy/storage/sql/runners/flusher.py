"""The flusher: callers of a server share statements and commits, each still waiting for its own.

What piles up while flushes are under way goes into the next one. Operations of a single write go with their like; where
the write has a form for many, one message does it for all of them and commits by itself. All others are driven in step:
each is asked for its next query, equal statements go to the server in one message, everybody gets the answer, and so
on; one commit ends them all. That is only right for operations that touch nothing in common (`Touches`), so those that
do follow each other within the flush, and wait while others touch it. Those that look for whatever is free go with
their like only, too, as one operation that finds enough for all.

Nobody suffers from the company. An operation that is refused before it has written anything is answered so by itself;
anything worse, a row that somebody else holds included, rolls the flush back, and each operation runs alone.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Any

from ..operation import Call, Touches
from ..statement import Query, Statement, Want
from .job import Job
from .pool import Connection, Pool
from .trouble import Failure, Trouble

if TYPE_CHECKING:
    from .server import ServerRunner

LANES = 2
"""Flushes under way at once: while the server is at one, the next is put together."""
_LARGEST_FLUSH = 256
_SMALLEST_SHARE = 16
"""Fewer are not divided among lanes: two messages cost more than is gained by sending them at the same time."""
_MOST_SOLOISTS = 4
"""Whoever starts workflows one after the other is one, and each of them is another."""
_MANY = 8
"""So many callers who were answered are given time to ask for more before others are answered."""
_ROUNDS = 5
"""Of the event loop: whoever creates an instance needs four of them until its first step is to be recorded."""
_LANE_PATIENCE_SEC = 0.05
"""A flush that has not come back by then waits for somebody, and others may start meanwhile."""


class Apart(Exception):
    """Nothing was done: the operation is to run by itself."""


class SharedJob(Job):
    """A job that knows what it touches, and whether it has written anything yet."""

    __slots__ = ("number", "touches", "wrote")

    def __init__(self, call: Call[Any], loop: asyncio.AbstractEventLoop, touches: Touches, number: int) -> None:
        super().__init__(call, loop)
        self.touches = touches
        self.number = number
        """In which order it came."""
        self.wrote = False

    def _raised(self, error: Exception) -> None:
        if self.wrote:
            raise Apart from error  # only a transaction of its own can take back what it has written
        self.fail(error)


class Crowd:
    """What those touch who are under way together."""

    __slots__ = ("changes", "shares")

    def __init__(self) -> None:
        self.changes: set[str] = set()
        self.shares: set[str] = set()

    def add(self, others: Touches | Crowd) -> None:
        self.changes.update(others.changes)
        self.shares.update(others.shares)

    def is_in_the_way_of(self, others: Touches | Crowd) -> bool:
        """Whether one of them changes what the others touch, or touches what they change."""
        free = self.changes.isdisjoint(others.changes) and self.shares.isdisjoint(others.changes)
        return not (free and self.changes.isdisjoint(others.shares))


class Batch(Crowd):
    """Operations that go together."""

    __slots__ = ("_apart", "alike", "jobs")

    def __init__(self, jobs: list[SharedJob]) -> None:
        self.jobs = jobs
        self.alike = bool(jobs) and jobs[0].touches.alike is not None
        changes = [name for job in jobs for name in job.touches.changes]
        self.changes = set(changes)
        self.shares = {name for job in jobs for name in job.touches.shares}
        self._apart = len(changes) == len(self.changes) and self.changes.isdisjoint(self.shares)

    def in_turns(self) -> list[list[SharedJob]]:
        """Split it so that those who touch something in common follow each other, in the order they came.

        Each turn goes by what others may touch as well, a channel or an awaited instance, so that two flushes that meet
        in the database come to its rows in the same order; an instance has an owner, who meets nobody there.
        """
        turns = [self.jobs] if self._apart else self._taking_turns()
        return [sorted(jobs, key=lambda job: job.touches.shares[:1] or job.touches.changes[1:2]) for jobs in turns]

    def _taking_turns(self) -> list[list[SharedJob]]:
        turns: list[tuple[Crowd, list[SharedJob]]] = [(Crowd(), [])]
        for job in self.jobs:
            turn = len(turns)
            while turn and not turns[turn - 1][0].is_in_the_way_of(job.touches):
                turn -= 1
            if turn == len(turns):
                turns.append((Crowd(), []))
            crowd, jobs = turns[turn]
            crowd.add(job.touches)
            jobs.append(job)
        return [jobs for _, jobs in turns]


class Flight:
    """A batch under way."""

    __slots__ = ("batch", "connection", "gives_up_at", "gives_way_at", "has_lane")

    def __init__(self, batch: Batch, now: float) -> None:
        self.batch = batch
        self.has_lane = not batch.alike
        self.gives_way_at = now + _LANE_PATIENCE_SEC
        self.connection: Connection | None = None
        self.gives_up_at = math.inf


class Flusher:
    """Puts operations that wait at the same time into common transactions."""

    def __init__(self, runner: ServerRunner, pool: Pool) -> None:
        self._runner = runner
        self._pool = pool
        self.lanes = LANES
        self._forget()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _forget(self) -> None:
        self._queues: dict[Hashable, list[SharedJob]] = {}
        """Who waits, by company: only those of one company go together. They take turns."""
        self._numbers = itertools.count()
        self._busy: list[Crowd] = []
        self._flights: list[Flight] = []
        self._landed: deque[Batch] = deque()
        """Batches that are back; the callers of the first are answered."""
        self._their_turn: Batch | None = None
        """The first of them, while its callers have yet to ask for more."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._called = False
        self._watched = False
        self._came_last = 0
        self._soloists: deque[int] = deque(maxlen=_MOST_SOLOISTS)
        """Tasks whose operations came when nobody else's did."""

    def plays_solo(self, touches: Touches) -> bool:
        """Whether the running task comes again and again, and nobody else does: then there is no company to wait for.

        A task that was not seen alone before is queued: it may be the first of many that come at the same time.
        """
        if self._queues or self._busy or touches.alike is not None:
            return False
        self._came_last = id(asyncio.current_task())
        return self._came_last in self._soloists

    def put(self, call: Call[Any], touches: Touches) -> SharedJob:
        """Queue an operation; it goes with whatever else is queued when the event loop comes round."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._pool.settle_in()
            self._forget()  # what an event loop that has ended left behind is nobody's any more
            self._loop = loop
        job = SharedJob(call, loop, touches, next(self._numbers))
        # Those of a single write go with their like, in one message; what takes several, with whatever does so, too.
        company = touches.alike if touches.alike is not None else call.function if call.traits.autocommit else None
        self._queues.setdefault(company, []).append(job)
        # If there is no lane, whoever leaves one comes for it.
        if not self._called and (touches.alike is not None or self._free_lanes() > 0):
            self._called = True
            self._keep(loop.create_task(self._depart(), context=Context()), self._has_departed)
        return job

    @contextmanager
    def keeping_clear(self, touches: Touches) -> Iterator[None]:
        """No flush touches what an operation touches that runs by itself."""
        alone = Crowd()
        alone.add(touches)
        busy = self._busy
        busy.append(alone)
        try:
            yield
        finally:
            busy.remove(alone)
            if busy is self._busy:  # else its event loop has ended, and others are served in another
                self._dispatch()

    async def _depart(self) -> None:
        """The event loop has come round: fly with what is queued by now, in this task, which has just been started."""
        self._called = False
        flight = self._next_flight()
        if flight is not None:
            self._dispatch()
            await self._fly(flight)

    def _dispatch(self) -> None:
        """Start flushes of what is queued, as long as there are lanes."""
        while self._queues and (flight := self._next_flight()) is not None:
            task = asyncio.create_task(self._fly(flight), context=Context())
            self._keep(task, functools.partial(self._has_flown, flight))

    def _keep(self, task: asyncio.Task[None], on_done: Callable[[asyncio.Task[None]], None]) -> None:
        """Until it is done; all of them have contexts of their own: not the trace of whoever happened to be first."""
        self._tasks.add(task)
        task.add_done_callback(on_done)

    # A program that ends cancels all tasks, perhaps before they have begun: nobody else would come for who waits.

    def _has_departed(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and self._called:
            self._called = False
            self._dispatch()

    def _has_flown(self, flight: Flight, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if flight in self._flights:
            for job in flight.batch.jobs:
                job.fail(Apart())
            self._land(flight)

    def _free_lanes(self) -> int:
        return self.lanes - sum([flight.has_lane for flight in self._flights])

    def _next_flight(self) -> Flight | None:
        """None if nobody waits, all lanes are taken, or what they touch: whoever does so comes here afterwards."""
        batch = self._next_batch()
        if batch is None:
            return None
        self._busy.append(batch)
        loop = asyncio.get_running_loop()
        flight = Flight(batch, loop.time())
        self._flights.append(flight)
        self._keep_watch(loop)
        if self._their_turn is not None:
            self._end_turn(self._their_turn)  # those who are answered now go on when this flight is on its way
        return flight

    def _keep_watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look after flushes now and then: a timer for each of them would cost more than many a statement."""
        if self._flights and not self._watched:
            self._watched = True
            loop.call_later(_LANE_PATIENCE_SEC, self._look_after_flights, loop)

    def _look_after_flights(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the lane of who waits for somebody, and the connection of who waits for an answer that does not come."""
        self._watched = False
        now = loop.time()
        for flight in self._flights:
            if flight.gives_way_at <= now:
                flight.has_lane = False
            if flight.gives_up_at <= now and flight.connection is not None:
                flight.connection.abort()
        self._keep_watch(loop)
        self._dispatch()

    def _next_batch(self) -> Batch | None:
        """A fair share for each lane that is free, of what nobody is touching; those who are alike need no lane."""
        free_lanes = self._free_lanes() if self._queues else 0
        for company, waiting in self._queues.items():
            needs_lane = waiting[0].touches.alike is None
            if needs_lane and free_lanes <= 0:
                continue
            share = max(-(-len(waiting) // free_lanes), _SMALLEST_SHARE) if needs_lane else len(waiting)
            batch, left = self._divided(waiting, min(share, _LARGEST_FLUSH))
            if batch is not None:
                del self._queues[company]
                if left:
                    self._queues[company] = left  # behind the others
                return batch
        return None

    def _divided(self, waiting: list[SharedJob], limit: int) -> tuple[Batch | None, list[SharedJob]]:
        """The first of those who wait whom nobody keeps waiting, and the others."""
        batch = Batch(waiting[:limit])
        others = [job for queue in self._queues.values() if queue is not waiting for job in queue]
        if not any(busy.is_in_the_way_of(batch) for busy in (Batch(others), *self._busy)):
            return batch, waiting[limit:]
        in_the_way = Crowd()
        for busy in self._busy:
            in_the_way.add(busy)
        wanted = set(waiting)
        free: list[SharedJob] = []
        for job in sorted([*waiting, *others], key=lambda job: job.number):
            if job in wanted and len(free) < limit and not in_the_way.is_in_the_way_of(job.touches):
                free.append(job)
                wanted.discard(job)
            else:
                in_the_way.add(job.touches)  # nobody overtakes one with whom it has something in common
        return (Batch(free) if free else None), [job for job in waiting if job in wanted]

    async def _fly(self, flight: Flight) -> None:
        """Run a batch and answer its callers."""
        jobs = flight.batch.jobs
        try:
            if len(jobs) == 1:
                await self._run_one(jobs[0])
            elif flight.batch.alike:
                await self._run_as_one(jobs)
            else:
                await self._flush(flight)
        except BaseException as error:
            for job in jobs:
                job.fail(Apart() if isinstance(error, Apart) else error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        """Make room for the next batch, and answer the callers of this one when it is their turn."""
        self._flights.remove(flight)
        self._busy.remove(flight.batch)
        if len(flight.batch.jobs) > 1 or self._queues:
            self._soloists.clear()
        elif self._came_last not in self._soloists:
            self._soloists.append(self._came_last)
        self._landed.append(flight.batch)
        if len(self._landed) == 1:
            self._answer()

    def _answer(self) -> None:
        """Answer batches that have landed: after one of many callers, the next when those have asked for more.

        Were both lanes answered at once, we would work for both and then wait for both. In turns, we work for one while
        the server is at the other.
        """
        while self._landed:
            batch = self._landed[0]
            for job in batch.jobs:
                job.answer()
            self._runner.announce([hint for job in batch.jobs for hint in job.hints])
            if len(batch.jobs) >= _MANY:
                self._their_turn = batch
                asyncio.get_running_loop().call_soon(self._come_round, batch, _ROUNDS)
                return
            self._landed.popleft()
            self._dispatch()

    def _come_round(self, batch: Batch, rounds: int) -> None:
        """The event loop has come round once more; nobody is waited for without end."""
        if rounds and self._their_turn is batch:
            asyncio.get_running_loop().call_soon(self._come_round, batch, rounds - 1)
        else:
            self._end_turn(batch)

    def _end_turn(self, batch: Batch) -> None:
        """Go on to the next batch, unless that has happened already."""
        if self._landed and self._landed[0] is batch:
            self._their_turn = None
            self._landed.popleft()
            self._dispatch()
            self._answer()

    async def _run_one(self, job: SharedJob) -> None:
        """Without company, without the cost of company."""
        job.result = await self._runner.attempt(job.call)

    async def _run_as_one(self, jobs: list[SharedJob]) -> None:
        """Let one operation do what all of them ask."""
        try:
            results = await self._runner.attempt(Call.as_one([job.call for job in jobs]))
        except Exception as error:
            if not isinstance(error, Failure) or not error.unsafe:
                raise Apart from error
            for job in jobs:
                job.fail(Failure(error.error, error.kind, unsafe=True))
            return
        for job, result in zip(jobs, results, strict=True):
            job.result = result

    async def _flush(self, flight: Flight) -> None:
        """Run a batch in one transaction."""
        try:
            connection = self._pool.take_now() or await self._runner.taken(self._pool.take())
        except Failure as failure:
            raise Apart from failure
        flight.connection = connection
        flight.gives_up_at = asyncio.get_running_loop().time() + self._runner.statement_timeout_sec
        try:
            await self._commit_together(connection, flight.batch)
        except BaseException as error:
            if not isinstance(error, Exception):
                connection.abort()  # the event loop ends
            raise
        finally:
            self._pool.give_back(connection)

    async def _commit_together(self, connection: Connection, batch: Batch) -> None:
        first, *turns = batch.in_turns()
        asking = _begun(first)
        single_writes = not turns and first[0].call.traits.autocommit  # then all are: they go with their like
        if single_writes and connection.can_write_at_once(queries := _asked(asking)):
            await self._write_at_once(connection, asking, queries)
            return
        try:
            await self._runner.told(connection, connection.begin_impatiently())
            await self._in_step(connection, asking)
            for jobs in turns:
                await self._in_step(connection, _begun(jobs))
        except Exception as error:  # whoever's it is: nothing is committed yet
            await self._runner.roll_back(connection)
            raise Apart from error
        try:
            await self._runner.commit(connection)
        except Failure as failure:
            if not failure.unsafe:
                raise Apart from failure
            for job in batch.jobs:
                if job.wrote:  # each gets an exception of its own: raising one changes it
                    job.fail(Failure(failure.error, failure.kind, unsafe=True))
            return
        self._note_commit(batch.jobs)

    async def _write_at_once(self, connection: Connection, asking: list[SharedJob], queries: list[Query[Any]]) -> None:
        """Run operations of which each asks for the same write: one message is its own transaction."""
        try:
            self._note_statements(asking)
            answers = await self._runner.told(connection, connection.write_at_once(queries))
        except Exception as error:
            if not isinstance(error, Failure) or error.kind is not Trouble.LOST:
                raise Apart from error
            for job in asking:
                job.fail(Failure(error.error, error.kind, unsafe=True))
            return
        for job, answer in zip(asking, answers, strict=True):
            if answer is None:
                job.fail(Apart())
                continue
            job.go_on(answer)
            if job.asks is not None:
                job.fail(AssertionError(f"after the one statement with which it writes came {job.asks.statement}"))
        self._note_commit(asking)

    async def _in_step(self, connection: Connection, asking: list[SharedJob]) -> None:
        """Run operations that touch nothing in common side by side, query by query."""
        while asking:
            self._note_statements(asking)
            queries = _asked(asking)
            different, places = without_repetitions(queries)
            found = await self._runner.told(connection, connection.execute_together(different))
            going_on: list[SharedJob] = []
            for job, query, place in zip(asking, queries, places, strict=True):
                answer = found[place]
                job.wrote = job.wrote or (bool(answer) and query.writes)
                if answer is None and query.statement.many is not None and not job.wrote:
                    job.fail(Apart())  # nobody knows why: its row may just be held by somebody
                    continue
                job.go_on(answer)
                if job.asks is not None:
                    going_on.append(job)
            asking = going_on

    def _note_statements(self, asking: list[SharedJob]) -> None:
        if self._runner.probe is not None:
            for job in asking:
                self._runner.note("before statement", job.call)

    def _note_commit(self, jobs: list[SharedJob]) -> None:
        if self._runner.probe is None:
            return
        for job in jobs:
            if job.error is None:
                try:
                    self._runner.note("after commit", job.call)
                except Exception as error:
                    job.fail(error)


def _begun(jobs: list[SharedJob]) -> list[SharedJob]:
    """Start them; those who ask something."""
    for job in jobs:
        job.begin()
    return [job for job in jobs if job.asks is not None]


def _asked(asking: list[SharedJob]) -> list[Query[Any]]:
    return [job.asks for job in asking if job.asks is not None]


def without_repetitions(queries: list[Query[Any]]) -> tuple[list[Query[Any]], list[int]]:
    """Queries that differ, and for each of those given which of them answers it: the clock is read once for all."""
    different: list[Query[Any]] = []
    places: list[int] = []
    known: dict[tuple[Statement[Any], Want], int] = {}
    for query in queries:
        place = len(different)
        if not query.params and not query.writes:
            place = known.setdefault((query.statement, query.want), place)
        if place == len(different):
            different.append(query)
        places.append(place)
    return different, places
