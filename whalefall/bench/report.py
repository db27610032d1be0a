# SPDX-License-Identifier: Apache-2.0
"""Figures on paper: a table for the terminal, JSON, one CSV row per request, and a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whalefall.bench.metrics import Spread, Summary, e2e_s, icls_s, itls_s, tpot_s, ttft_s
from whalefall.bench.picture import Panel, draw
from whalefall.bench.records import Record

SPREADS = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "icl_ms": "inter-chunk latency",
    "e2e_ms": "end-to-end latency",
}
EXACT = ("token_ids", "logprobs", "continuous_usage")


def to_table(summary: Summary) -> str:
    lines = [
        _line("requests", f"{summary.requests - summary.failed} ok, {summary.failed} failed, in {summary.duration_s:.2f} s"),
        _line("prompt tokens", f"{summary.prompt_tokens:,} ({summary.cached_tokens:,} cached)"),
        _line("output tokens", f"{summary.output_tokens:,}"),
        _line("requests/s", f"{summary.requests_per_s:.3f}"),
        _line("output tokens/s", f"{summary.output_tokens_per_s:,.1f}"),
        _line("total tokens/s", f"{summary.total_tokens_per_s:,.1f}"),
    ]
    if summary.goodput_per_s is not None:
        lines.append(_line("goodput, requests/s", f"{summary.goodput_per_s:.3f}"))
    spreads = [(title, s) for name, title in SPREADS.items() if (s := getattr(summary, name))]
    lines += spread_table(spreads, "ms")
    if any(way not in EXACT for way, _ in summary.counted_by):
        ways = ", ".join(f"{way}: {count} requests" for way, count in summary.counted_by)
        lines.append(
            f"Tokens per chunk are estimates here ({ways}): totals hold, TPOT holds where usage came, ITL is a share of each chunk."
        )
    lines += [f"{count} x {error}" for error, count in summary.errors[:5]]
    return "\n".join(lines)


def spread_table(spreads: Sequence[tuple[str, Spread]], unit: str) -> list[str]:
    if not spreads:
        return []
    marks = [f"p{p:g}" for p, _ in spreads[0][1].percentiles]
    lines = ["", f"{unit:<24}" + "".join(f"{head:>11}" for head in ["mean", *marks, "max"])]
    for title, s in spreads:
        lines.append(f"{title:<24}" + "".join(f"{value:>11.2f}" for value in [s.mean, *(v for _, v in s.percentiles), s.max]))
    return lines


def to_json(summary: Summary, settings: Mapping[str, Any]) -> str:
    body = asdict(summary)
    for name in SPREADS:
        if body[name] is not None:
            body[name]["percentiles"] = {f"p{p:g}": value for p, value in body[name]["percentiles"]}
    body["counted_by"], body["errors"] = dict(summary.counted_by), dict(summary.errors)
    return json.dumps({"settings": dict(settings), "summary": body}, indent=1, ensure_ascii=False)


def to_csv(records: Sequence[Record]) -> str:
    """One row per request in the order sent; milliseconds; an empty cell is a figure that does not exist."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = ["label", "sent_s", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms", "tpot_ms", "e2e_ms"]
    writer.writerow([*heads, "max_itl_ms", "finish_reason", "counted_by", "error"])
    start_s = min((r.sent_s for r in records), default=0.0)
    for r in records:
        timed = [_ms(ttft_s(r)), _ms(tpot_s(r)), _ms(e2e_s(r)), _ms(max(itls_s(r), default=None))]
        counts = [r.prompt_tokens, r.cached_tokens, r.output_tokens]
        writer.writerow([r.label, f"{r.sent_s - start_s:.6f}", *counts, *timed, r.finish_reason, r.counted_by, r.error])
    return out.getvalue()


def to_picture(records: Sequence[Record], title: str) -> str:
    """SVG: four distributions as cumulative curves."""
    good = [r for r in records if r.is_ok]
    panels = [
        Panel("TTFT, ms", [t * 1e3 for r in good if (t := ttft_s(r)) is not None]),
        Panel("TPOT, ms", [t * 1e3 for r in good if (t := tpot_s(r)) is not None]),
        Panel("gap between chunks, ms", [g * 1e3 for r in good for g in icls_s(r)]),
        Panel("end to end, ms", [t * 1e3 for r in good if (t := e2e_s(r)) is not None]),
    ]
    return draw(title, panels)


def write_files(folder: Path, files: Mapping[str, str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def _line(name: str, value: str) -> str:
    return f"{name:<24}{value}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"
