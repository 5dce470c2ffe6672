"""Two workflows talking to each other.

    python examples/chat.py

Each message reaches its receiver once and in order, even if it was sent before the receiver existed, and even if either
of them is killed between any two lines.
"""

import asyncio
import os

from romancy import App, activity, receive_direct, send_to, subscribe, workflow

DATABASE = os.environ.get("ROMANCY_URL", "sqlite://:memory:")

DIALOGUE = ["Knock, knock.", "Who's there?", "Tank.", "Tank who?", "You're welcome."]


@activity
async def show(who: str, line: str) -> None:
    print(f"  {who + ':':<6} {line}")  # an activity, so that a replay does not print it again


@workflow
async def chat(me: str, friend: str, turn: int) -> int:
    await subscribe("chat", "direct")
    heard = 0
    for number, line in enumerate(DIALOGUE):
        if number % 2 == turn:
            await show(me, line)
            await send_to(friend, line, channel="chat")
        else:
            message = await receive_direct("chat")
            heard += len(message.data)
    return heard


async def main() -> None:
    async with App(DATABASE, workflows=[chat]) as app:
        ada = await app.start(chat, "Ada", "bob", 0, id="ada")
        bob = await app.start(chat, "Bob", "ada", 1, id="bob")
        print(f"=> Ada has heard {await ada.result()} letters, Bob {await bob.result()}")


if __name__ == "__main__":
    asyncio.run(main())
