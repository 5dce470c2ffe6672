"""The command line, where it could surprise."""

import asyncio
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from romancy import (
    App,
    Retry,
    TerminalError,
    WorkflowFailedError,
    activity,
    activity_context,
    receive,
    receive_direct,
    sleep,
    start_child,
    subscribe,
    wait_event,
    workflow,
)
from romancy.cli.main import main
from romancy.storage import (
    CompensationEntry,
    HistoryEvent,
    SQLStorage,
    WorkflowInstance,
    WorkflowStatus,
    open_storage,
)
from tests.engine.conftest import MakeApp
from tests.harness import Harness

LOOKING = [["list"], ["show", "x"], ["cancel", "x"], ["unpark", "x"], ["bench"]]


@pytest.mark.parametrize("command", LOOKING, ids=lambda it: it[0])
def test_looking_at_a_file_that_is_not_there_does_not_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    path = tmp_path / "ordres.db"
    assert main([*command, "--url", f"sqlite:///{path}"]) == 1
    assert capsys.readouterr().err == f"error: there is no SQLite database '{path}'\n"
    assert not path.exists()


@pytest.mark.parametrize("url", ["sqlite:///orders.db", "orders.db"])
def test_a_relative_path_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["list", "--url", url]) == 1
    assert capsys.readouterr().err == (
        f"error: there is no SQLite database '{tmp_path}/orders.db'\n"
        "hint: 'orders.db' is looked for in the current directory\n"
    )
    assert not (tmp_path / "orders.db").exists()


@activity
async def fine() -> None: ...


@workflow
async def breaks() -> None:
    await fine()
    raise KeyError("missing")


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """A database in which one instance has failed and one was cancelled."""
    url = f"sqlite:///{tmp_path}/orders.db"
    async with App(url, workflows=[breaks]) as app:
        with pytest.raises(WorkflowFailedError):
            await (await app.start(breaks, id="failed")).result(timeout=10)
    async with App(url, workflows=[breaks], worker=False) as client:
        handle = await client.start(breaks, id="cancelled")
        await handle.cancel("changed my mind")
    return url


async def run(*arguments: str) -> int:
    return await asyncio.to_thread(main, arguments)


@pytest.mark.parametrize(("instance_id", "why"), [("failed", "KeyError: 'missing'"), ("cancelled", "changed my mind")])
async def test_showing_an_instance_tells_why_it_ended(
    url: str, capsys: pytest.CaptureFixture[str], instance_id: str, why: str
) -> None:
    assert await run("show", instance_id, "--url", url) == 0
    assert f"{instance_id:<10} {why}\n" in capsys.readouterr().out


async def refund(order_id: str) -> None: ...


async def unpack(order_id: str) -> None: ...


@activity(compensate=refund)
async def charge(order_id: str) -> None: ...


@activity(compensate=unpack, retry=Retry(max_attempts=3, initial_sec=0.01))
async def pack(order_id: str) -> None:
    match activity_context().attempt:
        case 1:
            raise ConnectionError(f"no answer from the {'ware' * 20}house\nand more")
        case 2:
            raise TimeoutError


@activity(compensate=refund, retry=Retry(max_attempts=2, initial_sec=600))
async def ship(order_id: str) -> None:
    raise TerminalError("not to the Moon") if order_id == "moon" else ConnectionError("no carrier")


@workflow
async def sleeps() -> None:
    await sleep(timedelta(hours=1))


@workflow
async def fulfil(order_id: str) -> None:
    await charge(order_id)
    await pack(order_id)
    await subscribe("news")
    await subscribe("__direct__", "direct")
    child = await start_child(sleeps)
    await asyncio.gather(
        receive("news", timeout=60), receive_direct(), wait_event("paid"), child.result(), ship(order_id)
    )


async def shown(harness: Harness, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """What `romancy show` says, with every time the same."""
    assert await run("show", *arguments, "--url", harness.url) == 0
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", capsys.readouterr().out).splitlines()


async def comes_to(status: WorkflowStatus, storage: SQLStorage, instance_id: str) -> None:
    async with asyncio.timeout(10):
        while (await storage.get_instance(instance_id)).status is not status:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)


async def test_showing_an_instance_tells_what_it_waits_for(
    harness: Harness, storage: SQLStorage, make_app: MakeApp, capsys: pytest.CaptureFixture[str]
) -> None:
    app = await make_app(fulfil, sleeps)
    await app.start(fulfil, "mars", id="order-1")
    await comes_to(WorkflowStatus.WAITING_FOR_MESSAGE, storage, "order-1")
    await comes_to(WorkflowStatus.WAITING_FOR_TIMER, storage, "order-1/start_child:1")
    told = await shown(harness, capsys, "order-1")
    assert [line.removeprefix("waits for  ") for line in told if line.startswith("waits")] == [
        "a message on news, until TIME",
        "a message to it alone",
        "a message on paid",
        "a message on paid to it alone",
        "the end of order-1/start_child:1",
        "the next attempt at 5/ship:1, due TIME",
    ]
    assert "waits for  sleep:1, due TIME" in await shown(harness, capsys, "order-1/start_child:1")


