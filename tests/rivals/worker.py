"""A process full of rivals: reads what to do, says when it is ready, waits for the word, and tells what came of it.

One line each way, in JSON: {"url", "action", "names", "clock", "arguments"} → "ready" → go → {"outcomes"} or {"error"}.
"""

import asyncio
import json
import sys
import traceback
from typing import Any

from romancy.storage import open_storage
from tests.rivals.actions import ACTIONS


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


async def fight(job: dict[str, Any]) -> list[Any]:
    action = ACTIONS[job["action"]]
    async with open_storage(job["url"]) as storage:
        storage.runner.driver.clock_offset = job["clock"]
        await storage.get_instance("nobody")  # connected
        say("ready")
        sys.stdin.readline()
        return await asyncio.gather(*(action(storage, name, **job["arguments"]) for name in job["names"]))


for line in sys.stdin:
    try:
        say({"outcomes": asyncio.run(fight(json.loads(line)))})
    except Exception:
        say({"error": traceback.format_exc()})
