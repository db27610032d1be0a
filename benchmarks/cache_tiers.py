# SPDX-License-Identifier: Apache-2.0
"""What does a prefix hit cost in each tier? Time to first token by prompt length: cold, and with the prompt's blocks on the device, in host
memory and on disk; bounded and exact replay.

Win: every tier beats computing at every length of two blocks or more; host and disk stay within 1.5x of a hit on the device at 8,192.
How: the same prompts, told apart by their first tokens. Host: the device's pool is too small for the others' blocks beside a prompt's own,
so that they were evicted. Disk: a fresh engine on the directory that an earlier one filled (and the system's page cache; say so when you
quote it). The median of some prompts per point; a suffix of 16 new tokens on every hit. Lengths beyond the model's positions are run with
the same weights and a config that allows more: what a token costs does not depend on what it means, and the output says so.
Run: OMP_NUM_THREADS=1 nice -n -20 python -m benchmarks.cache_tiers [--model DIR] [--lengths 512,...,16384] [--svg docs/cache-tiers.svg]
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from whalefall import LLM, SamplingParams
from whalefall.engine.embedded import embedded_model_dir

COLUMNS = "commit,date,device,load_1min,model,replay,tier,prompt_tokens,cached_tokens,ttft_median_ms,ttft_min_ms,ttft_max_ms"
TIERS = ("cold", "device", "host", "disk")
SUFFIX = 16
ONE = SamplingParams(temperature=0.0, max_tokens=1)


class Point(NamedTuple):
    replay: str
    tier: str
    num_tokens: int
    num_cached: int
    """At least, over the samples."""
    ttft_s: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.ttft_s)

    @property
    def best_s(self) -> float:
        """For the picture: on a machine that does other work too, noise only ever adds."""
        return min(self.ttft_s)


def prompt_of(sample: int, length: int) -> list[int]:
    return [3 + (sample * 977 + i * i + 7 * i) % 250 for i in range(length - SUFFIX)]


def asked(llm: LLM, prompt: Sequence[int], suffix: int) -> tuple[float, int]:
    """Seconds to the first token of a prompt with a suffix that nobody has sent before; cached tokens."""
    ids = [*prompt, *(3 + (suffix * 31 + i) % 250 for i in range(SUFFIX))]
    start_s = time.perf_counter()
    (output,) = llm.generate(ids, ONE, use_tqdm=False)
    return time.perf_counter() - start_s, output.num_cached_tokens


def stretched(model: Path, num_positions: int, folder: Path) -> tuple[Path, str]:
    """The model, or one in `folder` of the same files with more positions; and what to call it."""
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    if text["max_position_embeddings"] >= num_positions:
        return model, model.name
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    name = f"{model.name} with positions {text['max_position_embeddings']} -> {num_positions}"
    text["max_position_embeddings"] = num_positions
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder, name


def settle(llm: LLM) -> None:
    """Let what moves between tiers arrive."""
    while llm.core.scheduler.waits_for_moves:
        llm.core.turn()
        time.sleep(0.001)


def measure(model: Path, replay: str, length: int, num_samples: int) -> Iterator[Point]:
    with tempfile.TemporaryDirectory() as disk:
        options: dict[str, Any] = {"replay": replay, "max_num_seqs": 1, "max_model_len": length + 64, "use_tqdm": False}
        options |= {"disk_cache_dir": disk, "host_cache_bytes": 2**29, "kv_cache_memory_bytes": small_pool(model, replay, length)}
        points: dict[str, list[tuple[float, int]]] = {tier: [] for tier in TIERS}
        with LLM(model, **options) as llm:
            asked(llm, prompt_of(99, length), 0)  # warm up
            for sample in range(num_samples):
                points["cold"].append(asked(llm, prompt_of(sample, length), 0))
                settle(llm)
                points["device"].append(asked(llm, prompt_of(sample, length), 1))
                settle(llm)
            for sample in range(num_samples):  # the last one's blocks have pushed these out, one after another
                points["host"].append(asked(llm, prompt_of(sample, length), 2))
                settle(llm)
        for sample in range(num_samples):
            with LLM(model, **options) as llm:
                asked(llm, prompt_of(77, 64), 0)  # warm up: no block of it is kept
                points["disk"].append(asked(llm, prompt_of(sample, length), 3))
        for tier, values in points.items():
            yield Point(replay, tier, length, min(cached for _, cached in values), [s for s, _ in values])


def small_pool(model: Path, replay: str, length: int) -> int:
    """Bytes of a pool that holds one prompt, and nothing of another beside it."""
    with LLM(model, replay=replay, max_num_seqs=1, max_model_len=length + 64, use_tqdm=False) as llm:
        m = llm.config.memory
        return m.num_slots * m.slot_bytes + (-(-(length + 64) // 256) + 1) * (m.block_bytes + m.snapshot_bytes)


COLOURS = {"cold": "#8a8f98", "device": "#1b6ca8", "host": "#2a9d8f", "disk": "#e07a2f"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 64, 96, 44, 52


def picture(points: Sequence[Point], replay: str, name: str, device: str) -> str:
    """TTFT against prompt length as SVG, one line per tier, logarithmic both ways."""
    shown = [p for p in points if p.replay == replay]
    lengths = sorted({p.num_tokens for p in shown})
    num_samples = len(shown[0].ttft_s)
    low, high = (10 ** round_(math.log10(1e3 * edge)) for round_, edge in zip((math.floor, math.ceil), _range(shown), strict=True))

    def x_of(num_tokens: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(num_tokens / lengths[0]) / math.log(lengths[-1] / lengths[0])

    def y_of(ms: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(ms / low) / math.log(high / low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">Time to first token after a prefix hit, by tier ({replay} replay)</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 10}" fill="#555">prompt tokens; {name.replace("->", "to")}, {device}; best of {num_samples}</text>',
        f'<text x="{LEFT - 8}" y="{TOP - 8}" text-anchor="end" fill="#555">ms</text>',
    ]
    for decade in range(round(math.log10(low)), round(math.log10(high)) + 1):
        for ms in (10**decade, 2 * 10**decade, 5 * 10**decade):
            if ms <= high:
                parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(ms):.1f}" y2="{y_of(ms):.1f}" stroke="#e4e4e4"/>')
                parts.append(f'<text x="{LEFT - 8}" y="{y_of(ms) + 4:.1f}" text-anchor="end" fill="#555">{ms:,}</text>')
    for n in lengths:
        parts.append(f'<text x="{x_of(n):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#555">{n:,}</text>')
    ends = sorted((y_of(1e3 * max(p for p in shown if p.tier == tier).best_s), tier) for tier in TIERS)
    label_y = -15.0
    for y, tier in ends:
        line = sorted((p.num_tokens, p.best_s) for p in shown if p.tier == tier)
        path = " ".join(f"{x_of(n):.1f},{y_of(1e3 * s):.1f}" for n, s in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[tier]}" stroke-width="2"/>')
        label_y = max(y, label_y + 15)  # names of lines that end together stand below each other
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{label_y + 4:.1f}" fill="{COLOURS[tier]}">{tier}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _range(points: Sequence[Point]) -> tuple[float, float]:
    best = [p.best_s for p in points]
    return min(best), max(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--replays", default="bounded,exact")
    parser.add_argument("--svg", type=Path, default=None)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    lengths = [int(length) for length in args.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model, name = stretched(args.model or embedded_model_dir(), max(lengths) + 64, Path(folder))
        run(model, name, lengths, args)


def run(model: Path, name: str, lengths: Sequence[int], args: argparse.Namespace) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    device = f"{torch.get_num_threads()} CPU thread(s)" if not torch.cuda.is_available() else torch.cuda.get_device_name()
    print(COLUMNS)
    points: list[Point] = []
    for replay in args.replays.split(","):
        for length in lengths:
            for p in measure(model, replay, length, args.samples):
                points.append(p)
                times = ",".join(f"{1e3 * value:.1f}" for value in (p.median_s, min(p.ttft_s), max(p.ttft_s)))
                head = f"{commit},{datetime.date.today()},{device},{os.getloadavg()[0]:.1f},{name},{p.replay},{p.tier}"
                print(f"{head},{p.num_tokens},{p.num_cached},{times}", flush=True)
    if args.svg is not None:
        args.svg.write_text(picture(points, args.replays.split(",")[0], name, device), encoding="utf-8")


if __name__ == "__main__":
    main()
