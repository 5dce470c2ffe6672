"""Databases that are there already: whoever only looks must not make one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import RomancyError
from ..storage import SQLStorage, open_storage
from ..storage.sql.runners.sqlite import MEMORY
from ..storage.urls import parse_url


def open_existing(url: str, **options: Any) -> SQLStorage:
    """The storage a URL names; RomancyError for a SQLite file that is not there."""
    parsed = parse_url(url)
    if parsed.kind == "sqlite" and parsed.database != MEMORY:
        _check_exists(Path(parsed.database))
    return open_storage(url, **options)


def _check_exists(path: Path) -> None:
    if path.exists():
        return
    hint = "" if path.is_absolute() else f"\nhint: {str(path)!r} is looked for in the current directory"
    raise RomancyError(f"there is no SQLite database {str(path.absolute())!r}{hint}")
