# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces, an optional extra: one span per request with children for queue, prefill and decode.

Spans are written when a request has ended, from times that were noted anyway, so a traced request does nothing more while it runs.
Attribute names follow the GenAI conventions and those that vLLM adds to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

from whalefall.core.errors import ConfigError

SERVICE = "whalefall"
HOW_TO_INSTALL = "tracing needs the OpenTelemetry SDK: pip install 'whalefall[otel]'"

incoming_headers: ContextVar[Mapping[str, str] | None] = ContextVar("incoming_headers", default=None)
"""Headers of the HTTP request that is being answered; its `traceparent` makes our span a child of the caller's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTrace:
    """Of one request that has ended. Times in seconds on the monotonic clock; None for what never happened."""

    request_id: str
    model: str
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reasons: tuple[str, ...]
    error: str | None = None
    headers: Mapping[str, str] | None = None
    """As the request's `incoming_headers`."""


Tracer: TypeAlias = Callable[[RequestTrace], None]


def make_tracer(endpoint: str | None) -> Tracer | None:
    """
    Args:
        endpoint: address of an OTLP collector over HTTP, such as http://localhost:4318/v1/traces; None: no tracing.
    Raises:
        ConfigError: the packages are not installed.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"--otlp-traces-endpoint: {HOW_TO_INSTALL} ({error})") from error
    return tracer_to(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


def tracer_to(processor: Any) -> Tracer:
    """A tracer that hands its spans to an OpenTelemetry span processor."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
    provider.add_span_processor(processor)
    tracer = provider.get_tracer(SERVICE)
    return lambda request: _write(tracer, request)


def _write(tracer: Any, request: RequestTrace) -> None:
    from opentelemetry import propagate, trace

    # Spans carry wall-clock nanoseconds; the offset of the two clocks is taken now, so a clock that was set meanwhile does no harm.
    offset_ns = time.time_ns() - time.monotonic_ns()

    def at(seconds: float) -> int:
        return int(seconds * 1e9) + offset_ns

    parent = propagate.extract(dict(request.headers)) if request.headers else None
    kind = trace.SpanKind.SERVER
    span = tracer.start_span("llm_request", context=parent, kind=kind, start_time=at(request.arrival_s), attributes=_attributes(request))
    inside = trace.set_span_in_context(span)
    for name, begin_s, end_s in _stages(request):
        tracer.start_span(name, context=inside, start_time=at(begin_s)).end(at(end_s))
    if request.error is not None:
        span.set_status(trace.StatusCode.ERROR, request.error)
    span.end(at(request.finished_s))


def _stages(request: RequestTrace) -> list[tuple[str, float, float]]:
    """(name, begin, end) of each stage the request came to; the last one ends with it."""
    begins = [("queue", request.arrival_s), ("prefill", request.first_scheduled_s), ("decode", request.first_token_s)]
    reached = [(name, begin_s) for name, begin_s in begins if begin_s is not None]
    ends = [begin_s for _, begin_s in reached[1:]] + [request.finished_s]
    return [(name, begin_s, end_s) for (name, begin_s), end_s in zip(reached, ends, strict=True)]


def _attributes(request: RequestTrace) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.model": request.model,
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.usage.cached_tokens": request.cached_tokens,
        "gen_ai.usage.completion_tokens": request.completion_tokens,
        "gen_ai.response.finish_reasons": list(request.finish_reasons),
        "gen_ai.latency.e2e": request.finished_s - request.arrival_s,
    }
    if request.first_scheduled_s is not None:
        attributes["gen_ai.latency.time_in_queue"] = request.first_scheduled_s - request.arrival_s
    if request.first_token_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = request.first_token_s - request.arrival_s
    return attributes
