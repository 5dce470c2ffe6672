"""Connections that are cut, late, frozen, or were never to be had."""

import asyncio
import socket
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest

from romancy.storage import (
    ChannelMode,
    InvalidStatusTransitionError,
    Lock,
    LockLostError,
    OutboxEvent,
    OutcomeUnknownError,
    SQLStorage,
    StorageUnavailableError,
    TransactionDeadlineError,
    TransientStorageError,
    WorkflowStatus,
    open_storage,
)
from tests.faults.leaks import assert_nothing_is_held
from tests.faults.proxy import Proxy, proxied
from tests.harness import Harness, history_of, step

pytestmark = pytest.mark.databases("postgres", "mariadb", "mysql")


class Line(NamedTuple):
    """A storage behind a proxy, and another one with a line of its own."""

    proxy: Proxy
    storage: SQLStorage
    direct: SQLStorage
    commit: bytes
    """How a commit looks on the wire."""


@pytest.fixture
async def line(harness: Harness, storage: SQLStorage) -> AsyncIterator[Line]:
    async with proxied(harness.url) as proxy, open_storage(proxy.url) as behind:
        yield Line(proxy, behind, storage, b"COMMIT\0" if harness.name == "postgres" else b"\3COMMIT")


async def warm_up(harness: Harness, line: Line) -> None:
    """Let the connection know the statement: from now on PostgreSQL is sent only its parameters."""
    lock = await harness.locked(line.storage)
    await line.storage.append_history(step(lock.instance_id), lock=lock)
    await line.storage.append_history(step(lock.instance_id, "charge:2"))


async def locked_again(harness: Harness, storage: SQLStorage) -> Lock:
    """The lock of an instance that was given back before, so that completing it takes several statements."""
    first = await harness.locked(storage)
    await storage.release_lock(first.instance_id, first.worker_id)
    lock = await storage.try_acquire_lock(first.instance_id, first.worker_id, 60)
    assert lock is not None
    return lock


async def completed(storage: SQLStorage, lock: Lock) -> bool:
    instance = await storage.get_instance(lock.instance_id)
    assert instance is not None
    return instance.status == WorkflowStatus.COMPLETED


# Cut in the middle of an operation.


@pytest.mark.parametrize("word", [b"BEGIN", b"workflow_instances AS i", b"FROM romancy_receipts"])
async def test_an_operation_cut_before_its_commit_is_run_again(harness: Harness, line: Line, word: bytes) -> None:
    lock = await locked_again(harness, line.direct)

    line.proxy.cut_when_sent = word
    await line.storage.update_instance_output(lock.instance_id, '"done"', lock=lock)

    assert line.proxy.cuts == 1
    assert await completed(line.direct, lock)
    await assert_nothing_is_held(line.storage)


@pytest.mark.parametrize("word", [b"workflow_instances AS i", b"FROM romancy_receipts"])
async def test_an_operation_cut_before_an_answer_is_run_again(harness: Harness, line: Line, word: bytes) -> None:
    lock = await locked_again(harness, line.direct)

    line.proxy.cut_when_answered = word
    await line.storage.update_instance_output(lock.instance_id, '"done"', lock=lock)

    assert line.proxy.cuts == 1
    assert await completed(line.direct, lock)


async def test_an_operation_cut_before_its_commit_arrives_is_of_unknown_outcome(harness: Harness, line: Line) -> None:
    lock = await locked_again(harness, line.direct)

    line.proxy.cut_when_sent = line.commit
    with pytest.raises(OutcomeUnknownError, match="complete"):
        await line.storage.update_instance_output(lock.instance_id, '"done"', lock=lock)

    assert not await completed(line.direct, lock)
    await line.storage.update_instance_output(lock.instance_id, '"done"', lock=lock)
    await assert_nothing_is_held(line.storage)


async def test_an_operation_cut_after_its_commit_is_of_unknown_outcome(harness: Harness, line: Line) -> None:
    lock = await locked_again(harness, line.direct)

    line.proxy.cut_when_answered = line.commit
    with pytest.raises(OutcomeUnknownError, match="complete"):
        await line.storage.update_instance_output(lock.instance_id, '"done"', lock=lock)

    assert await completed(line.direct, lock)


