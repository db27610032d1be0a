# SPDX-License-Identifier: Apache-2.0
"""EngineStats: what the engine counts, as plain numbers. Who exposes them under which names is the door's business.

Counters only rise. Gauges are of the last step. `Histogram` keeps counts per bucket, as a scraper wants them, and no samples.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# The buckets of vLLM's metrics of the same meaning, so that dashboards carry over.
_TENTHS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1)
TTFT_BOUNDS_S = (*_TENTHS, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
ITL_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_MINUTES = (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
REQUEST_BOUNDS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, *_MINUTES)
TOKENS_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)


@dataclass(slots=True)
class Histogram:
    bounds: tuple[float, ...]
    """Upper bounds of the buckets, rising, each inclusive; a last bucket without bound follows."""
    counts: list[int] = field(default_factory=list)
    """Observations per bucket, not cumulative; one longer than bounds."""
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class TierStats:
    """Of the tiers below the device's blocks. Queries and hits are in blocks."""

    host_blocks_used: int = 0
    """Records that can be found."""
    host_blocks_total: int = 0
    host_queries: int = 0
    """Blocks of entering requests that the device did not have."""
    host_hits: int = 0
    host_stored_bytes: int = 0
    host_loaded_bytes: int = 0
    """Copied back to the device."""
    host_failures: int = 0
    host_evictions: int = 0
    has_disk: bool = False
    disk_blocks_used: int = 0
    """Bytes in the whole directory at the last look, whoever wrote them, in blocks of this engine."""
    disk_blocks_total: int = 0
    """0 for an object store: it has no cap here."""
    disk_queries: int = 0
    disk_hits: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    disk_failures: int = 0
    """Errors of the file system, and records found damaged."""
    disk_evictions: int = 0
    is_disk_off: bool = False
    """Writing or reading was given up after failures."""
    skipped_blocks: int = 0
    """Not kept, or not written, because the tiers did not keep up."""
    num_timeouts: int = 0
    """Requests that gave up waiting for blocks and computed them."""


@dataclass(slots=True)
class DraftStats:
    """Of speculation, since start."""

    num_drafts: int = 0
    """Times that drafts of a request were verified."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_place: list[int] = field(default_factory=list)
    """Drafts accepted at each place of a block, the first one first."""
    num_undrafted: int = 0
    """Times that a request drew a token with nothing to verify: its first, no idea, opted out, or drafting does not pay."""

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """One request's drafts in one step."""
        self.num_drafts += 1
        self.draft_tokens += num_drafts
        self.accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_per_place[place] += 1

    def plus(self, other: DraftStats) -> DraftStats:
        longer, shorter = sorted((self.accepted_per_place, other.accepted_per_place), key=len, reverse=True)
        per_place = [count + (shorter[i] if i < len(shorter) else 0) for i, count in enumerate(longer)]
        return DraftStats(
            self.num_drafts + other.num_drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
            per_place,
            self.num_undrafted + other.num_undrafted,
        )

    def copy(self) -> DraftStats:
        return self.plus(DraftStats())


@dataclass(slots=True)
class EngineGauges:
    """The engine's side, replaced as a whole after each step."""

    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    """Usable blocks; the null block is not among them."""
    slots_used: int = 0
    slots_total: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    batched_tokens: int = 0
    """Rows that all steps have run, prompts and outputs together."""
    blocks_cached: int = 0
    """Blocks that a prefix hit can find, whether somebody holds them or not."""
    prefix_adopted_tokens: int = 0
    """In blocks that requests took over at an entry; those of entries after a preemption among them."""
    prefix_replayed_tokens: int = 0
    """Rows run again after hits, to refill windows."""
    prefix_readmitted_tokens: int = 0
    """Tokens that preempted requests found again."""
    prefix_stored_blocks: int = 0
    prefix_evicted_blocks: int = 0
    prefix_evicted_tokens: int = 0
    ring_tag_mismatches: int = 0
    """Window rows that should have been there and were not: anything but 0 is a fault of the cache bookkeeping."""
    drafts: DraftStats | None = None
    """None without speculation."""
    tiers: TierStats | None = None
    """None without tiers below the device's blocks."""


@dataclass(slots=True)
class EngineStats:
    """Gauges of the engine, and what the front has counted since start."""

    engine: EngineGauges = field(default_factory=EngineGauges)
    prompt_tokens: int = 0
    """Of prompts that have begun to give output, each counted once, whatever n."""
    cached_prompt_tokens: int = 0
    """Those among them taken from the prefix cache."""
    generation_tokens: int = 0
    """Tokens delivered; what a stop string cuts off is not counted."""
    finished: dict[str, int] = field(default_factory=dict)
    """Completions ended, by finish reason."""
    empty_answers: int = 0
    """Completions that ended normally without any text."""
    num_requests: int = 0
    """Requests accepted."""
    num_restarts: int = 0
    """Times the engine process was started again."""
    ttft_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    """Arrival to first token, per completion."""
    itl_s: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))
    """Gap between consecutive tokens of a completion."""
    queue_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    """Arrival to first scheduled."""
    e2e_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    """Arrival to the end, per completion."""
    prefill_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    """First scheduled to first token, per completion that ended with a token."""
    decode_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    """First token to last token."""
    inference_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    """First scheduled to last token."""
    tpot_s: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))
    """Mean gap between the tokens of a completion that has several."""
    prompt_length: Histogram = field(default_factory=lambda: Histogram(TOKENS_BOUNDS))
    generation_length: Histogram = field(default_factory=lambda: Histogram(TOKENS_BOUNDS))

    @property
    def kv_usage(self) -> float:
        """Share of the blocks in use, 0..1."""
        return self.engine.blocks_used / self.engine.blocks_total if self.engine.blocks_total else 0.0


class ThroughputReport:
    """Says every few seconds, while there is work, how fast it goes. Told the counters; reads no clock."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._since_s: float | None = None
        self._rows = self._drawn = 0

    def line(self, now_s: float, gauges: EngineGauges, *, num_rows: int, num_drawn: int) -> str | None:
        """A log line when one is due.

        Args:
            num_rows: rows run since start, prompts and outputs together.
            num_drawn: tokens drawn since start.
        """
        if self._since_s is None:
            self._since_s, self._rows, self._drawn = now_s, num_rows, num_drawn
            return None
        elapsed_s = now_s - self._since_s
        if elapsed_s < self._interval_s:
            return None
        rows_rate, drawn_rate = (num_rows - self._rows) / elapsed_s, (num_drawn - self._drawn) / elapsed_s
        self._since_s, self._rows, self._drawn = now_s, num_rows, num_drawn
        return (
            f"{drawn_rate:,.1f} tokens/s out, {rows_rate:,.1f} rows/s run; "
            f"{gauges.num_running} running, {gauges.num_waiting} waiting; blocks {gauges.blocks_used}/{gauges.blocks_total}"
        )

    def rest(self) -> None:
        """The engine went idle: the next line starts counting when there is work again."""
        self._since_s = None
