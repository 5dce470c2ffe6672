"""What hints say, and how many of them become few."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..sql.operation import Hint

CATCH_UP = Hint("catch_up", "")
"""Hints may have been missed: look once at everything."""

TOPICS = (
    "workflow_resumable",
    "workflow_channel_message",
    "workflow_outbox_pending",
    "workflow_timer_expired",
    "workflow_cancelled",
    "workflow_finished",
)

LONGEST_PAYLOAD = 8000
"""Bytes; what PostgreSQL accepts, a little less."""
_MOST_OF_A_TOPIC = 100
"""More than that at once, and the listener had better look for itself."""


class Told(msgspec.Struct, frozen=True):
    """What the payload of a hint says. It may come from another framework, or from anybody."""

    instance_id: str = ""
    workflow_name: str = ""
    channel: str = ""
    more: bool = False
    """There was more to say than this: look at everything of the topic."""


class _Payload(msgspec.Struct):
    """The keys that the frameworks use: each has its own names for the same things."""

    instance_id: str = ""
    wf_id: str = ""
    workflow_name: str = ""
    wf_name: str = ""
    channel: str = ""
    channel_name: str = ""
    ch: str = ""
    more: bool = False


def told(hint: Hint) -> Told:
    """Read a hint, whoever sent it; one that cannot be read means: look."""
    try:
        said = msgspec.json.decode(hint.payload, type=_Payload)
    except (msgspec.DecodeError, UnicodeError):
        return Told(more=True)
    return Told(
        instance_id=said.instance_id or said.wf_id,
        workflow_name=said.workflow_name or said.wf_name,
        channel=said.channel or said.channel_name or said.ch,
        more=said.more,
    )


def digest(hints: Iterable[Hint]) -> list[Hint]:
    """What is left to say when many things were announced: of each subject the last, and of each topic not too much."""
    last: dict[str, dict[str, Hint]] = {}
    for hint in hints:
        last.setdefault(hint.topic, {})[_subject(hint)] = hint
    few: list[Hint] = []
    for subjects in last.values():
        of_topic = list(subjects.values())
        few += of_topic if len(of_topic) <= _MOST_OF_A_TOPIC else [_and_more(of_topic[-1])]
    return few


def _subject(hint: Hint) -> str:
    """What a listener does not have to be told of twice."""
    match hint.topic:
        case "workflow_channel_message":
            return told(hint).channel
        case "workflow_resumable":
            return told(hint).workflow_name
        case "workflow_outbox_pending":
            return ""
    return hint.payload


def _and_more(hint: Hint) -> Hint:
    said = msgspec.json.decode(hint.payload)
    return Hint(hint.topic, msgspec.json.encode({**said, "more": True}).decode())
