# SPDX-License-Identifier: Apache-2.0
"""From logits to a token id, in plain torch: the meaning of every sampling op.

Rows are independent: nothing here looks across rows, so a row's result does not depend on its company. Ids tie towards the lower one,
everywhere. L = rows whose logits are wanted, V = vocabulary, K = alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whalefall.kernels.registry import op
from whalefall.kernels.sampling.random import exponential_noise

NO_LIMIT = 2**31 - 1
"""top_k of a row that keeps every token."""
SHORT_LIST = 1_024
"""How many of the best ids `keep_top` looks at first, at most; of a small vocabulary a quarter."""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    logits_LV = torch.randn(num_rows, vocab_size, generator=_generator(seed))
    if num_rows and vocab_size > 2:
        logits_LV[0, vocab_size // 2 :] = logits_LV[0, 0]  # a long tie
        logits_LV[-1, 1::2] = -math.inf  # half of the ids masked
    return logits_LV


_SHAPES = ((0, 7), (1, 1), (1, 2), (3, 5), (2, 513), (9, 1024), (2, 129_280))


def _logits_cases() -> Iterator[tuple[Any, ...]]:
    for num_rows, vocab_size in _SHAPES:
        yield (_logits(num_rows, vocab_size),)


@op("sampling.argmax", cases=_logits_cases)
def argmax(logits_LV: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest id of each row and its logit, in one pass.

    Returns:
        ids_L: int64, the lowest id among equal maxima. best_L: its logit; NaN if the row holds any NaN.
    Numerics: exact.
    """
    best_L, ids_L = logits_LV.max(-1)
    return ids_L, best_L


