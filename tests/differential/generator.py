"""Random sequences that collide: few instances, channels, steps and workers, and mostly locks that are live.

The generator plays each step on an oracle of its own, so that it knows who holds what and can aim at it. It draws from
its seed only: the same seed is the same sequence, on every database.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from romancy.storage import (
    ANY,
    ChannelMessage,
    ChannelMode,
    ChannelSubscription,
    ChannelWait,
    CompensationEntry,
    HistoryEvent,
    InstanceWait,
    ListInstancesOptions,
    OutboxEvent,
    OutboxStatus,
    StorageError,
    TimerSubscription,
    WorkflowInstance,
    WorkflowStatus,
)

from .oracle import FINISHED, NEIGHBOUR, OURS, RUNNABLE, WAITING
from .steps import Advance, Call, Drawn, Held, In, Published, Rehearsal, Step, Together, Transaction

T = TypeVar("T")
Kinds = dict[Callable[["Generator"], Call | None], int]

INSTANCES = ("ann", "bob", "cid", "dan", "eve", "Ann", "ann ", "fay", "gus", "hal")
NOBODY = "nobody"
WORKFLOWS = ("order", "refund")
CODES = ("old code", "new code")
WORKERS = ("w1", "w2", "w3")
ACTIVITIES = tuple(f"s{number}" for number in range(1, 10))
TIMERS = ("t1", "t2")
CHANNELS = ("jobs", "news", "News")
GROUPS = ("g1", "g2")
EVENTS = ("e1", "e2", "e3", "e4")
PAYLOADS = ('{"n": 9007199254740993}', '"é\\u00e9"', "[1, 2]", "null", '{"a":1,"a":2}')
INPUT_FILTERS = (
    {"n": 9007199254740993},
    {"n": 9007199254740992},
    {"a": 2},
    {"a": 2.0, "n": None},
    {"a": 1},
    {"a": True},
    {"a.b": None},
    {"a": "2"},
)
LOCK_SEC = (1500.0, 4500.0, 9500.0)
FLEETING = ("now", "framework", "last_id")
AGES = (timedelta(seconds=500), timedelta(seconds=1500), timedelta(seconds=2500))


def half_ticks(halves: int) -> Any:
    """A moment so far from now; it stands where a time belongs until the step is played."""
    return In(halves)


class Generator(Rehearsal):
    """Draws steps, one after the other."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.script: list[Step] = []

    def steps(self, count: int) -> list[Step]:
        return [self._play(self._next()) for _ in range(count)]

    # One step.

    def _next(self) -> Step:
        if not self.script and self.chance(0.3):
            self.script = [step for step in self.pick(SCENES)(self) if not self.chance(0.1)]
        if self.script and self.chance(0.7):
            return self.script.pop(0)
        if self.chance(0.08):
            return Advance(self.pick((1, 1, 1, 2, 4)))
        if self.chance(0.06):
            return Transaction(tuple(self._in_transaction(depth=1)), commit=self.chance(0.6))
        if self.chance(0.05):
            return Together(tuple(self._written_together()))
        return self._call()

    def _call(self, kinds: Kinds | None = None) -> Call:
        kinds = KINDS if kinds is None else kinds
        while True:
            (draw,) = self.random.choices(list(kinds), list(kinds.values()))
            call = draw(self)
            if call is not None and (self._does_something(call) or self.chance(0.05)):
                return call

    def _does_something(self, call: Call) -> bool:
        """Whether the call would find or change anything; most that come to nobody's mind would not."""
        before, handles = self.oracle.snapshot(), self.handles.copy()
        answer = self.ask_oracle(call, self.arguments(call)[0])
        changed = self.changed_since(before)
        self.oracle.restore(before)
        self.handles = handles
        return changed or (bool(answer) and not isinstance(answer, StorageError))

    def changed_since(self, before: dict[str, Any]) -> bool:
        return any(before[name] != value for name, value in vars(self.oracle).items() if name not in FLEETING)

    def _in_transaction(self, depth: int) -> list[Step]:
        steps: list[Step] = []
        for _ in range(self.random.randint(1, 4)):
            if depth < 3 and self.chance(0.2):
                steps.append(Transaction(tuple(self._in_transaction(depth + 1)), commit=self.chance(0.5)))
            else:
                steps.append(replace(self._call(OWN_KINDS), by=OURS))
        return steps

    def _written_together(self) -> list[Call]:
        return [replace(self._call(WRITES), by=OURS) for _ in range(self.random.randint(2, 5))]

    def _play(self, step: Step) -> Step:
        """Let the oracle live through the step, so that the next one can be aimed."""
        match step:
            case Advance(ticks):
                self.advance(ticks)
            case Transaction(steps, commit):
                with self.transaction(commit=commit):
                    for inner in steps:
                        self._play(inner)
            case Together(calls):
                for call in calls:
                    self._play(call)
            case Call():
                answer = self.ask_oracle(step, self.arguments(step)[0])
                if not isinstance(answer, StorageError):
                    self.handles.note(step.name, answer, answer)
        return step

    # What is drawn for a step.

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, choices: Iterable[T]) -> T:
        return self.random.choice(list(choices))

    def maybe(self, value: T, probability: float = 0.5) -> T | None:
        return value if self.chance(probability) else None

    def instance(self, *statuses: str) -> str:
        """Mostly one that exists, in one of these statuses if there is any."""
        known = [name for name, instance in self.oracle.instances.items() if instance.status in statuses]
        if known and self.chance(0.9):
            return str(self.pick(known))
        if self.chance(0.1):
            return NOBODY
        return str(self.pick(self.oracle.instances or INSTANCES))

    def run(self, *statuses: str) -> Held:
        """Mostly the live lock of an instance in one of these statuses; sometimes one that is lost, or never was."""
        live = [
            Held(name, instance.locked_by)
            for name, instance in self.oracle.instances.items()
            if instance.locked_by and not self.oracle.is_free(instance) and instance.status in statuses
        ]
        if live and self.chance(0.92):
            return self.pick(live)
        return Held(self.instance(*statuses), self.worker(), self.pick((0, 0, 1, 2)))

    def worker(self) -> str:
        return str(self.pick(WORKERS))

    def framework(self, instance_id: str = "") -> str:
        """Whoever runs the instance; polls are mostly ours."""
        instance = self.oracle.instances.get(instance_id)
        if instance is not None:
            return str(instance.framework)
        return NEIGHBOUR if self.chance(0.1) else OURS

    def activity(self) -> str:
        return str(self.pick(ACTIVITIES))

    def new_activity(self, instance_id: str) -> str:
        """Mostly a step that has not been taken."""
        new = [name for name in ACTIVITIES if (instance_id, name) not in self.oracle.history]
        return str(self.pick(new)) if new and self.chance(0.9) else self.activity()

    def payload(self) -> str:
        return str(self.pick(PAYLOADS))

    def channel(self, instance_id: str | None = None) -> str:
        """Mostly one that the instance is subscribed to, or that somebody waits for."""
        waited = [wait.channel for wait in self.oracle.channel_waits.values()]
        if instance_id is None and waited and self.chance(0.5):
            return str(self.pick(waited))
        subscribed = [key[1] for key in self.oracle.subscriptions if instance_id in (None, key[0])]
        if subscribed and self.chance(0.9):
            return str(self.pick(subscribed))
        return str(self.pick(CHANNELS))

    def event(self, instance_id: str) -> HistoryEvent:
        if self.chance(0.2):
            return HistoryEvent(instance_id, self.activity(), "ActivityCompleted", event_data_binary=b"\x00\xff")
        return HistoryEvent(
            instance_id,
            self.activity(),
            self.pick(("ActivityCompleted", "ActivityCompleted", "ActivityFailed")),
            event_data=self.maybe(self.payload(), 0.9),
            created_at=self.maybe(half_ticks(-1), 0.1),
        )

    def step(self, *statuses: str) -> tuple[str, dict[str, Any]]:
        """An instance, with ``lock=`` and ``record=`` of a step that its run takes."""
        held = self.run(*(statuses or RUNNABLE))
        options: dict[str, Any] = {}
        if self.chance(0.5):
            options["lock"] = held
        if self.chance(0.3):
            options["record"] = self.event(held.instance_id)
        return held.instance_id, options

    def fenced(self, *statuses: str, probability: float = 0.7) -> tuple[str, dict[str, Any]]:
        """An instance, with ``lock=`` of its run or without."""
        held = self.run(*(statuses or RUNNABLE))
        return held.instance_id, {"lock": held} if self.chance(probability) else {}

    def soon(self) -> Any:
        return half_ticks(self.pick((-1, 1, 1, 1, 1, 3, 3, 5)))

    def timer(self, instance_id: str) -> TimerSubscription:
        return TimerSubscription(instance_id, self.pick(TIMERS), self.soon(), activity_id=self.maybe(self.activity()))

    def channel_wait(self, instance_id: str) -> ChannelWait:
        timeout_at = self.maybe(self.soon(), 0.4)
        return ChannelWait(self.channel(instance_id), self.new_activity(instance_id), timeout_at)

    def waits(self, instance_id: str) -> list[Any]:
        drawn: list[Any] = []
        while not drawn or self.chance(0.4):
            kind = self.random.random()
            if kind < 0.3:
                drawn.append(self.timer(instance_id))
            elif kind < 0.8 and any(key[0] == instance_id for key in self.oracle.subscriptions):
                drawn.append(self.channel_wait(instance_id))
            else:
                drawn.append(InstanceWait(self.instance(*RUNNABLE, *WAITING), self.activity()))
        return drawn

    def poll_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.chance(0.2):
            options["workflow_names"] = self.random.sample(WORKFLOWS, self.random.randint(0, 2))
        if self.chance(0.1):
            options["owner_service"] = self.pick(("", "shop"))
        if self.chance(0.2):
            options["limit"] = self.pick((1, 2))
        return options


