"""A saga: three steps that belong together, each with the step that undoes it.

    python examples/order_saga.py

One order goes through. One fails at its last step, one is cancelled while it waits: what they did is undone, last step
first. Nothing of that is in the workflow's body; it is said once, where an activity is defined.
"""

import asyncio
import os

from romancy import (
    App,
    TerminalError,
    WorkflowCancelledError,
    WorkflowFailedError,
    activity,
    receive_direct,
    subscribe,
    workflow,
)

DATABASE = os.environ.get("ROMANCY_URL", "sqlite://:memory:")


async def refund(order: str, amount: int, result: str | None) -> None:
    # `result` is what charge returned; None if it was cut off and may have charged or not.
    print(f"  {order}: refund {amount} euros, {result}")


@activity(compensate=refund)
async def charge(order: str, amount: int) -> str:
    print(f"  {order}: charge {amount} euros")
    return f"receipt R-{order}"


async def put_back(order: str) -> None:
    print(f"  {order}: put the goods back on the shelf")


@activity(compensate=put_back)
async def reserve(order: str) -> None:
    print(f"  {order}: reserve the goods")


@activity
async def ship(order: str, address: str) -> str:
    if address == "nowhere":
        raise TerminalError("there is no such address")  # trying again is no use
    print(f"  {order}: ship to {address}")
    return f"{order} is on its way to {address}"


@workflow
async def fulfil(order: str, amount: int) -> str:
    await charge(order, amount)
    await reserve(order)
    await subscribe("address", "direct")
    address = (await receive_direct("address")).data
    return await ship(order, address)


async def main() -> None:
    async with App(DATABASE, workflows=[fulfil]) as app:
        good = await app.start(fulfil, "order-1", 30, id="order-1")
        await app.send_to("order-1", "Paris", channel="address")
        print("=>", await good.result())

        bad = await app.start(fulfil, "order-2", 40, id="order-2")
        await app.send_to("order-2", "nowhere", channel="address")
        try:
            await bad.result()
        except WorkflowFailedError as error:
            print("=>", error)

        regretted = await app.start(fulfil, "order-3", 50, id="order-3")
        while await regretted.status() != "waiting_for_message":
            await asyncio.sleep(0.05)
        await regretted.cancel("the customer changed their mind")
        try:
            await regretted.result()
        except WorkflowCancelledError as error:
            print("=>", error)


if __name__ == "__main__":
    asyncio.run(main())
