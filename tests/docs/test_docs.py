"""The documents: their snippets run, their links lead somewhere, their commands and lists are those of the code."""

import argparse
import ast
import asyncio
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import romancy
from romancy.cli.main import parser
from romancy.storage import (
    HistoryIteratorOptions,
    ListInstancesOptions,
    PostgresStorage,
    SQLiteStorage,
    Storage,
    errors,
)
from romancy.storage.sql import checks, outbox, storage
from romancy.storage.sql.runners import postgres, runner, server, sqlite

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

ENGINE_PAGES = (
    "tutorial.md",
    "workflows.md",
    "activities.md",
    "waiting.md",
    "messages.md",
    "events-and-outbox.md",
    "sagas.md",
    "workers.md",
    "state.md",
    "cloudevents.md",
    "observability.md",
    "cli.md",
)

_FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fenced(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """The blocks in these languages, with the line on which each begins."""
    text = page.read_text()
    for block in _FENCED.finditer(text):
        if block["language"] in languages:
            yield text.count("\n", 0, block.start("text")), block["text"]


@pytest.mark.parametrize("page", [page for page in PAGES if any(fenced(page, "python"))], ids=name)
def test_the_snippets_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", program)  # where a program's functions and errors are found again
    with asyncio.Runner() as loop:
        for line, text in fenced(page, "python"):
            code = compile("\n" * line + text, name(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            awaiting = eval(code, vars(program))
            if awaiting is not None:
                loop.run(awaiting)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for link in _LINK.finditer(page.read_text()):
        target = (page.parent / link["path"]).resolve() if link["path"] else page
        assert target.exists(), link[0]
        if link["anchor"]:
            assert link["anchor"] in anchors(target), link[0]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = (heading["title"] for heading in _HEADING.finditer(_FENCED.sub("", page.read_text())))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_decision_can_be_found_from_the_architecture() -> None:
    linked = {link["path"] for link in _LINK.finditer((ROOT / "ARCHITECTURE.md").read_text())}
    assert {name(page) for page in ROOT.glob("docs/decisions/*.md")} <= linked


def test_the_readme_shows_the_command_for_tests_and_the_one_for_the_demo() -> None:
    lines = [line for _, text in fenced(ROOT / "README.md", "", "sh") for line in text.splitlines()]
    commands = [line for line in lines if line.startswith("make")]
    assert commands == ["make demo", "make test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.split()[1] for command in commands} <= set(targets)


def test_every_public_name_is_explained_somewhere() -> None:
    pages = "".join((ROOT / "docs" / page).read_text() for page in ENGINE_PAGES)
    assert [public for public in romancy.__all__ if not re.search(rf"\b{public}\b", pages)] == []


def test_the_settings_on_the_workers_page_are_those_of_the_code() -> None:
    text = (ROOT / "docs/workers.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| (\S+) \|", text, re.MULTILINE)
    assert [(setting, float(shown)) for setting, shown in table] == [
        (field, float(value)) for field, value in msgspec.structs.asdict(romancy.Settings()).items()
    ]


def test_the_command_line_page_shows_every_command_and_option() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    [commands] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    assert re.findall(r"^## romancy (\w+)", text, re.MULTILINE) == list(commands.choices)
    options = {
        option
        for command in commands.choices.values()
        for action in command._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    assert [option for option in sorted(options) if not re.search(rf"`?{option}\b", text)] == []


def test_the_storage_page_shows_every_operation() -> None:
    text = (ROOT / "docs/storage.md").read_text()
    operations = [operation for operation in dir(Storage) if not operation.startswith("_")]
    assert [operation for operation in operations if not re.search(rf"\b{operation}\b", text)] == []


def test_the_storage_page_explains_every_error() -> None:
    [table] = re.findall(r"^\| error \|.*?\n\n", (ROOT / "docs/storage.md").read_text(), re.MULTILINE | re.DOTALL)
    raised = {error for error, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert set(re.findall(r"`(\w+Error)`", table)) == raised - {"StorageError"}


def test_the_limits_on_the_guarantees_page_are_those_of_the_code() -> None:
    text = (ROOT / "docs/guarantees.md").read_text().partition("## Limits")[2]
    assert dict(re.findall(r"^\| (.+?) \| (\d.*?) \|$", text, re.MULTILINE)) == {
        "a key (ids, channels, groups, names)": f"{checks.LONGEST_KEY} characters",
        "a payload (JSON or binary), by default": f"{storage.MAX_PAYLOAD_BYTES // 2**20} MiB",
        "an error message of the outbox, clipped": f"{checks.LONGEST_ERROR:,} characters",
        "a list without `limit`": f"{default(Storage.find_expired_timers, 'limit')}",
        "a page of instances without `limit`": f"{ListInstancesOptions().limit}",
        "a batch of retention without `limit`": f"{default(Storage.cleanup_old_outbox_events, 'limit'):,}",
        "any list, and any batch of events, messages or locks": f"{checks.LARGEST_LIMIT:,}",
        "a batch of `HistoryIterator`": f"{HistoryIteratorOptions().batch_size:,}",
        "a transaction on SQLite, by default": f"{default(SQLiteStorage, 'transaction_deadline_sec'):g} s",
        "a transaction on a server, by default": f"{default(PostgresStorage, 'transaction_deadline_sec'):g} s",
        "a statement on a server": f"{default(postgres.PostgresRunner, 'statement_timeout_sec'):g} s",
        "reaching a server": f"{default(postgres.PostgresRunner, 'connect_timeout_sec'):g} s",
        "attempts of an operation on a server": f"{server._ATTEMPTS}",
        "repeating an operation that the server rolled back": f"{server._CONFLICT_PATIENCE_SEC:g} s",
        "repeating an operation that an outage prevented": f"{server._OUTAGE_PATIENCE_SEC:g} s",
        "waiting for SQLite's writer, by default": f"{sqlite.SQLiteRunner(':memory:')._busy_sec:g} s",
        "operations that share a commit on SQLite": f"{sqlite._LARGEST_BATCH}",
        "letting operations finish on `close()`": f"{runner.CLOSE_DEADLINE_SEC:g} s",
        "a lease of outbox events, by default": f"{default(Storage.get_pending_outbox_events, 'lease_sec'):g} s",
        "the pause before an outbox event is tried again": f"{outbox._LONGEST_PAUSE_SEC:g} s",
        "connections of a pool, by default": f"{default(PostgresStorage, 'pool_size')}",
    }


def default(function: Callable[..., Any], parameter: str) -> Any:
    return inspect.signature(function).parameters[parameter].default


def test_the_architecture_draws_every_module() -> None:
    [house] = [text for _, text in fenced(ROOT / "ARCHITECTURE.md", "") if text.startswith("src/romancy/")]
    drawn: list[str] = []
    path: list[str] = []
    for line in house.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [line.split()[0].rstrip("/")]
        drawn.append("/".join(path))
    modules = [name(module) for module in (ROOT / "src/romancy").rglob("*.py")]
    assert [module for module in modules if module not in drawn and not module.endswith("__init__.py")] == []
    assert [path for path in drawn if not (ROOT / path).exists()] == []