async def test_a_completion_that_cannot_find_out_what_came_of_it_says_so(harness: Harness, line: Line) -> None:
    lock = await harness.locked(line.direct)
    await line.storage.update_instance_output((first := await harness.locked(line.direct)).instance_id, "1", lock=first)

    line.proxy.cut_when_answered, line.proxy.closed_after_cut = b"done", True
    with pytest.raises(OutcomeUnknownError):
        await line.storage.update_instance_output(lock.instance_id, '"done"', lock=lock)

    assert await completed(line.direct, lock)


async def test_a_completion_that_a_rival_has_prevented_is_not_taken_for_done(harness: Harness, line: Line) -> None:
    lock = await harness.locked(line.direct)

    line.proxy.cut_when_sent = b"has_ties"
    completing = asyncio.create_task(line.storage.update_instance_output(lock.instance_id, '"done"', lock=lock))
    while not line.proxy.cuts:
        await asyncio.sleep(0)
    await line.direct.update_instance_output(lock.instance_id, '"other"')

    with pytest.raises((LockLostError, InvalidStatusTransitionError)):
        await completing


@pytest.mark.parametrize("many", [1, 5])
@pytest.mark.parametrize("cut", ["cut_when_sent", "cut_when_answered"])
@pytest.mark.parametrize("recording", [False, True])
async def test_a_completion_by_one_statement_finds_out_what_came_of_it(
    harness: Harness, line: Line, cut: str, many: int, recording: bool
) -> None:
    async def complete(output: str) -> list[Lock]:
        locks = [await harness.locked(line.direct) for _ in range(many)]
        records = [step(lock.instance_id) if recording else None for lock in locks]
        await asyncio.gather(
            *(
                line.storage.update_instance_output(lock.instance_id, output, lock=lock, record=record)
                for lock, record in zip(locks, records, strict=True)
            )
        )
        return locks

    await complete('"warm"')  # from now on PostgreSQL is sent only parameters
    setattr(line.proxy, cut, b"done")
    locks = await complete('"done"')

    assert line.proxy.cuts == 1
    assert [await completed(line.direct, lock) for lock in locks] == [True] * many
    assert [len(await history_of(line.direct, lock.instance_id)) for lock in locks] == [int(recording)] * many
    await assert_nothing_is_held(line.storage)


@pytest.mark.parametrize("cut", ["cut_when_sent", "cut_when_answered"])
async def test_a_publish_is_never_repeated_when_its_outcome_is_unknown(line: Line, cut: str) -> None:
    setattr(line.proxy, cut, line.commit)
    with pytest.raises(OutcomeUnknownError):
        await line.storage.publish_to_channel("news", "1")

    published = await line.direct.get_pending_channel_messages("news")
    assert len(published) == (1 if cut == "cut_when_answered" else 0)


@pytest.mark.parametrize("cut", ["cut_when_sent", "cut_when_answered"])
async def test_claims_of_several_that_are_cut_are_of_unknown_outcome_for_each(
    harness: Harness, line: Line, cut: str
) -> None:
    for _ in range(4):
        await harness.instance(line.direct)

    setattr(line.proxy, cut, line.commit)
    claiming = (line.storage.claim_resumable_workflows(f"worker-{number}", 60, 1) for number in range(3))
    answers = await asyncio.gather(*claiming, return_exceptions=True)

    assert [type(answer) for answer in answers] == [OutcomeUnknownError] * 3
    assert len({id(answer) for answer in answers}) == 3
    assert len(await line.direct.find_resumable_workflows()) == (1 if cut == "cut_when_answered" else 4)
    await assert_nothing_is_held(line.storage)


async def test_claims_of_several_that_are_cut_before_their_commit_are_run_again(harness: Harness, line: Line) -> None:
    for _ in range(4):
        await harness.instance(line.direct)

    line.proxy.cut_when_sent = b"lock_token = lock_token + 1"
    claiming = (line.storage.claim_resumable_workflows(f"worker-{number}", 60, 1) for number in range(3))
    answers = await asyncio.gather(*claiming)

    assert line.proxy.cuts == 1
    assert len({lock.instance_id for claims in answers for _, lock in claims}) == 3
    assert len(await line.direct.find_resumable_workflows()) == 1