# The kinds of calls. Each draws one, or gives up with None when nothing fits.


def create_instance(g: Generator) -> Call | None:
    free = [name for name in INSTANCES if name not in g.oracle.instances]
    if sum(instance.status not in FINISHED for instance in g.oracle.instances.values()) > 3 and not g.chance(0.05):
        return None
    instance = WorkflowInstance(
        g.pick(free) if free and g.chance(0.95) else g.pick(INSTANCES),
        g.pick(WORKFLOWS),
        status=g.pick((*[WorkflowStatus.RUNNING] * 8, WorkflowStatus.COMPENSATING, WorkflowStatus.RECURRED)),
        framework=g.maybe(NEIGHBOUR, 0.1),
        input_data=g.payload(),
        source_hash=g.pick(("", "abc")),
        owner_service=g.pick(("", "shop")),
        continued_from=g.maybe(g.instance(), 0.1),
        locked_by=g.maybe(g.worker(), 0.6),
        lock_timeout_seconds=g.maybe(2500, 0.15),
        lock_token=g.pick((0, 0, 0, 7)),
        started_at=g.maybe(half_ticks(-1), 0.1),
    )
    return Call("create_instance", (instance,), {"lock_timeout_sec": g.pick(LOCK_SEC)})


def update_instance_status(g: Generator) -> Call:
    instance_id, options = g.fenced(*RUNNABLE, *WAITING)
    status = g.pick((*[WorkflowStatus.RUNNING] * 3, *[WorkflowStatus.COMPENSATING] * 4, *WorkflowStatus))
    if g.chance(0.3):
        options["output_data"] = g.payload()
    return Call("update_instance_status", (instance_id, status, g.pick(("", "broken"))), options)


