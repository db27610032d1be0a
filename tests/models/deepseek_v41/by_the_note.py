# SPDX-License-Identifier: Apache-2.0
"""V4.1 a second time, straight from the design note: one sequence, float64, plain loops, no cache, no chunks.

Shares nothing with the model but its weights and the constants of the hash. Slow and obvious; every shortcut the model takes is held
against it. Switches turn single rules into the mistakes that are easy to make, so that a test can show they would be noticed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whalefall.models.deepseek_v41.engram_tables import compressed_vocab, hash_multipliers, table_offsets, table_primes
from whalefall.testing.drive import LoadedModel


@dataclass(kw_only=True)
class Mistakes:
    """Rules that may be switched."""

    comb_is_transposed: bool = False
    carry_is_unshifted: bool = False
    every_visible_entry: bool = False
    """Not a mistake but the dense reference: attend to all visible entries, without index or candidates."""
    decoder_from: int = 0
    """Bounded replay: rows below are left out above the border layer."""
    hit: int = 0
    """Encoder replay: compressed entries of positions below come from a cold run; rows begin one window before."""


@dataclass
class _Shared:
    """What layers publish to later ones."""

    main: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    lists: dict[int, list[list[int]]] = field(default_factory=dict)
    candidates: list[set[int]] = field(default_factory=list)
    cached: _Shared | None = None
    """After a hit: what the cold run published."""


class ByTheNote:
    def __init__(self, loaded: LoadedModel, mistakes: Mistakes | None = None) -> None:
        self.c: Any = loaded.config
        self.m: Any = loaded.model
        self.loaded = loaded
        self.shared = _Shared()
        self.rules = mistakes or Mistakes()
        self.dir = loaded.context.model_dir

    def logits(self, ids: list[int]) -> Tensor:
        """float64 [rows, V]: of every position, or of those from `decoder_from` or the replay start on."""
        c, rules = self.c, self.rules
        border = c.compress_ratios.index(1)
        first = rules.hit - c.sliding_window if rules.hit else 0
        streams = w(self.m.embed)[ids[first:]][:, None].expand(-1, c.hc_mult, -1).clone()
        carry = torch.zeros(len(ids) - first, c.hc_mult, dtype=torch.float64)
        carry[:, 0] = 1
        shared = self.shared = _Shared()
        if rules.hit:
            cold = ByTheNote(self.loaded)
            cold.logits(ids[: rules.hit])
            shared.cached = cold.shared
        for layer in range(c.num_hidden_layers):
            block = self.m.layers[layer]
            if layer in c.engram_layer_ids:
                streams = self.engram(block.engram, layer, streams, ids, first)
            if layer == border + 1 and rules.decoder_from > first:
                left_out, first = rules.decoder_from - first, rules.decoder_from
                streams, carry = streams[left_out:], carry[left_out:]
                shared.lists = {k: v[left_out:] for k, v in shared.lists.items()}
                shared.candidates = shared.candidates[left_out:]
            positions = list(range(first, len(ids)))
            for name, sublayer in (("attn", self.attention), ("ffn", self.moe)):
                pre, post, comb = self.mixes(getattr(block, f"hc_{name}"), streams)
                x = torch.einsum("ts,tsh->th", pre if rules.carry_is_unshifted else carry, streams)
                y = sublayer(block, layer, rms(x, w(getattr(block, f"{name}_norm")), c.rms_norm_eps), positions, shared)
                mixed = torch.einsum("tba,tah->tbh" if rules.comb_is_transposed else "tab,tah->tbh", comb, streams)
                streams = mixed + post[:, :, None] * y[:, None]
                carry = pre
        h = rms(torch.einsum("ts,tsh->th", carry, streams), w(self.m.norm), c.rms_norm_eps)
        return (h @ w(self.m.head).T)[max(0, rules.decoder_from - first) :]

    def mixes(self, hc: Any, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, s = self.c, self.c.hc_mult
        fn, base, scale = hc.fn.double(), hc.base.double(), hc.scale.double()
        flat = streams.flatten(1)
        m = (flat @ fn.T) / torch.sqrt((flat * flat).mean(1, keepdim=True) + c.rms_norm_eps)
        pre = torch.sigmoid(m[:, :s] * scale[0] + base[:s]) + c.hc_eps
        post = 2 * torch.sigmoid(m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
        comb = torch.softmax((m[:, 2 * s :] * scale[2] + base[2 * s :]).view(-1, s, s), dim=2) + c.hc_eps
        comb = comb / (comb.sum(1, keepdim=True) + c.hc_eps)
        for _ in range(c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + c.hc_eps)
            comb = comb / (comb.sum(1, keepdim=True) + c.hc_eps)
        return pre, post, comb

    # attention

    def attention(self, block: Any, layer: int, x: Tensor, positions: list[int], shared: _Shared) -> Tensor:
        c, a = self.c, block.attn
        ratio = c.compress_ratios[layer]
        table = self.frequencies(long=ratio > 0)
        qr = rms(x @ w(a.wq_a).T, w(a.q_norm), c.rms_norm_eps)
        q = rope((qr @ w(a.wq_b).T).view(len(x), c.num_attention_heads, c.head_dim), positions, table)
        kv = rope(rms(x @ w(a.wkv).T, w(a.kv_norm), c.rms_norm_eps), positions, table)
        if ratio:
            self.publish(a, layer, x, qr, positions, shared)
        kv_src, idx_src = source(layer, c.kv_source_layer_ids), source(layer, c.index_source_layer_ids)
        out = torch.empty_like(q)
        for row, t in enumerate(positions):
            low = max(0, t - c.sliding_window + 1, positions[0])
            keys = kv[row - (t - low) : row + 1]
            if ratio:
                keys = torch.cat((keys, shared.main[kv_src][torch.tensor(shared.lists[idx_src][row], dtype=torch.int64)]))
            weight = torch.exp(q[row] @ keys.T * c.head_dim**-0.5)
            out[row] = weight @ keys / (weight.sum(1) + torch.exp(a.attn_sink.double()))[:, None]
        out = rope(out, positions, table, sign=-1)
        groups = out.reshape(len(x), c.o_groups, -1)
        wo_a = w(a.wo_a).view(c.o_groups, c.o_lora_rank, -1)
        z = torch.cat([groups[:, g] @ wo_a[g].T for g in range(c.o_groups)], dim=1)
        return z @ w(a.wo_b).T

    def publish(self, a: Any, layer: int, x: Tensor, qr: Tensor, positions: list[int], shared: _Shared) -> None:
        c, ratio, long = self.c, self.c.compress_ratios[layer], self.frequencies(long=True)
        if layer in c.kv_source_layer_ids:
            new = self.rules.hit or positions[0]  # replayed rows publish nothing
            assert positions[0] == (new - c.sliding_window if new else 0)
            latents, firsts = [], []
            for j in range((positions[-1] + 1 - new) // ratio):
                group = x[new - positions[0] + j * ratio :][:ratio]
                value = group @ w(a.compressor.wkv).T
                if ratio > 1:
                    value = (torch.softmax(group @ w(a.compressor.wgate).T, dim=0) * value).sum(0, keepdim=True)
                latents.append(rms(value[0], w(a.compressor.norm), c.rms_norm_eps))
                firsts.append(new + j * ratio)
            latent = torch.stack(latents) if latents else torch.empty(0, c.head_dim, dtype=torch.float64)
            shared.main[layer] = rope(latent, firsts, long)
            shared.keys[layer] = rope(rms(latent @ w(a.indexer.wk).T, w(a.indexer.k_norm), c.rms_norm_eps), firsts, long)
            if shared.cached is not None:
                shared.main[layer] = torch.cat((shared.cached.main[layer], shared.main[layer]))
                shared.keys[layer] = torch.cat((shared.cached.keys[layer], shared.keys[layer]))
        if layer not in c.index_source_layer_ids:
            return
        keys = shared.keys[source(layer, c.kv_source_layer_ids)]
        q = rope((qr @ w(a.indexer.wq_b).T).view(len(x), c.index_n_heads, c.index_head_dim), positions, long)
        weights = x @ w(a.indexer.weights_proj).T
        lists = []
        for row, t in enumerate(positions):
            visible = list(range((t + 1) // ratio))
            score = (weights[row][:, None] * (q[row] @ keys.T).clamp_min(0)).sum(0).tolist()
            if layer == c.candidate_source_layer_id:
                shared.candidates.append(self.best_blocks(score, len(visible)))
            if layer > c.candidate_source_layer_id and not self.rules.every_visible_entry:
                visible = [j for j in visible if j // c.candidate_block_size in shared.candidates[row]]
            if not self.rules.every_visible_entry:
                visible = sorted(visible, key=lambda j: (-score[j], j))[: c.index_topk]
            lists.append(visible)
        shared.lists[layer] = lists

    def best_blocks(self, score: list[float], num_visible: int) -> set[int]:
        size = self.c.candidate_block_size
        blocks = [max(score[b : min(b + size, num_visible)]) for b in range(0, num_visible, size)]
        if blocks:
            blocks[-1] = math.inf
        return set(sorted(range(len(blocks)), key=lambda b: (-blocks[b], b))[: self.c.candidate_topk_blocks])

    def frequencies(self, *, long: bool) -> list[float]:
        c, d = self.c, self.c.qk_rope_head_dim
        if not long:
            return [c.rope_theta ** (-2 * i / d) for i in range(d // 2)]
        b, y = c.compress_rope_theta, c.rope_scaling

        def dim(n: float) -> float:
            return d * math.log(y.original_max_position_embeddings / (2 * math.pi * n)) / (2 * math.log(b))

        low: float = max(0, math.floor(dim(y.beta_fast)))
        high: float = min(d - 1, math.ceil(dim(y.beta_slow)))
        high += 0.001 * (high == low)
        ramps = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(d // 2)]
        return [b ** (-2 * i / d) * (ramp / y.factor + 1 - ramp) for i, ramp in enumerate(ramps)]

    # experts and n-grams

    def moe(self, block: Any, layer: int, x: Tensor, positions: list[int], shared: _Shared) -> Tensor:
        c, f = self.c, block.ffn
        out = []
        for row in x:
            score = torch.sqrt(torch.nn.functional.softplus(w(f.gate) @ row, threshold=1000)).tolist()
            biased = [s + float(b) for s, b in zip(score, f.gate.bias)]
            chosen = sorted(range(len(score)), key=lambda e: (-biased[e], e))[: c.num_experts_per_tok]
            total = sum(score[e] for e in chosen)
            y = self.expert(row, w(f.shared_experts.w1), w(f.shared_experts.w3), w(f.shared_experts.w2))
            for e in chosen:
                w1, w3 = f.experts.w13[e].double().chunk(2)
                y = y + score[e] / (total + 1e-20) * c.routed_scaling_factor * self.expert(row, w1, w3, f.experts.w2[e].double())
            out.append(y)
        return torch.stack(out)

    def expert(self, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        limit = self.c.swiglu_limit
        gate, up = (w1 @ x).clamp(max=limit), (w3 @ x).clamp(-limit, limit)
        return w2 @ (gate / (1 + torch.exp(-gate)) * up)

    def engram(self, e: Any, layer: int, streams: Tensor, ids: list[int], first: int) -> Tensor:
        c = self.c
        out = streams.clone()
        for t, rows in enumerate(self.table_rows(layer, ids)[first:]):
            picked = torch.cat([e.embed(torch.tensor([[row]]))[0] for row in rows]).double()
            kv = (w(e.wkv) @ picked).view(c.hc_mult + 1, -1)
            for s in range(c.hc_mult):
                r, k = streams[t, s], kv[s]
                d = (r * e.q_weight[s].double() * e.k_weight[s].double() * k).sum() / math.sqrt(c.hidden_size)
                d = float(d / torch.sqrt((r * r).mean() + c.rms_norm_eps) / torch.sqrt((k * k).mean() + c.rms_norm_eps))
                gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(d), 1e-6)), d)))
                out[t, s] = r + gate * kv[c.hc_mult]
        return out

    def table_rows(self, layer: int, ids: list[int], unknown: tuple[int, ...] = ()) -> list[list[int]]:
        """Rows of every position, in plain integers; `unknown` ids have no compressed id."""
        c = self.c
        vocab = compressed_vocab(self.dir / "tokenizer.json", c.vocab_size)
        multipliers = hash_multipliers(layer, vocab.count, c.engram_max_ngram_size)
        primes = table_primes(c.engram_vocab_size, len(c.engram_layer_ids), c.engram_max_ngram_size, c.engram_n_heads)
        own = primes[c.engram_layer_ids.index(layer)]
        offsets, heads, pad = table_offsets(own), c.engram_n_heads, int(vocab.map_V[c.engram_pad_token_id])
        result = []
        for t in range(len(ids)):
            recent, is_blocked = [], False
            for k in range(c.engram_max_ngram_size):
                compressed = int(vocab.map_V[ids[t - k]]) if t >= k and ids[t - k] not in unknown else -1
                is_blocked = is_blocked or compressed == -1
                recent.append(pad if is_blocked else compressed)
            rows, h = [], recent[0] * multipliers[0]
            for n in range(1, c.engram_max_ngram_size):
                h ^= recent[n] * multipliers[n]
                rows += [h % own[(n - 1) * heads + head] + offsets[(n - 1) * heads + head] for head in range(heads)]
            result.append(rows)
        return result


def w(module: Any) -> Tensor:
    """A module's weight in float64."""
    weight: Tensor = module.weight
    return weight.double()


def source(layer: int, sources: tuple[int, ...]) -> int:
    return max((s for s in sources if s <= layer), default=-1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: list[int], frequencies: list[float], sign: int = 1) -> Tensor:
    """Turn the last dims as complex numbers."""
    angle = sign * torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angle), angle)
    width = 2 * len(frequencies)
    z = torch.view_as_complex(x[..., -width:].reshape(*x.shape[:-1], len(frequencies), 2).contiguous())
    turned = torch.view_as_real(z * turn.view(len(positions), *[1] * (x.dim() - 2), len(frequencies))).flatten(-2)
    return torch.cat((x[..., :-width], turned), dim=-1)
