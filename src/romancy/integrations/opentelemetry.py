"""Traces and metrics (the extra ``romancy[otel]``).

    App(url, workflows=[…], hooks=[OpenTelemetryHooks()])

A span for each time that a worker runs an instance, with a span inside for each attempt at a step; the span of a step
is the current one in its activity, so what the activity traces is found inside it. An instance that waits has no span:
its runs are found by the attribute `romancy.instance_id`. Metrics have no instance ids, only names.
"""

from __future__ import annotations

from contextvars import Token
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

from ..hooks import Hooks, StepEvent, WorkflowEvent


class OpenTelemetryHooks(Hooks):
    """Tells OpenTelemetry what a worker does; without providers of its own, through the global ones."""

    def __init__(
        self, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracer = trace.get_tracer("romancy", tracer_provider=tracer_provider)
        meter = metrics.get_meter("romancy", meter_provider=meter_provider)
        self._started = meter.create_counter("romancy.workflows.started", description="instances begun")
        self._finished = meter.create_counter("romancy.workflows.finished", description="instances ended, by status")
        self._parked = meter.create_counter("romancy.workflows.parked", description="instances set aside")
        self._run_duration = meter.create_histogram(
            "romancy.workflow.run.duration", unit="s", description="how long a worker was at an instance"
        )
        self._step_duration = meter.create_histogram(
            "romancy.step.duration", unit="s", description="how long an attempt at a step took"
        )
        self._runs: dict[str, Span] = {}
        self._steps: dict[tuple[str, str], tuple[Span, Token[Context]]] = {}

    # Instances.

    def on_workflow_started(self, event: WorkflowEvent) -> None:
        names = {"romancy.workflow": event.workflow_name}
        # Whoever started the instance may have ended long before it: a link, not a parent.
        caller = trace.get_current_span().get_span_context()
        self._runs[event.instance_id] = self._tracer.start_span(
            f"workflow {event.workflow_name}",
            context=Context(),
            kind=SpanKind.CONSUMER,
            attributes={**names, "romancy.instance_id": event.instance_id, "romancy.resumed": event.resumed},
            links=[Link(caller)] if caller.is_valid else [],
        )
        if not event.resumed:
            self._started.add(1, names)

    def on_workflow_finished(self, event: WorkflowEvent) -> None:
        self._finished.add(1, {"romancy.workflow": event.workflow_name, "romancy.status": event.status})
        self._end_run(event, event.status, failed=event.status == "failed")

    def on_workflow_suspended(self, event: WorkflowEvent) -> None:
        self._end_run(event, "suspended", failed=False)

    def on_workflow_parked(self, event: WorkflowEvent) -> None:
        self._parked.add(1, {"romancy.workflow": event.workflow_name})
        self._end_run(event, "parked", failed=True)

    def _end_run(self, event: WorkflowEvent, outcome: str, *, failed: bool) -> None:
        names = {"romancy.workflow": event.workflow_name, "romancy.outcome": outcome}
        self._run_duration.record(event.duration_sec, names)
        span = self._runs.pop(event.instance_id, None)
        if span is None:
            return
        span.set_attribute("romancy.outcome", outcome)
        if event.reason:
            span.set_attribute("romancy.reason", event.reason)
        if failed:
            span.set_status(Status(StatusCode.ERROR, event.error_type or event.reason))
        span.end()

    # Steps.

    def on_step_started(self, event: StepEvent) -> None:
        run = self._runs.get(event.instance_id)
        parent = Context() if run is None else trace.set_span_in_context(run, Context())
        attributes = {
            **_names(event),
            "romancy.instance_id": event.instance_id,
            "romancy.step_id": event.step_id,
            "romancy.attempt": event.attempt,
        }
        span = self._tracer.start_span(event.name, context=parent, attributes=attributes)
        token = otel_context.attach(trace.set_span_in_context(span))
        self._steps[event.instance_id, event.step_id] = span, token

    def on_step_finished(self, event: StepEvent) -> None:
        self._end_step(event)

    def on_step_failed(self, event: StepEvent) -> None:
        self._end_step(event)

    def _end_step(self, event: StepEvent) -> None:
        outcome = "finished" if event.error_type is None else "failed"
        self._step_duration.record(event.duration_sec, {**_names(event), "romancy.outcome": outcome})
        span, token = self._steps.pop((event.instance_id, event.step_id))
        otel_context.detach(token)
        if event.error_type is not None:
            span.set_attribute("error.type", event.error_type)
            span.set_status(Status(StatusCode.ERROR, event.error))
        span.end()


def _names(event: StepEvent) -> dict[str, Any]:
    return {"romancy.workflow": event.workflow_name, "romancy.step": event.name, "romancy.kind": event.kind}
