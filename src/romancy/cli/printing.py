"""What is printed: a terminal can show all of it, and obeys none of it."""

from __future__ import annotations

import codecs
import io
import json
from typing import TextIO


def escaped(text: str) -> str:
    """A text from the database in one line: what is not printable in it, a line's end for one, as JSON writes it."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else _as_json(sign) for sign in text)


def show_everything(stream: TextIO) -> None:
    """Let characters that the stream's encoding does not have be escaped rather than be an error; JSON stays JSON."""
    if isinstance(stream, io.TextIOWrapper):
        codecs.register_error("romancy.json", _replaced)
        stream.reconfigure(errors="romancy.json")


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "only what is printed is encoded here"
    return _as_json(error.object[error.start : error.end]), error.end


def _as_json(text: str) -> str:
    return json.dumps(text)[1:-1]