def update_instance_activity(g: Generator) -> Call:
    instance_id, options = g.fenced()
    return Call("update_instance_activity", (instance_id, g.activity()), options)


def update_instance_output(g: Generator) -> Call:
    instance_id, options = g.fenced("running", probability=0.9)
    if g.chance(0.4):
        options["record"] = g.event(instance_id)
    return Call("update_instance_output", (instance_id, g.maybe(g.payload(), 0.8)), options)


def cancel_instance(g: Generator) -> Call:
    return Call("cancel_instance", (g.instance(*RUNNABLE, *WAITING), "enough"), {"compensate": g.chance(0.5)})


def park(g: Generator) -> Call:
    instance_id, options = g.fenced(*RUNNABLE, *WAITING, probability=0.3)
    return Call("park", (instance_id, "why"), {"until": g.maybe(g.soon(), 0.7), **options})


def unpark(g: Generator) -> Call:
    parked = [name for name, instance in g.oracle.instances.items() if instance.parked_until]
    return Call("unpark", (g.pick(parked) if parked else g.instance(),))


def recur_instance(g: Generator) -> Call:
    held = g.run("running")
    return Call("recur_instance", (held.instance_id, g.payload()), {"lock": held})


def delete_finished_instances(g: Generator) -> Call:
    return Call("delete_finished_instances", (g.pick(AGES), g.pick((1, 2, 100))), by=g.framework())


def suspend(g: Generator) -> Call:
    held = g.run(*RUNNABLE)
    instance_id, options = held.instance_id, {"lock": held, "keep_lock": g.chance(0.1)}
    if g.chance(0.2):
        options["withdrawn"] = [g.activity(), g.pick(TIMERS)]
    options |= {option: True for option in ("one_message", "only_running") if g.chance(0.3)}
    return Call("suspend", (instance_id, g.waits(instance_id)), options, by=g.framework(instance_id))


def try_acquire_lock(g: Generator) -> Call:
    free = [name for name, instance in g.oracle.instances.items() if g.oracle.is_free(instance)]
    runnable = [name for name in free if g.oracle.instances[name].status in RUNNABLE]
    instance_id = g.pick(runnable) if runnable and g.chance(0.85) else g.instance(*RUNNABLE, *WAITING)
    return Call("try_acquire_lock", (instance_id, g.worker(), g.pick(LOCK_SEC)))


def claim_resumable_workflows(g: Generator) -> Call:
    return Call(
        "claim_resumable_workflows", (g.worker(), g.pick(LOCK_SEC)), {"limit": 2, **g.poll_options()}, by=g.framework()
    )


def release_lock(g: Generator) -> Call:
    held = g.run(*RUNNABLE, *WAITING)
    worker = held.worker_id if g.chance(0.9) else g.worker()
    return Call("release_lock", (held.instance_id, worker), {"lock": held} if g.chance(0.7) else {})


def refresh_lock(g: Generator) -> Call:
    held = g.run(*RUNNABLE, *WAITING)
    options = {"lock": held} if g.chance(0.7) else {}
    return Call("refresh_lock", (held.instance_id, held.worker_id, g.pick(LOCK_SEC)), options)


def refresh_locks(g: Generator) -> Call:
    locks = [g.run(*RUNNABLE, *WAITING) for _ in range(g.random.randint(1, 4))]
    if g.chance(0.3):
        locks.append(Held(locks[0].instance_id, locks[0].worker_id, 1))
    return Call("refresh_locks", (locks, g.pick(LOCK_SEC)))


def cleanup_stale_locks(g: Generator) -> Call:
    return Call("cleanup_stale_locks", (1500.0,), g.poll_options(), by=g.framework())


def append_history(g: Generator) -> Call:
    instance_id, options = g.fenced()
    event = g.event(instance_id)
    recorded = [
        other
        for key, other in g.oracle.history.items()
        if key[0] == instance_id and other.event_type in ("ActivityCompleted", "ActivityFailed")
    ]
    if recorded and g.chance(0.3):  # once more, as it stands there or nearly so
        again = g.pick(recorded)
        data = again.event_data if g.chance(0.7) else g.payload()
        event = HistoryEvent(instance_id, again.activity_id, again.event_type, None, data, again.event_data_binary)
    return Call("append_history", (event,), options)


def append_history_many(g: Generator) -> Call:
    instance_id, options = g.fenced()
    events = [g.event(instance_id) for _ in range(g.random.randint(0, 4))]
    if g.chance(0.15):
        events.append(g.event(g.instance()))
    return Call("append_history_many", (events,), options)


