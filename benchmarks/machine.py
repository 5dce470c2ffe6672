"""The machine that is measured on, and what it does to whoever waits: ratios of different hours differ by that."""

from __future__ import annotations

import configparser
import json
import os
import platform
import textwrap
import time
from pathlib import Path
from statistics import median

_PAUSE_SEC = 0.001
_TIMES = 200
_STEAL = 7
"""The column of /proc/stat with the time in which a processor would have worked, had the host let it."""


class Machine:
    """What a run is measured with, from its beginning."""

    def __init__(self) -> None:
        self.title = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
        self.title += f", Python {platform.python_version()}"
        self.after_a_pause = _after_a_pause()
        """How many times as long Python takes that has slept for a millisecond, as whoever waits for a commit has."""
        self._began = _processor_times()

    def taken_away(self) -> float | None:
        """The share of the processors' time that the host has given to others since; None if nobody tells."""
        if self._began is None or (now := _processor_times()) is None:
            return None
        passed = [after - before for before, after in zip(self._began, now, strict=True)]
        return passed[_STEAL] / max(1, sum(passed))

    def disturbances(self) -> str:
        """What pauses cost and what was taken away, in words."""
        taken = self.taken_away()
        others = "" if taken is None else f" The host gave {taken:.0%} of the processors' time to others meanwhile."
        return f"After a pause of a millisecond, Python takes {self.after_a_pause:.1f} times as long here.{others}"


def _processor_times() -> list[int] | None:
    """How long all processors together were in each of their states; None where that is not to be had."""
    found = Path("/proc/stat")
    if not found.exists():
        return None
    return [int(ticks) for ticks in found.read_text().split("\n", 1)[0].split()[1 : _STEAL + 2]]


def _after_a_pause() -> float:
    """In turns, so that both meet the same machine."""
    at_once: list[float] = []
    paused: list[float] = []
    for _ in range(_TIMES):
        at_once.append(_seconds_of_python())
        time.sleep(_PAUSE_SEC)
        paused.append(_seconds_of_python())
        _seconds_of_python()  # what comes next follows at once
    return median(paused) / median(at_once)


def _seconds_of_python() -> float:
    """As much as some durable steps take, in as many places of the standard library as could be."""
    began = time.perf_counter()
    configparser.ConfigParser().read_string("[order]\nid = 17\neuros = 42\n")
    json.dumps({"order": {"id": 17, "lines": [1, 2, {"euros": 42}]}}, indent=1)
    textwrap.fill("Whoever waits for a commit has slept, and finds that others have been here. " * 2, 40)
    return time.perf_counter() - began
