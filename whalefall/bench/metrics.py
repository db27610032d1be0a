# SPDX-License-Identifier: Apache-2.0
"""From records to figures, with vLLM's definitions. Pure.

* TTFT: from sending to the first chunk that carries output. A role-only first chunk carries none.
* E2E: from sending to the last chunk that carries output.
* TPOT: (E2E - TTFT) / (output tokens - 1), one value a request; requests with one token have none.
* ITL: gaps between tokens, pooled over all requests. Where a chunk carries n tokens its gap is shared among them equally, so that the
  pool always holds output - 1 gaps a request whose sum is E2E - TTFT. With one token a chunk this is vLLM's ITL to the letter; with
  several, vLLM's client counts chunks, which is reported here under its own name, ICL (inter-chunk latency).
* Goodput: requests a second that met every given limit; a request with one token meets any TPOT.
* Throughputs divide by the whole duration, first send to last end. Failed requests count in no latency and in no throughput.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from whalefall.bench.records import Record

Goal = Literal["ttft", "tpot", "e2e"]
PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in the unit of its name, usually milliseconds."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    percentiles: tuple[tuple[float, float], ...]

    def at(self, percent: float) -> float:
        return dict(self.percentiles)[percent]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    requests: int
    failed: int
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float | None
    """None when no goals were given."""
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    icl_ms: Spread | None
    e2e_ms: Spread | None
    counted_by: tuple[tuple[str, int], ...]
    """How tokens were counted -> number of requests: anything but the exact ways makes TPOT and ITL estimates."""
    errors: tuple[tuple[str, int], ...]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks, as numpy's default; `ordered` ascends and is not empty."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float], percents: Sequence[float] = PERCENTILES) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in ordered) / len(ordered))
    points = tuple((p, percentile(ordered, p)) for p in percents)
    return Spread(len(ordered), mean, std, ordered[0], ordered[-1], points)


def ttft_s(record: Record) -> float | None:
    return record.arrivals[0].at_s - record.sent_s if record.arrivals else None


def e2e_s(record: Record) -> float | None:
    return record.arrivals[-1].at_s - record.sent_s if record.arrivals else None


def tpot_s(record: Record) -> float | None:
    if not record.arrivals or record.output_tokens < 2:
        return None
    return (record.arrivals[-1].at_s - record.arrivals[0].at_s) / (record.output_tokens - 1)


def itls_s(record: Record) -> list[float]:
    """output_tokens - 1 gaps: tokens that came with the first chunk waited nothing, later chunks share their gap."""
    if not record.arrivals:
        return []
    gaps = [0.0] * (record.arrivals[0].tokens - 1)
    for before, chunk in zip(record.arrivals, record.arrivals[1:]):
        gaps += [(chunk.at_s - before.at_s) / chunk.tokens] * chunk.tokens
    return gaps


def icls_s(record: Record) -> list[float]:
    return [chunk.at_s - before.at_s for before, chunk in zip(record.arrivals, record.arrivals[1:])]


def meets(record: Record, goals_ms: Mapping[Goal, float]) -> bool:
    values: dict[Goal, float | None] = {"ttft": ttft_s(record), "tpot": tpot_s(record) or 0.0, "e2e": e2e_s(record)}
    return record.is_ok and all((value := values[name]) is not None and value * 1e3 <= limit for name, limit in goals_ms.items())


def summarise(records: Sequence[Record], goals_ms: Mapping[Goal, float] | None = None, percents: Sequence[float] = PERCENTILES) -> Summary:
    good = [r for r in records if r.is_ok]
    duration = max((r.ended_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
    prompt, output = sum(r.prompt_tokens or 0 for r in good), sum(r.output_tokens for r in good)
    met = sum(meets(r, goals_ms) for r in good) if goals_ms else None

    def rate(amount: float) -> float:
        return amount / duration if duration > 0 else 0.0

    def milliseconds(values: Sequence[float | None]) -> Spread | None:
        return spread([v * 1e3 for v in values if v is not None], percents)

    return Summary(
        requests=len(records),
        failed=len(records) - len(good),
        duration_s=duration,
        prompt_tokens=prompt,
        cached_tokens=sum(r.cached_tokens or 0 for r in good),
        output_tokens=output,
        requests_per_s=rate(len(good)),
        output_tokens_per_s=rate(output),
        total_tokens_per_s=rate(prompt + output),
        goodput_per_s=None if met is None else rate(met),
        ttft_ms=milliseconds([ttft_s(r) for r in good]),
        tpot_ms=milliseconds([tpot_s(r) for r in good]),
        itl_ms=milliseconds([gap for r in good for gap in itls_s(r)]),
        icl_ms=milliseconds([gap for r in good for gap in icls_s(r)]),
        e2e_ms=milliseconds([e2e_s(r) for r in good]),
        counted_by=_counts(r.counted_by for r in good),
        errors=_counts(r.error for r in records if r.error is not None),
    )


def _counts(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    table: dict[str, int] = {}
    for name in names:
        table[name] = table.get(name, 0) + 1
    return tuple(sorted(table.items(), key=lambda item: (-item[1], item[0])))