def register_timer_subscription(g: Generator) -> Call:
    instance_id, options = g.fenced()
    return Call("register_timer_subscription", (g.timer(instance_id),), options)


def register_timer_subscription_and_release_lock(g: Generator) -> Call:
    held = g.run(*RUNNABLE)
    return Call(
        "register_timer_subscription_and_release_lock",
        (g.timer(held.instance_id), held.instance_id, held.worker_id),
        {"lock": held} if g.chance(0.7) else {},
    )


def fire_timer(g: Generator) -> Call:
    timers = list(g.oracle.timers.values())
    due = [timer for timer in timers if timer.expires_at <= g.oracle.now]
    timer = g.pick(due) if due and g.chance(0.8) else g.pick(timers) if timers else g.timer(g.instance())
    timer = TimerSubscription(timer.instance_id, timer.timer_id, half_ticks(1))
    return Call("fire_timer", (timer,), {"worker_id": g.worker()}, by=g.framework(timer.instance_id))


def fire_and_claim(g: Generator) -> Call:
    call = fire_timer(g)
    return Call("fire_and_claim", (*call.args, g.worker(), g.pick(LOCK_SEC)), claim_options(g), by=call.by)


def claim_options(g: Generator) -> dict[str, Any]:
    options = g.poll_options()
    options.pop("limit", None)
    return options


def remove_timer_subscription(g: Generator) -> Call:
    return Call("remove_timer_subscription", (g.instance(*WAITING), g.pick(TIMERS)))


def add_outbox_event(g: Generator) -> Call:
    event = OutboxEvent(
        g.pick(EVENTS),
        "paid",
        "/shop",
        event_data=g.maybe(g.payload(), 0.8),
        status=g.pick((*[OutboxStatus.PENDING] * 9, OutboxStatus.PROCESSING)),
        retry_count=8,  # so that the pause before the next attempt is long compared with a step, short with a tick
        created_at=g.maybe(half_ticks(-1), 0.1),
    )
    if g.chance(0.2):
        event = OutboxEvent(
            event.event_id, "paid", "/shop", event_data_binary=b"\x00\xff", content_type="x/y", retry_count=9
        )
    return Call("add_outbox_event", (event,), g.step()[1])


def get_pending_outbox_events(g: Generator) -> Call:
    return Call(
        "get_pending_outbox_events", (g.pick((1, 2, 100)),), {"lease_sec": g.pick(LOCK_SEC), "owner": g.worker()}
    )


def outbox_event(g: Generator) -> str:
    """Mostly one that is on its way."""
    on_its_way = [name for name, event in g.oracle.outbox.items() if event.status in ("pending", "processing")]
    return str(g.pick(on_its_way) if on_its_way and g.chance(0.8) else g.pick(EVENTS))


def mark_outbox_event_sent(g: Generator) -> Call:
    return Call("mark_outbox_event_sent", (outbox_event(g),))


def mark_outbox_event_failed(g: Generator) -> Call:
    options = {"error": g.pick(("", "no route")), "invalid": g.chance(0.3), "owner": g.maybe(g.worker())}
    return Call("mark_outbox_event_failed", (outbox_event(g),), options)


def increment_outbox_attempts(g: Generator) -> Call:
    options = {"error": g.pick(("", "timeout")), "owner": g.maybe(g.worker())}
    return Call("increment_outbox_attempts", (outbox_event(g),), options)


def cleanup_old_outbox_events(g: Generator) -> Call:
    return Call("cleanup_old_outbox_events", (g.pick(AGES),), {"limit": g.pick((1, 1000))})


def add_compensation(g: Generator) -> Call:
    instance_id, options = g.step()
    return Call("add_compensation", (CompensationEntry(instance_id, g.activity(), "undo", g.payload()),), options)


def publish_to_channel(g: Generator) -> Call:
    data = g.payload() if g.chance(0.85) else b"\x00\xff"
    arguments = (g.channel(), data, g.maybe('{"k": "v"}', 0.3))
    options = g.step()[1] if g.chance(0.3) else {}
    return Call("publish_to_channel", arguments, options, by=g.framework())


def publish_many(g: Generator) -> Call:
    messages = [ChannelMessage(g.channel(), data=g.payload()) for _ in range(g.random.randint(0, 4))]
    return Call("publish_many", (messages,), g.fenced(probability=0.3)[1])


def publish_once(g: Generator) -> Call:
    return Call("publish_once", (g.pick(EVENTS), g.channel(), g.payload()), by=g.framework())


def cleanup_seen_events(g: Generator) -> Call:
    return Call("cleanup_seen_events", (g.pick(AGES),), {"limit": g.pick((1, 1000))})


def set_instance_state(g: Generator) -> Call:
    instance_id, options = g.step()
    return Call("set_instance_state", (instance_id, g.payload()), options)


def count_takeover(g: Generator) -> Call:
    held = g.run(*RUNNABLE)
    return Call("count_takeover", (held.instance_id,), {"lock": held})


def note_refusal(g: Generator) -> Call:
    held = g.run(*RUNNABLE)
    return Call("note_refusal", (held.instance_id, g.pick(CODES)), {"lock": held})


def unpark_refused(g: Generator) -> Call:
    return Call("unpark_refused", (g.pick(WORKFLOWS), g.pick(CODES), g.pick((1, 100))))


