# SPDX-License-Identifier: Apache-2.0
"""The engine's counters as Prometheus text, under vLLM's names with our prefix. Read at scrape time, so no number can freeze.

On request every metric that vLLM has too is given a second time under vLLM's own prefix, so that its dashboards and routers work unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.samples import Sample

from whalefall.observe.metrics import DraftStats
from whalefall.server.door import Door
from whalefall.server.tier_metrics import tier_blocks, tier_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUR_PREFIX, VLLM_PREFIX = "whalefall:", "vllm:"
_PREFIX = (
    "prefix_adopted_tokens",
    "prefix_replayed_tokens",
    "prefix_readmitted_tokens",
    "prefix_stored_blocks",
    "prefix_evicted_blocks",
    "prefix_evicted_tokens",
)
ONLY_OURS = frozenset(
    {
        *_PREFIX,
        "kv_blocks",
        "state_slots_used",
        "engine_steps",
        "engine_restarts",
        "batched_tokens",
        "requests",
        "empty_answers",
        "ring_tag_mismatch",
        "spec_decode_num_undrafted",
    }
)
"""Names that mean nothing to vLLM's users."""
_LABELS = ["model_name", "engine"]
_REASONS = ("stop", "length", "abort", "error")


class EngineCollector:
    """Gauges are of the last step; counters and histograms since start. Empty while the model loads."""

    def __init__(self, door: Door, *, vllm_names: bool = False) -> None:
        self._door = door
        self._vllm_names = vllm_names
        self._values = [door.model_name, "0"]

    def collect(self) -> Iterator[Metric]:
        engine = self._door.engine_if_loaded
        if engine is None:
            return
        stats = engine.stats()
        yield from tier_metrics(stats.engine.tiers, _LABELS, self._values)
        for metric in self._ours(stats):
            yield metric
            if self._vllm_names and metric.name.removeprefix(OUR_PREFIX) not in ONLY_OURS:
                yield _renamed(metric)

    def _ours(self, stats: Any) -> Iterator[Metric]:
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
        # Tiers that the engine does not have are absent, which is how a reader tells "off" from "empty".
        blocks = GaugeMetricFamily("whalefall:kv_blocks", "KV cache blocks by tier and state.", labels=[*_LABELS, "tier", "state"])
        for state, count in (("used", stats.engine.blocks_used), ("free", stats.engine.blocks_total - stats.engine.blocks_used)):
            blocks.add_metric([*self._values, "device", state], count)
        for tier, state, count in tier_blocks(stats.engine.tiers):
            blocks.add_metric([*self._values, tier, state], count)
        yield blocks

    def _counters(self, stats: Any) -> Iterator[Metric]:
        for name, value, text in (
            ("prompt_tokens", stats.prompt_tokens, "Prompt tokens of requests that gave output."),
            ("prompt_tokens_cached", stats.cached_prompt_tokens, "Prompt tokens taken from the prefix cache."),
            ("generation_tokens", stats.generation_tokens, "Tokens delivered."),
            ("num_preemptions", stats.engine.num_preemptions, "Requests put back for want of blocks."),
            ("prefix_adopted_tokens", stats.engine.prefix_adopted_tokens, "Tokens whose blocks requests took over, at each entry."),
            ("prefix_replayed_tokens", stats.engine.prefix_replayed_tokens, "Rows run again after prefix hits, to refill windows."),
            ("prefix_readmitted_tokens", stats.engine.prefix_readmitted_tokens, "Tokens that preempted requests found again."),
            ("prefix_stored_blocks", stats.engine.prefix_stored_blocks, "Blocks that became findable for prefix hits."),
            ("prefix_evicted_blocks", stats.engine.prefix_evicted_blocks, "Remembered blocks whose memory was wanted."),
            ("prefix_evicted_tokens", stats.engine.prefix_evicted_tokens, "Tokens in those blocks."),
            ("ring_tag_mismatch", stats.engine.ring_tag_mismatches, "Window rows lost by the cache bookkeeping and masked; 0 in health."),
            ("engine_steps", stats.engine.num_steps, "Steps the engine has run."),
            ("batched_tokens", stats.engine.batched_tokens, "Rows run by all steps, prompts and outputs together."),
            ("requests", stats.num_requests, "Requests accepted."),
            ("prefix_cache_queries", stats.prompt_tokens, "Prompt tokens looked up in the prefix cache."),
            ("prefix_cache_hits", stats.cached_prompt_tokens, "Prompt tokens found in the prefix cache."),
            ("engine_restarts", stats.num_restarts, "Times the engine process was started again."),
            ("empty_answers", stats.empty_answers, "Completions that ended normally without any text."),
        ):
            counter = CounterMetricFamily(f"whalefall:{name}", text, labels=_LABELS)
            counter.add_metric(self._values, value)
            yield counter
        yield from self._draft_counters(stats.engine.drafts)
        success = CounterMetricFamily("whalefall:request_success", "Completions ended, by reason.", labels=[*_LABELS, "finished_reason"])
        for reason in _REASONS:
            success.add_metric([*self._values, reason], stats.finished.get(reason, 0))
        yield success

    def _draft_counters(self, drafts: DraftStats | None) -> Iterator[Metric]:
        """Absent without speculation."""
        if drafts is None:
            return
        for name, value, text in (
            ("spec_decode_num_drafts", drafts.num_drafts, "Times that drafts of a request were verified."),
            ("spec_decode_num_draft_tokens", drafts.draft_tokens, "Drafted tokens that were verified."),
            ("spec_decode_num_accepted_tokens", drafts.accepted_tokens, "Drafted tokens that were accepted."),
            ("spec_decode_num_undrafted", drafts.num_undrafted, "Tokens drawn with no draft to verify, where drafting rests among others."),
        ):
            counter = CounterMetricFamily(f"whalefall:{name}", text, labels=_LABELS)
            counter.add_metric(self._values, value)
            yield counter
        by_place = CounterMetricFamily(
            "whalefall:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by place in the block.", labels=[*_LABELS, "position"]
        )
        for place, count in enumerate(drafts.accepted_per_place):
            by_place.add_metric([*self._values, str(place)], count)
        yield by_place

    def _histograms(self, stats: Any) -> Iterator[Metric]:
        for name, histogram, text in (
            ("time_to_first_token_seconds", stats.ttft_s, "Arrival to first token."),
            ("inter_token_latency_seconds", stats.itl_s, "Gap between consecutive tokens."),
            ("time_per_output_token_seconds", stats.itl_s, "The same under its older name."),
            ("request_time_per_output_token_seconds", stats.tpot_s, "Mean gap between the tokens of a completion."),
            ("request_queue_time_seconds", stats.queue_s, "Arrival to first scheduled."),
            ("request_prefill_time_seconds", stats.prefill_s, "First scheduled to first token."),
            ("request_decode_time_seconds", stats.decode_s, "First token to last token."),
            ("request_inference_time_seconds", stats.inference_s, "First scheduled to last token."),
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


def _renamed(metric: Metric) -> Metric:
    twin = Metric(VLLM_PREFIX + metric.name.removeprefix(OUR_PREFIX), metric.documentation, metric.type)
    twin.samples = [Sample(VLLM_PREFIX + s.name.removeprefix(OUR_PREFIX), *s[1:]) for s in metric.samples]
    return twin


def registry_for(door: Door, *, vllm_names: bool = False) -> CollectorRegistry:
    """A registry of its own per app: two apps in one process never meet."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(door, vllm_names=vllm_names))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """As Prometheus text."""
    return generate_latest(registry)


def negotiate(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The body in the format that the scraper can read best, and its content type.

    Colons are legal in names of either format. The library's own choice of an encoder would turn them into underscores for scrapers that
    ask for OpenMetrics without saying how to escape, so that a name would depend on who asks.
    """
    if "application/openmetrics-text" in accept:
        return openmetrics.generate_latest(registry, "allow-utf-8"), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE
