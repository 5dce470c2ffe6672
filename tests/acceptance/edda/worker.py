"""A process of the real Edda that does what lines of JSON on its input ask for, and answers with lines of JSON.

It is run by the Python that has Edda (`environment.py`); tests talk to it through `neighbour.py`. Edda's background
loops run here as always; commands run a loop's body at once, because the loops pause for up to half a minute.
"""

import asyncio
import json
import sys
import time
import traceback
from typing import Any

import httpx2
from cloudevents.http import CloudEvent
from edda import (
    EddaApp,
    WorkflowContext,
    activity,
    publish,
    receive,
    send_event_transactional,
    send_to,
    sleep,
    subscribe,
    wait_event,
    workflow,
)
from edda.outbox.relayer import OutboxRelayer
from edda.storage.sqlalchemy_storage import WorkflowInstance
from sqlalchemy import insert
from sqlalchemy.exc import SQLAlchemyError

DONE = ("completed", "failed", "cancelled")
PATIENCE_SEC = 30.0


@activity
async def double(ctx: WorkflowContext, number: int) -> int:
    return 2 * number


@activity
async def emit(ctx: WorkflowContext, event_type: str, data: dict[str, Any]) -> str:
    return await send_event_transactional(ctx, event_type, "edda", data)


@workflow
async def doubler(ctx: WorkflowContext, number: int) -> int:
    return await double(ctx, number)


@workflow
async def emitter(ctx: WorkflowContext, event_type: str, data: dict[str, Any]) -> str:
    return await emit(ctx, event_type, data)


@workflow
async def receiver(
    ctx: WorkflowContext,
    channel: str,
    mode: str = "broadcast",
    count: int = 1,
    timeout: int | None = None,
    gate: str | None = None,
) -> list[Any]:
    """Receive some messages; with a gate, let them pile up until a message comes through that channel."""
    await subscribe(ctx, channel, mode=mode)
    if gate is not None:
        await subscribe(ctx, gate)
        await receive(ctx, gate)
    return [(await receive(ctx, channel, timeout_seconds=timeout)).data for _ in range(count)]


@workflow
async def event_waiter(ctx: WorkflowContext, event_type: str) -> dict[str, Any]:
    event = await wait_event(ctx, event_type)
    return {"type": event.type, "source": event.source, "data": event.data}


@workflow
async def sender(ctx: WorkflowContext, target: str, data: dict[str, Any]) -> bool:
    return await send_to(ctx, instance_id=target, data=data)


@workflow
async def sleeper(ctx: WorkflowContext, seconds: int) -> None:
    await sleep(ctx, seconds)


class Broker:
    """An HTTP server that accepts every event and remembers its id."""

    url: str

    def __init__(self) -> None:
        self.received: list[str] = []

    async def __aenter__(self) -> "Broker":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split("\r\n")[0])
        self.received.append(json.loads(await reader.readexactly(length))["id"])
        writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


class Commands:
    """One method for each thing that can be asked for."""

    app: EddaApp | None = None

    def __init__(self) -> None:
        self._running = asyncio.Lock()

    async def open(self, url: str) -> None:
        """Start an Edda application, as its users do."""
        # shutdown() keeps the leader's lease: let it be short, for the next application on the same database.
        self.app = EddaApp(service_name="edda", db_url=url, leader_heartbeat_interval=1, leader_lease_duration=3)
        try:
            self._resume_one_at_a_time(self.app)
            await self.app.initialize()
        except BaseException:
            await self.app.storage.close()
            self.app = None
            raise

    def _resume_one_at_a_time(self, app: EddaApp) -> None:
        """Edda stores an instance before it locks it: in between, its own loop could run it a second time."""
        resume = app._resume_running_workflows

        async def resume_alone() -> int:
            async with self._running:
                return await resume()

        app._resume_running_workflows = resume_alone

    async def close(self) -> None:
        if self.app is not None:
            await self.app.shutdown()
            self.app = None

    async def start(self, workflow: str, **arguments: Any) -> str:
        """Start a workflow and run it until it waits or ends; its instance id."""
        async with self._running:
            return await globals()[workflow].start(**arguments)

    async def outcome(self, instance_id: str) -> dict[str, Any]:
        """Resume what can be resumed until this instance has ended; its status and output."""
        instance = await self._until(instance_id, *DONE)
        return {"status": instance["status"], "output": instance["output_data"]}

    async def until_waiting(self, instance_id: str) -> None:
        """Resume what can be resumed until this instance waits for a message, and may be delivered to."""
        await self._until(instance_id, "waiting_for_message")

    async def _until(self, instance_id: str, *statuses: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SEC
        while (instance := await self._instance(instance_id))["status"] not in statuses:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{instance_id} is still {instance['status']}")
            await self.app._resume_running_workflows()
            await asyncio.sleep(0.02)
        return instance

    async def status(self, instance_id: str) -> str:
        return (await self._instance(instance_id))["status"]

    async def _instance(self, instance_id: str) -> dict[str, Any]:
        return await self.app.storage.get_instance(instance_id)

    async def cycle(self) -> None:
        """Run the body of every background loop once."""
        await self.app.storage.cleanup_stale_locks()
        await self.app._check_expired_timers()
        await self.app._check_expired_message_subscriptions()
        await self.app.storage.cleanup_old_channel_messages(7)
        await self.app._resume_running_workflows()

    async def publish(self, channel: str, data: dict[str, Any]) -> str:
        return await publish(self.app.storage, channel, data, worker_id=self.app.worker_id)

    async def take(self, instance_id: str, channel: str) -> bool:
        """Take a message out of the queue of a competing channel, as `receive` does; whether it was got."""
        storage = self.app.storage
        pending = await storage.get_pending_channel_messages(instance_id, channel)
        try:
            if not pending or not await storage.claim_channel_message(pending[0]["message_id"], instance_id):
                return False
        except SQLAlchemyError:  # it was gone: Edda stumbles over its own handling of that
            return False
        await storage.delete_channel_message(pending[0]["message_id"])
        return True

    async def cloudevent(self, type: str, data: dict[str, Any]) -> None:
        await self.app.handle_cloudevent(CloudEvent({"type": type, "source": "a-shop"}, data), wait=True)

    async def relay(self) -> list[str]:
        """Let Edda's relayer send one batch from the outbox; the ids that a broker received."""
        async with Broker() as broker, httpx2.AsyncClient() as client:
            relayer = OutboxRelayer(self.app.storage, broker.url)
            relayer._http_client = client
            await relayer._poll_and_publish()
        return broker.received

    async def lock(self, instance_id: str, worker: str) -> bool:
        return await self.app.storage.try_acquire_lock(instance_id, worker)

    async def populate(self, count: int) -> None:
        """Many finished instances, through Edda's own table definition."""
        first = await self._instance(await self.start("doubler", number=1))
        row = {key: first[key] for key in ("workflow_name", "source_hash", "owner_service", "status")}
        row |= {"input_data": '{"number": 1}', "output_data": '{"result": 2}'}
        rows = [{**row, "instance_id": f"doubler-{number:08d}"} for number in range(1, count)]
        async with self.app.storage.engine.begin() as connection:
            for start in range(0, len(rows), 1000):
                await connection.execute(insert(WorkflowInstance), rows[start : start + 1000])


async def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed is no answer
    commands = Commands()
    while line := await asyncio.to_thread(sys.stdin.readline):
        question = json.loads(line)
        try:
            answer = {"answer": await getattr(commands, question["ask"])(**question["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
    await commands.close()


asyncio.run(main())
