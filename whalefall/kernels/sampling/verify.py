# SPDX-License-Identifier: Apache-2.0
"""Which drafts stay: rejection sampling, token by token and by the block, in plain torch.

Both give tokens that are distributed as the target's own, whatever the drafts were drawn from (q), as long as each draft was drawn from its
q and nothing looked at it before. R requests with up to K drafts each, M = K + 1 rows of target probabilities.

Random numbers belong to (seed, position, purpose, place in the block). The place matters: after a refusal a position is drafted and
judged again from an earlier place, and by the block the first refusal already depended on the numbers of all later positions. With a
number of its own for each (position, place), a round never meets a number that an earlier round has looked at.

Sources: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding"; Sun et al., "Block Verification Accelerates
Speculative Decoding", algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whalefall.kernels.registry import op
from whalefall.kernels.sampling.random import Purpose, random_bits

MAX_BLOCK = 63
"""Longest block of drafts that the counter of random numbers can tell apart."""


def block_purpose(purpose: Purpose, place: int) -> int:
    """The purpose of a number that belongs to one place in a block of drafts."""
    assert 0 <= place <= MAX_BLOCK, f"place {place} in a block, at most {MAX_BLOCK}"
    return int(purpose) | place << 2


def uniform(seed_R: Tensor, position_R: Tensor, purpose: int) -> Tensor:
    """One number in (0, 1) per row, float64."""
    return ((random_bits(seed_R, position_R, purpose, 1)[:, 0] & 0x7FFF_FFFF).double() + 0.5) * 2.0**-31


def _cases() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(3)
    for num_requests, num_drafts, vocab_size in ((0, 2, 5), (1, 1, 2), (5, 3, 7), (16, 5, 33), (3, 2, 1025)):
        shape = (num_requests, num_drafts + 1, vocab_size)
        target_RMV = (torch.randn(shape, generator=generator) * 2).softmax(-1)
        draft_RKV = (target_RMV[:, :-1].log() + torch.randn(num_requests, num_drafts, vocab_size, generator=generator)).softmax(-1)
        ids_RK = torch.randint(0, vocab_size, (num_requests, num_drafts), generator=generator)
        ids_RK[:1, -1:] = -1  # a shorter block
        draft_RKV[ids_RK < 0] = 0
        seed_R = torch.arange(num_requests) * 7919 - 3
        yield target_RMV, ids_RK, draft_RKV, seed_R, torch.arange(num_requests) + 100


@op("sampling.accept_standard", cases=_cases)
def accept_standard(target_RMV: Tensor, ids_RK: Tensor, draft_RKV: Tensor, seed_R: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
    """Keep draft i with probability min(1, p_i / q_i) if all before it were kept.

    Args:
        target_RMV: float32, row i is the target's distribution at the place of draft i; the last row's is that of the token after all.
        ids_RK: int64 drafts, -1 from a request's end of drafts on.
        draft_RKV: float32, what each draft was drawn from; all 0 where there is no draft.
        seed_R, position_R: int64; position of draft 0.
    Returns:
        num_R: int64 drafts kept. rest_RV: float32 weights, not normalised, that the token behind them is to be drawn from: what the target
            has more of than the draft, or after the last draft the target's own.
    """
    num_requests, num_drafts = ids_RK.shape
    found_RK = ids_RK >= 0
    at_RK1 = ids_RK.clamp_min(0)[..., None]
    p_RK, q_RK = (x.gather(-1, at_RK1)[..., 0].double() for x in (target_RMV[:, :num_drafts], draft_RKV))
    kept_RK = torch.stack(
        [uniform(seed_R, position_R + i, block_purpose(Purpose.ACCEPT, i)) * q_RK[:, i] < p_RK[:, i] for i in range(num_drafts)], dim=1
    )
    num_R = (kept_RK & found_RK).long().cumprod(-1).sum(-1)
    row_R = torch.arange(num_requests, device=ids_RK.device)
    target_RV = target_RMV[row_R, num_R]
    return num_R, _rest(target_RV, target_RV, _padded(draft_RKV)[row_R, num_R])


@op("sampling.accept_block", cases=_cases)
def accept_block(target_RMV: Tensor, ids_RK: Tensor, draft_RKV: Tensor, seed_R: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
    """Judge the drafts of a request together: never fewer kept on average than one by one. Arguments and results as `accept_standard`."""
    num_requests, num_drafts = ids_RK.shape
    found_RK = (ids_RK >= 0).long().cumprod(-1).bool()
    count_R = found_RK.sum(-1)
    at_RK1 = ids_RK.clamp_min(0)[..., None]
    p_RK, q_RK = (x.gather(-1, at_RK1)[..., 0].double() for x in (target_RMV[:, :num_drafts], draft_RKV))
    padded_RMV = _padded(draft_RKV)
    weight_R = torch.ones(num_requests, dtype=torch.float64, device=ids_RK.device)
    best_weight_R, num_R = weight_R, torch.zeros_like(count_R)
    for i in range(num_drafts):
        weight_R = torch.where(found_RK[:, i], (weight_R * p_RK[:, i] / q_RK[:, i].clamp_min(1e-300)).clamp_max(1.0), 0.0)
        more_R = (weight_R[:, None] * target_RMV[:, i + 1] - padded_RMV[:, i + 1]).clamp_min_(0).sum(-1)
        share_R = torch.where(weight_R < 1, more_R / (more_R + 1 - weight_R).clamp_min(1e-300), 1.0)
        share_R = torch.where(count_R == i + 1, weight_R, share_R)
        keeps_R = found_RK[:, i] & (uniform(seed_R, position_R + i, block_purpose(Purpose.ACCEPT, i)) < share_R)
        num_R = torch.where(keeps_R, i + 1, num_R)
        best_weight_R = torch.where(keeps_R, weight_R, best_weight_R)
    row_R = torch.arange(num_requests, device=ids_RK.device)
    target_RV = target_RMV[row_R, num_R]
    return num_R, _rest(target_RV, best_weight_R[:, None] * target_RV, padded_RMV[row_R, num_R])


def _padded(draft_RKV: Tensor) -> Tensor:
    """One more row: behind the last draft nothing was drafted."""
    return torch.nn.functional.pad(draft_RKV, (0, 0, 0, 1))


def _rest(target_RV: Tensor, weighted_RV: Tensor, draft_RV: Tensor) -> Tensor:
    """What is left to draw from. Where rounding leaves nothing the two are equal but for rounding, and the target serves."""
    rest_RV = (weighted_RV - draft_RV).clamp_min(0).float()
    return torch.where(rest_RV.sum(-1, keepdim=True) > 0, rest_RV, target_RV)
