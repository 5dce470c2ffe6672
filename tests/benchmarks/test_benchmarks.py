"""The benchmarks still run, and count what they measure; how fast anything is, is nothing for a test to judge."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import others
from benchmarks.__main__ import MEASUREMENTS
from benchmarks.databases import places
from benchmarks.machine import Machine
from benchmarks.measuring import TINY, Report, Result, Series, Target
from benchmarks.plot import plot

ROOT = Path(__file__).parents[2]


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize(
    ("place", "measurements", "results"),
    [("sqlite", [name for name in MEASUREMENTS if name != "others"], 26), ("postgres", ["appends", "workflows"], 6)],
)
def test_the_measurements_run_and_are_written_down(
    tmp_path: Path, place: str, measurements: list[str], results: int
) -> None:
    written = {"--json": tmp_path / "results.json", "--plot": tmp_path / "results.svg"}
    options = [str(word) for option in written.items() for word in option]
    ended = benchmarks("--tiny", "--databases", place, "--only", ",".join(measurements), *options)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(written["--json"].read_text())
    assert summary["after_a_pause"] > 0
    found = summary["results"]
    assert len(found) == results
    assert all(result["median"] >= 0 for result in found)
    assert ElementTree.parse(written["--plot"]).getroot().tag.endswith("svg")


def test_a_run_says_what_pauses_cost_and_what_the_host_took_away() -> None:
    machine = Machine()
    taken = machine.taken_away()
    assert taken is None or 0 <= taken <= 1
    assert f"takes {machine.after_a_pause:.1f} times as long here" in machine.disturbances()


async def test_what_cannot_be_installed_is_said_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(others, "cache_directory", lambda: tmp_path)
    report = Report(StringIO())
    async with places(["sqlite"]) as found:
        await others.measure(found, TINY, report)
    assert "DBOS on SQLite is not measured: it cannot be installed" in report.out.getvalue()
    assert [result.what for result in report.results] == ["a hand-written loop"]


@pytest.mark.parametrize("flag", ["--databases", "--only"])
def test_an_unknown_name_is_refused_with_the_known_ones(flag: str) -> None:
    ended = benchmarks(flag, "nothing")
    assert ended.returncode == 2
    assert "there is no nothing, only" in ended.stderr


def result(what: str, value: float, section: str) -> dict[str, Any]:
    return Result(what, "PostgreSQL", Series([value]), section=section).as_json()


def test_the_picture_has_a_bar_for_each_library_and_ours_among_them_by_speed() -> None:
    section = "A workflow, beside other libraries"
    results = [result("by hand", 0.5, section), result("slow & steady", 20, section)]
    drawn = ElementTree.fromstring(plot({"results": results, "machine": "2 cores", "measured_at": "today"}))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    labels = [text for text in texts if text in ("by hand", "romancy", "slow & steady")]
    assert labels == ["by hand", "romancy", "slow & steady"]


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (Target(least=2.5), 2.5, True),
        (Target(least=2.5), 2.4, False),
        (Target(most=10), 10.0, True),
        (Target(most=10), 10.1, False),
    ],
)
def test_a_target_is_a_bound_that_may_be_touched(target: Target, value: float, met: bool) -> None:
    assert Result("", "", Series([value]), target=target).met is met
