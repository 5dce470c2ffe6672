"""The table of faults on the guarantees page names tests, and they exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "guarantees.md"


def test_every_fault_is_tested_by_tests_that_exist() -> None:
    existing = {name for file in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)

    assert [int(number) for number, _ in rows] == list(range(1, 33))
    for number, tests in rows:
        named = re.findall(r"`(test_\w+)`", tests)
        assert named, f"fault {number} names no test"
        assert set(named) <= existing, f"fault {number} names a test that is gone"
