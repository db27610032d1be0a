# SPDX-License-Identifier: Apache-2.0
"""load_checkpoint: one pass over the shards in file order, each expected tensor handed to the sink once.

Headers are checked first (weights/check.py). Tensors are views of mapped files; touched pages are given back as the pass moves on, so
the peak is what the sink keeps plus one window of file pages.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from whalefall.weights.check import check_checkpoint
from whalefall.weights.mapped import MappedShard
from whalefall.weights.safetensors import Shard, ShardSet, StoredTensor
from whalefall.weights.spec import IgnoreRule, WeightMap

RELEASE_BYTES = 64 << 20
"""File pages that may stay mapped behind the reading position."""

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all); called after each tensor."""


class Sink(Protocol):
    """Where tensors go; see models/definition.py for the promise."""

    def put(self, name: str, tensor: Tensor) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class IgnoredTensors:
    """What one rule left in the file."""

    rule: IgnoreRule
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    model_dir: Path
    num_shards: int
    num_tensors: int
    """Handed to the sink."""
    num_bytes: int
    ignored: tuple[IgnoredTensors, ...]
    """Rules that met at least one tensor."""
    duration_s: float
    peak_rss_bytes: int
    """Highest resident memory of the process so far, mapped file pages included."""


def load_checkpoint(model_dir: str | Path, weight_map: WeightMap, sink: Sink, *, progress: Progress | None = None) -> LoadReport:
    """Fill a model.

    Raises:
        ConfigError: the checkpoint does not hold what the map expects; nothing has reached the sink then.
    """
    started_s = time.monotonic()
    shards = ShardSet.open(model_dir)
    check_checkpoint(shards, weight_map)
    wanted = [(shard, [t for t in shard.tensors if t.name in weight_map.tensors]) for shard in shards.shards]
    total_bytes = sum(t.num_bytes for _, tensors in wanted for t in tensors)
    done_bytes = 0
    for shard, tensors in wanted:
        for tensor in _read(shard, tensors, sink):
            done_bytes += tensor.num_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)
    sink.finish()
    return LoadReport(
        model_dir=shards.model_dir,
        num_shards=len(shards.shards),
        num_tensors=sum(len(tensors) for _, tensors in wanted),
        num_bytes=total_bytes,
        ignored=count_ignored(shards, weight_map),
        duration_s=time.monotonic() - started_s,
        peak_rss_bytes=peak_rss_bytes(),
    )


def count_ignored(shards: ShardSet, weight_map: WeightMap) -> tuple[IgnoredTensors, ...]:
    counts: dict[IgnoreRule, list[int]] = {}
    for tensor in shards.all_tensors():
        rule = None if tensor.name in weight_map.tensors else weight_map.rule_for(tensor.name)
        if rule is not None:
            counts.setdefault(rule, []).append(tensor.num_bytes)
    return tuple(IgnoredTensors(rule, len(sizes), sum(sizes)) for rule, sizes in counts.items())


def format_report(report: LoadReport) -> str:
    """A few lines for the log: what was loaded, what was left and why."""
    source = f"from {report.num_shards} shard(s)" if report.num_shards else "drawn at random, NOT from a checkpoint,"
    lines = [
        f"loaded {report.num_tensors:,} tensors, {format_bytes(report.num_bytes)} {source}"
        f" in {report.duration_s:.1f} s; peak memory {format_bytes(report.peak_rss_bytes)}"
    ]
    for left in report.ignored:
        expected = left.rule.num_expected
        of = f" of {expected:,}" if expected is not None and expected != left.num_tensors else ""
        lines.append(f"left {left.num_tensors:,}{of} tensors {left.rule.prefix}* ({format_bytes(left.num_bytes)}): {left.rule.reason}")
    return "\n".join(lines)


def format_bytes(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def _read(shard: Shard, tensors: list[StoredTensor], sink: Sink) -> Iterator[StoredTensor]:
    """Hand over one shard, yielding after each tensor so that the caller can count."""
    mapped = MappedShard(shard.path)
    released = 0
    for tensor in tensors:
        sink.put(tensor.name, mapped.tensor(tensor))
        if tensor.end - released >= RELEASE_BYTES:
            mapped.release(released, tensor.end)
            released = tensor.end
        yield tensor
    mapped.release(0, max((tensor.end for tensor in tensors), default=0))


def peak_rss_bytes() -> int:
    """Highest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
