# SPDX-License-Identifier: Apache-2.0
"""What makes training fast on a GPU: compiled layer functions, the Triton Sinkhorn, and FlexAttention in place of dense scores."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from training import model, optimiser
from training.sinkhorn import sinkhorn_triton


def speed_up() -> None:
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 1024
    torch.backends.cuda.matmul.allow_tf32 = True
    for name in ("rms", "rope", "open_sublayer", "close_sublayer", "moe", "engram_inject", "sink_and_unrotate"):
        setattr(model.FUNCTIONS, name, torch.compile(getattr(model, name), dynamic=False))
    model.FUNCTIONS.sinkhorn = sinkhorn_triton
    optimiser.ORTHOGONALISE = torch.compile(optimiser.orthogonalise, dynamic=False)


@lru_cache(maxsize=16)
def _block_mask(T: int, ratio: int, window: int) -> BlockMask:
    def mask(b: Tensor, h: Tensor, t: Tensor, k: Tensor) -> Tensor:
        near = (k < T) & (t >= k) & (t - k < window)
        return near | ((k >= T) & (k - T < (t + 1) // max(ratio, 1)))

    return create_block_mask(mask, None, None, T, T + (T // ratio if ratio else 0), device="cuda")


@torch.compile(dynamic=False)
def _flex(q: Tensor, k: Tensor, block_mask: BlockMask) -> Any:
    return flex_attention(q, k, k, block_mask=block_mask, enable_gqa=True, return_lse=True)


@torch.compile(dynamic=False)
def _flex_selected(q: Tensor, k: Tensor, block_mask: BlockMask, selection: Tensor) -> Any:
    T = q.shape[2]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, t: Tensor, at: Tensor) -> Tensor:
        return torch.where((at < T) | selection[b, t, torch.clamp(at - T, min=0)], score, -float("inf"))

    return flex_attention(q, k, k, score_mod=score_mod, block_mask=block_mask, enable_gqa=True, return_lse=True)


def flex_core(
    q: Tensor, kv: Tensor, entries: Tensor | None, ratio: int, window: int, selection: Tensor | None, window_start: int = 0
) -> tuple[Tensor, Tensor]:
    """As model.dense_core, for T a multiple of 128 and no bounded replay."""
    assert window_start == 0
    keys = (kv if entries is None else torch.cat((kv, entries), 1)).unsqueeze(1)
    mask = _block_mask(q.shape[1], ratio, window)
    q = q.transpose(1, 2)
    o, lse = _flex(q, keys, mask) if selection is None else _flex_selected(q, keys, mask, selection)
    return o.transpose(1, 2), lse.transpose(1, 2)
