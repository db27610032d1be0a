# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 in dense, differentiable torch: what Krill is trained with.

Whole sequences [B, T], no cache: sparse selection is a mask on dense scores. Parameters are named as in the official checkpoint, except
that a layer's experts are stacked (`experts.w13` [E, 2F, H], `experts.w2` [E, H, F]); export.py unstacks them. Runs in the dtype of its
matrices; norms, softmax and residual mixes are computed in float32. tests/training bind it to the golden vectors.
Letters as in the engine, B sequences of T tokens: S streams, H hidden, N heads, D head dim, C entries, I/J index heads and dim,
E experts, F inner. Source: design note deepseek-v41 §3, §4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from training.sinkhorn import sinkhorn
from whalefall.models.deepseek_v41.engram_tables import hash_multipliers, table_offsets, table_primes

AttentionCore = Callable[..., tuple[Tensor, Tensor]]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of the last dims; cos and sin broadcast against x[..., : rotated dims / 2]."""
    rotated = 2 * cos.shape[-1]
    pairs = x[..., -rotated:].float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-rotated], turned.to(x.dtype)), -1)


def rope_frequencies(c: SimpleNamespace, long: bool) -> Tensor:
    d = c.qk_rope_head_dim
    i = torch.arange(d // 2, dtype=torch.float64)
    if not long:
        return c.rope_theta ** (-2 * i / d)
    base, scaling = c.compress_rope_theta, c.rope_scaling

    def dim(turns: float) -> float:
        return d * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = max(0, math.floor(dim(scaling["beta_fast"]))), min(d - 1, math.ceil(dim(scaling["beta_slow"])))
    ramp = ((i - low) / ((high - low) or 0.001)).clamp(0, 1)
    e = base ** (-2 * i / d)
    return e / scaling["factor"] * ramp + e * (1 - ramp)


class Linear(nn.Module):
    """A matrix without bias; `fmt` says how the checkpoint stores it: fp8 (tiles), fp4, row (fp8 rows) or bf16."""

    def __init__(self, out: int, inner: int, fmt: str = "fp8") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, inner) * inner**-0.5)
        self.weight.fmt = fmt  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Gain(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class Table(nn.Module):
    def __init__(self, rows: int, width: int, scale: float, fmt: str = "bf16") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width) * scale)
        self.weight.fmt = fmt  # type: ignore[attr-defined]


# --- residual streams (functions, so that one compiled graph serves all layers) ---


def open_sublayer(
    R: Tensor, carry: Tensor, fn: Tensor, base: Tensor, scale: Tensor, gain: Tensor, eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normed sublayer input, and pre, post and the softmaxed comb logits (before Sinkhorn) of streams R [B, T, S, H]."""
    s = R.shape[-2]
    x = rms((carry.unsqueeze(-1) * R.float()).sum(-2).to(R.dtype), gain, eps)
    flat = R.flatten(-2)
    m = F.linear(flat, fn.to(R.dtype)).float() * torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(m[..., :s] * scale[0] + base[:s]) + hc_eps
    post = 2 * torch.sigmoid(m[..., s : 2 * s] * scale[1] + base[s : 2 * s])
    logits = (m[..., 2 * s :] * scale[2] + base[2 * s :]).unflatten(-1, (s, s))
    return x, pre, post, torch.softmax(logits, -1) + hc_eps


