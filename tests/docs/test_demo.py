"""The demo: it tells its story to the end, in plain text, and leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WIDEST = 100


@pytest.fixture
def told(tmp_path: Path) -> str:
    """What the demo prints into a pipe."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONWARNINGS": "error"}
    demo = subprocess.run(
        [sys.executable, "-m", "romancy.demo"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (demo.returncode, demo.stderr) == (0, "")
    return demo.stdout


def test_the_demo_shows_each_promise_being_kept(told: str) -> None:
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


def test_the_demo_fits_a_terminal_and_has_no_colours_in_a_pipe(told: str) -> None:
    body = told.split("\n", 1)[1]  # the first line names a file, which may lie anywhere
    assert max(map(len, body.splitlines())) <= WIDEST
    assert "\033" not in told


def test_the_demo_leaves_no_files(told: str, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
