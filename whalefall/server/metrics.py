# SPDX-License-Identifier: Apache-2.0
"""The engine's counters as Prometheus text, under vLLM's names with our prefix. Read at scrape time, so no number can freeze."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from whalefall.server.door import Door

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ["model_name", "engine"]
_REASONS = ("stop", "length", "abort", "error")


class EngineCollector:
    """Gauges are of the last step; counters and histograms since start. Empty while the model loads."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._values = [door.model_name, "0"]

    def collect(self) -> Iterator[Metric]:
        engine = self._door.engine_if_loaded
        if engine is None:
            return
        stats = engine.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield from self._histograms(stats)

    def _gauges(self, stats: Any) -> Iterator[Metric]:
        for name, value, text in (
            ("num_requests_running", stats.engine.num_running, "Requests in the running batch."),
            ("num_requests_waiting", stats.engine.num_waiting, "Requests waiting to be scheduled."),
            ("kv_cache_usage_perc", stats.kv_usage, "Share of KV cache blocks in use; 1 is all."),
            ("state_slots_used", stats.engine.slots_used, "Per-request state slots in use."),
        ):
            gauge = GaugeMetricFamily(f"whalefall:{name}", text, labels=_LABELS)
            gauge.add_metric(self._values, value)
            yield gauge

    def _counters(self, stats: Any) -> Iterator[Metric]:
        for name, value, text in (
            ("prompt_tokens", stats.prompt_tokens, "Prompt tokens of requests that gave output."),
            ("prompt_tokens_cached", stats.cached_prompt_tokens, "Prompt tokens taken from the prefix cache."),
            ("generation_tokens", stats.generation_tokens, "Tokens delivered."),
            ("num_preemptions", stats.engine.num_preemptions, "Requests put back for want of blocks."),
            ("engine_steps", stats.engine.num_steps, "Steps the engine has run."),
            ("batched_tokens", stats.engine.batched_tokens, "Rows run by all steps, prompts and outputs together."),
            ("requests", stats.num_requests, "Requests accepted."),
            ("empty_answers", stats.empty_answers, "Completions that ended normally without any text."),
        ):
            counter = CounterMetricFamily(f"whalefall:{name}", text, labels=_LABELS)
            counter.add_metric(self._values, value)
            yield counter
        success = CounterMetricFamily("whalefall:request_success", "Completions ended, by reason.", labels=[*_LABELS, "finished_reason"])
        for reason in _REASONS:
            success.add_metric([*self._values, reason], stats.finished.get(reason, 0))
        yield success

    def _histograms(self, stats: Any) -> Iterator[Metric]:
        for name, histogram, text in (
            ("time_to_first_token_seconds", stats.ttft_s, "Arrival to first token."),
            ("inter_token_latency_seconds", stats.itl_s, "Gap between consecutive tokens."),
            ("time_per_output_token_seconds", stats.itl_s, "The same under its older name."),
            ("request_queue_time_seconds", stats.queue_s, "Arrival to first scheduled."),
            ("e2e_request_latency_seconds", stats.e2e_s, "Arrival to the end."),
            ("request_prompt_tokens", stats.prompt_length, "Prompt length of requests."),
            ("request_generation_tokens", stats.generation_length, "Tokens generated per completion."),
        ):
            family = HistogramMetricFamily(f"whalefall:{name}", text, labels=_LABELS)
            family.add_metric(self._values, list(_cumulative(histogram)), histogram.sum)
            yield family


def _cumulative(histogram: Any) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        total += count
        yield bound, total


def registry_for(door: Door) -> CollectorRegistry:
    """A registry of its own per app: two apps in one process never meet."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(door))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)
