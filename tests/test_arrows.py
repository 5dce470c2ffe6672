"""Imports point down only: each floor of the house stands on those below it and knows nothing of those above."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import romancy

ROOT = Path(romancy.__file__).parent

# From the ground up. A module belongs to the floor that names it, or else the package it is in.
FLOORS: list[list[str]] = [
    ["romancy.storage.errors", "romancy.storage.models", "romancy.storage.turn"],
    [f"romancy.storage.{name}" for name in ("protocols", "history_iterator", "input_filters", "urls")],
    [f"romancy.storage.sql.{name}" for name in ("statement", "fragments", "checks", "rows", "drivers")],
    [f"romancy.storage.sql.{name}" for name in ("operation", "transactions", "runners")],
    ["romancy.storage.sql"],  # the managers
    ["romancy.storage.migrations", "romancy.storage.notifications"],
    ["romancy.storage.sql.storage"],
    ["romancy.storage"],
    [f"romancy.{name}" for name in ("checks", "errors", "serialization", "retry", "notices", "hooks")],
    ["romancy.engine"],
    ["romancy"],  # what users write workflows with
    ["romancy.worker", "romancy.outbox"],
    ["romancy.app", "romancy.__init__"],
    ["romancy.demo"],
    ["romancy.cli", "romancy.dashboard", "romancy.integrations", "romancy.testing", "romancy.__main__"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}

# Also told apart by what users may do without: storage works alone, without anything above it.
STORAGE = "romancy.storage"


def modules() -> dict[str, Path]:
    """Every module of the package by its name; a package is named by what is in its __init__."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = [*path.relative_to(ROOT.parent).with_suffix("").parts]
        if parts[-1] == "__init__" and len(parts) > 2:
            parts.pop()
        found[".".join(parts)] = path
    return found


MODULES = modules()


def imported(name: str, path: Path) -> Iterator[str]:
    """What a module of ours imports from us at run time; what only type checkers read is no arrow."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    package = package.removesuffix(".__init__")
    for node in run_time_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "romancy")
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            if source.split(".")[0] == "romancy":
                for alias in node.names:
                    full = f"{source}.{alias.name}"
                    yield full if full in MODULES else source


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from run_time_nodes(node)


def resolved(name: str) -> str:
    return "romancy.__init__" if name == "romancy" else name


ARROWS = {name: {resolved(target) for target in imported(name, path)} for name, path in MODULES.items()}


def floor(name: str) -> int:
    while name not in FLOOR:
        name = name.rpartition(".")[0]
    return FLOOR[name]


def test_the_walk_finds_the_imports() -> None:
    assert "romancy.storage.sql.operation" in ARROWS["romancy.storage.sql.locks"]
    assert "romancy.storage.errors" in ARROWS["romancy.storage.sql.locks"]
    assert len(ARROWS) > 40


def test_every_arrow_points_down() -> None:
    upwards = [
        f"{name} -> {target}"
        for name, targets in sorted(ARROWS.items())
        for target in sorted(targets)
        if floor(target) > floor(name)
    ]
    assert upwards == []


def test_storage_knows_nothing_of_what_stands_on_it() -> None:
    outside = [
        f"{name} -> {target}"
        for name, targets in sorted(ARROWS.items())
        for target in sorted(targets)
        if name.startswith(STORAGE) and not target.startswith(STORAGE)
    ]
    assert outside == []


def test_no_import_goes_in_a_circle() -> None:
    TopologicalSorter(ARROWS).prepare()  # CycleError shows the circle
