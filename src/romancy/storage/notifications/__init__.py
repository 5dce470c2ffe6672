"""Wake-ups: what became visible, told to whoever listens. Always hints: a poll finds everything that a hint announces.

Listeners in the same process hear of every commit of their storage. Between processes hints travel by NOTIFY on
PostgreSQL (`postgres.py`), and by datagrams between the processes of one machine elsewhere (`datagrams.py`).
"""

from .datagrams import DatagramWakeups, Meeting
from .hints import CATCH_UP, TOPICS, Told, told
from .postgres import PostgresWakeups
from .wakeups import InProcessWakeups, Listener, Wakeups

__all__ = [
    "CATCH_UP",
    "TOPICS",
    "DatagramWakeups",
    "InProcessWakeups",
    "Listener",
    "Meeting",
    "PostgresWakeups",
    "Told",
    "Wakeups",
    "told",
]
