"""The benchmarks still run; what they measure is nothing for a test to judge."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_all_measurements_run_and_print_their_tables() -> None:
    ended = benchmarks("--databases", "sqlite", "--tiny")
    assert ended.returncode == 0, ended.stderr
    for title in ("A fenced append by one caller", "by 4 callers at once", "Iterating a history", "Other operations"):
        assert title in ended.stdout
    assert len([line for line in ended.stdout.splitlines() if " SQLite  " in line]) == 9


@pytest.mark.parametrize("flag", ["--databases", "--only"])
def test_an_unknown_name_is_refused_with_the_known_ones(flag: str) -> None:
    ended = benchmarks(flag, "nothing")
    assert ended.returncode == 2
    assert "there is no nothing, only" in ended.stderr
