"""What beginners get wrong is said at once, in words that help."""

import asyncio
import logging
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from romancy import (
    App,
    Retention,
    Retry,
    RomancyError,
    SerializationError,
    Settings,
    WorkflowFailedError,
    activity,
    instance_id,
    sleep,
    start_child,
    workflow,
)
from romancy.storage import InstanceNotFoundError, InvalidKeyError
from tests.harness import Harness

from .conftest import MakeApp

pytestmark = pytest.mark.databases("sqlite")


@activity
async def step() -> int:
    return 1


@workflow
async def plain() -> int:
    return await step()


@workflow
async def other() -> int:
    return 2


@workflow
async def broken() -> None:
    raise KeyError("missing")


@workflow
async def parent_of_an_empty_id() -> None:
    await start_child(plain, id="")


@pytest.mark.parametrize("wrong", [step, "plain", plain.fn, None])
async def test_only_a_workflow_can_be_started(make_app: MakeApp, wrong: object) -> None:
    app = await make_app(plain)
    with pytest.raises(TypeError, match="is @workflow missing"):
        await app.start(wrong)


async def test_an_app_that_was_not_entered_says_so() -> None:
    app = App("sqlite://:memory:", workflows=[plain])
    with pytest.raises(RomancyError, match="async with app"):
        await app.start(plain)
    with pytest.raises(RomancyError, match="async with app"):
        await app.handle("order-1").result()


