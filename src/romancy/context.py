"""Where a workflow is, and values that stay the same on every replay."""

from __future__ import annotations

import random as _random
from datetime import UTC, datetime
from uuid import UUID
from uuid import uuid4 as _uuid4

from .engine.ambient import current_activity, current_run
from .engine.calls import note
from .serialization import encode
from .storage import Executor


def instance_id() -> str:
    """The id of the running instance."""
    return current_run("instance_id").instance_id


def is_replaying() -> bool:
    """Whether the body is only retracing what is recorded: for logging, never for decisions."""
    return not current_run("is_replaying").live


async def now() -> datetime:
    """The time, recorded."""
    run = current_run("now")
    # Our copy of the database's clock may be a little behind; what the body has seen happen lies in the past.
    moment = max(run.now(), datetime.fromtimestamp(run.time(), UTC))
    return datetime.fromisoformat(await note("now", encode(moment.isoformat(), "a time")))


async def uuid4() -> UUID:
    """A random UUID, recorded."""
    return UUID(await note("uuid4", encode(str(_uuid4()), "a UUID")))


async def random() -> float:
    """A random number from 0 to 1, recorded."""
    return float(await note("random", encode(_random.random(), "a number")))


def conn() -> Executor:
    """The user's own SQL, in the transaction of the running activity if it is transactional."""
    return current_activity("conn").storage.conn()
