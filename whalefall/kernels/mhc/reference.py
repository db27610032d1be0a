# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections: mixes, collapse of the streams, and the way back.

Source: design note deepseek-v41 §3.2; "mHC: Manifold-Constrained Hyper-Connections". All arithmetic is float32; streams keep their dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels.mhc import cases
from whalefall.kernels.registry import op


@op("mhc.mixes", cases=cases.mixed)
def mixes(
    streams_TSH: Tensor, fn_MF: Tensor, base_M: Tensor, scale_3: Tensor, eps: float, hc_eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """How the streams mix around one sublayer.

    Args:
        fn_MF: float32 [S * (2 + S), S * H]; rows are pre, post, then comb row by row. The norm's gain is already in it.
        scale_3: multipliers of the pre, post and comb parts.
        iterations: Sinkhorn rounds; the softmax with its column step counts as the first.
    Returns:
        pre_TS (weights of the next collapse), post_TS (weight of the sublayer's output per stream), comb_TSS [from, to].
    """
    tokens, streams, _ = streams_TSH.shape
    flat_TF = streams_TSH.flatten(1).float()
    norm_T1 = torch.linalg.vector_norm(flat_TF, dim=-1, keepdim=True)  # unlike a mean of squares it needs no second copy of the streams
    inv_rms_T1 = torch.rsqrt(norm_T1.square() / flat_TF.shape[1] + eps)
    m_TM = torch.nn.functional.linear(flat_TF, fn_MF) * inv_rms_T1
    pre_TS = torch.sigmoid(m_TM[:, :streams] * scale_3[0] + base_M[:streams]) + hc_eps
    post_TS = 2 * torch.sigmoid(m_TM[:, streams : 2 * streams] * scale_3[1] + base_M[streams : 2 * streams])
    comb_TSS = (m_TM[:, 2 * streams :] * scale_3[2] + base_M[2 * streams :]).view(tokens, streams, streams)
    return pre_TS, post_TS, sinkhorn(comb_TSS, hc_eps, iterations)


def sinkhorn(logits_TSS: Tensor, hc_eps: float, iterations: int) -> Tensor:
    """Nearly doubly stochastic matrices: softmax over rows, then column and row normalisations in turn, ending with columns."""
    # Tokens last: sums over four rows or columns then run along memory, many tokens at a time. One more row and one more column hold
    # hc_eps, so that a sum has it in already.
    tokens, streams, _ = logits_TSS.shape
    padded_SST = logits_TSS.new_full((streams + 1, streams + 1, tokens), hc_eps)
    comb_SST, with_row_SST, with_column_SST = padded_SST[:-1, :-1], padded_SST[:, :-1], padded_SST[:-1]
    comb_SST.copy_(torch.softmax(logits_TSS.permute(1, 2, 0), dim=1)).add_(hc_eps)
    comb_SST.div_(with_row_SST.sum(dim=0, keepdim=True))
    for _ in range(iterations - 1):
        comb_SST.div_(with_column_SST.sum(dim=1, keepdim=True))
        comb_SST.div_(with_row_SST.sum(dim=0, keepdim=True))
    return comb_SST.permute(2, 0, 1)


@op("mhc.collapse", cases=cases.collapsed)
def collapse(streams_TSH: Tensor, carry_TS: Tensor) -> Tensor:
    """The sublayer's input: sum over streams of carry times stream, rounded once to the streams' dtype."""
    return torch.bmm(carry_TS[:, None], streams_TSH.float().contiguous()).squeeze(1).to(streams_TSH.dtype)


@op("mhc.expand", cases=cases.expanded)
def expand(streams_TSH: Tensor, y_TH: Tensor, post_TS: Tensor, comb_TSS: Tensor) -> Tensor:
    """New streams: R'[b] = post[b] * y + sum over a of comb[a, b] * R[a]. The summed index is comb's first one."""
    out_TSH = post_TS[:, :, None] * y_TH.float()[:, None]
    # Over any other layout the batched product of a CPU runs one small product per token.
    comb_TSS, streams32_TSH = comb_TSS.contiguous(), streams_TSH.float().contiguous()
    return out_TSH.baddbmm_(comb_TSS.transpose(1, 2), streams32_TSH).to(streams_TSH.dtype)