@pytest.mark.parametrize("cut", ["cut_when_sent", "cut_when_answered"])
async def test_a_fenced_step_is_recorded_once_wherever_the_connection_is_cut(
    harness: Harness, line: Line, cut: str
) -> None:
    lock = await harness.locked(line.direct)
    await warm_up(harness, line)

    setattr(line.proxy, cut, b"refund:7")
    appended = await line.storage.append_history(step(lock.instance_id, "refund:7"), lock=lock)

    assert line.proxy.cuts == 1
    assert [event.id for event in await history_of(line.direct, lock.instance_id)] == [appended.id]


@pytest.mark.parametrize("cut", ["cut_when_sent", "cut_when_answered"])
async def test_a_step_without_a_fence_is_of_unknown_outcome(harness: Harness, line: Line, cut: str) -> None:
    instance_id = await harness.instance(line.direct)
    await warm_up(harness, line)

    setattr(line.proxy, cut, b"refund:7")
    with pytest.raises(OutcomeUnknownError):
        await line.storage.append_history(step(instance_id, "refund:7"))

    recorded = await history_of(line.direct, instance_id)
    assert len(recorded) == (1 if cut == "cut_when_answered" else 0)


@pytest.mark.parametrize("cut", ["cut_when_sent", "cut_when_answered"])
async def test_a_heartbeat_survives_a_cut(harness: Harness, line: Line, cut: str) -> None:
    lock = await harness.locked(line.direct)

    setattr(line.proxy, cut, line.commit)
    refreshed = await line.storage.refresh_lock(lock.instance_id, lock.worker_id, 300, lock=lock)

    assert refreshed is not None
    assert refreshed.expires_at > lock.expires_at


@pytest.mark.parametrize("cut", ["cut_when_sent", "cut_when_answered"])
async def test_a_read_is_simply_run_again(harness: Harness, line: Line, cut: str) -> None:
    instance_id = await harness.instance(line.direct)

    setattr(line.proxy, cut, b"FROM workflow_instances")

    assert await line.storage.get_instance(instance_id) is not None
    assert line.proxy.cuts == 1


@pytest.mark.parametrize("cut", ["cut_when_sent", "cut_when_answered"])
async def test_marking_an_event_as_sent_knows_its_own_doing_when_it_is_run_again(line: Line, cut: str) -> None:
    for name in ("first", "second"):
        await line.direct.add_outbox_event(OutboxEvent(name, "made", "test"))
    await line.storage.mark_outbox_event_sent("first")

    setattr(line.proxy, cut, b"second")

    assert await line.storage.mark_outbox_event_sent("second") is True
    assert line.proxy.cuts == 1
    assert await line.storage.mark_outbox_event_sent("second") is False


async def test_a_users_own_statement_is_of_unknown_outcome(line: Line) -> None:
    insert = "INSERT INTO system_locks (lock_name, locked_by) VALUES (:name, 'w')"
    await line.storage.conn().execute(insert, name="first")

    line.proxy.cut_when_answered = b"second"
    with pytest.raises(OutcomeUnknownError):
        await line.storage.conn().execute(insert, name="second")

    assert await line.direct.conn().fetch_value("SELECT COUNT(*) FROM system_locks") == 2


# Cut in the middle of a transaction.


@pytest.mark.parametrize("cut", ["cut_when_sent", "cut_when_answered"])
async def test_a_transaction_that_is_cut_has_written_nothing_and_can_be_repeated(
    harness: Harness, line: Line, cut: str
) -> None:
    lock = await harness.locked(line.direct)

    async def block() -> None:
        async with line.storage.transaction():
            await line.storage.append_history(step(lock.instance_id), lock=lock)
            await line.storage.subscribe_to_channel(lock.instance_id, "news", ChannelMode.BROADCAST, lock=lock)

    setattr(line.proxy, cut, b"INSERT INTO channel_subscriptions")
    with pytest.raises(TransientStorageError):
        await block()

    assert await history_of(line.direct, lock.instance_id) == []
    await block()
    assert len(await history_of(line.direct, lock.instance_id)) == 1
    await assert_nothing_is_held(line.storage)


