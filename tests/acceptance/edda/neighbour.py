"""Edda as the tests see it: another program, on the same database."""

import asyncio
import json
import select
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from .environment import edda_python

WORKER = Path(__file__).with_name("worker.py")
PATIENCE_SEC = 60.0

_SCHEMES = {"postgresql": "postgresql+asyncpg", "mysql": "mysql+aiomysql"}


class Edda:
    """A process of Edda; it opens one database after the other. What can be asked for: `worker.py`."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        self._process = subprocess.Popen(
            [edda_python(), WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    async def ask(self, what: str, **arguments: Any) -> Any:
        """Have Edda do something; its answer. Other tasks of ours run meanwhile."""
        return await asyncio.to_thread(self._ask, what, arguments)

    def _ask(self, what: str, arguments: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"ask": what, "arguments": arguments}), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_SEC)
        line = self._process.stdout.readline() if ready else ""
        answer = json.loads(line) if line else {"error": "no answer"}
        if "error" in answer:
            raise EddaError(f"{what}: {answer['error']}\n{self._end_of_log()}")
        return answer["answer"]

    def _end_of_log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]

    async def open(self, url: str, *, attempts: int = 5) -> None:
        """Start Edda's application on a database of ours.

        Its lock for migrations is one for all databases of a MariaDB server. When anybody holds it, for whatever
        database, Edda goes on after a second as if its own had been migrated, fails, and has to be started again.
        """
        scheme, _, rest = url.partition("://")
        for attempt in range(1, attempts + 1):
            try:
                await self.ask("open", url=f"{_SCHEMES.get(scheme, scheme)}://{rest}")
                return
            except EddaError as error:
                if attempt == attempts or "schema_version" not in str(error):
                    raise

    async def close(self) -> None:
        await self.ask("close")

    async def start(self, workflow: str, **arguments: Any) -> str:
        """Start a workflow and run it until it waits or ends; its instance id."""
        instance_id: str = await self.ask("start", workflow=workflow, **arguments)
        return instance_id

    def take(self, instance_id: str, channel: str) -> bool:
        """Take a message from a competing channel, at once and from any thread; whether there was one to take."""
        taken: bool = self._ask("take", {"instance_id": instance_id, "channel": channel})
        return taken

    async def result(self, instance_id: str) -> Any:
        """What the workflow returned, once it has completed."""
        outcome = await self.ask("outcome", instance_id=instance_id)
        assert outcome["status"] == "completed", outcome
        return outcome["output"]["result"]


class EddaError(Exception):
    """What Edda complained of."""
