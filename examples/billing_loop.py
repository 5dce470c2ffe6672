"""A loop that never ends: a customer is charged every month until they cancel.

    python examples/billing_loop.py          a month takes a second
    python examples/billing_loop.py 0.2      or less

`recur` starts the same instance over with new arguments. The history of the past month goes to the archive, so that a
loop of many years stays as quick as on its first day. Subscriptions stay, and no message is lost in between.
"""

import asyncio
import os
import sys
from datetime import timedelta

from romancy import App, ReceiveTimeoutError, activity, receive_direct, recur, subscribe, workflow

DATABASE = os.environ.get("ROMANCY_URL", "sqlite://:memory:")


@activity
async def charge(customer: str, month: int) -> None:
    print(f"  month {month}: {customer} pays 9 euros")


@workflow
async def subscription(customer: str, month: int, a_month: timedelta) -> str:
    await charge(customer, month)
    await subscribe("cancel", "direct")
    try:
        wish = await receive_direct("cancel", timeout=a_month)
    except ReceiveTimeoutError:
        recur(customer, month + 1, a_month)
    return f"{customer} left after {month} months: {wish.data}"


async def main(a_month: timedelta) -> None:
    async with App(DATABASE, workflows=[subscription]) as app:
        handle = await app.start(subscription, "Ada", 1, a_month, id="subscription of Ada")
        await asyncio.sleep(3.5 * a_month.total_seconds())
        await app.send_to(handle.id, "too much coffee", channel="cancel")
        print("=>", await handle.result())

        archived = await app.storage.get_archived_history(handle.id)
        print(f"   {len(await handle.history())} steps in the last month's history, {len(archived)} in the archive")


if __name__ == "__main__":
    asyncio.run(main(timedelta(seconds=float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)))
