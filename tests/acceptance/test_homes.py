"""A program is a script today and imported by a worker tomorrow: its functions and errors are found again."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from romancy import App, WorkflowFailedError
from romancy.storage import WorkflowStatus

PROGRAM = """
import asyncio
from pathlib import Path

from romancy import NO_RETRY, App, Settings, activity, receive, subscribe, workflow

class DeclinedError(Exception): ...

async def refund(order: str) -> None:
    Path("refunded").write_text(order)

@activity(compensate=refund)
async def charge(order: str) -> None: ...

@activity(retry=NO_RETRY)
async def decline() -> None:
    raise DeclinedError("no")

@workflow
async def shop(order: str) -> None:
    await charge(order)
    try:
        await decline()
    except DeclinedError:
        await subscribe("go")
        await receive("go")
        raise

app = App("sqlite:///shop.db", workflows=[shop], settings=Settings(lock_timeout_sec=2, heartbeat_sec=0.5, poll_sec=0.1))

async def main() -> None:
    async with app:
        await (await app.start(shop, "17", id="17")).result()

if __name__ == "__main__":
    asyncio.run(main())
"""


@asynccontextmanager
async def running(directory: Path, *arguments: str) -> AsyncIterator[None]:
    """A process of Python, killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=directory, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it may have ended by itself
            process.kill()
        await process.wait()


async def waits(client: App) -> bool:
    instance = await client.storage.get_instance("17")
    return instance is not None and instance.status is WorkflowStatus.WAITING_FOR_MESSAGE


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [(["program.py"], ["-m", "romancy", "worker", "program:app"]), (["-m", "program"], ["program.py"])],
    ids=["script, then worker", "module, then script"],
)
async def test_what_one_process_began_another_goes_on_with(
    tmp_path: Path, begins: list[str], goes_on: list[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    async with App(f"sqlite:///{tmp_path}/shop.db", worker=False) as client:
        async with running(tmp_path, *begins), asyncio.timeout(30):
            while not await waits(client):
                await asyncio.sleep(0.05)
        await client.publish("go", None)
        async with running(tmp_path, *goes_on):
            with pytest.raises(WorkflowFailedError, match="DeclinedError: no"):
                await client.handle("17").result(30)
    assert (tmp_path / "refunded").read_text() == "17"
