"""The schema and its history: SQL files, and what applies them."""

from .files import Migration
from .runner import migrate, pending, rollback

__all__ = ["Migration", "migrate", "pending", "rollback"]
