"""The schema and its history: SQL files, and what applies them."""

from .files import Migration
from .runner import MigrationStatus, migrate, pending, render, render_pending, rollback, status

__all__ = ["Migration", "MigrationStatus", "migrate", "pending", "render", "render_pending", "rollback", "status"]