@pytest.mark.parametrize("cut", ["cut_when_sent", "cut_when_answered"])
async def test_a_transaction_cut_at_its_commit_is_of_unknown_outcome(harness: Harness, line: Line, cut: str) -> None:
    lock = await harness.locked(line.direct)
    called_back: list[str] = []

    with pytest.raises(OutcomeUnknownError):
        async with line.storage.transaction():
            line.storage.register_post_commit_callback(lambda: called_back.append("committed"))
            await line.storage.append_history(step(lock.instance_id), lock=lock)
            setattr(line.proxy, cut, line.commit)

    recorded = await history_of(line.direct, lock.instance_id)
    assert len(recorded) == (1 if cut == "cut_when_answered" else 0)
    assert called_back == []
    assert not line.storage.in_transaction()
    await assert_nothing_is_held(line.storage)


async def test_a_transaction_begins_although_idle_connections_were_cut(harness: Harness, line: Line) -> None:
    instance_id = await harness.instance(line.direct)
    await asyncio.gather(*(line.storage.get_instance(instance_id) for _ in range(5)))

    line.proxy.cut_all()
    async with line.storage.transaction():
        await line.storage.append_history(step(instance_id))

    assert len(await history_of(line.direct, instance_id)) == 1


# All connections at once, in the middle of much work.


async def test_nothing_that_was_answered_is_lost_and_nothing_is_doubled_when_connections_keep_breaking(
    harness: Harness, line: Line
) -> None:
    locks = [await harness.locked(line.direct, f"worker-{number}") for number in range(8)]
    answered: dict[str, list[str]] = {lock.instance_id: [] for lock in locks}

    async def work(lock: Lock) -> None:
        for number in range(12):
            activity_id = f"step:{number}"
            while True:
                try:
                    await line.storage.append_history(step(lock.instance_id, activity_id), lock=lock)
                except (TransientStorageError, OutcomeUnknownError):
                    await asyncio.sleep(0.01)
                else:
                    break
            answered[lock.instance_id].append(activity_id)

    async def saw() -> None:
        for number in range(10):
            await asyncio.sleep(0.01 * number)
            line.proxy.cut_all()

    await asyncio.gather(saw(), *(work(lock) for lock in locks))

    for lock in locks:
        history = [event.activity_id for event in await history_of(line.direct, lock.instance_id)]
        assert history == answered[lock.instance_id]
    await line.storage.get_instance(locks[0].instance_id)
    await assert_nothing_is_held(line.storage)


# Late and frozen.


async def test_a_slow_line_only_takes_longer(harness: Harness, line: Line) -> None:
    line.proxy.delay_sec = 0.02
    lock = await harness.locked(line.storage)

    await line.storage.update_instance_output(lock.instance_id, '"done"', lock=lock)

    assert await completed(line.direct, lock)


async def test_a_transaction_on_a_frozen_line_ends_at_its_deadline(harness: Harness, line: Line) -> None:
    instance_id = await harness.instance(line.direct)

    with pytest.raises(TransactionDeadlineError):
        async with line.storage.transaction(deadline_sec=0.2):
            await line.storage.append_history(step(instance_id))
            line.proxy.frozen = True
            await line.storage.append_history(step(instance_id, "charge:2"))
    line.proxy.frozen = False

    await line.storage.append_history(step(instance_id, "charge:3"))
    assert [event.activity_id for event in await history_of(line.direct, instance_id)] == ["charge:3"]
    await assert_nothing_is_held(line.storage)


async def test_a_statement_without_an_answer_is_given_up_and_run_again(harness: Harness, line: Line) -> None:
    lock = await locked_again(harness, line.direct)
    line.proxy.cut_all()
    line.storage.runner.statement_timeout_sec = 0.3  # type: ignore[attr-defined]
    await line.storage.get_instance(lock.instance_id)  # connected anew, with less patience

    line.proxy.frozen = True
    completing = asyncio.create_task(line.storage.update_instance_output(lock.instance_id, '"done"', lock=lock))
    await asyncio.sleep(0.6)
    line.proxy.frozen = False
    await completing

    assert await completed(line.direct, lock)
    await assert_nothing_is_held(line.storage)