async def test_showing_an_instance_tells_how_attempts_failed_and_what_would_be_undone(
    harness: Harness, storage: SQLStorage, make_app: MakeApp, capsys: pytest.CaptureFixture[str]
) -> None:
    app = await make_app(fulfil)
    await app.start(fulfil, "mars", id="order-1")
    await comes_to(WorkflowStatus.WAITING_FOR_MESSAGE, storage, "order-1")
    told = await shown(harness, capsys, "order-1")
    begin = told.index("TIME  ActivityCompleted         charge:1")
    assert told[begin : begin + 6] == [
        "TIME  ActivityCompleted         charge:1",
        "TIME  ActivityFailed            pack:1#1",
        f"{'':19}  attempt 1: ConnectionError: no answer from the {'ware' * 7}wa …",
        "TIME  ActivityFailed            pack:1#2",
        f"{'':19}  attempt 2: TimeoutError",
        "TIME  ActivityCompleted         pack:1",
    ]
    assert told[-5:] == [
        "",
        f"to undo    5/ship:1 with {__name__}:refund",
        "to undo    start_child:1 with romancy.children:cancel_child",
        f"to undo    pack:1 with {__name__}:unpack",
        f"to undo    charge:1 with {__name__}:refund",
    ]
    assert '"mars"' not in "".join(told)


async def test_showing_an_instance_tells_what_was_undone(
    harness: Harness, make_app: MakeApp, capsys: pytest.CaptureFixture[str]
) -> None:
    app = await make_app(fulfil)
    with pytest.raises(WorkflowFailedError):
        await (await app.start(fulfil, "moon", id="order-1")).result(timeout=10)
    told = await shown(harness, capsys, "order-1")
    assert f"{'':19}  TerminalError: not to the Moon" in told
    assert [line.strip() for line in told if "undid" in line] == [
        "undid start_child:1 with romancy.children:cancel_child",
        f"undid pack:1 with {__name__}:unpack",
        f"undid charge:1 with {__name__}:refund",
    ]
    assert not any(line.startswith(("to undo", "waits for")) for line in told)


@workflow
async def undoes() -> None:
    await charge("order-1")
    with suppress(TerminalError):
        await ship("moon")
    await sleep(timedelta(hours=1))


async def test_a_step_that_failed_for_good_is_nothing_to_undo(
    harness: Harness, storage: SQLStorage, make_app: MakeApp, capsys: pytest.CaptureFixture[str]
) -> None:
    app = await make_app(undoes)
    await app.start(undoes, id="order-1")
    await comes_to(WorkflowStatus.WAITING_FOR_TIMER, storage, "order-1")
    told = await shown(harness, capsys, "order-1")
    assert [line for line in told if line.startswith("to undo")] == [f"to undo    charge:1 with {__name__}:refund"]


async def test_a_list_for_programs_does_not_pretend_that_payloads_are_empty(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("list", "--json", "--url", url) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {instance["instance_id"] for instance in listed} == {"failed", "cancelled"}
    assert not any("input_data" in instance or "output_data" in instance for instance in listed)


@pytest.fixture
async def parked(harness: Harness, storage: SQLStorage) -> None:
    """Instances of every age and status that can be parked, and some that are not."""
    now = await storage.current_time()
    for number in range(9):
        started_at = now - timedelta(minutes=number)
        await storage.create_instance(WorkflowInstance(f"order-{number}", "fulfil", started_at=started_at))
    await storage.update_instance_status("order-4", WorkflowStatus.COMPENSATING, "why")
    for number in (1, 4, 5):
        await storage.park(f"order-{number}", "why")
    await storage.park("order-7", "why", until=now + timedelta(hours=1))
    await storage.park("order-8", "why", until=now - timedelta(hours=1))


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ([], ["order-1", "order-4", "order-5", "order-7"]),
        (["--status", "compensating"], ["order-4"]),
        (["--id", "5"], ["order-5"]),
        (["--limit", "2"], ["order-1", "order-4"]),
        (["--workflow", "other"], []),
    ],
)
async def test_parked_instances_are_listed_newest_first(
    harness: Harness,
    parked: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    listed: list[str],
) -> None:
    monkeypatch.setattr("romancy.cli.instances._PAGE", 2)
    assert await run("list", "--parked", "--url", harness.url, *options) == 0
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()] == listed
    assert all(line.endswith("(parked)") for line in shown.out.splitlines())
    assert ("there are more" in shown.err) is ("--limit" in options)


