# SPDX-License-Identifier: Apache-2.0
"""What do moves between tiers cost on a GPU? Bandwidth of Store and Load through pinned memory, of the disk below, and what a step beside
them loses. Records have the shape of DeepSeek-V4.1's layers in the cut (benchmarks/v41_cut), bfloat16, blocks of 256 tokens.

Win: Load brings 16,384 tokens in less than 20 ms; a step beside copies takes less than 1.1 of its time alone.
Needs torch, numpy and safetensors only; less than a minute. Without a GPU it runs on the CPU, for a look at whether it runs.
Run: python -m benchmarks.device.kv_tiers [--blocks 64] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from whalefall.core.batch import CacheTensors
from whalefall.core.cache_spec import CacheSpec
from whalefall.core.seams import LocalComm
from whalefall.models.deepseek_v41.cache import cache_spec
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.definition import BuildContext
from whalefall.runtime.kvcache.pools import allocate, cache_bytes, restore_snapshot, take_snapshots
from whalefall.runtime.kvcache.tiers.disk import BlockFiles
from whalefall.runtime.kvcache.tiers.layout import RecordLayout
from whalefall.runtime.kvcache.tiers.record import BlockCopier, HostSlab

BLOCK_TOKENS = 256
CUT = Path(__file__).parents[1] / "v41_cut" / "config.json"
MATRIX, MULTIPLICATIONS = 4_096, 40


def spec_of_the_cut(device: torch.device) -> CacheSpec:
    config = DeepseekV41Config.from_hf(json.loads(CUT.read_text(encoding="utf-8")), str(CUT))
    context = BuildContext(
        dtype=torch.bfloat16, device=device, weights="packed", kv_cache_dtype="model", comm=LocalComm(), model_dir=CUT.parent
    )
    return cache_spec(config, context, BLOCK_TOKENS)


def median_s(act: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Of several calls after a first one; the device is idle before and after each."""
    times = []
    for _ in range(repeats + 1):
        _settle(device)
        start_s = time.perf_counter()
        act()
        _settle(device)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])


class Tiers:
    def __init__(self, num_blocks: int, device: torch.device) -> None:
        spec = spec_of_the_cut(device)
        self.device, self.num_blocks = device, num_blocks
        self.cache: CacheTensors = allocate(spec, 2 * num_blocks + 1, 4, device, with_snapshots=True)
        self.layout = RecordLayout.of(spec)
        self.slab = HostSlab(self.layout, num_blocks, is_pinned=device.type == "cuda")
        self.copier = BlockCopier(self.layout, self.cache.growing, 2 * num_blocks + 1, self.slab)

    def store(self) -> None:
        self.copier.store(range(1, self.num_blocks + 1), range(self.num_blocks))

    def load(self) -> None:
        self.copier.load(range(self.num_blocks), range(self.num_blocks + 1, 2 * self.num_blocks + 1))

    def is_sound(self) -> bool:
        """Whether what was stored and loaded is the same bytes."""
        for pool in self.cache.growing.values():
            pool.view(torch.uint8).random_(0, 256)
        _settle(self.device)
        self.store()
        self.load()
        per_block = [pool.view(2 * self.num_blocks + 1, -1).view(torch.uint8) for pool in self.cache.growing.values()]
        return all(torch.equal(b[1 : self.num_blocks + 1], b[self.num_blocks + 1 :]) for b in per_block)


def stretch_of_a_step(tiers: Tiers, repeats: int) -> tuple[float, float]:
    """Milliseconds of a row of matrix products alone, and with stores and loads beside."""
    a = torch.randn(MATRIX, MATRIX, device=tiers.device, dtype=torch.bfloat16)
    alone: list[float] = []
    beside: list[float] = []
    for times, is_beside in ((alone, False), (beside, True)) * (repeats + 1):
        _settle(tiers.device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(MULTIPLICATIONS):
            a @ a
        end.record()
        if is_beside:
            while not end.query():
                tiers.store()
                tiers.load()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(alone[1:]), statistics.median(beside[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiers = Tiers(args.blocks, device)
    num_bytes = args.blocks * tiers.layout.record_bytes

    def row(name: str, value: str) -> None:
        print(f"{name:<44} {value}", flush=True)

    def moved(name: str, act: Callable[[], object]) -> None:
        took_s = median_s(act, args.repeats, device)
        row(name, f"{1e3 * took_s:9.2f} ms  {num_bytes / took_s / 1e9:7.2f} GB/s")

    row("device", torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
    row("torch, pools", f"{torch.__version__}, {cache_bytes(tiers.cache) / 1e6:,.0f} MB")
    row(f"record of {BLOCK_TOKENS} tokens; blocks moved", f"{tiers.layout.record_bytes:,} bytes; {args.blocks}")
    row("stored and loaded bytes are the same", str(tiers.is_sound()))
    moved("Store (device to host)", tiers.store)
    moved("Load (host to device)", tiers.load)
    keys = [number.to_bytes(16, "little") for number in range(args.blocks)]
    with tempfile.TemporaryDirectory() as folder:
        files = BlockFiles(Path(folder), tiers.layout.layout_id, max_bytes=4 * num_bytes)
        start_s = time.perf_counter()
        for at, key in enumerate(keys):
            files.write(key, tiers.slab.row(at))
        took_s = time.perf_counter() - start_s
        row("Write (host to disk)", f"{1e3 * took_s:9.2f} ms  {num_bytes / took_s / 1e9:7.2f} GB/s")
        moved("Fetch (disk, page cache, to host)", lambda: all(files.read(key, tiers.slab.row(at)) for at, key in enumerate(keys)))
    row("snapshot taken", f"{1e6 * median_s(lambda: take_snapshots(tiers.cache, [1], [3]), 20, device):9.1f} us")
    row("snapshot restored", f"{1e6 * median_s(lambda: restore_snapshot(tiers.cache, 2, 3, BLOCK_TOKENS), 20, device):9.1f} us")
    if device.type == "cuda":
        alone_ms, beside_ms = stretch_of_a_step(tiers, args.repeats)
        row("a step alone; beside copies", f"{alone_ms:.2f} ms; {beside_ms:.2f} ms ({beside_ms / alone_ms:.3f}x)")


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
