"""What goes wrong without being the workflow's fault, and what is too large to be stored."""

import asyncio
import sys
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from romancy import (
    NO_RETRY,
    App,
    Retry,
    Settings,
    WorkflowFailedError,
    WorkflowMismatchError,
    activity,
    compensate_with,
    conn,
    emit,
    recur,
    sleep,
    start_child,
    workflow,
)
from romancy.errors import ActivityError
from romancy.serialization import StoredError
from romancy.storage import (
    InstanceNotFoundError,
    Lock,
    OutcomeUnknownError,
    PayloadTooLargeError,
    StorageUnavailableError,
    TransactionDeadlineError,
    TransientStorageError,
    WorkflowInstance,
)
from tests.engine.conftest import QUICK, MakeApp
from tests.engine.test_messages import until
from tests.engine.test_replay import COLD
from tests.faults.proxy import Proxy, proxied
from tests.harness import Harness

LIMIT = 20_000
calls: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()


def trouble(kind: str) -> Exception:
    kinds = {"transient": TransientStorageError, "unavailable": StorageUnavailableError, "unknown": OutcomeUnknownError}
    return kinds[kind]("the connection is gone")


@activity(transactional=True, retry=NO_RETRY)
async def pay(kind: str) -> int:
    await conn().execute("INSERT INTO fees (name) VALUES (:name)", name=kind)
    calls.append(kind)
    if calls.count(kind) < 4:
        raise trouble(kind)
    return int(await conn().fetch_value("SELECT COUNT(*) FROM fees"))


@activity(retry=NO_RETRY)
async def look_up(kind: str) -> str:
    calls.append(kind)
    if calls.count(kind) < 2:
        raise trouble(kind)
    return "found"


@workflow
async def paying(kind: str) -> int:
    return await pay(kind)


@workflow
async def looking(kind: str) -> str:
    return await look_up(kind)


@pytest.mark.parametrize("kind", ["transient", "unknown"])
async def test_trouble_with_the_database_is_no_attempt_of_a_transactional_activity(
    make_app: MakeApp, kind: str
) -> None:
    app = await make_app(paying)
    await app.storage.conn().execute("CREATE TABLE IF NOT EXISTS fees (name VARCHAR(20))")
    await app.storage.conn().execute("DELETE FROM fees")
    handle = await app.start(paying, kind)
    assert await handle.result(10) == 1
    assert [event.activity_id for event in await handle.history()] == ["pay:1"]