def publish_foreign(g: Generator) -> Call:
    options = {"reserved_id": Drawn()} if g.chance(0.6) else {}
    return Call("publish_foreign", (g.channel(), g.payload()), options)


def reserve_foreign(g: Generator) -> Call:
    return Call("reserve_foreign")


def subscribe_to_channel(g: Generator) -> Call:
    instance_id, options = g.step(*RUNNABLE, *WAITING)
    channel = g.pick(CHANNELS)
    mode = g.pick((*[usual_mode(channel)] * 8, *ChannelMode))
    return Call("subscribe_to_channel", (instance_id, channel, mode), options)


def unsubscribe_from_channel(g: Generator) -> Call:
    instance_id, options = g.step(*RUNNABLE, *WAITING)
    return Call("unsubscribe_from_channel", (instance_id, g.channel(instance_id)), options)


def register_channel_receive_and_release_lock(g: Generator) -> Call:
    held = g.run(*RUNNABLE)
    instance_id = held.instance_id
    return Call(
        "register_channel_receive_and_release_lock",
        (instance_id, g.channel(instance_id), held.worker_id, g.new_activity(instance_id), g.maybe(g.soon(), 0.4)),
        {"keep_lock": g.chance(0.3), **({"lock": held} if g.chance(0.7) else {})},
        by=g.framework(instance_id),
    )


def claim_channel_message(g: Generator) -> Call:
    return Call("claim_channel_message", (Published(g.random.randint(0, 4)), g.instance(*RUNNABLE, *WAITING)))


def delete_channel_message(g: Generator) -> Call:
    return Call("delete_channel_message", (Published(g.random.randint(0, 6)),))


def update_delivery_cursor(g: Generator) -> Call:
    instance_id = g.instance(*RUNNABLE, *WAITING)
    arguments = (instance_id, g.channel(instance_id), Published(g.random.randint(0, 4)))
    return Call("update_delivery_cursor", arguments)


def clear_channel_waiting_state(g: Generator) -> Call:
    instance_id = g.instance(*WAITING)
    return Call("clear_channel_waiting_state", (instance_id, g.channel(instance_id)))


def waiter(g: Generator) -> tuple[str, ChannelWait]:
    """Somebody's wait for a channel, mostly one that could be ended."""
    waits = [(key[0], wait) for key, wait in g.oracle.channel_waits.items()]
    due = [
        (instance_id, wait)
        for instance_id, wait in waits
        if g.oracle.instances[instance_id].status in WAITING
        and (g.oracle.pending(instance_id, wait.channel) or g.oracle.is_past(wait.timeout_at))
    ]
    if due and g.chance(0.85):
        return g.pick(due)
    instance_id = g.instance(*WAITING)
    return g.pick(waits) if waits and g.chance(0.8) else (instance_id, g.channel_wait(instance_id))


def deliver_channel_message(g: Generator) -> Call:
    instance_id, wait = waiter(g)
    options = {"lock": g.run(*WAITING)} if g.chance(0.3) else {}
    return Call(
        "deliver_channel_message", (instance_id, ChannelMessage(wait.channel)), options, by=g.framework(instance_id)
    )


def deliver_channel_message_with_lock(g: Generator) -> Call:
    instance_id, wait = waiter(g)
    return Call(
        "deliver_channel_message_with_lock",
        (instance_id, wait.channel, ChannelMessage(wait.channel), g.worker(), g.pick(LOCK_SEC)),
        by=g.framework(instance_id),
    )


def deliver_and_claim(g: Generator) -> Call:
    instance_id, wait = waiter(g)
    subscription = ChannelSubscription(instance_id, wait.channel, usual_mode(wait.channel))
    return Call(
        "deliver_and_claim",
        (subscription, g.worker(), g.pick(LOCK_SEC)),
        claim_options(g),
        by=g.framework(instance_id),
    )


def expire_channel_receive(g: Generator) -> Call:
    instance_id, wait = waiter(g)
    subscription = ChannelSubscription(
        instance_id, wait.channel, ChannelMode.BROADCAST, activity_id=wait.activity_id, timeout_at=half_ticks(1)
    )
    return Call("expire_channel_receive", (subscription,), by=g.framework(instance_id))


def cleanup_old_channel_messages(g: Generator) -> Call:
    return Call("cleanup_old_channel_messages", (g.pick(AGES),), {"limit": g.pick((1, 1000))})


def join_group(g: Generator) -> Call:
    instance_id, options = g.step()
    return Call("join_group", (instance_id, g.pick(GROUPS)), options)


def leave_group(g: Generator) -> Call:
    instance_id, options = g.step()
    return Call("leave_group", (instance_id, g.pick(GROUPS)), options)


def leave_all_groups(g: Generator) -> Call:
    return Call("leave_all_groups", (g.instance(),))


def try_acquire_system_lock(g: Generator) -> Call:
    return Call("try_acquire_system_lock", ("leader", g.worker(), g.pick(LOCK_SEC)))


def release_system_lock(g: Generator) -> Call:
    return Call("release_system_lock", ("leader", g.worker()))


def cleanup_expired_system_locks(g: Generator) -> Call:
    return Call("cleanup_expired_system_locks")


def archive_history(g: Generator) -> Call:
    instance_id, options = g.fenced()
    return Call("archive_history", (instance_id,), options)


def cleanup_instance_subscriptions(g: Generator) -> Call:
    return Call("cleanup_instance_subscriptions", (g.instance(*RUNNABLE, *WAITING),))


