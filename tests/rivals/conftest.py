"""The two arenas: twenty tasks on two storages of this process, and four processes with five tasks each."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Harness
from tests.rivals.actions import ACTIONS

RIVALS = 20
PROCESSES = 4


class Process:
    """A process that waits for jobs; see `worker.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rivals.worker"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process has ended"}')
        assert "error" not in answer, answer["error"]
        return answer

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=10)


@pytest.fixture(scope="session")
def processes() -> Iterator[list[Process]]:
    started = [Process() for _ in range(PROCESSES)]
    yield started
    for process in started:
        process.end()


class Arena:
    """Lets all rivals loose at once."""

    def __init__(self, harness: Harness, processes: list[Process]) -> None:
        self._harness = harness
        self._processes = processes
        self._fights = count(1)

    async def fight(self, action: str, **arguments: Any) -> list[Any]:
        """What each rival came back with."""
        names = [f"rival-{next(self._fights)}-{number}" for number in range(RIVALS)]
        if self._processes:
            return await asyncio.to_thread(self._in_processes, action, names, arguments)
        storages = [await self._harness.open(), await self._harness.open()]
        return await asyncio.gather(
            *(ACTIONS[action](storages[number % 2], name, **arguments) for number, name in enumerate(names))
        )

    def _in_processes(self, action: str, names: list[str], arguments: dict[str, Any]) -> list[Any]:
        try:
            return self._told(action, names, arguments)
        except BaseException:
            for number, process in enumerate(self._processes):  # some of them wait for a word that will never come
                process.kill()
                self._processes[number] = Process()
            raise

    def _told(self, action: str, names: list[str], arguments: dict[str, Any]) -> list[Any]:
        for number, process in enumerate(self._processes):
            job = {
                "url": self._harness.url,
                "action": action,
                "names": names[number::PROCESSES],
                "clock": self._harness.clock,
                "arguments": arguments,
            }
            process.tell(json.dumps(job))
        for process in self._processes:
            assert process.answer() == "ready"
        for process in self._processes:
            process.tell("go")
        return [outcome for process in self._processes for outcome in process.answer()["outcomes"]]


@pytest.fixture(params=["tasks", "processes"])
def arena(request: pytest.FixtureRequest, harness: Harness) -> Arena:
    return Arena(harness, [] if request.param == "tasks" else request.getfixturevalue("processes"))
