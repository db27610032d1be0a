# SPDX-License-Identifier: Apache-2.0
"""A 5-gram model over the same tokens (interpolated, Witten-Bell), for scale: bits per byte on the same held-out text.

Usage: python -m training.baseline [--order 5]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.prepare import SPECIAL_TOKENS, VOCAB_SIZE, load_tokens

BITS = 12
assert 1 << BITS >= VOCAB_SIZE


def keys(tokens: NDArray[np.uint16], n: int) -> NDArray[np.uint64]:
    """The n-grams of a stream, packed into 64-bit integers; entry i ends at token i + n - 1."""
    packed = np.zeros(len(tokens) - n + 1, dtype=np.uint64)
    for i in range(n):
        packed = (packed << np.uint64(BITS)) | tokens[i : len(tokens) - n + 1 + i].astype(np.uint64)
    return packed


def lookup(table: NDArray[np.uint64], values: NDArray[np.int64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return np.where(table[at] == wanted, values[at], 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("training/.work/data"))
    parser.add_argument("--order", type=int, default=5)
    args = parser.parse_args()
    train, held_out = load_tokens(args.data / "text.xz"), load_tokens(args.data / "text-held-out.xz")
    probability = np.full(len(held_out) - args.order + 1, 1 / VOCAB_SIZE)
    for n in range(1, args.order + 1):
        grams, counts = np.unique(keys(train, n), return_counts=True)
        contexts, first = np.unique(grams >> np.uint64(BITS), return_index=True)
        totals, kinds = np.add.reduceat(counts, first), np.diff(np.append(first, len(grams)))
        wanted = keys(held_out, n)[args.order - n :]
        count = lookup(grams, counts, wanted)
        total, kind = (lookup(contexts, v, wanted >> np.uint64(BITS)) for v in (totals, kinds))
        known = total > 0
        probability = np.where(known, (count + kind * probability) / np.maximum(total + kind, 1), probability)
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    widths = np.array(
        [
            len(piece.encode()) if "\ufffd" not in piece else 1
            for piece in tokenizer.decode_batch([[i] for i in range(VOCAB_SIZE)], skip_special_tokens=True)
        ]
    )
    widths[: len(SPECIAL_TOKENS)] = 0
    bits = -np.log2(probability).sum() / widths[held_out[args.order - 1 :]].sum()
    perplexity = math.exp(-np.log(probability).mean())
    print(f"{args.order}-gram, interpolated Witten-Bell: {bits:.4f} bits per byte (perplexity {perplexity:.1f} per token)")


if __name__ == "__main__":
    main()