async def test_a_flush_without_an_answer_is_given_up_and_its_operations_run_again(harness: Harness, line: Line) -> None:
    locks = [await locked_again(harness, line.direct) for _ in range(3)]
    line.proxy.cut_all()
    line.storage.runner.statement_timeout_sec = 0.3  # type: ignore[attr-defined]
    await asyncio.gather(*(line.storage.append_history(step(lock.instance_id), lock=lock) for lock in locks))

    line.proxy.frozen = True
    connections = line.proxy.connections
    completing = [
        asyncio.create_task(line.storage.update_instance_output(lock.instance_id, '"done"', lock=lock))
        for lock in locks
    ]
    await asyncio.sleep(0.6)
    tried_again = line.proxy.connections > connections
    line.proxy.frozen = False
    await asyncio.gather(*completing)

    assert tried_again
    assert [await completed(line.direct, lock) for lock in locks] == [True] * 3
    await assert_nothing_is_held(line.storage)


async def test_closing_does_not_wait_for_ever_on_a_frozen_line(harness: Harness, storage: SQLStorage) -> None:
    async with proxied(harness.url) as proxy:
        behind = open_storage(proxy.url)
        await asyncio.gather(*(behind.current_time() for _ in range(4)))
        proxy.frozen = True

        begun = time.monotonic()
        await behind.close()

        assert time.monotonic() - begun < 5


# Never to be had.


@pytest.fixture
def silence() -> Iterator[int]:
    """A port where somebody listens and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def nobody() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


SCHEMES = {"postgres": "postgresql", "mariadb": "mariadb", "mysql": "mysql"}


async def test_a_server_that_says_nothing_is_an_error_within_seconds(harness: Harness, silence: int) -> None:
    url = f"{SCHEMES[harness.name]}://ann:hunter2@127.0.0.1:{silence}/orders?connect_timeout=1"
    begun = time.monotonic()

    with pytest.raises(StorageUnavailableError, match=f"127.0.0.1:{silence}/orders: no answer in time") as caught:
        await open_storage(url).get_instance("order-1")

    assert time.monotonic() - begun < 4
    assert_no_password_in(caught.value)


def wrong_urls(good: str, nobody: int) -> dict[str, str]:
    scheme, _, rest = good.partition("://")
    credentials, _, place = rest.rpartition("@")
    user = credentials.partition(":")[0]
    server, _, database = place.partition("/")
    return {
        "password": f"{scheme}://{user}:hunter2@{place}",
        "encoded password": f"{scheme}://{user}:hun%2Fter%402@{place}",
        "user": f"{scheme}://nobody-{user}:hunter2@{place}",
        "database": f"{scheme}://{credentials}@{server}/no_such_{database}",
        "port": f"{scheme}://{user}:hunter2@127.0.0.1:{nobody}/{database}",
        "host": f"{scheme}://{user}:hunter2@no-such-host.invalid:1234/{database}",
        "DSN": f"{user}:hunter2@tcp({server})/{database}",
    }


@pytest.mark.parametrize("what", ["password", "encoded password", "user", "database", "port", "host", "DSN"])
async def test_a_wrong_address_is_a_clear_error_without_the_password(harness: Harness, nobody: int, what: str) -> None:
    if what == "DSN" and harness.name == "postgres":
        return  # Go's form is MySQL's
    url = wrong_urls(harness.url, nobody)[what]
    begun = time.monotonic()

    with pytest.raises(StorageUnavailableError, match="cannot connect to") as caught:
        await open_storage(url).get_instance("order-1")

    assert time.monotonic() - begun < 10
    assert_no_password_in(caught.value)


async def test_every_way_in_tells_of_a_wrong_password(harness: Harness, nobody: int) -> None:
    url = wrong_urls(harness.url, nobody)["password"]

    with pytest.raises(StorageUnavailableError, match="cannot connect to"):
        await open_storage(url).__aenter__()
    with pytest.raises(StorageUnavailableError, match="cannot connect to"):
        await open_storage(url).begin_transaction()
    with pytest.raises(StorageUnavailableError, match=r"cannot connect to|password"):
        await open_storage(url).initialize()


def assert_no_password_in(error: BaseException) -> None:
    told = "".join(traceback.format_exception(error))
    assert [password for password in ("hunter2", "hun/ter@2", "hun%2Fter%402") if password in told] == []
