"""Nothing of the reference is missing: its names, compared with what `romancy.storage` offers."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from romancy import storage
from tests.storage.reference import DRIVERS, ERRORS, FIELDS, FUNCTIONS, MANAGERS, METHODS, STORAGES, VALUES


def positional(function: Callable[..., Any]) -> str:
    """A function's name, and its arguments without those that can only be given by name."""
    parameters = inspect.signature(function).parameters.values()
    names = [
        one.name for one in parameters if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD) and one.name != "self"
    ]
    return f"{function.__name__}({', '.join(names)})"


@pytest.mark.parametrize("signature", sorted(set(FUNCTIONS.values())))
def test_every_function_of_the_reference_is_here(signature: str) -> None:
    function = getattr(storage, signature.partition("(")[0])
    assert positional(function) == signature


@pytest.mark.parametrize("name", ERRORS.values())
def test_every_error_of_the_reference_is_here(name: str) -> None:
    assert issubclass(getattr(storage, name), storage.StorageError)


@pytest.mark.parametrize("kind", METHODS)
def test_every_method_of_the_reference_is_here_with_its_arguments_in_order(kind: str) -> None:
    offered = getattr(storage, kind)
    for signature in METHODS[kind].values():
        assert positional(getattr(offered, signature.partition("(")[0])) == signature


@pytest.mark.parametrize("kind", STORAGES)
def test_each_storage_has_the_methods_of_all_managers(kind: str) -> None:
    offered = getattr(storage, kind)
    for manager in (*MANAGERS, "Storage"):
        for signature in METHODS[manager].values():
            assert positional(getattr(offered, signature.partition("(")[0])) == signature


def test_the_storage_protocol_is_its_managers() -> None:
    assert {manager.__name__ for manager in storage.Storage.__mro__} >= set(MANAGERS)


@pytest.mark.parametrize("kind", DRIVERS)
def test_each_driver_has_the_methods_of_a_driver(kind: str) -> None:
    offered = getattr(storage, kind)
    assert issubclass(offered, storage.Driver)
    for signature in METHODS["Driver"].values():
        assert positional(getattr(offered, signature.partition("(")[0])) == signature


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_of_the_reference_is_here(kind: str) -> None:
    model = getattr(storage, kind)
    missing = [field for field in FIELDS[kind].values() if not hasattr(model, field)]
    assert missing == []


@pytest.mark.parametrize("kind", VALUES)
def test_every_value_of_the_reference_is_here(kind: str) -> None:
    assert set(VALUES[kind].values()) <= {str(value) for value in getattr(storage, kind)}


def test_every_type_of_the_reference_is_exported() -> None:
    named = {*METHODS, *FIELDS, *VALUES, *MANAGERS, *STORAGES, *DRIVERS}
    assert named - set(storage.__all__) == set()
