"""Events on their way out: a relayer leases them from the database and gives them to a publisher."""

from .http import CloudEventsPublisher
from .relayer import InvalidEventError, Publisher, Relayer

__all__ = ["CloudEventsPublisher", "InvalidEventError", "Publisher", "Relayer"]
