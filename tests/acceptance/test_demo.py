"""The demo: a real worker is really killed, and a newcomer sees why it does not matter."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

WIDEST = 110


def demo(directory: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "romancy", "demo"],
        env={**os.environ, "TMPDIR": str(directory), "PYTHONWARNINGS": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def told(directory: Path) -> str:
    """What the demo prints into a pipe."""
    process = demo(directory)
    story, troubles = process.communicate(timeout=60)
    assert (process.returncode, troubles) == (0, "")
    return story


def words_of(worker: str, told: str) -> list[str]:
    """What a worker says, without the details."""
    return [line.split(f"{worker}  ")[1].split()[0] for line in told.splitlines() if f" s  {worker} " in line]


def test_a_killed_worker_is_replaced_and_recorded_steps_are_not_repeated(told: str) -> None:
    assert words_of("worker-1", told) == ["starts,", "charge:", "pack:"]
    assert "is gone, exit status -9" in told
    first_order = words_of("worker-2", told)[:4]
    assert first_order == ["starts,", "pack:", "pack:", "ship:"]


def test_the_order_waits_for_a_timer_and_for_an_approval(told: str) -> None:
    for moment in ("waiting_for_timer, locked by nobody", "waiting_for_message, locked by nobody"):
        assert told.count(moment) == 1, moment
    assert "await order.result()  ->  'parcel P-order-17 is on its way to Paris'" in told


def test_an_order_that_fails_is_undone_last_step_first(told: str) -> None:
    assert words_of("worker-2", told)[4:] == ["charge:", "pack:", "pack:", "ship:", "unpack:", "refund:"]
    assert "WorkflowFailedError: no carrier flies to the Moon" in told


def test_the_history_has_each_step_once(told: str) -> None:
    steps = re.findall(r"^  (order-\d+  [\w:-]+)  ", told, re.MULTILINE)
    assert [step for step in steps if "17" in step] == [
        "order-17  charge:1",
        "order-17  pack:1",
        "order-17  sleep:1",
        "order-17  subscribe:1",
        "order-17  receive_approval:order-17:1",
        "order-17  ship:1",
    ]
    assert len(steps) == len(set(steps)) == 15


def test_the_demo_fits_a_terminal_has_no_colours_in_a_pipe_and_says_where_to_go(told: str) -> None:
    assert max(map(len, told.splitlines())) <= WIDEST
    assert "\033" not in told
    next_steps = re.findall(r"^  ((?:docs|examples|src)/\S*)", told, re.MULTILINE)
    assert [(Path(__file__).parents[2] / path).exists() for path in next_steps] == [True, True, True]


def test_the_demo_leaves_no_files(told: str, directory: Path) -> None:
    assert list(directory.iterdir()) == []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes started in the background of a shell ignore SIGINT, and so would theirs."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_demo_ends_its_workers(tmp_path: Path) -> None:
    process = demo(tmp_path)
    assert process.stdout is not None
    line = next(line for line in process.stdout if "starts, process" in line)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(line.split()[-1]), 0)
    assert list(tmp_path.iterdir()) == []
