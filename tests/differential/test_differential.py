"""Random sequences of operations give the answers of an oracle, and leave its tables, on every database.

A failing seed is shrunk and printed. ``ROMANCY_SEED=17`` runs that one alone, ``ROMANCY_SEEDS=1000`` so many and
``ROMANCY_SEEDS=1000-1999`` those.
"""

import inspect
import os
from datetime import timedelta
from typing import Any

import pytest

from romancy.storage import StorageError, protocols
from tests.harness import Harness

from .generator import Generator
from .oracle import Oracle
from .steps import Call
from .trial import Laboratory

STEPS = 80
BLOCK = 10
DEFAULT = range(40)


def chosen_seeds() -> range:
    """The seeds to run, from the environment."""
    if only := os.environ.get("ROMANCY_SEED"):
        return range(int(only), int(only) + 1)
    first, dash, last = os.environ.get("ROMANCY_SEEDS", str(len(DEFAULT))).partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


SEEDS = chosen_seeds()
BLOCKS = [SEEDS[start : start + BLOCK] for start in range(0, len(SEEDS), BLOCK)]


@pytest.mark.parametrize("seeds", BLOCKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
async def test_random_sequences_give_the_answers_of_the_oracle(harness: Harness, seeds: range) -> None:
    laboratory = await Laboratory.open(harness)
    for seed in seeds:
        steps = Generator(seed).steps(STEPS)
        if await laboratory.difference(steps) is not None:
            fewer = await laboratory.shrunk(steps)
            listing = "\n".join(f"{number:3}  {step}" for number, step in enumerate(fewer, start=1))
            difference = await laboratory.difference(fewer)
            pytest.fail(f"ROMANCY_SEED={seed} on {harness.name}, shrunk to\n{listing}\n\n{difference}", pytrace=False)


@pytest.mark.databases("sqlite")
async def test_a_fault_is_found_and_shrunk_to_a_few_steps(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    late = timedelta(seconds=1000)
    monkeypatch.setattr(Oracle, "_in", lambda self, seconds: self.now + timedelta(seconds=seconds) + late)
    laboratory = await Laboratory.open(harness)
    steps = Generator(0).steps(STEPS)

    assert await laboratory.difference(steps) is not None
    assert len(await laboratory.shrunk(steps)) <= 3


class Witness(Generator):
    """Notes which operations find or change something."""

    def __init__(self, seed: int, fruitful: set[str]) -> None:
        super().__init__(seed)
        self.fruitful = fruitful

    def ask_oracle(self, call: Call, arguments: Any) -> Any:
        before = self.oracle.snapshot()
        answer = super().ask_oracle(call, arguments)
        if not isinstance(answer, StorageError) and (answer or self.changed_since(before)):
            self.fruitful.add(call.name)
        return answer


def test_every_operation_of_the_contract_is_made_to_do_something() -> None:
    fruitful: set[str] = set()
    for seed in range(100):
        Witness(seed, fruitful).steps(STEPS)

    managers = [manager for manager in protocols.Storage.__mro__ if manager.__name__.endswith("Manager")]
    contract = {
        name for manager in managers for name in vars(manager) if inspect.iscoroutinefunction(getattr(manager, name))
    }
    transactions = {"begin_transaction", "commit_transaction", "rollback_transaction"}  # steps of their own
    fruitful.update(["get_history_paginated", "get_history_to_replay"])  # by get_history, page by page
    assert contract - transactions <= fruitful