def read(g: Generator) -> Call:
    """Something that only looks."""
    instance_id, channel = g.instance(*RUNNABLE, *WAITING, *FINISHED), g.channel()
    reads: list[Call] = [
        Call("get_instance", (instance_id,)),
        Call("get_history", (instance_id,)),
        Call("get_history_count", (instance_id,)),
        Call("get_history_event", (instance_id, g.activity())),
        Call("get_compensations", (instance_id,)),
        Call("get_instance_state", (instance_id,)),
        Call("get_awaited_steps", (instance_id,)),
        Call("get_waits", (instance_id,)),
        Call("get_archived_history", (instance_id,)),
        Call("get_channel_subscription", (instance_id, g.channel(instance_id))),
        Call("get_channel_mode", (channel,)),
        Call("get_pending_channel_messages", (channel, Published(g.random.randint(0, 5)), g.pick((1, 100)))),
        Call("get_pending_channel_messages_for_instance", (instance_id, g.channel(instance_id))),
        Call("get_delivery_cursor", (instance_id, g.channel(instance_id))),
        Call("get_channel_subscribers_waiting", (channel,), {"limit": g.pick((1, 100))}),
        Call("get_group_members", (g.pick(GROUPS),)),
        Call("current_time"),
        *[list_instances(g) for _ in range(3)],
    ]
    return g.pick(reads)


def list_instances(g: Generator) -> Call:
    options = ListInstancesOptions(
        status_filter=g.maybe(g.pick(WorkflowStatus), 0.2),
        workflow_name_filter=g.maybe("FUN", 0.2),
        instance_id_filter=g.maybe("aN", 0.2),
        started_after=g.maybe(half_ticks(-3), 0.2),
        started_before=g.maybe(half_ticks(-1), 0.2),
        input_filters=g.maybe(g.pick(INPUT_FILTERS), 0.4) or {},
    )
    kwargs = {"payloads": g.chance(0.5), "framework": g.pick((None, None, NEIGHBOUR, ANY))}
    return Call("list_instances", (options,), kwargs, by=g.framework())


def poll(g: Generator) -> Call:
    """What a background service does all the time."""
    polls = (
        "find_resumable_workflows",
        "find_expired_timers",
        "find_expired_channel_subscriptions",
        "find_deliverable_subscriptions",
    )
    if g.chance(0.2):
        soon = g.pick((0.0, 1500.0))
        asked = {name: value for name, value in g.poll_options().items() if name != "limit"}
        return Call("look_for_work", (soon,), asked, by=g.framework())
    return Call(g.pick(polls), (), g.poll_options(), by=g.framework())


# Scenes: calls that belong together. Others come in between, and now and then one is left out.


def actor(g: Generator) -> tuple[str, str, Step]:
    """An instance that runs, who runs it, and how that came about."""
    runnable = [
        instance
        for instance in g.oracle.instances.values()
        if instance.status == "running" and instance.framework == OURS and instance.parked_until is None
    ]
    free = [name for name in INSTANCES if name not in g.oracle.instances]
    worker = g.worker()
    if free and (not runnable or g.chance(0.3)):
        born = WorkflowInstance(g.pick(free), g.pick(WORKFLOWS), locked_by=worker)
        return born.instance_id, worker, Call("create_instance", (born,), {"lock_timeout_sec": 9500.0})
    instance = g.pick(runnable or g.oracle.instances.values())
    if instance.locked_by and not g.oracle.is_free(instance):
        worker = instance.locked_by
        return instance.instance_id, worker, Call("refresh_lock", (instance.instance_id, worker, 9500.0))
    return instance.instance_id, worker, Call("try_acquire_lock", (instance.instance_id, worker, 9500.0))


def receive(g: Generator) -> list[Step]:
    """An instance waits for a message, and gets it."""
    (instance_id, worker, run), channel = actor(g), g.pick(CHANNELS)
    wait = (instance_id, channel, worker, g.new_activity(instance_id), g.maybe(g.soon(), 0.3))
    message = ChannelMessage(channel)
    deliveries = (
        Call("deliver_channel_message_with_lock", (instance_id, channel, message, "w9", 1500.0)),
        Call("deliver_channel_message", (instance_id, message)),
        Call("deliver_and_claim", (ChannelSubscription(instance_id, channel, usual_mode(channel)), "w9", 1500.0)),
    )
    return [
        run,
        Call("subscribe_to_channel", (instance_id, channel, usual_mode(channel))),
        Call("register_channel_receive_and_release_lock", wait, {"lock": Held(instance_id, worker)}),
        *[Call("publish_to_channel", (channel, g.payload())) for _ in range(g.random.randint(1, 3))],
        Call("get_pending_channel_messages_for_instance", (instance_id, channel)),
        Call("find_deliverable_subscriptions"),
        g.pick(deliveries),
        Call("get_delivery_cursor", (instance_id, channel)),
    ]


