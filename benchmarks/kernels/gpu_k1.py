# SPDX-License-Identifier: Apache-2.0
"""Do the Triton twins of experts, gate, dense products, norm, rotation, formats, stores and sampling reach the card's ceilings?

Real layer sizes of DeepSeek-V4.1. Each row: equality with the reference in float32 (largest error of any row, twin and plain bfloat16 torch
beside each other), median time inside a CUDA graph that walks over enough copies to leave the L2 cache, GB/s and TFLOP/s with their share
of the measured ceilings (4.284 TB/s copy, 776 TFLOP/s bfloat16). A kernel that fails is a row that says so; the others run.
Win: >= 90 % of copy bandwidth where weights stream, >= 70 % of the matrix rate where arithmetic binds.
Run, on a GPU: python -m benchmarks.kernels.gpu_k1 --out gpu_k1.csv [--only experts,fp8] [--tokens 1,8,64]
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whalefall.kernels import compare, gemm, kv_store, moe, norm, quant, rope, sampling
from whalefall.kernels.registry import Op

COPY_GB_S, BF16_TFLOP_S = 4284.0, 776.0
HIDDEN, INNER, EXPERTS, PER_TOKEN, VOCAB = 5120, 2304, 384, 6, 129_280
DECODE, PREFILL = (1, 8, 32, 64, 150, 256), (2048, 8192)
OUTSIDE_L2 = 192 << 20
FIELDS = ("kernel", "shape", "tokens", "us", "gb_s", "pct_copy", "tflop_s", "pct_bf16", "error", "plain_error", "note")


@dataclass
class Row:
    """One measurement: `sets` are argument tuples over which the graph walks."""

    kernel: str
    shape: str
    tokens: int
    op: Op[Any, Any]
    sets: list[tuple[Any, ...]]
    num_bytes: float
    flops: float = 0.0
    note: str = ""
    checks: bool = True
    inputs_to_float32: Callable[[tuple[Any, ...]], tuple[Any, ...]] = field(default=lambda args: tuple(_wide(a) for a in args))


def _wide(arg: Any) -> Any:
    return arg.float() if isinstance(arg, Tensor) and arg.dtype == torch.bfloat16 else arg


def _randn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.float32) * scale).to(dtype)


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)


def _fp8(n: int, k: int) -> tuple[Tensor, Tensor]:
    weight = (torch.randn(n, k, device="cuda") * 1.0).clamp(-8, 8).to(torch.float8_e4m3fn)
    return weight, torch.full((n // 32, k // 32), 121, device="cuda", dtype=torch.uint8)


def _copies(num_bytes: float, make: Callable[[], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [make() for _ in range(max(1, min(64, math.ceil(OUTSIDE_L2 / num_bytes))))]


# what is measured


def experts(tokens: tuple[int, ...]) -> Iterator[Row]:
    w13 = _bytes(EXPERTS, 2 * INNER, HIDDEN // 2).view(torch.int8)
    w2 = _bytes(EXPERTS, HIDDEN, INNER // 2).view(torch.int8)
    scale13 = torch.full((EXPERTS, 2 * INNER, HIDDEN // 32), 119, device="cuda", dtype=torch.uint8)
    scale2 = torch.full((EXPERTS, HIDDEN, INNER // 32), 119, device="cuda", dtype=torch.uint8)
    scale13 -= (_bytes(*scale13.shape) & 1).to(torch.uint8)
    each = (w13[0].numel() + w2[0].numel()) + scale13[0].numel() + scale2[0].numel()
    for t in tokens:
        sets, hit = [], 0
        for _ in range(4 if t <= 64 else 2):
            chosen = torch.rand(t, EXPERTS, device="cuda").argsort(-1)[:, :PER_TOKEN].contiguous()
            weight = torch.rand(t, PER_TOKEN, device="cuda")
            sets.append((_randn(t, HIDDEN), chosen, weight, w13, scale13, w2, scale2, 10.0))
            hit += chosen.unique().numel()
        flops = 2.0 * t * PER_TOKEN * 3 * HIDDEN * INNER
        yield Row(
            "experts_mxfp4", f"{EXPERTS}x{HIDDEN}x{INNER}", t, moe.experts_mxfp4, sets, hit / len(sets) * each, flops, checks=t <= 600
        )


def fp8(tokens: tuple[int, ...]) -> Iterator[Row]:
    shapes = {"wq_a": (1280, 5120), "wkv": (512, 5120), "wq_b": (32768, 1280), "wo_b": (5120, 8192), "w1": (2304, 5120), "w2": (5120, 2304)}
    for name, (n, k) in shapes.items():
        for t in tokens:
            sets = _copies(n * k, lambda n=n, k=k, t=t: (_randn(t, k), *_fp8(n, k)))
            size = n * k * (1 + 1 / 1024) + 2 * t * (n + k)
            yield Row("linear_fp8_tile", f"{name} {n}x{k}", t, gemm.linear_fp8_tile, sets, size, 2.0 * t * n * k)


def grouped(tokens: tuple[int, ...]) -> Iterator[Row]:
    for t in tokens:
        sets = _copies(8 * 1024 * 4096, lambda t=t: (_randn(t, 8, 4096), *_fp8(8 * 1024, 4096)))
        yield Row(
            "grouped_linear_fp8_tile", "wo_a 8x1024x4096", t, gemm.grouped_linear_fp8_tile, sets, 8 * 1024 * 4096, 2.0 * t * 8192 * 4096
        )


def float32(tokens: tuple[int, ...]) -> Iterator[Row]:
    for name, n, dtype in (("gate f32", 384, torch.float32), ("compressor f32", 512, torch.float32), ("head bf16", VOCAB, torch.bfloat16)):
        for t in tokens:
            if n == VOCAB and t > 256:
                continue
            size = n * HIDDEN * (4 if dtype == torch.float32 else 2) + t * (2 * HIDDEN + 4 * n)
            sets = _copies(size, lambda n=n, t=t, d=dtype: (_randn(t, HIDDEN), _randn(n, HIDDEN, dtype=d, scale=HIDDEN**-0.5)))
            yield Row("linear_float32", f"{name} {n}x{HIDDEN}", t, gemm.linear_float32, sets, size, 2.0 * t * n * HIDDEN)


def small(tokens: tuple[int, ...]) -> Iterator[Row]:
    for t in tokens:
        bias = _randn(EXPERTS, dtype=torch.float32, scale=0.02)
        sets = [(_randn(t, EXPERTS, dtype=torch.float32), bias, PER_TOKEN, 1.5) for _ in range(8)]
        yield Row("gate", f"top {PER_TOKEN} of {EXPERTS}", t, moe.gate, sets, t * (4 * EXPERTS + 12 * PER_TOKEN))
        sets = [(_randn(t, INNER), _randn(t, INNER), 10.0) for _ in range(8)]
        yield Row("clamped_swiglu", f"{INNER}", t, moe.clamped_swiglu, sets, 6.0 * t * INNER)
        for width in (5120, 1280, 512):
            sets = [(_randn(t, width), _randn(width, dtype=torch.float32), 1e-20) for _ in range(8)]
            yield Row("rms_norm", f"{width}", t, norm.rms_norm, sets, 4.0 * t * width)
        angle = torch.rand(t, 32, device="cuda") * 1000
        sets = [(_randn(t, 64, 512), angle.cos(), angle.sin(), False) for _ in range(4)]
        yield Row("rotate", "64x512", t, rope.rotate, sets, 4.0 * t * 64 * 512)
        for name, op in (("fakequant_mxfp8", quant.fakequant_mxfp8), ("fakequant_nvfp4", quant.fakequant_nvfp4)):
            yield Row(name, "512", t, op, [(_randn(t, 512),) for _ in range(8)], 4.0 * t * 512)
        pool = _randn(65536, 512)
        sets = [(pool, torch.randperm(65536, device="cuda")[:t].contiguous(), _randn(t, 512)) for _ in range(8)]
        yield Row("store_rows", "512", t, kv_store.store_rows, sets, 4.0 * t * 512, checks=False)


def sample(tokens: tuple[int, ...]) -> Iterator[Row]:
    for t in (t for t in tokens if t <= 256):
        logits = [_randn(t, VOCAB, dtype=torch.float32) for _ in range(4)]
        yield Row("argmax", f"{VOCAB}", t, sampling.argmax, [(x,) for x in logits], 4.0 * t * VOCAB)
        seed = torch.arange(t, device="cuda")
        yield Row("draw", f"{VOCAB}", t, sampling.draw, [(x, seed * 77, seed + 5, 0) for x in logits], 4.0 * t * VOCAB)


def dequantise(tokens: tuple[int, ...]) -> Iterator[Row]:
    for n, k in ((32768, 1280), (5120, 8192)):
        sets = [(*_fp8(n, k), torch.bfloat16) for _ in range(4)]
        yield Row("dequantize_fp8_tile", f"{n}x{k}", 0, quant.dequantize_fp8_tile, sets, 3.0 * n * k)


def sweep(tokens: tuple[int, ...]) -> Iterator[Row]:
    """Ways to cut the experts' products, one at a time beside the chosen ones."""
    from whalefall.kernels.moe import triton_experts as twin

    table, s = twin.SHAPES, twin.Shape
    few_up = [s(8, 32, 256, 4, 3), s(8, 32, 256, 4, 4), s(8, 16, 256, 4, 4), s(8, 64, 256, 8, 3), s(8, 32, 512, 8, 3), s(8, 32, 512, 16, 3)]
    few_down = [s(8, 64, 256, 4, 4), s(8, 64, 256, 4, 3), s(8, 32, 256, 4, 4), s(8, 64, 256, 8, 3), s(8, 128, 256, 8, 3)]
    many_up = [s(64, 64, 128, 4, 3), s(64, 64, 64, 4, 4), s(64, 128, 64, 8, 4), s(64, 128, 128, 8, 3)]
    many_down = [s(64, 64, 128, 4, 4), s(64, 128, 64, 4, 4), s(64, 128, 128, 8, 3), s(64, 256, 64, 8, 3)]
    wide_up = [s(128, 64, 64, 4, 3), s(128, 128, 64, 8, 3), s(128, 64, 128, 4, 2)]
    wide_down = [s(128, 128, 64, 4, 4), s(128, 64, 128, 4, 3), s(128, 64, 64, 4, 4)]
    for t in (t for t in tokens if t in (1, 8, 64, 256, 2048, 8192)):
        (row,) = experts((t,))
        is_few, (up, down) = twin.shapes_for(t * PER_TOKEN, EXPERTS)
        ups, downs = (few_up, few_down) if is_few else (many_up, many_down)
        if is_few:
            pairs = [(up, down), *((u, down) for u in ups), *((up, d) for d in downs)]
        else:
            pairs = [(up, down), *zip(ups, downs), *zip(wide_up, wide_down)]
        for pair in pairs:
            twin.SHAPES = ((math.inf, is_few, *pair),)
            shape = f"up {_cut(pair[0])} down {_cut(pair[1])}"
            yield Row("experts_mxfp4", shape, t, row.op, list(row.sets), row.num_bytes, row.flops, checks=False)
        twin.SHAPES = table


