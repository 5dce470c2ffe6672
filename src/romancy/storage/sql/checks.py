"""What comes in is checked before anything is sent: keys, JSON, sizes, limits."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import msgspec

from ..errors import InvalidJSONError, InvalidKeyError, PayloadTooLargeError

LONGEST_KEY = 255
LARGEST_LIMIT = 100_000
LONGEST_ERROR = 2000
LONGEST_SEC = 100 * 365 * 86400

_any_json = msgspec.json.Decoder(msgspec.Raw)


def check_key(what: str, key: str, longest: int = LONGEST_KEY) -> str:
    """Accept 1 to 255 characters of Unicode without NUL; never truncate."""
    if type(key) is str and 0 < len(key) <= longest and key.isascii() and "\0" not in key:
        return key  # what nearly all are, and each step of each workflow has three
    if not isinstance(key, str):
        raise InvalidKeyError(f"{what} must be a str, not {type(key).__name__}")
    if not 0 < len(key) <= longest:
        raise InvalidKeyError(f"{what} must have 1 to {longest} characters, not {len(key)}")
    if "\0" in key:
        raise InvalidKeyError(f"{what} must not contain NUL: {key!r}")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise InvalidKeyError(f"{what} is not valid Unicode: {key!r}") from error
    return key


def check_optional_key(what: str, key: str | None, longest: int = LONGEST_KEY) -> str | None:
    """The same, None staying None."""
    return None if key is None else check_key(what, key, longest)


def check_label(what: str, label: str, longest: int = LONGEST_KEY) -> str:
    """Like a key, but it may be empty."""
    return label if label == "" else check_key(what, label, longest)


def can_be_stored(text: str) -> bool:
    """Whether a text to look for can be in a database at all: Unicode without NUL."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def findable(names: Iterable[str]) -> list[str]:
    """Those of the names that can be in a database at all."""
    return [name for name in names if can_be_stored(name)]


def plain_text(text: str) -> str:
    """Free text as every database can keep it: no NUL, no half of a surrogate pair."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def check_json(what: str, text: str, limit: int) -> str:
    """Accept JSON text of at most `limit` bytes; it is stored byte for byte."""
    if not isinstance(text, str):
        raise InvalidJSONError(f"{what} must be JSON text (str), not {type(text).__name__}")
    try:
        encoded = text.encode()
        if len(encoded) > limit:
            raise PayloadTooLargeError(what, len(encoded), limit)
        _any_json.decode(encoded)
    except UnicodeEncodeError as error:
        raise InvalidJSONError(f"{what} is not valid Unicode") from error
    except msgspec.DecodeError as error:
        raise InvalidJSONError(f"{what} is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidJSONError(f"{what} is nested too deeply") from error
    return text


def check_optional_json(what: str, text: str | None, limit: int) -> str | None:
    """The same, None staying None."""
    return None if text is None else check_json(what, text, limit)


def check_binary(what: str, payload: bytes | None, limit: int) -> bytes | None:
    """Accept at most `limit` bytes."""
    if payload is None:
        return None
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise TypeError(f"{what} must be bytes, not {type(payload).__name__}")
    payload = bytes(payload)
    check_size(what, len(payload), limit)
    return payload


def size_of(payload: str | bytes) -> int:
    """How many bytes a payload has."""
    return len(payload.encode("utf-8", "replace") if isinstance(payload, str) else payload)


def check_size(what: str, size: int, limit: int) -> None:
    """PayloadTooLargeError above the limit."""
    if size > limit:
        raise PayloadTooLargeError(what, size, limit)


def page_size(limit: int, default: int = 100) -> int:
    """How many rows to return; 0 means the default."""
    if limit < 0:
        raise ValueError(f"a limit must not be negative: {limit}")
    return min(limit or default, LARGEST_LIMIT)


def check_batch(what: str, count: int) -> None:
    """Accept as many things at once as one transaction should hold."""
    if count > LARGEST_LIMIT:
        raise ValueError(f"at most {LARGEST_LIMIT:,} {what} at once, not {count:,}")


def row_id(number: int) -> int:
    """An id as the databases can compare it: what is beyond their 64 bits is beyond every row, too."""
    return max(-(2**63), min(number, 2**63 - 1))


def age_sec(older_than: timedelta) -> float:
    """How old something must be, in seconds; a thousand years are as old as anything gets."""
    if older_than < timedelta(0):
        raise ValueError(f"older_than must not be negative: {older_than}")
    return min(older_than.total_seconds(), 10.0 * LONGEST_SEC)


def not_negative(what: str, seconds: float) -> float:
    """Accept a number of seconds, zero included, up to a hundred years."""
    return positive(what, seconds) if seconds != 0 else 0.0


def positive(what: str, seconds: float) -> float:
    """Accept a number of seconds above zero, up to a hundred years."""
    if not 0 < seconds <= LONGEST_SEC:
        raise ValueError(f"{what} must be more than 0 seconds and at most {LONGEST_SEC:,}, not {seconds}")
    return float(seconds)
