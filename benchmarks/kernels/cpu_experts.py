# SPDX-License-Identifier: Apache-2.0
"""Do the grouped products of the dense experts pay against the reference's loop over experts, and up to how many tokens?

Win: at least 1.3 times from 4 to 64 tokens (decode), no loss at the longest that the twin accepts.
Run: python -m benchmarks.kernels.cpu_experts [--threads 1]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from whalefall.kernels.moe.cpu import experts_dense_cpu
from whalefall.kernels.moe.reference import experts_dense, gate

EXPERTS, PER_TOKEN, HIDDEN, INNER, LIMIT = 16, 3, 256, 128, 10.0
LAYERS = 8
"""Weights of as many layers are used in turn, so that they do not stay in the cache."""
ROUNDS = 15


def median_ms(fn: Callable[..., Tensor], rows: tuple[Tensor, ...], layers: list[tuple[Tensor, Tensor]]) -> float:
    times = []
    for _, weights in zip(range(ROUNDS + 2), itertools.cycle(layers)):
        begin = time.perf_counter()
        fn(*rows, *weights, LIMIT)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    layers = [(torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 16, torch.randn(EXPERTS, HIDDEN, INNER) / 11) for _ in range(LAYERS)]
    print("tokens,reference_ms,cpu_grouped_ms,times", file=sys.stdout)
    with torch.inference_mode():
        for tokens in (1, 4, 16, 64, 128, 256, 1024):
            rows = (torch.randn(tokens, HIDDEN), *gate(torch.randn(tokens, EXPERTS), torch.zeros(EXPERTS), PER_TOKEN, 1.5))
            plain, grouped = median_ms(experts_dense.reference, rows, layers), median_ms(experts_dense_cpu, rows, layers)
            print(f"{tokens},{plain:.3f},{grouped:.3f},{plain / grouped:.2f}")


if __name__ == "__main__":
    main()
