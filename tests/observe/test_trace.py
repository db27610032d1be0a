# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: the stages of one that ran, of one that never began, and the caller's trace as parent."""

from __future__ import annotations

import time
from typing import Any

import pytest

from whalefall import AsyncLLM, SamplingParams
from whalefall.core.errors import ConfigError
from whalefall.engine.client import ThreadEngine
from whalefall.observe import trace
from whalefall.observe.phases import Phases
from whalefall.observe.trace import RequestTrace, Tracer, make_tracer, tracer_to
from whalefall.testing import stub_process
from whalefall.testing.stub_process import stub_folder

SECOND = 10**9


@pytest.fixture
def spans() -> tuple[Tracer, Any]:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    return tracer_to(SimpleSpanProcessor(exporter)), exporter.get_finished_spans


def request(**changes: Any) -> RequestTrace:
    values: dict[str, Any] = {
        "request_id": "r",
        "model": "m",
        "arrival_s": 100.0,
        "first_scheduled_s": 101.0,
        "first_token_s": 103.0,
        "finished_s": 107.0,
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "completion_tokens": 9,
        "finish_reasons": ("stop",),
    }
    return RequestTrace(**(values | changes))


def lengths(finished: Any) -> dict[str, float]:
    return {span.name: round((span.end_time - span.start_time) / SECOND, 6) for span in finished}


def test_stages_follow_each_other_and_fill_the_request(spans: Any) -> None:
    tracer, finished = spans
    tracer(request())
    assert lengths(finished()) == {"queue": 1.0, "prefill": 2.0, "decode": 4.0, "llm_request": 7.0}
    root = next(span for span in finished() if span.name == "llm_request")
    children = [span for span in finished() if span is not root]
    assert all(span.parent.span_id == root.context.span_id for span in children)
    assert root.attributes["gen_ai.latency.time_to_first_token"] == 3.0 and root.attributes["gen_ai.usage.completion_tokens"] == 9
    age_s = (time.time_ns() - root.start_time) / SECOND
    assert abs(age_s - (time.monotonic() - 100.0)) < 1.0, "wall clock, whatever the monotonic clock counts from"


def test_request_that_never_began_has_only_its_wait(spans: Any) -> None:
    tracer, finished = spans
    tracer(request(first_scheduled_s=None, first_token_s=None, finish_reasons=("error",), error="broken"))
    assert lengths(finished()) == {"queue": 7.0, "llm_request": 7.0}
    root = finished()[-1]
    assert not root.status.is_ok and root.status.description == "broken"
    assert "gen_ai.latency.time_to_first_token" not in root.attributes


def test_callers_trace_is_the_parent(spans: Any) -> None:
    tracer, finished = spans
    tracer(request(headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}))
    assert {f"{span.context.trace_id:032x}" for span in finished()} == {"0af7651916cd43dd8448eb211c80319c"}
    assert f"{finished()[-1].parent.span_id:016x}" == "b7ad6b7169203331"


async def test_engine_traces_a_request_at_its_end() -> None:
    resolved, core = stub_process.plain(stub_process.EngineConfig(model="stub"), Phases())
    seen: list[RequestTrace] = []
    engine = AsyncLLM(stub_folder().opened(resolved), ThreadEngine(core), tracer=seen.append)
    token = trace.incoming_headers.set({"traceparent": "x"})
    async for _ in engine.generate([1, 2], SamplingParams(max_tokens=4, n=2), "r"):
        pass
    trace.incoming_headers.reset(token)
    await engine.shutdown()
    (only,) = seen
    assert (only.request_id, only.prompt_tokens, only.completion_tokens, only.finish_reasons) == ("r", 2, 8, ("length", "length"))
    assert only.headers == {"traceparent": "x"} and only.first_scheduled_s is not None and only.first_token_s is not None
    assert only.arrival_s <= only.first_scheduled_s <= only.first_token_s <= only.finished_s


def test_missing_packages_are_named_with_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'whalefall\[otel\]'"):
        make_tracer("http://localhost:4318/v1/traces")
    assert make_tracer(None) is None
