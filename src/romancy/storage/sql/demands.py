"""What callers ask for who look for the same things: one look finds enough for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from .checks import check_key, page_size, positive

T = TypeVar("T")


class Claim(msgspec.Struct, frozen=True):
    """A worker's wish for instances to run."""

    worker_id: str
    timeout_sec: float
    limit: int
    workflow_names: Sequence[str] | None
    owner_service: str | None

    def check(self) -> None:
        """An error is its own caller's, before the wish is added to those of others."""
        check_key("worker_id", self.worker_id)
        positive("timeout_sec", self.timeout_sec)


class Lease(msgspec.Struct, frozen=True):
    """A relayer's wish for events to send."""

    owner: str
    lease_sec: float
    limit: int

    def check(self) -> None:
        """The same."""
        check_key("owner", self.owner)
        positive("lease_sec", self.lease_sec)


def limit_of_all(demands: Sequence[Claim | Lease]) -> int:
    """How many to look for."""
    return page_size(sum(page_size(demand.limit) for demand in demands))


def dealt(found: Iterable[T], demands: Sequence[Claim | Lease]) -> list[list[T]]:
    """What each of them gets: the same as if they had come one after the other."""
    left = iter(found)
    return [list(islice(left, page_size(demand.limit))) for demand in demands]
