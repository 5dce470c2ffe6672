"""Exactly once: a step that changes your own tables, in one transaction with its record.

    python examples/transfer.py

A plain activity may run twice if its process dies before the result is recorded. A transactional one cannot: what it
does through `conn()`, its events and its record are committed together, or not at all.
"""

import asyncio
import os

from romancy import App, Retry, TerminalError, activity, activity_context, conn, emit, workflow

DATABASE = os.environ.get("ROMANCY_URL", "sqlite://:memory:")


class NotEnoughMoneyError(TerminalError): ...


@activity(transactional=True, retry=Retry(initial_sec=0.1))
async def transfer(payer: str, payee: str, amount: int) -> int:
    taken = await conn().execute(
        "UPDATE accounts SET balance = balance - :amount WHERE name = :name AND balance >= :amount",
        amount=amount,
        name=payer,
    )
    if not taken:
        raise NotEnoughMoneyError(f"{payer} does not have {amount} euros")
    if activity_context().attempt == 1:
        print(f"  {payer} has paid {amount} euros to {payee}, and the power fails ...")
        raise ConnectionError("which rolls everything back; the next attempt starts afresh")
    await conn().execute(
        "UPDATE accounts SET balance = balance + :amount WHERE name = :name", amount=amount, name=payee
    )
    await emit("money.transferred", {"from": payer, "to": payee, "amount": amount})
    return int(await conn().fetch_value("SELECT balance FROM accounts WHERE name = :name", name=payee))


@workflow
async def settle(debts: list[tuple[str, str, int]]) -> list[str]:
    told = []
    for payer, payee, amount in debts:
        try:
            told.append(f"{payee} now has {await transfer(payer, payee, amount)}")
        except NotEnoughMoneyError as error:
            told.append(str(error))
    return told


async def balances(app: App) -> str:
    rows = await app.storage.conn().fetch_all("SELECT name, balance FROM accounts ORDER BY name")
    return f"{dict(map(tuple, rows))}, {sum(row[1] for row in rows)} in all"


async def main() -> None:
    async with App(DATABASE, workflows=[settle]) as app:
        await app.storage.conn().execute("CREATE TABLE accounts (name VARCHAR(20) PRIMARY KEY, balance INTEGER)")
        await app.storage.conn().execute("INSERT INTO accounts VALUES ('Ada', 100), ('Bob', 20)")
        print("before:", await balances(app))
        handle = await app.start(settle, [("Ada", "Bob", 30), ("Bob", "Ada", 5), ("Bob", "Ada", 500)], id="friday")
        print("=>", "; ".join(await handle.result()))
        print("after: ", await balances(app))
        events = await app.storage.get_pending_outbox_events()
        print("events:", ", ".join(f"{event.event_type} {event.event_data}" for event in events))


if __name__ == "__main__":
    asyncio.run(main())