async def test_trouble_with_the_database_is_no_attempt_of_a_plain_activity(make_app: MakeApp) -> None:
    app = await make_app(looking)
    handle = await app.start(looking, "unavailable")
    assert await handle.result(10) == "found"
    assert [event.activity_id for event in await handle.history()] == ["look_up:1"]


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_start_of_unknown_outcome_starts_the_instance_once_and_runs_it_at_once(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    app = await make_app(looking, settings=Settings(lock_timeout_sec=600.0, heartbeat_sec=1.0))
    await (await app.start(looking, "unavailable")).result(10)
    create, attempts = app.storage.create_instance, 0

    async def break_off(instance: WorkflowInstance) -> Lock | None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            if how == "after":
                await create(instance)
            raise OutcomeUnknownError("the connection broke while the answer was on its way")
        return await create(instance)

    monkeypatch.setattr(app.storage, "create_instance", break_off)
    handle = await app.start(looking, "transient")
    assert await handle.result(10) == "found"
    assert attempts == 2


async def cancel_booking() -> None:
    calls.append("undo")
    if calls.count("undo") < 12:
        raise TransientStorageError("the connection is gone")


@workflow
async def undone() -> None:
    await compensate_with(cancel_booking)
    raise ValueError("after all")


@pytest.mark.databases("sqlite")
async def test_trouble_with_the_database_is_no_attempt_of_a_compensation(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("romancy.worker.executor._LONGEST_TROUBLE_SEC", 0.01)
    app = await make_app(undone)
    handle = await app.start(undone)
    with pytest.raises(WorkflowFailedError, match="after all"):
        await handle.result(10)
    assert calls == ["undo"] * 12


@activity(transactional=True, retry=Retry(max_attempts=0, initial_sec=0.01))
async def dawdle() -> None:
    calls.append("dawdle")
    raise TransactionDeadlineError("it was open for too long")


@workflow
async def too_slow() -> str:
    try:
        await dawdle()
    except TransactionDeadlineError as error:
        return str(error)
    return "in time"


async def test_a_transaction_past_its_deadline_is_not_tried_again(make_app: MakeApp) -> None:
    app = await make_app(too_slow)
    assert await (await app.start(too_slow)).result(10) == "it was open for too long"
    assert calls == ["dawdle"]


@activity(retry=Retry(max_attempts=0, initial_sec=0.3, factor=1.0, jitter=0.0, max_duration=timedelta(seconds=0.5)))
async def hopeless() -> None:
    calls.append("hopeless")
    raise ConnectionError("nobody there")


@workflow
async def hoping() -> None:
    await hopeless()


async def test_durable_pauses_count_towards_the_longest_duration(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["romancy.activity"], "SHORT_PAUSE_SEC", 0.0)
    app = await make_app(hoping)
    with pytest.raises(WorkflowFailedError, match="nobody there"):
        await (await app.start(hoping)).result(10)
    assert len(calls) in (2, 3)


# Cancelled, gone, or of another.


async def gives_up() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task


@activity(retry=NO_RETRY)
async def cancels_its_own() -> None:
    await gives_up()


async def undo_by_cancelling() -> None:
    calls.append("undo")
    if len(calls) == 1:
        await gives_up()


@workflow
async def cancelling() -> None:
    await compensate_with(undo_by_cancelling)
    await asyncio.gather(cancels_its_own(), sleep(3600))


async def test_a_cancellation_inside_an_activity_is_its_error_and_nobody_waits_for_it(make_app: MakeApp) -> None:
    app = await make_app(cancelling)
    with pytest.raises(WorkflowFailedError, match="CancelledError"):
        await (await app.start(cancelling)).result(10)
    assert calls == ["undo", "undo"]


@activity
async def delete(instance_id: str) -> None:
    await conn().execute("DELETE FROM workflow_instances WHERE instance_id = :id", id=instance_id)


@activity
async def linger() -> None:
    await asyncio.sleep(1.5)


@workflow
async def bereaved(meanwhile: bool) -> str:
    child = await start_child(measures, "x")
    await delete(child.id)
    lingering = asyncio.ensure_future(linger() if meanwhile else sleep(0))
    try:
        await child.result()
    except InstanceNotFoundError:
        return "gone"
    finally:
        await lingering
    return "found"


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_a_child_that_is_gone_is_an_error_in_the_body(make_app: MakeApp, meanwhile: bool) -> None:
    app = await make_app(bereaved)
    assert await (await app.start(bereaved, meanwhile)).result(10) == "gone"


@workflow
async def informed_too_late() -> str:
    child = await start_child(measures, "x")
    try:
        return str(await child.result())
    except InstanceNotFoundError:
        return "gone"


async def test_a_child_that_is_deleted_before_its_parent_looks_is_not_said_to_be_cancelled(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await make_app(informed_too_late, measures)
    get_instance = app.storage.get_instance

    async def after_it_was_deleted(instance_id: str) -> Any:
        return None if instance_id.endswith("start_child:1") else await get_instance(instance_id)

    monkeypatch.setattr(app.storage, "get_instance", after_it_was_deleted)
    assert await (await app.start(informed_too_late)).result(10) == "gone"


# Lines that are cut, and servers that do not answer, in the middle of a transaction.

lines: list[Proxy] = []


@activity(transactional=True, retry=NO_RETRY)
async def pay_over_a_bad_line(how: str) -> int:
    calls.append(how)
    await conn().execute("INSERT INTO fees (name) VALUES (:name)", name=how)
    if calls == ["cut"]:
        lines[0].cut_all()
    elif calls == ["frozen"]:
        lines[0].frozen = True
    return int(await conn().fetch_value("SELECT COUNT(*) FROM fees"))


@workflow
async def paying_over_a_bad_line(how: str) -> int:
    return await pay_over_a_bad_line(how)


@pytest.mark.databases("postgres", "mariadb", "mysql")
@pytest.mark.parametrize("how", ["cut", "frozen"])
async def test_a_bad_line_is_no_attempt_of_a_transactional_activity(harness: Harness, how: str) -> None:
    async with proxied(harness.url) as proxy:
        lines[:] = [proxy]
        options: dict[str, Any] = {"settings": QUICK, "transaction_deadline_sec": 1.0}
        async with App(proxy.url, workflows=[paying_over_a_bad_line], **options) as app:
            await app.storage.conn().execute("CREATE TABLE IF NOT EXISTS fees (name VARCHAR(20))")
            await app.storage.conn().execute("DELETE FROM fees")
            handle = await app.start(paying_over_a_bad_line, how)

            async def frozen() -> bool:
                return proxy.frozen

            if how == "frozen":
                await until(frozen)
                await asyncio.sleep(2.5)  # longer than the transaction may last, and the lock
                proxy.frozen = False
            assert await handle.result(20) == 1
            assert [event.activity_id for event in await handle.history()] == ["pay_over_a_bad_line:1"]
    assert calls == [how, how]


@workflow
async def presumptuous() -> str:
    try:
        await start_child(measures, "x", id="taken")
    except WorkflowMismatchError as error:
        return str(error)
    return "mine"


async def test_a_child_with_the_id_of_another_workflow_is_refused(make_app: MakeApp) -> None:
    app = await make_app(presumptuous, looking)
    await app.start(looking, "transient", id="taken")
    assert "is of workflow 'looking'" in await (await app.start(presumptuous)).result(10)


apps: list[App] = []


@workflow
async def emits() -> None:
    await emit("told", {}, event_id="from the body")


@activity
async def start_another() -> None:
    await (await apps[0].start(emits)).result(10)


@workflow
async def starts_another() -> None:
    await start_another()


async def test_a_workflow_started_by_an_activity_emits_for_itself(make_app: MakeApp) -> None:
    app = await make_app(starts_another, emits)
    apps[:] = [app]
    handle = await app.start(starts_another)
    await handle.result(10)
    inner = await app.storage.conn().fetch_value("SELECT COUNT(*) FROM workflow_history WHERE activity_id = 'emit:1'")
    assert inner == 1
    assert [event.event_id for event in await app.storage.get_pending_outbox_events()] == ["from the body"]


# Too large.

UNLIMITED = Retry(max_attempts=0, initial_sec=0.01)


async def refund(size: int) -> None:
    calls.append("refund")


@activity(retry=UNLIMITED, compensate=refund)
async def make(size: int) -> str:
    calls.append("make")
    return "x" * size


@activity(retry=UNLIMITED)
async def measure(text: str) -> int:
    calls.append("measure")
    return len(text)


@activity(retry=UNLIMITED)
async def shout(size: int) -> None:
    calls.append("shout")
    await emit("shouted", "x" * size)


@activity(retry=NO_RETRY)
async def complain(size: int) -> None:
    raise ValueError("x" * size)


@workflow
async def carries(what: str, size: int) -> Any:
    try:
        match what:
            case "argument":
                return await measure("x" * size)
            case "result":
                return len(await make(size))
            case "event":
                await shout(size)
            case "child":
                await start_child(measures, "x" * size)
    except PayloadTooLargeError as error:
        return f"too large, the limit is {error.limit}"


@workflow
async def measures(text: str) -> int:
    return len(text)


@pytest.fixture
async def small_app(make_app: MakeApp) -> App:
    """An app that stores little at once."""
    workflows = (carries, measures, returns, complains, starts_over, keeps_going, side_by_side)
    app: App = await make_app(*workflows, settings=COLD, max_payload_bytes=LIMIT)
    return app


@pytest.mark.parametrize(
    ("what", "effects"), [("argument", []), ("result", ["make"]), ("event", ["shout"]), ("child", [])]
)
async def test_what_is_too_large_to_be_stored_is_a_named_error_and_final(
    small_app: App, what: str, effects: list[str]
) -> None:
    handle = await small_app.start(carries, what, LIMIT + 1)
    assert await handle.result(10) == f"too large, the limit is {LIMIT}"
    assert calls == effects


async def test_an_argument_and_a_result_that_only_together_are_too_large_are_both_kept(small_app: App) -> None:
    handle = await small_app.start(carries, "argument", LIMIT - 200)
    assert await handle.result(10) == LIMIT - 200


async def test_an_input_that_is_too_large_is_the_callers_error(small_app: App) -> None:
    with pytest.raises(PayloadTooLargeError):
        await small_app.start(measures, "x" * (LIMIT + 1))


@workflow
async def returns(size: int) -> str:
    return "x" * size


@workflow
async def starts_over(text: str, size: int) -> None:
    recur("x" * size, size)


@pytest.mark.parametrize("workflow", ["returns", "starts_over"])
async def test_a_body_that_ends_with_something_too_large_has_failed(small_app: App, workflow: str) -> None:
    given: tuple[Any, ...] = (LIMIT + 1,) if workflow == "returns" else ("", LIMIT + 1)
    handle = await small_app.start(small_app.workflows[workflow], *given)
    with pytest.raises(WorkflowFailedError, match="PayloadTooLargeError"):
        await handle.result(10)


@workflow
async def complains(size: int) -> None:
    await complain(size)


async def test_an_error_that_is_too_large_is_kept_shorter(small_app: App) -> None:
    handle = await small_app.start(complains, 10 * LIMIT)
    with pytest.raises(WorkflowFailedError, match=r"ValueError: xxx+ …"):
        await handle.result(10)


@workflow
async def keeps_going(size: int) -> None:
    await make(size)


async def test_an_effect_whose_result_cannot_be_stored_is_undone_all_the_same(small_app: App) -> None:
    handle = await small_app.start(keeps_going, LIMIT + 1)
    with pytest.raises(WorkflowFailedError, match="PayloadTooLargeError: the result of make has"):
        await handle.result(10)
    assert calls == ["make", "refund"]


@workflow
async def side_by_side() -> list[int | str]:
    results = await asyncio.gather(make(1), make(LIMIT + 1), make(2), make(3), return_exceptions=True)
    return [type(one).__name__ if isinstance(one, BaseException) else len(one) for one in results]


async def test_each_of_several_steps_written_together_gets_its_own_outcome(
    small_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = small_app.storage.append_history

    async def slowly(*args: Any, **options: Any) -> Any:
        await asyncio.sleep(0.05)  # so that the others pile up
        return await append(*args, **options)

    monkeypatch.setattr(small_app.storage, "append_history", slowly)
    handle = await small_app.start(side_by_side)
    assert await handle.result(10) == [1, "PayloadTooLargeError", 2, 3]


# Errors keep their type.


class OutOfStockError(Exception):
    def __init__(self, item: str, *, left: int, seen_by: object = None) -> None:
        super().__init__(f"{item}: only {left} left")
        self.item = item
        self.left = left
        self.seen_by = seen_by


class MissingFileError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "not there", path)


@activity(retry=NO_RETRY)
async def take(item: str) -> None:
    raise OutOfStockError(item, left=3, seen_by=object())


@workflow
async def shopping() -> list[Any]:
    try:
        await take("tea")
    except OutOfStockError as error:
        return [str(error), error.item, error.left, hasattr(error, "seen_by")]
    return []


async def test_an_error_keeps_its_type_and_attributes_though_its_init_takes_other_arguments(make_app: MakeApp) -> None:
    app = await make_app(shopping)
    assert await (await app.start(shopping)).result(10) == ["tea: only 3 left", "tea", 3, False]


@pytest.mark.parametrize(
    "error",
    [
        MissingFileError("/nowhere"),
        KeyError("key"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        PayloadTooLargeError("it", 2, 1),
        ActivityError("Gone", "for good"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_come_back_as_they_were(error: Exception) -> None:
    stored = msgspec.json.decode(msgspec.json.encode(StoredError.of(error)), type=StoredError)
    revived = stored.revive()
    assert type(revived) is type(error)
    if not isinstance(error, UnicodeDecodeError):  # its bytes become text
        assert (str(revived), vars(revived)) == (str(error), vars(error))
    if isinstance(error, OSError):
        assert isinstance(revived, OSError)
        assert (revived.errno, revived.strerror, revived.filename) == (2, "not there", "/nowhere")


def test_a_group_of_errors_comes_back_with_its_errors() -> None:
    group = ExceptionGroup("two", [OutOfStockError("tea", left=1), ExceptionGroup("one", [KeyError("key")])])
    revived = msgspec.json.decode(msgspec.json.encode(StoredError.of(group)), type=StoredError).revive()
    assert isinstance(revived, ExceptionGroup)
    assert (str(revived), repr(revived)) == (str(group), repr(group))
    found, rest = revived.split(KeyError)
    assert found is not None
    assert rest is not None
    assert rest.exceptions[0].left == 1


@pytest.mark.parametrize(("module", "name"), [("this", "Error"), ("os", "system"), ("builtins", "SystemExit")])
def test_what_is_stored_neither_imports_nor_calls_anything(module: str, name: str) -> None:
    sys.modules.pop("this", None)
    revived = StoredError(name, "boo", module, msgspec.Raw(b'["true"]')).revive()
    assert isinstance(revived, ActivityError)
    assert "this" not in sys.modules


async def test_a_class_that_is_gone_becomes_an_activity_error(harness: Harness) -> None:
    class Local(Exception): ...

    @activity(retry=NO_RETRY)
    async def fails() -> None:
        raise Local("here only")

    @workflow
    async def meets() -> str:
        try:
            await fails()
        except ActivityError as error:
            return f"{error.error_type.rpartition('.')[2]} {error.message}"
        return ""

    async with App(harness.url, workflows=[meets], settings=QUICK) as app:
        assert await (await app.start(meets)).result(10) == "Local here only"
