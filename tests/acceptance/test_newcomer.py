"""What the README promises to somebody who has nothing but the README."""

import asyncio
import re
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


async def start(directory: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-u", "orders.py", cwd=directory, stdout=asyncio.subprocess.PIPE
    )


async def finished(process: asyncio.subprocess.Process) -> list[str]:
    async with asyncio.timeout(30):
        printed, _ = await process.communicate()
    return printed.decode().splitlines()


async def test_the_first_workflow_is_killed_and_goes_on_where_it_was(tmp_path: Path) -> None:
    program = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "orders.py").write_text(program)

    killed = await start(tmp_path)
    assert killed.stdout is not None
    assert (await killed.stdout.readline()).decode() == "charging 42 euros for order-17\n"
    await asyncio.sleep(1)
    killed.kill()
    assert await finished(killed) == []

    assert await finished(await start(tmp_path)) == ["shipping order-17", "receipt for order-17"]
    assert await finished(await start(tmp_path)) == ["receipt for order-17"]