def race(g: Generator) -> list[Step]:
    """An instance waits for several things, and each of them happens."""
    (instance_id, worker, run), (other, _, other_run), channel = actor(g), actor(g), g.pick(CHANNELS)
    timer = TimerSubscription(
        instance_id, g.pick(TIMERS), half_ticks(1), activity_id=g.maybe(g.new_activity(instance_id))
    )
    waits: list[Any] = [
        timer,
        ChannelWait(channel, g.new_activity(instance_id), g.maybe(half_ticks(1), 0.5)),
        InstanceWait(other, g.new_activity(instance_id)),
    ]
    subscription = ChannelSubscription(
        instance_id, channel, ChannelMode.BROADCAST, activity_id=waits[1].activity_id, timeout_at=waits[1].timeout_at
    )
    events: list[Step] = [
        g.pick((Call("fire_timer", (timer,), {"worker_id": "w9"}), Call("fire_and_claim", (timer, "w9", 1500.0)))),
        Call("publish_to_channel", (channel, g.payload())),
        Call("deliver_channel_message_with_lock", (instance_id, channel, ChannelMessage(channel), "w9", 1500.0)),
        Call("expire_channel_receive", (subscription,)),
        Call("cancel_instance", (other, "enough")),
        Call("find_deliverable_subscriptions"),
        Call("clear_channel_waiting_state", (instance_id, channel)),
        Call("try_acquire_lock", (instance_id, worker, 9500.0)),
        Call("suspend", (instance_id, [g.pick(waits)]), {"lock": Held(instance_id, worker)}),
    ]
    g.random.shuffle(waits)
    g.random.shuffle(events)
    return [
        run,
        other_run,
        Call("subscribe_to_channel", (instance_id, channel, usual_mode(channel))),
        Call("suspend", (instance_id, waits[: g.random.randint(1, 3)]), {"lock": Held(instance_id, worker)}),
        Advance(1),
        *events,
    ]


def time_out(g: Generator) -> list[Step]:
    """An instance waits for a message that does not come in time, or just so."""
    (instance_id, worker, run), channel, activity = actor(g), g.pick(CHANNELS), g.activity()
    wait = (instance_id, channel, worker, activity, half_ticks(1))
    mode = usual_mode(channel)
    subscription = ChannelSubscription(instance_id, channel, mode, activity_id=activity, timeout_at=half_ticks(-1))
    return [
        run,
        Call("subscribe_to_channel", (instance_id, channel, mode)),
        Call("register_channel_receive_and_release_lock", wait),
        Call("get_channel_subscribers_waiting", (channel,)),
        Advance(1),
        Call("find_expired_channel_subscriptions"),
        Call("expire_channel_receive", (subscription,)),
        Call("get_history_event", (instance_id, activity)),
    ]


def meet(g: Generator) -> list[Step]:
    """Instances join a group, and leave it; somebody takes the lead meanwhile."""
    (first, _, run), (second, _, other_run), group, worker = actor(g), actor(g), g.pick(GROUPS), g.worker()
    return [
        run,
        other_run,
        Call("join_group", (second, group)),
        Call("join_group", (first, group)),
        Call("try_acquire_system_lock", ("leader", worker, 1500.0)),
        Call("get_group_members", (group,)),
        Call("leave_all_groups", (second,)),
        Call("release_system_lock", ("leader", worker)) if g.chance(0.5) else Advance(2),
        Call("cleanup_expired_system_locks"),
    ]


def compete(g: Generator) -> list[Step]:
    """Two subscribers want the same messages, and one that has claimed some ends."""
    (owner, _, owner_run), (rival, worker, run), channel = actor(g), actor(g), "jobs"
    wait = (rival, channel, worker, g.new_activity(rival))
    return [
        owner_run,
        run,
        Call("subscribe_to_channel", (owner, channel, ChannelMode.COMPETING)),
        Call("subscribe_to_channel", (rival, channel, ChannelMode.COMPETING)),
        Call("publish_to_channel", (channel, g.payload())),
        Call("claim_channel_message", (Published(0), owner)),
        Call("register_channel_receive_and_release_lock", wait),
        Call("find_deliverable_subscriptions"),
        Call(g.pick(("cancel_instance", "update_instance_output")), (owner, "null")),
        Call("find_deliverable_subscriptions"),
        Call("deliver_channel_message_with_lock", (rival, channel, ChannelMessage(channel), "w9", 1500.0)),
    ]


def come_late(g: Generator) -> list[Step]:
    """A message of another framework becomes visible after one with a greater id."""
    (instance_id, worker, run), channel = actor(g), "news"
    wait = (instance_id, channel, worker, g.new_activity(instance_id))
    return [
        run,
        Call("reserve_foreign"),
        Call("subscribe_to_channel", (instance_id, channel, ChannelMode.BROADCAST)),
        Call("publish_to_channel", (channel, g.payload())),
        Call("update_delivery_cursor", (instance_id, channel, Published(0))),
        Call("publish_foreign", (channel, g.payload()), {"reserved_id": Drawn()}),
        Advance(2),
        Call("cleanup_old_channel_messages", (AGES[1],)),
        Call("register_channel_receive_and_release_lock", wait),
    ]


def relay(g: Generator) -> list[Step]:
    """An event goes out, at the second attempt."""
    event = g.pick(EVENTS)
    lease = Call("get_pending_outbox_events", (100,), {"lease_sec": 1500.0, "owner": g.worker()})
    return [
        Call("add_outbox_event", (OutboxEvent(event, "paid", "/shop", event_data=g.payload(), retry_count=8),)),
        lease,
        Call("increment_outbox_attempts", (event,), {"error": "timeout"}),
        lease,
        Advance(1),
        lease,
        Advance(2),
        lease,
        Call("mark_outbox_event_sent", (event,)),
        Advance(2),
        Call("cleanup_old_outbox_events", (AGES[1],)),
    ]


