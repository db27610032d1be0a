# SPDX-License-Identifier: Apache-2.0
"""Do the CPU tiles of the sparse attention pay against the plain reference, in prefill and in decode?

Win: at least 2 times in prefill (rows of one prompt, consecutive), no loss in decode (rows of different requests, scattered lists).
Run: python -m benchmarks.kernels.cpu_attention [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from whalefall.kernels.attention.cpu import sparse_mqa_cpu
from whalefall.kernels.attention.reference import sparse_mqa

HEADS, WIDTH, WINDOW, LIST = 8, 64, 128, 64
ROUNDS = 15


def prefill(rows: int) -> tuple[Tensor, ...]:
    """Consecutive rows of one prompt: shifted windows, entry lists over the same entries."""
    position = torch.arange(rows)[:, None]
    window = position + torch.arange(1 - WINDOW, 1)
    entries = torch.rand(rows, rows // 2 + LIST).argsort(1)[:, :LIST]
    return torch.randn(rows, HEADS, WIDTH), torch.randn(rows, WIDTH), window.clamp_min(-1), torch.randn(rows // 2 + LIST, WIDTH), entries


def decode(rows: int) -> tuple[Tensor, ...]:
    """One row each of many requests: every window in a ring of its own, every list in blocks of its own."""
    ring = torch.arange(rows)[:, None] * WINDOW + torch.rand(rows, WINDOW).argsort(1)
    entries = torch.arange(rows)[:, None] * 256 + torch.rand(rows, 256).argsort(1)[:, :LIST]
    return torch.randn(rows, HEADS, WIDTH), torch.randn(rows * WINDOW, WIDTH), ring, torch.randn(rows * 256, WIDTH), entries


def median_ms(fn: Callable[..., Tensor], args: tuple[Tensor, ...]) -> float:
    sink, scale = torch.zeros(HEADS), WIDTH**-0.5
    times = []
    for _ in range(ROUNDS + 2):
        begin = time.perf_counter()
        fn(*args, sink, scale)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    print("case,rows,reference_ms,cpu_tiles_ms,times", file=sys.stdout)
    with torch.inference_mode():
        for name, make, sizes in (("prefill", prefill, (128, 512, 2048)), ("decode", decode, (1, 8, 64, 256))):
            for rows in sizes:
                args = make(rows)
                plain, tiles = median_ms(sparse_mqa.reference, args), median_ms(sparse_mqa_cpu, args)
                print(f"{name},{rows},{plain:.3f},{tiles:.3f},{plain / tiles:.2f}")


if __name__ == "__main__":
    main()
