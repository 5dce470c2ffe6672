"""What hints say, and how many of them become few."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..sql.ending import FINISHED_TOPIC
from ..sql.operation import Hint

CATCH_UP = Hint("catch_up", "")
"""Hints may have been missed: look once at everything."""

TOPICS = (
    "workflow_resumable",
    "workflow_channel_message",
    "workflow_outbox_pending",
    "workflow_timer_expired",
    "workflow_cancelled",
    FINISHED_TOPIC,
)

LONGEST_PAYLOAD = 7900
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
    instance_ids: tuple[str, ...] = ()
    """Those that have finished, if there are several to tell of."""


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
    instance_ids: tuple[str, ...] = ()


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
        instance_ids=said.instance_ids,
    )


def digest(hints: Iterable[Hint]) -> list[Hint]:
    """What is left to say when many things were announced: of each subject the last, and of each topic not too much."""
    last: dict[str, dict[str, Hint]] = {}
    for hint in hints:
        last.setdefault(hint.topic, {})[_subject(hint)] = hint
    few: list[Hint] = []
    for topic, subjects in last.items():
        of_topic = list(subjects.values())
        if len(of_topic) > _MOST_OF_A_TOPIC:
            few.append(_and_more(of_topic[-1]))
        elif topic == FINISHED_TOPIC:
            few += _as_one(of_topic)
        else:
            few += of_topic
    return few


def _as_one(finished: list[Hint]) -> list[Hint]:
    """All that have finished in one hint, if that is not too long: each hint is a message to each who listens."""
    if len(finished) == 1:
        return finished
    ids = [told(hint).instance_id for hint in finished]
    payload = msgspec.json.encode({"instance_ids": ids})
    return [Hint(FINISHED_TOPIC, payload.decode())] if len(payload) <= LONGEST_PAYLOAD else finished


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
