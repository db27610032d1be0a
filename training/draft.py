# SPDX-License-Identifier: Apache-2.0
"""The DSpark draft of Krill in dense torch: many anchors of a sequence drafted at once, for training and for measuring acceptance.

An anchor a is a position whose backbone row is in place; its block drafts positions a+2 .. a+1+M from [token a+1, noise, ...].
Source: design note deepseek-v41 §4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from training.model import FUNCTIONS, Attention, Krill, Pass


class Drafts(NamedTuple):
    hidden: Tensor
    """[B, A, M, H] before the norm: what the confidence head reads."""
    base: Tensor
    """[B, A, M, V] float32 logits without the Markov term."""


def draft(model: Krill, ids: Tensor, features: Tensor, anchors: Tensor, p: Pass) -> Drafts:
    """Run the draft blocks for A anchors of every sequence.

    Args:
        ids: [B, T] tokens; anchor + 1 must be inside.
        anchors: [A], the same for all sequences, or [B, A].
        features: [B, T, taps * H], the backbone's streams at the attention input of the target layers, averaged and joined.
    """
    c, first, last = model.c, model.mtp[0], model.mtp[-1]
    block_size = c.dspark_block_size
    m = FUNCTIONS.rms(first.main_proj(features), first.main_norm.weight, c.rms_norm_eps)
    anchors = anchors.expand(ids.shape[0], -1)
    block = torch.full((*anchors.shape, block_size), c.dspark_noise_token_id, dtype=ids.dtype, device=ids.device)
    block[..., 0] = ids.gather(1, anchors + 1)
    places = anchors.unsqueeze(-1) + 1 + torch.arange(block_size, device=ids.device)
    R, carry = model.streams(block)
    for layer in model.mtp:
        R, carry = layer(R, carry, p, lambda x, layer=layer: _attend(layer.attn, x, m, anchors, places, p))
    hidden = (carry.unsqueeze(-1) * R.float()).sum(-2).to(R.dtype)
    return Drafts(hidden, model.logits(FUNCTIONS.rms(hidden, last.norm.weight, c.rms_norm_eps)))


def _attend(attn: Attention, x: Tensor, m: Tensor, anchors: Tensor, places: Tensor, p: Pass) -> Tensor:
    """Each slot sees the window's main rows up to the anchor and all slots of its own block."""
    c, T = attn.c, m.shape[1]
    cos, sin = (table[places] for table in p.plain)
    _, q = attn.queries(x, cos, sin)
    own = attn.keys(x, cos, sin)
    main = attn.keys(m, *(table[:T] for table in p.plain))
    rows = anchors.unsqueeze(-1) - torch.arange(c.sliding_window - 1, -1, -1, device=x.device)
    near = main[torch.arange(len(m), device=x.device)[:, None, None], rows.clamp_min(0)]
    scale = c.head_dim**-0.5
    far_logits = torch.einsum("bamnd,bawd->bamnw", q, near).float().masked_fill(rows[:, :, None, None] < 0, -torch.inf)
    logits = torch.cat((far_logits, torch.einsum("bamnd,bakd->bamnk", q, own).float()), -1) * scale
    lse = torch.logsumexp(logits, -1)
    weight = torch.exp(logits - lse.unsqueeze(-1)).to(x.dtype)
    w = rows.shape[-1]
    o = torch.einsum("bamnw,bawd->bamnd", weight[..., :w], near) + torch.einsum("bamnk,bakd->bamnd", weight[..., w:], own)
    return attn.output(o, lse, cos, sin)


def markov(model: Krill, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Embedding of the previous token in the Markov head, and the logits it adds."""
    head = model.mtp[-1].markov_head
    e = F.embedding(previous, head["embed"].weight)
    return e, head["head"](e).float()


def confidence(model: Krill, hidden: Tensor, e: Tensor) -> Tensor:
    """Logit of the probability that the draft is accepted, given that the ones before it were."""
    proj = model.mtp[-1].confidence_head["proj"].weight.float()
    return (torch.cat((hidden.float(), e.float()), -1) @ proj.T).squeeze(-1)
