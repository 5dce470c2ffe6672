"""SQLite: how operations of one batch share statements.

Those who look for whatever is free, to claim or to lease it, look once for all. Those who ask for the same single write
get one statement for all of them, if it has a form for many: their parameters go as one JSON text. Whoever is odd is
left to run alone, and finds out why.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from ..drivers.sqlite import SQLiteDriver
from ..operation import Call, Hint
from ..statement import Many, Query, Rendered, as_json, has_bytes, picker
from .job import Job
from .sqlite_session import TransactionGone

_FEW = 3
"""So few are written one by one: to put them together would cost more."""
_LONGEST_JSON = 200_000


class Company:
    """Serves those of a batch who can be served together."""

    def __init__(
        self,
        driver: SQLiteDriver,
        note: Callable[[str, Call[Any]], None],
        drive: Callable[[sqlite3.Connection, Call[Any], list[Hint]], Any],
    ) -> None:
        """NOTE tells the probe where an operation is; DRIVE runs one so that nothing is left of it on an error."""
        self._driver = driver
        self._note = note
        self._drive = drive

    def without_those_served(self, connection: sqlite3.Connection, batch: list[Job]) -> list[Job]:
        """Serve whom one statement can serve together; the others, who are to run one by one."""
        if len(batch) == 1:
            return batch
        looking: dict[Hashable, list[Job]] = {}
        writing: dict[Hashable, list[Job]] = {}
        for job in batch:
            traits = job.call.traits
            if traits.as_one is not None:
                with suppress(Exception):  # alone it is told what is wrong with its arguments
                    touches = job.call.touches()
                    looking.setdefault(touches and touches.alike, []).append(job)
            elif traits.autocommit and not traits.own_sql:
                writing.setdefault(job.call.function, []).append(job)
        looking.pop(None, None)
        served: set[Job] = set()
        for jobs in looking.values():
            if len(jobs) > 1:
                served.update(self._look_once(connection, jobs))
        for jobs in writing.values():
            if len(jobs) > _FEW:
                served.update(self._write_once(connection, jobs))
        return [job for job in batch if job not in served] if served else batch

    def _look_once(self, connection: sqlite3.Connection, jobs: list[Job]) -> list[Job]:
        """Let one operation do what all of them ask; nobody is served if it fails."""
        try:
            results = self._drive(connection, Call.as_one([job.call for job in jobs]), jobs[0].hints)
        except TransactionGone:
            raise
        except Exception:
            jobs[0].start_over()
            return []
        for job, result in zip(jobs, results, strict=True):
            job.result = result
        return jobs

    def _write_once(self, connection: sqlite3.Connection, jobs: list[Job]) -> list[Job]:
        """Run operations of a single write with one statement; those who are done with.

        The others run alone: who asks for a row that somebody before it asks for, whoever is odd, and whose row cannot
        be written.
        """
        many = _form_for_many(jobs[0])
        if many is None:
            return []
        rendered, key_of = self._driver.for_many(many), picker(many.key)
        asking: dict[tuple[Any, ...], Job] = {}
        rows: list[str] = []
        done: list[Job] = []
        room = _LONGEST_JSON
        for job in jobs:
            query = _asked(job, many)
            key, row = ((), "") if query is None else (key_of(query.params), _as_row(query, rendered))
            if not row or key in asking or len(row) > room:
                job.leave_off()
                continue
            try:
                self._note("before statement", job.call)
            except BaseException as error:
                job.fail(error)
                done.append(job)
                continue
            asking[key] = job
            rows.append(row)
            room -= len(row)
        answers = {row[1:]: row[0] for row in connection.execute(rendered.text, (f"[{','.join(rows)}]",))}
        for key, job in asking.items():
            answer = answers.get(key)
            if answer is None:
                job.leave_off()
                continue
            job.go_on(answer)
            assert job.asks is None, "a single statement of it writes"
            done.append(job)
        return done


def _form_for_many(job: Job) -> Many | None:
    """What writes for many who ask what this one asks."""
    try:
        job.begin()
        many = None if job.asks is None else job.asks.statement.many
    except Exception:
        many = None
    job.leave_off()
    return many if many is not None and many.sqlite else None


def _asked(job: Job, many: Many) -> Query[Any] | None:
    """Begin an operation; what it asks, if that can be one of many."""
    try:
        job.begin()
        query = job.asks
        return None if query is None or query.statement.many is not many or has_bytes(query) else query
    except Exception:
        return None  # alone it is told what is wrong


def _as_row(query: Query[Any], rendered: Rendered) -> str:
    """Its parameters as one of many; nothing if they are odd."""
    try:
        return as_json(rendered.bind(query.params))
    except Exception:
        return ""
