"""A place of its own for the sockets of each test."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from romancy.storage.notifications.datagrams import DIRECTORY_VARIABLE


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where processes meet; a short path, as the addresses of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="wake-") as directory:
        path = Path(directory) / "home"
        monkeypatch.setenv(DIRECTORY_VARIABLE, str(path))
        yield path