@pytest.mark.databases("sqlite")
async def test_the_search_for_parked_instances_has_an_end(
    harness: Harness, parked: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("romancy.cli.instances._PAGE", 2)
    monkeypatch.setattr("romancy.cli.instances._MOST_LOOKED_AT", 4)
    assert await run("list", "--parked", "--url", harness.url) == 0
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()] == ["order-1", "order-4"]
    assert shown.err == "hint: only the newest 4 that are running were looked at; --workflow narrows them\n"


@pytest.mark.parametrize("option", ["list --limit", "migrate --down", "bench --rounds"])
@pytest.mark.parametrize(
    ("number", "complaint"),
    [("0", "must be at least 1, not 0"), ("-1", "not -1"), ("abc", "a whole number, not 'abc'")],
)
def test_a_wrong_number_is_refused_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, number: str, complaint: str
) -> None:
    command, name = option.split()
    path = tmp_path / "orders.db"
    with pytest.raises(SystemExit) as ended:
        main([command, f"{name}={number}", "--url", f"sqlite:///{path}"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert f"error: argument {name}: must be" in said.err
    assert complaint in said.err
    assert said.out == ""
    assert not path.exists()


async def test_what_is_not_there_cannot_be_unparked(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("unpark", "nobody", "--url", url) == 1
    assert "there is no instance 'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("shop", "does not say which App"),
        (":app", "':app' does not say which App\nhint: give module:name, such as orders:app"),
        (".shop:app", "'.shop:app' does not say which App"),
        ("shop.py:app", "a module is named without .py"),
        ("nowhere:app", "cannot import 'nowhere'"),
        ("shop:ap", "hint: there is shop:app"),
        ("shop:number", "not an App, but of type int"),
        ("shop:idle", "has no workflows to run"),
    ],
)
def test_a_worker_that_finds_no_app_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    address: str,
    complaint: str,
) -> None:
    (tmp_path / "shop.py").write_text(
        "from romancy import App, workflow\n"
        "@workflow\nasync def sell() -> None: ...\n"
        "app, idle, number = App('sqlite:///x.db', workflows=[sell]), App('sqlite:///x.db'), 7\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    assert main(["worker", address]) == 1
    assert complaint in capsys.readouterr().err


def test_a_module_that_cannot_import_something_shows_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torn.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        main(["worker", "torn:app"])


HOSTILE = "order-1\norder-2  completed\x1b[31m\x9b0m\u202eü"


@pytest.fixture
async def hostile(harness: Harness, storage: SQLStorage) -> None:
    """An instance whose every text would draw lines and colours of its own."""
    lock = await storage.create_instance(WorkflowInstance(HOSTILE, HOSTILE, locked_by=HOSTILE))
    assert lock is not None
    step = HistoryEvent(
        HOSTILE, HOSTILE, "ActivityFailed", event_data='{"error_type": "E", "error_message": "\\u001b"}'
    )
    await storage.append_history(step, lock=lock)
    await storage.add_compensation(CompensationEntry(HOSTILE, HOSTILE, HOSTILE, "{}"), lock=lock)


@pytest.mark.parametrize("command", [["list"], ["show", HOSTILE], ["show", HOSTILE, "--payloads"]])
async def test_what_is_shown_is_not_obeyed_by_the_terminal(
    harness: Harness, hostile: None, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert await run(*command, "--url", harness.url) == 0
    told = capsys.readouterr().out
    assert r"order-1\norder-2  completed\u001b[31m\u009b0m\u202eü" in told
    assert all(line.isprintable() for line in told.split("\n"))
    assert not [line for line in told.splitlines() if line.startswith("order-2")]


async def test_an_error_of_several_lines_is_shown_in_lines_that_cannot_be_mistaken_for_others(
    harness: Harness, storage: SQLStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    await storage.create_instance(WorkflowInstance("order-1", "order"))
    await storage.park("order-1", "RuntimeError: first\nstatus     completed")
    told = await shown(harness, capsys, "order-1")
    assert told[-3:-1] == [
        "parked     until it is unparked: RuntimeError: first",
        "           status     completed",
    ]


async def test_what_the_terminal_cannot_show_is_escaped_and_programs_are_told_it_as_it_is(harness: Harness) -> None:
    async with App(harness.url, workflows=[breaks], worker=False) as client:
        await client.start(breaks, id="grün\n")

    async def listed(*options: str) -> str:
        command = [sys.executable, "-m", "romancy", "list", "--url", harness.url, *options]
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        ended = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True)
        assert ended.stderr == ""
        return str(ended.stdout)

    assert (await listed()).startswith(r"gr\u00fcn\n  running")
    assert json.loads(await listed("--json"))["instance_id"] == "grün\n"


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'orders.db'}"

    async def order() -> None:
        async with open_storage(url) as storage:
            await storage.initialize()
            await storage.create_instance(WorkflowInstance("order-1", "order"))

    asyncio.run(order())
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        command = [sys.executable, "-m", "romancy", "list", "--url", url]
        ended = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)

    assert (ended.returncode, ended.stderr) == (141, "")
