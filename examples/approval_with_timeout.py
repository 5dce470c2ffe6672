"""Waiting for a person, but not for ever.

    python examples/approval_with_timeout.py

An expense waits until somebody decides, or until their time is up. While it waits, nothing runs: neither a process nor
a connection is held, and it may take weeks. Here the time is up after a second.
"""

import asyncio
import os
from datetime import timedelta

from romancy import App, ReceiveTimeoutError, activity, receive_direct, subscribe, workflow

DATABASE = os.environ.get("ROMANCY_URL", "sqlite://:memory:")


@activity
async def ask(person: str, claim: str) -> None:
    print(f"  to {person}: please decide about {claim!r}")


@workflow
async def expense(claim: str, patience: timedelta) -> str:
    await subscribe("decision", "direct")
    for person in ("the manager", "the director"):
        await ask(person, claim)
        try:
            decision = await receive_direct("decision", timeout=patience)
        except ReceiveTimeoutError:
            continue  # recorded as well: after a crash the manager is not asked again
        return f"{decision.data['verdict']} by {decision.data['by']}"
    return "rejected, since nobody cared"


async def main() -> None:
    async with App(DATABASE, workflows=[expense]) as app:
        claims = ["a train ticket", "a dinner", "a helicopter"]
        handles = [await app.start(expense, claim, timedelta(seconds=1), id=claim) for claim in claims]

        # Usually from another process: a web service, a chat bot, a script.
        await app.send_to("a train ticket", {"verdict": "approved", "by": "Ada"}, channel="decision")
        await asyncio.sleep(1.5)
        await app.send_to("a dinner", {"verdict": "rejected", "by": "Grace"}, channel="decision")

        for handle in handles:
            print(f"=> {handle.id}: {await handle.result()}")


if __name__ == "__main__":
    asyncio.run(main())