def undo(g: Generator) -> list[Step]:
    """An instance is cancelled, and waits for a timer while it compensates."""
    instance_id, worker, run = actor(g)
    lock = {"lock": Held(instance_id, worker)}
    timer = TimerSubscription(instance_id, g.pick(TIMERS), half_ticks(1))
    return [
        run,
        Call("add_compensation", (CompensationEntry(instance_id, g.activity(), "undo"),), lock),
        Call("cancel_instance", (instance_id, "enough"), {"compensate": True}),
        Call("refresh_lock", (instance_id, worker, 9500.0), lock),
        Call("get_compensations", (instance_id,)),
        Call("suspend", (instance_id, [timer]), lock),
        Advance(1),
        Call("fire_timer", (timer,), {"worker_id": "w9"}),
        Call("try_acquire_lock", (instance_id, worker, 9500.0)),
        Call("update_instance_status", (instance_id, WorkflowStatus.FAILED, "broken"), lock),
        Advance(2),
        Call("delete_finished_instances", (AGES[1],)),
    ]


def start_over(g: Generator) -> list[Step]:
    """An instance recurs."""
    instance_id, worker, run = actor(g)
    lock = {"lock": Held(instance_id, worker)}
    return [
        run,
        Call("append_history", (g.event(instance_id),), lock),
        Call("append_history", (g.event(instance_id),), lock),
        Call("add_compensation", (CompensationEntry(instance_id, g.activity(), "undo"),), lock),
        Call("set_instance_state", (instance_id, g.payload()), lock),
        Call("recur_instance", (instance_id, g.payload()), lock),
        Call("get_archived_history", (instance_id,)),
        Call("get_instance_state", (instance_id,)),
        Call("append_history", (g.event(instance_id),), lock),
    ]


def vanish(g: Generator) -> list[Step]:
    """A worker dies, and another one takes over."""
    instance_id, worker, run = actor(g)
    return [
        run,
        Call("refresh_lock", (instance_id, worker, 1500.0)),
        Advance(2),
        Call("cleanup_stale_locks", (1500.0,)),
        Call("claim_resumable_workflows", (g.worker(), 9500.0)),
        Call("append_history", (g.event(instance_id),), {"lock": Held(instance_id, worker)}),
    ]


def refuse(g: Generator) -> list[Step]:
    """An instance does not fit the code, until there is other code."""
    instance_id, worker, run = actor(g)
    lock = {"lock": Held(instance_id, worker)}
    return [
        run,
        Call("count_takeover", (instance_id,), lock),
        Call("note_refusal", (instance_id, CODES[0]), lock),
        Call("park", (instance_id, "does not fit"), lock),
        *(Call("unpark_refused", (name, code)) for code in CODES for name in WORKFLOWS),
    ]


def usual_mode(channel: str) -> ChannelMode:
    return ChannelMode.COMPETING if channel == "jobs" else ChannelMode.BROADCAST


SCENES = (receive, receive, race, race, race, time_out, compete, come_late, meet, vanish, relay, undo, start_over)
SCENES += (refuse,)

WRITES: Kinds = {
    create_instance: 20,
    try_acquire_lock: 14,
    suspend: 12,
    subscribe_to_channel: 10,
    publish_to_channel: 10,
    deliver_channel_message_with_lock: 6,
    deliver_and_claim: 6,
    append_history: 7,
    register_channel_receive_and_release_lock: 6,
    fire_timer: 4,
    fire_and_claim: 4,
    update_instance_status: 4,
    update_instance_output: 3,
    cancel_instance: 3,
    register_timer_subscription_and_release_lock: 3,
    claim_resumable_workflows: 3,
    release_lock: 3,
    add_outbox_event: 3,
    get_pending_outbox_events: 3,
    mark_outbox_event_sent: 2,
    add_compensation: 3,
    append_history_many: 2,
    publish_many: 2,
    publish_once: 2,
    cleanup_seen_events: 1,
    set_instance_state: 2,
    count_takeover: 1,
    note_refusal: 1,
    unpark_refused: 1,
    claim_channel_message: 3,
    expire_channel_receive: 3,
    join_group: 3,
    recur_instance: 2,
    park: 2,
    unpark: 2,
    register_timer_subscription: 2,
    deliver_channel_message: 2,
    update_delivery_cursor: 2,
    clear_channel_waiting_state: 2,
    unsubscribe_from_channel: 2,
    try_acquire_system_lock: 2,
    increment_outbox_attempts: 2,
    update_instance_activity: 1,
    delete_finished_instances: 1,
    cleanup_stale_locks: 1,
    remove_timer_subscription: 1,
    mark_outbox_event_failed: 1,
    cleanup_old_outbox_events: 1,
    delete_channel_message: 1,
    cleanup_old_channel_messages: 2,
    leave_group: 1,
    leave_all_groups: 1,
    release_system_lock: 1,
    cleanup_expired_system_locks: 1,
    archive_history: 1,
    cleanup_instance_subscriptions: 1,
}
"""What one storage writes, and how often; heartbeats overtake others and are not among them."""

HEARTBEATS: Kinds = {refresh_lock: 3, refresh_locks: 3}

OWN_KINDS = {**WRITES, **HEARTBEATS, read: 16, poll: 12}
KINDS = {**OWN_KINDS, publish_foreign: 4, reserve_foreign: 2}