def _cut(shape: Any) -> str:
    return f"{shape.tokens}x{shape.rows}x{shape.columns} w{shape.warps} s{shape.stages}"


GROUPS: dict[str, Callable[[tuple[int, ...]], Iterator[Row]]] = {
    "experts": experts,
    "fp8": fp8,
    "grouped": grouped,
    "float32": float32,
    "small": small,
    "sample": sample,
    "dequantise": dequantise,
    "sweep": sweep,
}


# how


def median_us(fn: Callable[..., Any], sets: list[tuple[Any, ...]], replays: int = 15) -> float:
    """Median time of one call inside a graph that walks over the sets."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for args in sets[:2]:
            fn(*args)
    torch.cuda.current_stream().wait_stream(side)
    rounds = max(1, 8 // len(sets))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for args in sets:
                fn(*args)
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(sets)))
    return sorted(times[2:])[replays // 2]


def errors(row: Row) -> tuple[float, float]:
    """(twin, plain torch) against the reference on float32 inputs; ids count as errors where they differ."""
    args = row.sets[0]
    truth = _results(row.op.reference, row.inputs_to_float32(args))
    twin, plain = _results(row.op, args), _results(row.op.reference, args)
    return max(map(compare.error, twin, truth)), max(map(compare.error, plain, truth))


def _results(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    result = fn(*args)
    return result if isinstance(result, tuple) else (result,)


def measure(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"kernel": row.kernel, "shape": row.shape, "tokens": row.tokens, "note": row.note}
    chosen = row.op.select(*row.sets[0])
    found["note"] = "reference" if chosen is row.op.reference else getattr(chosen, "__name__", "")
    if row.checks:
        found["error"], found["plain_error"] = (f"{e:.2e}" for e in errors(row))
    us = median_us(chosen, row.sets)
    gb_s, tflop_s = row.num_bytes / us / 1e3, row.flops / us / 1e6
    found |= {"us": f"{us:.2f}", "gb_s": f"{gb_s:.0f}", "pct_copy": f"{100 * gb_s / COPY_GB_S:.1f}"}
    return found | {"tflop_s": f"{tflop_s:.1f}", "pct_bf16": f"{100 * tflop_s / BF16_TFLOP_S:.1f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="-", help="CSV file; - for standard output")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, comma separated")
    parser.add_argument("--tokens", default=",".join(map(str, DECODE + PREFILL)))
    options = parser.parse_args()
    torch.manual_seed(0)
    with open(options.out, "w", newline="") if options.out != "-" else sys.stdout as file, torch.inference_mode():
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for name in options.only.split(","):
            begin = time.perf_counter()
            _run_group(name, tuple(map(int, options.tokens.split(","))), writer)
            file.flush()
            print(f"# {name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def _run_group(name: str, tokens: tuple[int, ...], writer: csv.DictWriter[str]) -> None:
    try:
        for row in GROUPS[name](tokens):
            try:
                found = measure(row)
            except Exception as error:
                traceback.print_exc(limit=4)
                text = f"FAILED {type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
                found = {"kernel": row.kernel, "shape": row.shape, "tokens": row.tokens, "note": text}
            writer.writerow(found)
            print(",".join(str(found.get(f, "")) for f in FIELDS), file=sys.stderr, flush=True)
            row.sets.clear()
            torch.cuda.empty_cache()
    except Exception:
        traceback.print_exc(limit=6)


if __name__ == "__main__":
    main()
