"""Typed JSON: values become JSON text, and come back as what the type hints say."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

import msgspec

from .errors import ActivityError, SerializationError


def _encode_unknown(value: Any) -> Any:
    if hasattr(value, "model_dump"):  # pydantic, without depending on it
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not a type that can be stored")


def _decode_unknown(kind: type[Any], value: Any) -> Any:
    if hasattr(kind, "model_validate"):
        return kind.model_validate(value)
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not a type that can be read back")


_encoder = msgspec.json.Encoder(enc_hook=_encode_unknown, order="deterministic")


def encode(value: Any, what: str) -> str:
    """JSON text of a value; SerializationError says what could not be stored."""
    try:
        text = _encoder.encode(value).decode()
        if "null" in text and _has_odd_number(value):  # which msgspec writes as null
            raise ValueError("JSON has neither infinity nor NaN")
        return text
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError, OverflowError) as error:
        # What msgspec says of such a dict is about an option that is ours.
        reason = "the keys of a dict must be str" if "with str keys" in str(error) else error
        raise SerializationError(f"{what} cannot be stored as JSON: {reason}") from error


def _has_odd_number(value: Any) -> bool:
    """Whether there is an infinity or a NaN somewhere in a value."""
    parts: Iterable[Any]
    match value:
        case float():
            return not math.isfinite(value)
        case Mapping():
            parts = value.values()
        case list() | tuple() | set() | frozenset():
            parts = value
        case msgspec.Struct():
            parts = (getattr(value, name) for name in value.__struct_fields__)
        case _ if hasattr(value, "model_dump"):
            parts = value.model_dump().values()
        case _ if dataclasses.is_dataclass(value):
            parts = (getattr(value, field.name) for field in dataclasses.fields(value))
        case _:
            return False
    return any(_has_odd_number(part) for part in parts)


def decode(text: str | bytes | msgspec.Raw, kind: Any, what: str) -> Any:
    """The value of a JSON text, as the type `kind`."""
    try:
        return _decoder(kind).decode(text)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise _unfit(what, error) from error


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_decode_unknown)


def _unfit(what: str, error: Exception) -> SerializationError:
    return SerializationError(f"{what} does not fit its type hint: {error}")


class Signature:
    """A function's parameters and result, as they are stored and read back."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._name = name
        self._an_argument, self._the_result = f"an argument of {name}", f"the result of {name}"
        self._signature = inspect.signature(function)
        try:
            hints = get_type_hints(function)
        except NameError:  # a hint that only the type checker can see
            hints = {}
        self.result_type = hints.get("return", Any)
        self._types = {parameter: hints.get(parameter, Any) for parameter in self._signature.parameters}
        self._positional = _only_positional(self._signature)

    def encode_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The arguments as a JSON object by parameter; TypeError if they do not fit the function."""
        if self._positional is not None and len(args) == len(self._positional) and not kwargs:
            named = dict(zip(self._positional, args))  # noqa: B905 (what most calls are, in a twentieth of the time)
        else:
            try:
                named = dict(self._signature.bind(*args, **kwargs).arguments)
            except TypeError as error:
                raise TypeError(f"{self._name}: {error}") from None
        return encode(named, self._an_argument)

    def encode_checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The same; SerializationError if they could not be read again as the type hints say."""
        text = self.encode_arguments(args, kwargs)
        self.decode_by_parameter(text)
        return text

    def decode_arguments(self, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, by position and by name, from a JSON object by parameter."""
        arguments = self.decode_by_parameter(text)
        if self._named is not None:
            return (), arguments
        call = inspect.BoundArguments(self._signature, arguments)
        return call.args, call.kwargs

    def decode_by_parameter(self, text: str) -> dict[str, Any]:
        """The arguments of a call, from a JSON object by parameter."""
        if self._named is not None:
            try:
                return self._named.decode(text)
            except (TypeError, ValueError, msgspec.MsgspecError):
                pass  # one by one it turns out which of them does not fit
        stored = decode(text, dict[str, msgspec.Raw], f"the input of {self._name}")
        return {
            name: decode(stored[name], self._stored_type(parameter), f"argument {name!r} of {self._name}")
            for name, parameter in self._signature.parameters.items()
            if name in stored
        }

    @cached_property
    def _named(self) -> msgspec.json.Decoder[dict[str, Any]] | None:
        """Reads all arguments at once, if each of them can be given by its name and has a type that can be read."""
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if any(parameter.kind not in by_name for parameter in self._signature.parameters.values()):
            return None
        try:
            return _decoder(TypedDict("Arguments", self._types, total=False))  # type: ignore[operator]  # known at run time
        except TypeError:
            return None

    def with_defaults(self, text: str, other: Signature) -> str:
        """Stored arguments, and the defaults of those that were not given but that another function takes."""
        stored = decode(text, dict[str, msgspec.Raw], f"the input of {self._name}")
        for name, parameter in self._signature.parameters.items():
            if name not in stored and other.takes(name) and parameter.default is not inspect.Parameter.empty:
                stored[name] = msgspec.Raw(encode(parameter.default, f"the default of {name!r}").encode())
        return encode(stored, f"the input of {self._name}")

    def _stored_type(self, parameter: inspect.Parameter) -> Any:
        kind = self._types[parameter.name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return tuple[kind, ...]  # type: ignore[valid-type]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return dict[str, kind]  # type: ignore[valid-type]
        return kind

    def encode_result(self, result: Any) -> str:
        return encode(result, self._the_result)

    def encode_and_decode_result(self, result: Any) -> tuple[str, Any]:
        """The same, and what is read of it as the type hint says; SerializationError if that cannot be."""
        text = self.encode_result(result)
        return text, self.decode_result(text)

    def decode_result(self, text: str | msgspec.Raw) -> Any:
        try:
            return self._result.decode(text)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise _unfit(self._the_result, error) from error

    @cached_property
    def _result(self) -> msgspec.json.Decoder[Any]:
        kind = self.result_type
        return _decoder(Any if kind is None or kind is type(None) else kind)

    def decode_parameter(self, name: str, text: str | msgspec.Raw) -> Any:
        """One argument, as its type hint says."""
        return decode(text, self._types[name], f"argument {name!r} of {self._name}")

    def takes(self, parameter: str) -> bool:
        """Whether the function has a parameter of this name."""
        return parameter in self._signature.parameters

    def takes_all(self, parameters: Iterable[str]) -> bool:
        """Whether it can be called with arguments of all these names."""
        any_name = inspect.Parameter.VAR_KEYWORD
        open_ended = any(parameter.kind is any_name for parameter in self._signature.parameters.values())
        return open_ended or all(self.takes(parameter) for parameter in parameters)

    def required(self) -> set[str]:
        """The parameters without which it cannot be called."""
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return {
            name
            for name, parameter in self._signature.parameters.items()
            if parameter.default is inspect.Parameter.empty and parameter.kind not in variable
        }


def _only_positional(signature: inspect.Signature) -> tuple[str, ...] | None:
    """The names of the parameters, if each of them can be given by its position alone."""
    simple = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if all(parameter.kind in simple for parameter in signature.parameters.values()):
        return tuple(signature.parameters)
    return None


def fingerprint(text: str) -> str:
    """A short hash that tells whether two stored values are the same."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def home(thing: Any) -> str:
    """The module in which other processes find a function or class, even if this one was started with that module."""
    return _main_name() if thing.__module__ == "__main__" else str(thing.__module__)


def locate(module: str, qualified_name: str) -> Any:
    """A function or class in its home; ImportError or AttributeError if it is not there."""
    found = sys.modules["__main__"] if module == _main_name() else importlib.import_module(module)
    for part in qualified_name.split("."):
        found = getattr(found, part)
    return found


def _main_name() -> str:
    """By which name others import what this process calls `__main__`: orders, after ``python orders.py``."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    return Path(path).stem if path else "__main__"


_LONGEST_MESSAGE = 10_000
_LONGEST_TRACE = 20_000
_LARGEST_GROUP = 20
_LARGEST_DETAIL = 50_000
"""How many bytes an error's arguments may have, and its attributes; larger ones are not kept."""


class StoredError(msgspec.Struct, frozen=True):
    """An exception as it is kept in history; of bounded size, whatever it carries."""

    error_type: str
    error_message: str
    error_module: str = ""
    error_args: msgspec.Raw = msgspec.Raw(b"[]")
    error_attributes: msgspec.Raw = msgspec.Raw(b"{}")
    errors: tuple[StoredError, ...] = ()
    """Those in a group."""
    stack_trace: str = ""

    @classmethod
    def of(cls, error: BaseException, stack_trace: str = "") -> StoredError:
        """Keep an exception: its type by name, its arguments and attributes as far as they are JSON."""
        kind = type(error)
        try:
            message = clipped(str(error), _LONGEST_MESSAGE)
        except Exception as unspeakable:
            message = f"(its text cannot be had: {type(unspeakable).__name__})"
        # An OSError leaves its file's name out of `args`.
        given = error.__reduce__()[1] if isinstance(error, OSError) else error.args
        arguments = _detail(list(given)) or _detail([_storable(one) for one in given])
        attributes = {name: value for name, value in vars(error).items() if _detail(value) is not None}
        return cls(
            error_type=kind.__qualname__,
            error_message=message,
            error_module=home(kind),
            error_args=arguments or msgspec.Raw(_encoder.encode([message])),
            error_attributes=_detail(attributes) or msgspec.Raw(b"{}"),
            errors=tuple(cls.of(one) for one in _grouped(error)),
            stack_trace=clipped(stack_trace, _LONGEST_TRACE, from_the_end=True),
        )

    def brief(self) -> StoredError:
        """What is left of it where little space is."""
        message = clipped(self.error_message, 200)
        return StoredError(self.error_type, message, self.error_module, msgspec.Raw(_encoder.encode([message])))

    def revive(self) -> BaseException:
        """The exception again, of its own type if this process knows it; else an ActivityError."""
        try:
            kind = _known_error(self.error_module, self.error_type)
            if kind is not None:
                args = tuple(msgspec.json.decode(self.error_args))
                if issubclass(kind, ExceptionGroup):
                    args = (*args[:1], [one.revive() for one in self.errors])
                return self._noted(
                    _made_again(kind, args, msgspec.json.decode(self.error_attributes, type=dict[str, Any]))
                )
        except (AttributeError, TypeError, ValueError):
            pass
        return self._noted(ActivityError(self.error_type, self.error_message))

    def _noted(self, error: BaseException) -> BaseException:
        """With the traceback of where it was raised, for whoever looks at it."""
        if self.stack_trace:
            error.add_note(f"\nWhere it was raised:\n\n{self.stack_trace.rstrip()}")
        return error


def _grouped(error: BaseException) -> tuple[BaseException, ...]:
    return error.exceptions[:_LARGEST_GROUP] if isinstance(error, BaseExceptionGroup) else ()


def clipped(text: str, longest: int, *, from_the_end: bool = False) -> str:
    """A text of bounded length that can be stored."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= longest:
        return text
    return f"… {text[-longest:]}" if from_the_end else f"{text[:longest]} …"


def _detail(value: Any) -> msgspec.Raw | None:
    """The JSON of a part of an error; None for what is no JSON or too much of it."""
    try:
        text = _encoder.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError):
        return None
    return msgspec.Raw(text) if len(text) <= _LARGEST_DETAIL else None


def _storable(argument: Any) -> Any:
    return argument if _detail(argument) is not None else clipped(str(argument), 1000)


def _known_error(module: str, qualified_name: str) -> type[Exception] | None:
    """A class of exceptions that this process has imported: what is stored never decides what is imported."""
    found: Any = sys.modules.get("__main__" if module == _main_name() else module)
    for part in qualified_name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _made_again(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    """An exception as it was. Its own `__init__` made it so once, perhaps of other arguments, and is not called."""
    built_in: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    error: Exception = built_in.__new__(kind, *args)
    error.args = args
    with suppress(TypeError):
        built_in.__init__(error, *args)  # such as the errno of an OSError
    vars(error).update(attributes)
    return error