def _bitmask_cases() -> Iterator[tuple[Any, ...]]:
    for num_rows, vocab_size in (*_SHAPES, (2, 31), (2, 32), (2, 33), (3, 65)):
        words = -(-vocab_size // 32)
        bits_LW = torch.randint(-(2**31), 2**31, (num_rows, words), generator=_generator(10), dtype=torch.int64).to(torch.int32)
        bits_LW[:1] = 0  # a dead end
        bits_LW[1:2] = -1  # no rule at all
        yield _logits(num_rows, vocab_size), bits_LW


@op("sampling.apply_bitmask", cases=_bitmask_cases)
def apply_bitmask(logits_LV: Tensor, bits_LW: Tensor) -> Tensor:
    """Mask the ids whose bit is not set with -inf.

    Args:
        bits_LW: int32 [L, ceil(V / 32)]; id v is bit v % 32 (lowest first) of word v // 32. Bits beyond the vocabulary mean nothing.
    Returns:
        float32 [L, V], new memory.
    Numerics: exact.
    """
    # Byte by byte: the expanded mask is then one byte per id, a quarter of what words would take. Little-endian, as every device here is.
    bit_8 = 1 << torch.arange(8, device=bits_LW.device, dtype=torch.uint8)
    is_masked_LX8 = (bits_LW.contiguous().view(torch.uint8)[:, :, None] & bit_8) == 0
    return logits_LV.masked_fill(is_masked_LX8.flatten(1)[:, : logits_LV.shape[-1]], -math.inf)


def _penalise_cases() -> Iterator[tuple[Any, ...]]:
    for num_rows, vocab_size in _SHAPES[1:]:
        counts_LV = torch.randint(0, 3, (num_rows, vocab_size), generator=_generator(1), dtype=torch.int32)
        seen_LV = (counts_LV > 0) | (torch.rand(num_rows, vocab_size, generator=_generator(2)) < 0.3)
        ramp_L = torch.linspace(-2, 2, num_rows)
        yield _logits(num_rows, vocab_size), counts_LV, seen_LV, ramp_L, ramp_L.flip(0), torch.linspace(0.5, 1.5, num_rows)


@op("sampling.penalise", cases=_penalise_cases)
def penalise(
    logits_LV: Tensor, counts_LV: Tensor, seen_LV: Tensor, presence_L: Tensor, frequency_L: Tensor, repetition_L: Tensor
) -> Tensor:
    """Make repeated tokens less likely.

    Args:
        counts_LV: int32, how often each id was generated so far (the prompt does not count).
        seen_LV: bool, ids in the prompt or the output.
        presence_L, frequency_L: subtracted once, and once per occurrence, from ids with a count; 0 for none.
        repetition_L: divides positive and multiplies negative logits of seen ids, first; 1 for none.
    Returns:
        float32 [L, V], new memory.
    """
    factor_L1 = repetition_L[:, None]
    repeated_LV = torch.where(logits_LV > 0, logits_LV / factor_L1, logits_LV * factor_L1)
    out_LV = torch.where(seen_LV, repeated_LV, logits_LV)
    out_LV -= frequency_L[:, None] * counts_LV
    out_LV -= presence_L[:, None] * (counts_LV > 0)
    return out_LV


def _count_cases() -> Iterator[tuple[Any, ...]]:
    for num_rows, width, vocab_size in ((1, 1, 1), (3, 17, 5), (4, 300, 129)):
        ids_LC = torch.randint(0, vocab_size, (num_rows, width), generator=_generator(3), dtype=torch.int32)
        yield ids_LC, torch.rand(num_rows, width, generator=_generator(4)) < 0.6, vocab_size


@op("sampling.count_tokens", cases=_count_cases)
def count_tokens(ids_LC: Tensor, valid_LC: Tensor, vocab_size: int) -> Tensor:
    """How often each id of the vocabulary stands among the valid entries of each row: int32 [L, V]."""
    counts_LV1 = ids_LC.new_zeros((ids_LC.shape[0], vocab_size + 1), dtype=torch.int32)
    ids_LC = torch.where(valid_LC, ids_LC, vocab_size).long()  # invalid ones count in a column of their own
    return counts_LV1.scatter_add_(1, ids_LC, torch.ones_like(ids_LC, dtype=torch.int32))[:, :vocab_size]


def _top_cases() -> Iterator[tuple[Any, ...]]:
    for num_rows, vocab_size in _SHAPES:
        for k in {1, min(5, vocab_size), min(20, vocab_size)}:
            yield _logits(num_rows, vocab_size, seed=7), k


@op("sampling.top_ids", cases=_top_cases)
def top_ids(scores_LV: Tensor, k: int) -> Tensor:
    """The k best ids of each row by falling score, equal scores by rising id.

    Args:
        scores_LV: float32 without NaN.
        k: 0 <= k <= V.
    Returns:
        int64 [L, k].
    Numerics: exact. Score and id are packed into one integer key, because a top-k over floats may order ties as it likes.
    """
    bits_LV = (scores_LV + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered_LV = bits_LV ^ ((bits_LV >> 31) & 0x7FFF_FFFF)  # float order as signed integer order
    id_V = torch.arange(scores_LV.shape[-1], device=scores_LV.device)
    key_LV = (ordered_LV.long() << 32) | (0xFFFF_FFFF - id_V)
    return 0xFFFF_FFFF - (key_LV.topk(k, dim=-1).values & 0xFFFF_FFFF)


def _keep_cases() -> Iterator[tuple[Any, ...]]:
    for num_rows, vocab_size in _SHAPES[1:]:
        top_k_L = torch.tensor([1, NO_LIMIT, 3, 40, vocab_size], dtype=torch.int64).repeat(num_rows)[:num_rows]
        top_p_L = torch.tensor([1.0, 0.9, 1e-6, 0.5], dtype=torch.float32).repeat(num_rows)[:num_rows]
        yield _logits(num_rows, vocab_size, seed=5), top_k_L, top_p_L


@op("sampling.keep_top", cases=_keep_cases)
def keep_top(logits_LV: Tensor, top_k_L: Tensor, top_p_L: Tensor) -> Tensor:
    """Keep the top_k likeliest ids, of these the smallest set whose probability reaches top_p, and mask the rest with -inf.

    Args:
        top_k_L: int64 >= 1; `NO_LIMIT` keeps all.
        top_p_L: float32 in (0, 1]; 1 keeps all. Probabilities are those after the top_k step, renormalised.
    Returns:
        [L, V], new memory. At least one id stays in every row that has a finite logit.
    Numerics: weights exp(logit - best) in float32, their sums in float64; the set is decided in order of falling logit, equal logits by
        rising id.
    """
    vocab_size = logits_LV.shape[-1]
    # Most sets are short, and a full sort costs a hundred times a short list. On a GPU the look at the values would stall the queue.
    if logits_LV.device.type != "cpu":
        return _keep_of_list(logits_LV, top_k_L, top_p_L, vocab_size)[0]
    out_LV, wants_more_L = _keep_of_list(logits_LV, top_k_L, top_p_L, min(SHORT_LIST, -(-vocab_size // 4)))
    if wants_more_L.any():
        more_L = wants_more_L.nonzero()[:, 0]
        out_LV[more_L] = _keep_of_list(logits_LV[more_L], top_k_L[more_L], top_p_L[more_L], vocab_size)[0]
    return out_LV


def _keep_of_list(logits_LV: Tensor, top_k_L: Tensor, top_p_L: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`keep_top` that looks at the `width` best ids only, and whether a row's set may reach beyond them (its result is then void)."""
    vocab_size, place_K = logits_LV.shape[-1], torch.arange(width, device=logits_LV.device)
    ids_LK = top_ids(logits_LV, width)
    sorted_LK = logits_LV.gather(-1, ids_LK)
    best_L1 = sorted_LK[:, :1]
    weight_LK = (sorted_LK - best_L1).exp_().double().masked_fill_(place_K >= top_k_L[:, None], 0)
    whole_L = (logits_LV - best_L1).exp_().sum(-1, dtype=torch.float64)
    total_L = torch.where(top_k_L < vocab_size, weight_LK.sum(-1), whole_L)
    before_LK = torch.nn.functional.pad(weight_LK.cumsum(-1)[:, :-1], (1, 0))
    limit_L = torch.where(top_p_L < 1, top_p_L.double() * total_L, math.inf)  # rounding must not cut the tail of a row that wants all
    num_kept_L = torch.minimum((before_LK < limit_L[:, None]).sum(-1), top_k_L)
    sorted_LK = sorted_LK.masked_fill_(place_K >= num_kept_L[:, None], -math.inf)
    wants_more_L = (top_k_L > width) & ((top_k_L < vocab_size) | (num_kept_L == width))
    return torch.full_like(logits_LV, -math.inf).scatter_(-1, ids_LK, sorted_LK), wants_more_L


def _draw_cases() -> Iterator[tuple[Any, ...]]:
    for num_rows, vocab_size in _SHAPES:
        rows_L = torch.arange(num_rows, dtype=torch.int64)
        yield _logits(num_rows, vocab_size, seed=6), rows_L * 7919 - 3, rows_L + 1_000_000, 0


@op("sampling.draw", cases=_draw_cases)
def draw(logits_LV: Tensor, seed_L: Tensor, position_L: Tensor, purpose: int) -> Tensor:
    """Draw one id per row from softmax(logits): the exponential race form of Gumbel-max.

    Id v wins when logits[v] - log(E[v]) is largest, with E from `sampling.exponential_noise`. A masked id (-inf) never wins.

    Returns:
        ids_L: int64.
    """
    noise_LV = exponential_noise(seed_L, position_L, purpose, logits_LV.shape[-1])
    return (logits_LV - noise_LV.log()).argmax(-1)


def _rank_cases() -> Iterator[tuple[Any, ...]]:
    for num_rows, vocab_size in _SHAPES:
        yield _logits(num_rows, vocab_size, seed=8), torch.randint(0, vocab_size, (num_rows,), generator=_generator(9))


@op("sampling.rank", cases=_rank_cases)
def rank(scores_LV: Tensor, ids_L: Tensor) -> Tensor:
    """The place of one id per row in the order of `top_ids`, 1 = best: int64 [L]."""
    score_L1 = scores_LV.gather(-1, ids_L[:, None])
    id_V = torch.arange(scores_LV.shape[-1], device=scores_LV.device)
    ahead_LV = (scores_LV > score_L1) | ((scores_LV == score_L1) & (id_V < ids_L[:, None]))
    return ahead_LV.sum(-1) + 1
