"""A web service whose orders outlive it.

    python examples/fastapi_service.py                    a visit to the service, then the end
    uvicorn --app-dir examples fastapi_service:service    the service itself

The workflows run in the process of the web service, started and stopped by its lifespan. They could as well run in
others: with `worker=False` the service only starts and queries them, and ``romancy worker`` runs them.
(Needs FastAPI, uvicorn and httpx, which are in romancy's extra `examples`.)
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, HTTPException

from romancy import App, WorkflowHandle, activity, receive_direct, subscribe, workflow
from romancy.storage import InstanceNotFoundError

DATABASE = os.environ.get("ROMANCY_URL", "sqlite://:memory:")


@activity
async def bake(pizza: str) -> str:
    return f"a hot {pizza}"


@workflow
async def order(pizza: str) -> str:
    await subscribe("payment", "direct")
    payment = await receive_direct("payment")
    return f"{await bake(pizza)} for {payment.data['euros']} euros"


pizzeria = App(DATABASE, workflows=[order])


@asynccontextmanager
async def lifespan(service: FastAPI) -> AsyncIterator[None]:
    async with pizzeria:
        yield


service = FastAPI(lifespan=lifespan)


@service.put("/orders/{order_id}", status_code=202)
async def place(order_id: str, pizza: str) -> dict[str, str]:
    """Asking twice is harmless: the same id is the same order."""
    handle = await pizzeria.start(order, pizza, id=order_id)
    return {"id": handle.id, "status": await handle.status()}


@service.post("/orders/{order_id}/payment", status_code=202)
async def pay(order_id: str, euros: int) -> None:
    await pizzeria.send_to(order_id, {"euros": euros}, channel="payment")


@service.get("/orders/{order_id}")
async def look(order_id: str) -> dict[str, str]:
    handle: WorkflowHandle[str] = pizzeria.handle(order_id, order)
    try:
        return {"id": handle.id, "status": await handle.status()}
    except InstanceNotFoundError:
        raise HTTPException(404, f"there is no order {order_id}") from None


@service.get("/orders/{order_id}/pizza")
async def eat(order_id: str) -> str:
    try:
        return await pizzeria.handle(order_id, order).result(timeout=10)
    except TimeoutError:
        raise HTTPException(504, "not ready yet; ask again") from None


async def visit() -> None:
    """What a browser would do, without a network in between."""
    transport = httpx.ASGITransport(service)
    async with lifespan(service), httpx.AsyncClient(transport=transport, base_url="http://pizzeria") as browser:
        for method, path in [
            ("PUT", "/orders/7?pizza=margherita"),
            ("PUT", "/orders/7?pizza=margherita"),
            ("GET", "/orders/7"),
            ("GET", "/orders/8"),
            ("POST", "/orders/7/payment?euros=9"),
            ("GET", "/orders/7/pizza"),
        ]:
            answer = await browser.request(method, path)
            print(f"{method:<4} {path:<26}  {answer.status_code}  {answer.text}")


if __name__ == "__main__":
    asyncio.run(visit())