async def test_starting_what_only_others_can_run_is_warned_of_once(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = await make_app(plain)
    with caplog.at_level(logging.WARNING, "romancy"):
        await app.start(other)
        await app.start(other)
    assert [record.getMessage() for record in caplog.records] == [
        "workflow 'other' is not one of this app's: it waits for another worker to run it"
    ]


async def test_waiting_for_what_is_parked_is_warned_of(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    client = await make_app(worker=False)
    handle = await client.start(plain, id="order-1")
    await client.storage.park("order-1", "why")
    with caplog.at_level(logging.WARNING, "romancy"), pytest.raises(TimeoutError):
        await handle.result(timeout=0.3)
    assert [record.getMessage() for record in caplog.records] == [
        "instance order-1 is parked, and waited for; `romancy show` tells why"
    ]


async def test_a_failure_tells_where_it_happened(make_app: MakeApp) -> None:
    app = await make_app(broken)
    with pytest.raises(WorkflowFailedError) as failed:
        await (await app.start(broken)).result(timeout=10)
    (note,) = failed.value.__notes__
    assert __file__ in note
    assert 'raise KeyError("missing")' in note


def undo_with(order: str, reason: str) -> None: ...


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"retry": 3}, "retry must be a Retry"),
        ({"timeout": "10s"}, "a timeout is a timedelta or a number of seconds"),
        ({"compensate": lambda order: None}, "a compensation must have a name"),
        ({"compensate": undo_with}, "its compensation needs order, reason"),
    ],
)
def test_wrong_options_of_an_activity_are_refused_where_they_stand(options: dict[str, Any], words: str) -> None:
    async def charge(order: str) -> None: ...

    with pytest.raises(TypeError, match=words):
        activity(**options)(charge)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"max_attempts": "3"}, TypeError, "max_attempts must be a whole number, not '3'"),
        ({"max_attempts": None}, TypeError, "max_attempts must be a whole number, not None"),
        ({"max_attempts": True}, TypeError, "max_attempts must be a whole number, not True"),
        ({"max_attempts": -1}, ValueError, "max_attempts must be at least 0, not -1"),
        ({"initial_sec": "x"}, TypeError, "initial_sec must be a number, not 'x'"),
        ({"initial_sec": -1}, ValueError, "initial_sec must be from 0 to 3,153,600,000, not -1"),
        ({"initial_sec": math.inf}, ValueError, "initial_sec must be from 0 to 3,153,600,000, not inf"),
        ({"factor": -2}, ValueError, "factor must be from 0 to 1,000, not -2"),
        ({"longest_sec": timedelta(seconds=1)}, TypeError, "longest_sec must be a number, not datetime.timedelta"),
        ({"longest_sec": math.nan}, ValueError, "longest_sec must be from 0 to inf, not nan"),
        ({"jitter": 5}, ValueError, "jitter must be from 0 to 1, not 5"),
        ({"max_duration": 60}, TypeError, "max_duration must be a timedelta or None, not 60"),
        ({"max_duration": timedelta(-1)}, ValueError, "max_duration must not be negative: -1 day"),
        (
            {"retry_on": [ConnectionError]},
            TypeError,
            "retry_on must be a tuple of exception classes, .*, not .<class",
        ),
        ({"retry_on": (ConnectionError, "OSError")}, TypeError, "retry_on must be a tuple of exception classes"),
        ({"terminal": [ValueError]}, TypeError, "terminal must be a tuple of exception classes"),
        ({"terminal": (int,)}, TypeError, "terminal must be a tuple of exception classes"),
    ],
)
def test_wrong_options_of_a_retry_are_refused_where_they_stand(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        Retry(**options)


@pytest.mark.parametrize("kinds", [OSError, (OSError,), (KeyError, OSError)])
def test_a_retry_takes_one_class_of_errors_or_several(kinds: Any) -> None:
    assert Retry(retry_on=kinds).allows(ConnectionError(), 1, 0.0)
    assert not Retry(retry_on=kinds).allows(ValueError(), 1, 0.0)
    assert not Retry(terminal=kinds).allows(ConnectionError(), 1, 0.0)
    assert Retry(terminal=kinds).allows(ValueError(), 1, 0.0)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"concurrency": 0}, ValueError, "concurrency must be at least 1, not 0"),
        ({"concurrency": 2.5}, TypeError, "concurrency must be a whole number, not 2.5"),
        ({"lock_timeout_sec": 0}, ValueError, "lock_timeout_sec must be more than 0 and at most 3,153,600,000, not 0"),
        ({"lock_timeout_sec": math.inf}, ValueError, "lock_timeout_sec must be more than 0 and at most .*, not inf"),
        ({"lock_timeout_sec": "6"}, TypeError, "lock_timeout_sec must be a number, not '6'"),
        ({"lock_timeout_sec": timedelta(seconds=6)}, TypeError, "lock_timeout_sec must be a number, not datetime.time"),
        ({"heartbeat_sec": 0}, ValueError, "heartbeat_sec must be more than 0"),
        ({"heartbeat_sec": 10}, ValueError, r"heartbeat_sec \(10\) must be less than lock_timeout_sec \(6.0\)"),
        ({"lock_timeout_sec": 1}, ValueError, r"heartbeat_sec \(1.5\) must be less than lock_timeout_sec \(1\)"),
        ({"poll_sec": 0}, ValueError, "poll_sec must be more than 0"),
        ({"takeovers": 0}, ValueError, "takeovers must be at least 1, not 0"),
        ({"warm": -1}, ValueError, "warm must be at least 0, not -1"),
        ({"drain_sec": -1}, ValueError, "drain_sec must be from 0 to inf, not -1"),
    ],
)
def test_wrong_settings_are_refused_where_they_stand(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        Settings(**options)


@pytest.mark.parametrize("name", ["instances", "messages", "events", "seen_events"])
def test_a_wrong_retention_is_refused_where_it_stands(name: str) -> None:
    wrong: dict[str, Any] = {name: 90}
    with pytest.raises(TypeError, match=f"{name} must be a timedelta.*, not 90"):
        Retention(**wrong)
    with pytest.raises(ValueError, match=f"{name} must not be negative: -1 day"):
        Retention(**{name: timedelta(days=-1)})


@pytest.mark.parametrize("wrong", [None, 60, timedelta(0), timedelta(minutes=-1)])
def test_a_retention_that_looks_without_a_pause_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="every must be a timedelta of more than 0, not"):
        Retention(every=wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"settings": 5}, "settings must be Settings or None, not 5"),
        ({"settings": {}}, "settings must be Settings or None, not {}"),
        ({"retention": 90}, "retention must be a Retention or None, not 90"),
        ({"retention": timedelta(days=90)}, "retention must be a Retention or None, not datetime"),
    ],
)
def test_what_are_no_settings_is_refused_by_the_app(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        App("sqlite://:memory:", **options)


@pytest.mark.parametrize("decorator", [activity, workflow, activity(name="charge"), workflow(name="charge")])
async def test_a_method_is_refused_where_it_stands_unless_it_needs_no_object(decorator: Any) -> None:
    with pytest.raises(TypeError, match=r"Shop\.charge is a method: activities and workflows are functions"):

        class Shop:
            @decorator
            async def charge(self, euros: int) -> int:
                return euros

    class Bank:
        @staticmethod
        @decorator
        async def charge(euros: int) -> int:
            return euros

        async def refund(self, euros: int) -> int:
            return -euros

    assert await Bank.charge(5) == 5
    assert await decorator(Bank().refund)(5) == -5


async def test_a_wrong_argument_is_refused_before_anything_is_stored(make_app: MakeApp) -> None:
    app = await make_app(twice)
    with pytest.raises(SerializationError, match="argument 'number' of twice does not fit its type hint"):
        await app.start(twice, "2", id="wrong")
    assert await app.storage.get_instance("wrong") is None


async def test_arguments_that_a_workflow_does_not_take_are_told_with_its_name(make_app: MakeApp) -> None:
    app = await make_app(twice)
    with pytest.raises(TypeError, match=r"^twice: missing a required argument: 'number'$"):
        await app.start(twice)
    with pytest.raises(TypeError, match=r"^twice: too many positional arguments$"):
        await app.start(twice, 1, 2)


async def test_an_empty_id_is_an_error_and_not_another_instance_each_time(make_app: MakeApp) -> None:
    app = await make_app(plain, parent_of_an_empty_id)
    with pytest.raises(InvalidKeyError, match="instance_id must have 1 to 255 characters"):
        await app.start(plain, id="")
    with pytest.raises(WorkflowFailedError, match="instance_id must have 1 to 255 characters"):
        await (await app.start(parent_of_an_empty_id)).result(10)


async def test_an_instance_that_is_not_there_has_no_history_either(make_app: MakeApp) -> None:
    app = await make_app(plain)
    with pytest.raises(InstanceNotFoundError):
        await app.handle("nobody").history()


async def test_a_message_that_nobody_could_receive_is_not_sent(make_app: MakeApp) -> None:
    app = await make_app(plain)
    with pytest.raises(TypeError, match="metadata must be a dict, not str"):
        await app.publish("orders", 1, metadata="urgent")  # type: ignore[arg-type]
    for receiver in (app.handle("order-1"), "", 5):
        with pytest.raises(InvalidKeyError, match="instance_id must"):
            await app.send_to(receiver, 1)  # type: ignore[arg-type]


@workflow
async def sleeping(seconds: Any) -> None:
    await sleep(float(seconds) if isinstance(seconds, str) and seconds != "5" else seconds)


@pytest.mark.parametrize("seconds", ["5", "nan", "inf", 1e12, True])
async def test_only_a_time_that_ends_can_be_slept(make_app: MakeApp, seconds: object) -> None:
    app = await make_app(sleeping)
    with pytest.raises(WorkflowFailedError, match=r"sleep\(\) needs"):
        await (await app.start(sleeping, seconds)).result(10)


async def test_a_dict_with_other_keys_than_text_is_named_as_such(make_app: MakeApp) -> None:
    app = await make_app(plain)
    with pytest.raises(SerializationError, match=r"the keys of a dict must be str$"):
        await app.publish("orders", {1: 2})


async def test_a_call_of_a_workflow_is_not_a_workflow(make_app: MakeApp) -> None:
    app = await make_app(twice)
    with pytest.raises(TypeError, match="not a call of it"):
        await app.start(twice(2))


@pytest.mark.parametrize(("wrong", "kind"), [(None, "NoneType"), (5, "int"), (Path("orders.db"), "PosixPath")])
def test_a_url_that_is_no_text_is_refused(wrong: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"url must be text, such as 'sqlite:///orders.db', and not of type {kind}"):
        App(wrong)


async def test_an_argument_that_the_app_does_not_have_is_named(harness: Harness) -> None:
    with pytest.raises(TypeError, match=r"App has no argument 'workflow'; did you mean 'workflows'\?"):
        App(harness.url, workflow=[twice])


async def test_an_app_that_was_closed_says_so(harness: Harness) -> None:
    app = App(harness.url, workflows=[twice])
    async with app:
        pass
    with pytest.raises(RomancyError, match="make a new App"):
        await app.__aenter__()


@activity
async def add(one: int, other: int) -> int:
    return one + other


@workflow
async def twice(number: int) -> int:
    return await add(number, number)


@activity(retry=Retry(max_attempts=2, initial_sec=0.01))
async def buggy(secret: str) -> None:
    raise LookupError(f"no account for {secret}")


@workflow
async def pays(secret: str) -> None:
    await buggy(secret)


async def test_a_failure_tells_where_it_was_raised(make_app: MakeApp) -> None:
    app = await make_app(pays)
    with pytest.raises(WorkflowFailedError) as failed:
        await (await app.start(pays, "4711")).result(10)
    told = "\n".join(failed.value.__notes__)
    assert 'raise LookupError(f"no account for {secret}")' in told
    assert "in pays" in told


async def test_the_log_tells_of_failures_and_nothing_that_errors_say(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = await make_app(pays)
    with pytest.raises(WorkflowFailedError):
        await (await app.start(pays, "4711", id="order-1")).result(10)
    said = [record.getMessage() for record in caplog.records]
    assert [
        text for text in said if text.startswith("instance order-1: attempt 1 at step buggy:1 has failed with Look")
    ]
    assert "instance order-1: attempt 2 at step buggy:1 has failed with LookupError, for good" in said
    assert "instance order-1 of pays has failed with LookupError; `romancy show` tells more" in said
    assert not [text for text in said if "4711" in text]


@activity
async def dozes() -> None:
    await sleep(1)


@activity
def asks_in_a_thread() -> str:
    return instance_id()


@workflow
async def misled() -> list[str]:
    return [str(error) for error in await asyncio.gather(dozes(), asks_in_a_thread(), return_exceptions=True)]


async def test_an_activity_that_calls_what_belongs_in_a_body_fails_at_once(make_app: MakeApp) -> None:
    app = await make_app(misled)
    handle = await app.start(misled)
    assert await handle.result(10) == [
        "sleep() belongs in a workflow's body, not in an activity",
        "instance_id() belongs in a workflow's body, not in an activity",
    ]
    failed = [event.activity_id for event in await handle.history() if event.event_type == "ActivityFailed"]
    assert not [step for step in failed if "#" in step]


async def test_waiting_in_vain_says_for_what(make_app: MakeApp) -> None:
    app = await make_app(naps)
    handle = await app.start(naps, id="sleeper")
    with pytest.raises(TimeoutError, match=r"instance sleeper has not finished within 0\.1 s"):
        await handle.result(0.1)


@workflow
async def naps() -> None:
    await sleep(3600)
