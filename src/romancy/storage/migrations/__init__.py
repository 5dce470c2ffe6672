"""The schema and its history: SQL files, and what applies them."""

from .files import Migration
from .inputs import declare_input_path, declared_input_paths, forget_input_path
from .runner import MigrationStatus, migrate, pending, render, render_pending, rollback, status

__all__ = [
    "Migration",
    "MigrationStatus",
    "declare_input_path",
    "declared_input_paths",
    "forget_input_path",
    "migrate",
    "pending",
    "render",
    "render_pending",
    "rollback",
    "status",
]
