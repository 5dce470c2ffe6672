"""OpenTelemetry: a span for each run and each attempt at a step, and metrics without instance ids."""

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from romancy import Retry, WorkflowFailedError, activity, sleep, workflow
from romancy.integrations.opentelemetry import OpenTelemetryHooks
from tests.engine.conftest import MakeApp
from tests.engine.test_messages import until

pytestmark = pytest.mark.databases("sqlite")


class Telemetry:
    """What was exported."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self._metrics = InMemoryMetricReader()
        self.tracing = TracerProvider()
        self.tracing.add_span_processor(SimpleSpanProcessor(self._spans))
        self.hooks = OpenTelemetryHooks(
            tracer_provider=self.tracing, meter_provider=MeterProvider(metric_readers=[self._metrics])
        )

    async def spans(self, count: int) -> list[ReadableSpan]:
        """The spans, as soon as there are so many."""

        async def enough() -> bool:
            return len(self._spans.get_finished_spans()) >= count

        await until(enough)
        return list(self._spans.get_finished_spans())

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """The points of a metric: its attributes, and its value or count."""
        data: Any = self._metrics.get_metrics_data()
        return [
            (dict(point.attributes), getattr(point, "value", getattr(point, "count", None)))
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


current: list[trace.Span] = []


@activity(retry=Retry(max_attempts=2, initial_sec=0.001))
async def flaky() -> int:
    current.append(trace.get_current_span())
    if len(current) == 1:
        raise ConnectionError("not yet")
    return 1


@workflow
async def works() -> int:
    await sleep(0.05)
    return await flaky()


@workflow
async def fails() -> None:
    raise ValueError("on purpose")


@pytest.fixture(autouse=True)
def first_try() -> None:
    current.clear()


async def test_runs_and_attempts_are_spans(make_app: MakeApp, telemetry: Telemetry) -> None:
    app = await make_app(works, hooks=[telemetry.hooks])
    await (await app.start(works, id="i")).result(10)

    spans = await telemetry.spans(4)
    waited, failed, done, ended = spans
    assert [span.name for span in spans] == ["workflow works", "flaky", "flaky", "workflow works"]
    assert [(span.attributes or {})["romancy.instance_id"] for span in spans] == ["i"] * 4
    assert (waited.attributes or {})["romancy.outcome"] == "suspended"
    assert (ended.attributes or {})["romancy.outcome"] == "completed"
    for number, step in enumerate((failed, done), 1):
        assert step.parent is not None
        assert step.parent.span_id == ended.context.span_id
        assert (step.attributes or {})["romancy.attempt"] == number
    assert (failed.status.status_code, (failed.attributes or {})["error.type"]) == (StatusCode.ERROR, "ConnectionError")
    assert done.status.status_code is not StatusCode.ERROR


async def test_a_steps_span_is_the_current_one_in_its_activity(make_app: MakeApp, telemetry: Telemetry) -> None:
    app = await make_app(works, hooks=[telemetry.hooks])
    await (await app.start(works)).result(10)

    steps = [span for span in await telemetry.spans(4) if span.name == "flaky"]
    assert [span.get_span_context().span_id for span in current] == [step.context.span_id for step in steps]
    assert not trace.get_current_span().get_span_context().is_valid


async def test_a_run_is_linked_to_whoever_started_it(make_app: MakeApp, telemetry: Telemetry) -> None:
    app = await make_app(fails, hooks=[telemetry.hooks])
    with telemetry.tracing.get_tracer("shop").start_as_current_span("order") as order:
        handle = await app.start(fails)
    with pytest.raises(WorkflowFailedError):
        await handle.result(10)

    [run] = [span for span in await telemetry.spans(2) if span.name == "workflow fails"]
    assert (run.parent, [link.context.span_id for link in run.links]) == (None, [order.get_span_context().span_id])
    assert (run.status.status_code, run.status.description) == (StatusCode.ERROR, "ValueError")


async def test_metrics_count_by_names_and_never_by_instance(make_app: MakeApp, telemetry: Telemetry) -> None:
    app = await make_app(works, hooks=[telemetry.hooks])
    await (await app.start(works)).result(10)
    await telemetry.spans(4)

    step = {"romancy.workflow": "works", "romancy.step": "flaky", "romancy.kind": "activity"}
    run = {"romancy.workflow": "works"}
    assert telemetry.points("romancy.workflows.started") == [(run, 1)]
    assert telemetry.points("romancy.workflows.finished") == [({**run, "romancy.status": "completed"}, 1)]
    assert telemetry.points("romancy.step.duration") == [
        ({**step, "romancy.outcome": "failed"}, 1),
        ({**step, "romancy.outcome": "finished"}, 1),
    ]
    assert telemetry.points("romancy.workflow.run.duration") == [
        ({**run, "romancy.outcome": "suspended"}, 1),
        ({**run, "romancy.outcome": "completed"}, 1),
    ]
