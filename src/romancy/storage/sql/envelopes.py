"""How a received message is written into history, in the words of the framework that will read it.

Envelopes are spliced from text, never decoded and encoded again: big integers, key order and unicode survive.
"""

from __future__ import annotations

import base64
import json

import msgspec

from ..models import ChannelMessage, ChannelSubscription, HistoryEvent, HistoryEventType
from .timers import iso

EDDA, ROMANCY_GO = "python", "go"


def received_event(instance_id: str, activity_id: str, message: ChannelMessage, framework: str) -> HistoryEvent:
    """The history event of a delivered message."""
    return HistoryEvent(
        instance_id=instance_id,
        activity_id=activity_id,
        event_type=HistoryEventType.CHANNEL_MESSAGE_RECEIVED,
        event_data=_romancy_go(message) if framework == ROMANCY_GO else _edda(message),
        event_data_binary=message.data_binary,
    )


def readable(message: ChannelMessage, framework: str) -> ChannelMessage:
    """The message as the receiver's framework can replay it.

    Edda breaks on bytes in a history, for ever, and Romancy knows none; they get JSON as CloudEvents write bytes in it.
    """
    if message.data_binary is None or framework not in (EDDA, ROMANCY_GO):
        return message
    text = base64.b64encode(message.data_binary).decode()
    return msgspec.structs.replace(message, data=f'{{"data_base64": "{text}"}}', data_binary=None)


def _edda(message: ChannelMessage) -> str:
    assert message.published_at is not None, "a stored message has a time"
    return (
        f'{{"id": {json.dumps(message.message_id)}, "channel": {json.dumps(message.channel)},'
        f' "data": {message.data or "null"}, "metadata": {message.metadata or "{}"},'
        f' "published_at": "{iso(message.published_at)}"}}'
    )


def _romancy_go(message: ChannelMessage) -> str:
    assert message.published_at is not None, "a stored message has a time"
    metadata = f', "metadata": {message.metadata}' if message.metadata else ""
    return (
        f'{{"id": {message.id}, "channel_name": {json.dumps(message.channel)}, "data": {message.data or "null"}'
        f'{metadata}, "created_at": "{iso(message.published_at)}"}}'
    )


def timeout_event(subscription: ChannelSubscription) -> HistoryEvent:
    """The history event of a receive that timed out."""
    assert subscription.activity_id is not None, "a waiting subscription knows its step"
    data = {
        "_error": True,
        "error_type": "TimeoutError",
        "error_message": f"no message on channel {subscription.channel!r} in time",
        "channel": subscription.channel,
        "timeout_at": None if subscription.timeout_at is None else iso(subscription.timeout_at),
    }
    return HistoryEvent(
        instance_id=subscription.instance_id,
        activity_id=subscription.activity_id,
        event_type=HistoryEventType.MESSAGE_TIMEOUT,
        event_data=json.dumps(data),
    )
