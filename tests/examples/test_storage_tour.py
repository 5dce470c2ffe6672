"""The tour of the storage: it tells its story to the end, in plain text, and leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "examples/storage_tour.py"
WIDEST = 100


@pytest.fixture
def told(tmp_path: Path) -> str:
    """What the tour prints into a pipe."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONWARNINGS": "error"}
    tour = subprocess.run([sys.executable, TOUR], env=environment, capture_output=True, text=True, timeout=60)
    assert (tour.returncode, tour.stderr) == (0, "")
    return tour.stdout


def test_the_tour_shows_each_promise_being_kept(told: str) -> None:
    for moment in (
        "gets None and goes away",
        "already_recorded=True",
        "takes it: token 2",
        "refused, as it should be: LockLostError",
        "waiting_for_timer, locked by None",
        "and has it at once",
        "as sent: True",
        "receive_parcel:1",
        "running with 0 steps",
    ):
        assert told.count(moment) == 1, moment
    assert sorted(line[-5:].strip() for line in told.splitlines() if "fires it" in line) == ["False", "True"]


def test_the_tour_fits_a_terminal_and_has_no_colours_in_a_pipe(told: str) -> None:
    body = told.split("\n", 1)[1]  # the first line names a file, which may lie anywhere
    assert max(map(len, body.splitlines())) <= WIDEST
    assert "\033" not in told


def test_the_tour_leaves_no_files(told: str, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