def close_sublayer(R: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """R'[b] = post[b] y + sum_a comb[a, b] R[a]."""
    out = post.unsqueeze(-1) * y.float().unsqueeze(-2)
    for a in range(R.shape[-2]):
        out = out + comb[..., a, :].unsqueeze(-1) * R[..., a, :].float().unsqueeze(-2)
    return out.to(R.dtype)


def moe(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared13: Tensor,
    shared2: Tensor,
    top: int,
    scaling: float,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """All experts on all tokens, weighted by the gate (zero where not chosen). Also returns how many tokens chose each expert."""
    num = gate.shape[0]
    score = torch.sqrt(F.softplus(F.linear(x, gate.to(x.dtype)).float()).clamp_min(1e-30))  # no infinite slope at a hopeless logit
    chosen = torch.zeros_like(score).scatter(-1, torch.topk(score + bias, top, -1).indices, 1.0)
    kept = score * chosen
    weight = kept / (kept.sum(-1, keepdim=True) + 1e-20) * scaling
    weight = torch.cat((weight, torch.ones_like(weight[..., :1])), -1)
    w_in = torch.cat((w13.flatten(0, 1), shared13)).to(x.dtype)
    w_out = torch.cat((w2, shared2.unsqueeze(0))).transpose(1, 2).flatten(0, 1).to(x.dtype)
    g, u = F.linear(x, w_in).unflatten(-1, (num + 1, 2, -1)).float().unbind(-2)
    a = F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit) * weight.unsqueeze(-1)
    return a.to(x.dtype).flatten(-2) @ w_out, chosen.flatten(0, -2).sum(0)


def engram_inject(R: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    s, h = R.shape[-2:]
    kv32 = kv.float().unflatten(-1, (s + 1, h))
    k, v = kv32[..., :s, :], kv32[..., s:, :]
    r = R.float()
    d = (r * q_weight.float() * k_weight.float() * k).sum(-1)
    d = d * torch.rsqrt(r.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps) * h**-0.5
    g = torch.sigmoid(torch.sign(d) * torch.sqrt(d.abs().clamp_min(1e-6)))
    return (r + g.unsqueeze(-1) * v).to(R.dtype)


def sink_and_unrotate(o: Tensor, lse: Tensor, sink: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Give the sink its share of the softmax, sum / (sum + exp(sink)), and turn the output back by the query's position."""
    return rope((o.float() * torch.sigmoid(lse - sink.float()).unsqueeze(-1)).to(o.dtype), cos, -sin)


def visible(T: int, ratio: int, device: torch.device) -> Tensor:
    """[T, C] bool: the entry's whole group lies at or before the query."""
    t = torch.arange(T, device=device)
    return torch.arange(T // ratio, device=device) < ((t + 1) // ratio).unsqueeze(-1)


def dense_core(
    q: Tensor, kv: Tensor, entries: Tensor | None, ratio: int, window: int, selection: Tensor | None, window_start: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention output [B, T, N, D] without the sink, and the log of its softmax sum [B, T, N].

    selection: [B, T, C] bool, entries on the query's list (all visible ones if None).
    window_start: rows from it on see no window key below it (bounded replay).
    """
    T, dim = q.shape[1], q.shape[-1]
    t = torch.arange(T, device=q.device)
    ago = t.unsqueeze(-1) - t
    mask = (ago >= 0) & (ago < window) & ((t >= window_start) | (t.unsqueeze(-1) < window_start))
    keys, mask = kv, mask.expand(q.shape[0], T, T)
    if entries is not None:
        allowed = visible(T, ratio, q.device).expand(q.shape[0], -1, -1) if selection is None else selection
        keys, mask = torch.cat((kv, entries), 1), torch.cat((mask, allowed), -1)
    logits = torch.einsum("btnd,bkd->bntk", q.float(), keys.float()) * dim**-0.5
    logits = logits.masked_fill(~mask.unsqueeze(1), -torch.inf)
    lse = torch.logsumexp(logits, -1)
    out = torch.einsum("bntk,bkd->btnd", torch.exp(logits - lse.unsqueeze(-1)), keys.float())
    return out.to(q.dtype), lse.transpose(1, 2)


@dataclass
class Pass:
    """What one forward shares between layers."""

    long: tuple[Tensor, Tensor]
    plain: tuple[Tensor, Tensor]
    core: AttentionCore
    select: bool
    """Top-k lists and candidate blocks are in force."""
    distill_rows: Tensor | None = None
    """Query positions whose attention teaches the indexers; None: no index loss."""
    bounded_from: int = 0
    """First row the decoder keeps (bounded replay); 0: exact."""
    round_cache: bool = False
    entries: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    selection: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    index_scores: dict[int, Tensor] = field(default_factory=dict)
    targets: dict[int, Tensor] = field(default_factory=dict)
    loads: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)

    def index_loss(self) -> Tensor:
        """Mean cross entropy of the index softmax against the attention mass on entries, over the index sources."""
        losses = []
        for layer, scores in self.index_scores.items():
            mass = self.targets[layer]
            total = mass.sum(-1, keepdim=True)
            log_p = torch.log_softmax(scores, -1).masked_fill(scores == -torch.inf, 0.0)
            losses.append(-(mass / (total + 1e-9) * log_p).sum(-1).mean())
        return torch.stack(losses).mean()


class Compressor(nn.Module):
    def __init__(self, c: SimpleNamespace, ratio: int) -> None:
        super().__init__()
        self.ratio, self.eps = ratio, c.rms_norm_eps
        self.wkv = Linear(c.head_dim, c.hidden_size, "bf16")
        if ratio == 2:
            self.wgate = Linear(c.head_dim, c.hidden_size, "bf16")
        self.norm = Gain(c.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        v = self.wkv(x)
        if self.ratio == 2:
            whole = x.shape[1] // 2 * 2
            v, g = v[:, :whole].float().unflatten(1, (-1, 2)), self.wgate(x)[:, :whole].float().unflatten(1, (-1, 2))
            v = (torch.softmax(g, 2) * v).sum(2).to(x.dtype)
        return FUNCTIONS.rms(v, self.norm.weight, self.eps)


class Indexer(nn.Module):
    def __init__(self, c: SimpleNamespace, owns_keys: bool) -> None:
        super().__init__()
        self.heads, self.dim, self.eps = c.index_n_heads, c.index_head_dim, c.rms_norm_eps
        self.wq_b = Linear(self.heads * self.dim, c.q_lora_rank)
        self.weights_proj = Linear(self.heads, c.hidden_size, "bf16")
        if owns_keys:
            self.wk = Linear(self.dim, c.head_dim, "bf16")
            self.k_norm = Gain(self.dim)

    def keys(self, latent: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return FUNCTIONS.rope(FUNCTIONS.rms(self.wk(latent), self.k_norm.weight, self.eps), *table)

    def scores(self, qr: Tensor, x: Tensor, keys: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """[B, rows, C] float32; the constant factor only sets the softmax temperature of the index loss."""
        q = FUNCTIONS.rope(self.wq_b(qr).unflatten(-1, (self.heads, self.dim)), table[0].unsqueeze(-2), table[1].unsqueeze(-2))
        w = self.weights_proj(x).float() * (self.heads * self.dim) ** -0.5
        total = None
        for head in range(self.heads):
            part = torch.relu(q[:, :, head] @ keys.transpose(1, 2)).float() * w[..., head, None]
            total = part if total is None else total + part
        return total  # type: ignore[return-value]


class Attention(nn.Module):
    def __init__(self, c: SimpleNamespace, layer: int, ratio: int) -> None:
        super().__init__()
        self.c, self.layer, self.ratio = c, layer, ratio
        heads, dim = c.num_attention_heads, c.head_dim
        self.wq_a = Linear(c.q_lora_rank, c.hidden_size)
        self.q_norm = Gain(c.q_lora_rank)
        self.wq_b = Linear(heads * dim, c.q_lora_rank)
        self.wkv = Linear(dim, c.hidden_size)
        self.kv_norm = Gain(dim)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = Linear(c.o_groups * c.o_lora_rank, heads * dim // c.o_groups)
        self.wo_b = Linear(c.hidden_size, c.o_groups * c.o_lora_rank)
        if ratio and layer in c.kv_source_layer_ids:
            self.compressor = Compressor(c, ratio)
        if ratio and layer in c.index_source_layer_ids:
            self.indexer = Indexer(c, layer in c.kv_source_layer_ids)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        qr = FUNCTIONS.rms(self.wq_a(x), self.q_norm.weight, self.c.rms_norm_eps)
        q = self.wq_b(qr).unflatten(-1, (self.c.num_attention_heads, self.c.head_dim))
        return qr, FUNCTIONS.rope(q, cos.unsqueeze(-2), sin.unsqueeze(-2))

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return FUNCTIONS.rope(FUNCTIONS.rms(self.wkv(x), self.kv_norm.weight, self.c.rms_norm_eps), cos, sin)

    def output(self, o: Tensor, lse: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the sink, rotate back, and project group by group."""
        o = FUNCTIONS.sink_and_unrotate(o, lse, self.attn_sink, cos.unsqueeze(-2), sin.unsqueeze(-2))
        groups = o.flatten(-2).unflatten(-1, (self.c.o_groups, -1))
        wo_a = self.wo_a.weight.to(o.dtype).unflatten(0, (self.c.o_groups, -1))
        return self.wo_b(torch.einsum("...gk,gok->...go", groups, wo_a).flatten(-2))

    def forward(self, x: Tensor, p: Pass) -> Tensor:
        T = x.shape[1]
        cos, sin = (table[:T] for table in (p.long if self.ratio else p.plain))
        qr, q = self.queries(x, cos, sin)
        kv = self.keys(x, cos, sin)
        entries = selection = None
        if self.ratio:
            entries, selection = self._entries(x, qr, p)
        if p.round_cache:
            kv = _straight_through(kv, "fakequant_mxfp8")
        source = self.c.kv_source_layer_ids[-1]
        start = {"window_start": p.bounded_from} if p.bounded_from and self.layer > source else {}
        o, lse = p.core(q, kv, entries, self.ratio, self.c.sliding_window, selection, **start)
        if self.ratio and p.distill_rows is not None:
            self._teach(q, lse, entries, p)
        return self.output(o, lse, cos, sin)

    def _entries(self, x: Tensor, qr: Tensor, p: Pass) -> tuple[Tensor, Tensor | None]:
        c = self.c
        kv_src = max(i for i in c.kv_source_layer_ids if i <= self.layer)
        idx_src = max(i for i in c.index_source_layer_ids if i <= self.layer)
        if kv_src == self.layer:
            latent = self.compressor(x)
            table = tuple(t[: latent.shape[1] * self.ratio : self.ratio] for t in p.long)
            entries = FUNCTIONS.rope(latent, *table)
            p.entries[self.layer] = _straight_through(entries, "fakequant_nvfp4") if p.round_cache else entries
            p.index_keys[self.layer] = self.indexer.keys(latent.detach(), table)
        if idx_src == self.layer and (p.select or p.distill_rows is not None):
            self._index(x.detach(), qr.detach(), p.index_keys[kv_src], p)
        return p.entries[kv_src], p.selection[idx_src] if p.select else None

    def _index(self, x: Tensor, qr: Tensor, keys: Tensor, p: Pass) -> None:
        T = x.shape[1]
        seen = visible(T, self.ratio, x.device)
        if p.distill_rows is not None:
            rows = p.distill_rows
            table = (p.long[0][rows], p.long[1][rows])
            scores = self.indexer.scores(qr[:, rows], x[:, rows], keys, table)
            p.index_scores[self.layer] = scores.masked_fill(~seen[rows], -torch.inf)
        if p.select:
            with torch.no_grad():
                scores = self.indexer.scores(qr, x, keys, (p.long[0][:T], p.long[1][:T])).masked_fill(~seen, -torch.inf)
                if self.layer > self.c.candidate_source_layer_id:
                    scores = scores.masked_fill(~p.candidates, -torch.inf)  # type: ignore[operator]
                p.selection[self.layer] = _top(scores, self.c.index_topk)
                if self.layer == self.c.candidate_source_layer_id:
                    p.candidates = self._candidates(scores)

    def _candidates(self, scores: Tensor) -> Tensor:
        """[B, T, C] bool: entries inside the best blocks of each query; the last visible block is always kept."""
        size, C = self.c.candidate_block_size, scores.shape[-1]
        blocks = F.pad(scores, (0, -C % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
        last = (torch.isfinite(scores).sum(-1, keepdim=True) - 1).clamp_min(0) // size
        kept = _top(blocks.scatter(-1, last, torch.inf), self.c.candidate_topk_blocks)
        return kept.repeat_interleave(size, -1)[..., :C]

    @torch.no_grad()
    def _teach(self, q: Tensor, lse: Tensor, entries: Tensor, p: Pass) -> None:
        rows = p.distill_rows
        seen = visible(q.shape[1], self.ratio, q.device)[rows]
        logits = torch.einsum("btnd,bkd->bntk", q[:, rows], entries).float() * self.c.head_dim**-0.5 - lse[:, rows].transpose(
            1, 2
        ).unsqueeze(-1)
        mass = torch.exp(logits.clamp(max=20)).sum(1).masked_fill(~seen, 0.0)
        idx_src = max(i for i in self.c.index_source_layer_ids if i <= self.layer)
        p.targets[idx_src] = p.targets.get(idx_src, 0) + mass


def _top(scores: Tensor, k: int) -> Tensor:
    """Bool mask of the k largest finite scores along the last dim."""
    if scores.shape[-1] <= k:
        return scores > -torch.inf
    top = torch.topk(scores, k, -1, sorted=False)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, top.indices, top.values > -torch.inf)


def _straight_through(x: Tensor, op: str) -> Tensor:
    from whalefall.kernels.quant import reference

    with torch.no_grad():
        rounded = getattr(reference, op)(x)
    return x + (rounded - x).detach()


class Experts(nn.Module):
    def __init__(self, num: int, inner: int, hidden: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(num, 2 * inner, hidden) * hidden**-0.5)
        self.w2 = nn.Parameter(torch.randn(num, hidden, inner) * inner**-0.5)
        self.w13.fmt = self.w2.fmt = "fp4"  # type: ignore[attr-defined]


class Gate(nn.Module):
    def __init__(self, num: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num, hidden) * hidden**-0.5)
        self.bias = nn.Parameter(torch.zeros(num), requires_grad=False)


class MoE(nn.Module):
    def __init__(self, c: SimpleNamespace, num: int, top: int) -> None:
        super().__init__()
        self.c, self.top = c, top
        self.gate = Gate(num, c.hidden_size)
        self.experts = Experts(num, c.moe_intermediate_size, c.hidden_size)
        self.shared_experts = nn.ModuleDict(
            {
                n: Linear(*((c.hidden_size, c.moe_intermediate_size) if n == "w2" else (c.moe_intermediate_size, c.hidden_size)))
                for n in ("w1", "w2", "w3")
            }
        )

    def forward(self, x: Tensor, p: Pass) -> Tensor:
        shared = self.shared_experts
        shared13 = torch.cat((shared["w1"].weight, shared["w3"].weight))
        y, load = FUNCTIONS.moe(
            x,
            self.gate.weight,
            self.gate.bias,
            self.experts.w13,
            self.experts.w2,
            shared13,
            shared["w2"].weight,
            self.top,
            self.c.routed_scaling_factor,
            self.c.swiglu_limit,
        )
        p.loads.append(load.detach())
        return y


class Engram(nn.Module):
    def __init__(self, c: SimpleNamespace, layer: int) -> None:
        super().__init__()
        self.c, at = c, c.engram_layer_ids.index(layer)
        primes = table_primes(c.engram_vocab_size, len(c.engram_layer_ids), c.engram_max_ngram_size, c.engram_n_heads)[at]
        self.heads = c.engram_n_heads
        self.multipliers = hash_multipliers(layer, c.engram_compressed_vocab_size, c.engram_max_ngram_size)
        self.register_buffer("primes", torch.tensor(primes), persistent=False)
        self.register_buffer("offsets", torch.tensor(table_offsets(primes)), persistent=False)
        self.embed = Table(sum(primes), c.engram_head_dim, 0.5, "row")
        self.wkv = Linear((c.hc_mult + 1) * c.hidden_size, len(primes) * c.engram_head_dim)
        self.q_weight = nn.Parameter(torch.ones(c.hc_mult, c.hidden_size))
        self.k_weight = nn.Parameter(torch.ones(c.hc_mult, c.hidden_size))

    def rows(self, compressed: Tensor, pad: int) -> Tensor:
        """Table rows [B, T, slots] of each token's n-grams; compressed ids [B, T] (text only: nothing blocks but the start)."""
        h = compressed * self.multipliers[0]
        slots = []
        for back in range(1, self.c.engram_max_ngram_size):
            earlier = F.pad(compressed, (back, 0), value=pad)[:, : compressed.shape[1]]
            h = h ^ (earlier * self.multipliers[back])
            slots += [h] * self.heads
        return torch.stack(slots, -1) % self.primes + self.offsets

    def forward(self, R: Tensor, compressed: Tensor, pad: int) -> Tensor:
        e = F.embedding(self.rows(compressed, pad), self.embed.weight).flatten(-2).to(R.dtype)
        return FUNCTIONS.engram_inject(R, self.wkv(e), self.q_weight, self.k_weight, self.c.rms_norm_eps)


class Block(nn.Module):
    def __init__(self, c: SimpleNamespace, layer: int, ratio: int, num_experts: int, top: int) -> None:
        super().__init__()
        self.c, s = c, c.hc_mult
        if layer in c.engram_layer_ids and layer < c.num_hidden_layers:
            self.engram = Engram(c, layer)
        self.attn_norm, self.ffn_norm = Gain(c.hidden_size), Gain(c.hidden_size)
        self.attn = Attention(c, layer, ratio)
        self.ffn = MoE(c, num_experts, top)
        for name in ("attn", "ffn"):
            base = torch.zeros(2 * s + s * s)
            base[:s] = -3
            base[layer % s] = 3
            base[2 * s :] = torch.where(torch.eye(s, dtype=torch.bool), 3.0, -3.0).flatten()
            setattr(self, f"hc_{name}_fn", nn.Parameter(torch.randn(2 * s + s * s, s * c.hidden_size) * 1e-3))
            setattr(self, f"hc_{name}_base", nn.Parameter(base))
            setattr(self, f"hc_{name}_scale", nn.Parameter(torch.full((3,), 0.1)))

    def forward(self, R: Tensor, carry: Tensor, p: Pass, attend: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
        R, carry = self._sublayer("attn", R, carry, attend or (lambda x: self.attn(x, p)))
        return self._sublayer("ffn", R, carry, lambda x: self.ffn(x, p))

    def _sublayer(self, name: str, R: Tensor, carry: Tensor, layer: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        fn, base, scale = (getattr(self, f"hc_{name}_{part}") for part in ("fn", "base", "scale"))
        gain = getattr(self, f"{name}_norm").weight
        x, pre, post, comb = FUNCTIONS.open_sublayer(R, carry, fn, base, scale, gain, self.c.rms_norm_eps, self.c.hc_eps)
        comb = FUNCTIONS.sinkhorn(comb, self.c.hc_sinkhorn_iters, self.c.hc_eps)
        return FUNCTIONS.close_sublayer(R, layer(x), post, comb), pre


FUNCTIONS = SimpleNamespace(
    rms=rms,
    rope=rope,
    open_sublayer=open_sublayer,
    close_sublayer=close_sublayer,
    moe=moe,
    engram_inject=engram_inject,
    sink_and_unrotate=sink_and_unrotate,
    sinkhorn=sinkhorn,
)
"""The functions every layer calls; a trainer on a GPU replaces them by compiled ones."""


class Krill(nn.Module):
    """The backbone; `mtp` holds the draft blocks, which `draft` (draft.py) runs."""

    def __init__(self, config: dict[str, Any], compressed_map: Sequence[int] | np.ndarray) -> None:
        super().__init__()
        c = self.c = SimpleNamespace(**config["text_config"])
        self.embed = Table(c.vocab_size, c.hidden_size, 0.5)
        self.layers = nn.ModuleList(
            Block(c, i, c.compress_ratios[i], c.n_routed_experts, c.num_experts_per_tok) for i in range(c.num_hidden_layers)
        )
        self.norm = Gain(c.hidden_size)
        self.head = Linear(c.vocab_size, c.hidden_size, "bf16")
        self.mtp = nn.ModuleList(
            Block(c, c.num_hidden_layers + i, 0, c.dspark_n_routed_experts, c.dspark_num_experts_per_tok)
            for i in range(c.num_nextn_predict_layers)
        )
        if self.mtp:
            first, last = self.mtp[0], self.mtp[-1]
            first.main_proj = Linear(c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size)
            first.main_norm = Gain(c.hidden_size)
            last.norm = Gain(c.hidden_size)
            last.markov_head = nn.ModuleDict(
                {"embed": Table(c.vocab_size, c.dspark_markov_rank, 0.1), "head": Linear(c.vocab_size, c.dspark_markov_rank, "bf16")}
            )
            last.confidence_head = nn.ModuleDict({"proj": Linear(1, c.hidden_size + c.dspark_markov_rank, "bf16")})
        self.register_buffer("compressed", torch.as_tensor(np.asarray(compressed_map), dtype=torch.int64), persistent=False)
        self._tables: dict[tuple[bool, torch.device], tuple[Tensor, Tensor]] = {}

    def table(self, long: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        if (long, device) not in self._tables:
            angles = torch.outer(torch.arange(self.c.max_position_embeddings + 16, dtype=torch.float64), rope_frequencies(self.c, long))
            self._tables[(long, device)] = (angles.cos().float().to(device), angles.sin().float().to(device))
        return self._tables[(long, device)]

    def make_pass(self, **options: Any) -> Pass:
        device = self.embed.weight.device
        options = {"core": dense_core, "select": True} | options
        return Pass(long=self.table(True, device), plain=self.table(False, device), **options)

    def streams(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Four equal streams of the embedding, and the one-hot carry."""
        x = F.embedding(ids, self.embed.weight)
        R = x.unsqueeze(-2).expand(*x.shape[:-1], self.c.hc_mult, x.shape[-1]).contiguous()
        carry = F.one_hot(torch.zeros_like(ids), self.c.hc_mult).float()
        return R, carry

    def forward(self, ids: Tensor, p: Pass) -> Tensor:
        """Normed final hidden states [B, T, H] (the head is applied by the caller, which may want few rows); fills p."""
        R, carry = self.streams(ids)
        compressed = self.compressed[ids]
        pad = int(self.pad)
        for i, block in enumerate(self.layers):
            if hasattr(block, "engram"):
                R = block.engram(R, compressed, pad)
            if i in self.c.dspark_target_layer_ids:
                p.taps.append(R.float().mean(-2).to(R.dtype).detach())
            R, carry = block(R, carry, p)
        h = (carry.unsqueeze(-1) * R.float()).sum(-2).to(R.dtype)
        return FUNCTIONS.rms(h, self.norm.weight, self.c.rms_norm_eps)

    @property
    def pad(self) -> int:
        if not hasattr(self, "_pad"):
            self._pad = int(self.compressed[self.c.engram_pad_token_id])
        return self._pad

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).float()
