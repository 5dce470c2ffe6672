"""What a driver's error means for an operation, in the words all servers share."""

from __future__ import annotations

from enum import Enum


class Trouble(Enum):
    """What a driver's error means for the operation."""

    CONFLICT = "rolled back by the database to let somebody else through: run it again"
    LOST = "the connection is gone, and with it the knowledge of what happened"
    UNREACHABLE = "there was no connection to begin with"
    REFUSED = "the statement itself was refused"
    MISUSE = "not the database's: an argument is wrong, and the caller is told so in the same words everywhere"


class Failure(Exception):
    """A driver's error, what it means, and whether the write may have been committed all the same."""

    def __init__(self, error: Exception, kind: Trouble, *, unsafe: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.kind = kind
        self.unsafe = unsafe
