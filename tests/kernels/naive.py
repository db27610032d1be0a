# SPDX-License-Identifier: Apache-2.0
"""Every op a second time: float64, loops over tokens, heads and keys, straight from the design note. Slow, obvious, independent.

`NAIVE[name]` takes an op's arguments and gives its result as float64 (or integers). It is the truth that reference and twins are held
against.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# number formats

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = [e4m3(code) for code in range(127)]


def nearest(value: float, magnitudes: list[float]) -> float:
    """The nearest of the magnitudes, with the sign of the value; a tie goes to the even code; the largest one caps."""
    size = min(abs(value), magnitudes[-1])
    code = min(range(len(magnitudes)), key=lambda c: (abs(magnitudes[c] - size), c % 2))
    return math.copysign(magnitudes[code], value)


def power_above(amax: float, largest: float) -> float:
    """The smallest power of two that brings amax within `largest`."""
    exponent = -140
    while amax > largest * 2.0**exponent:
        exponent += 1
    return 2.0**exponent


def blockwise(x: Tensor, group: int, rounded: Callable[[list[float]], list[float]]) -> Tensor:
    flat = x.double().reshape(-1, group).tolist()
    return torch.tensor([rounded(block) for block in flat], dtype=torch.float64).view(x.shape)


def fakequant_mxfp8(x: Tensor) -> Tensor:
    def rounded(block: list[float]) -> list[float]:
        scale = power_above(max(1e-4, *map(abs, block)), 448)
        return [nearest(v / scale, E4M3) * scale for v in block]

    return blockwise(x, 32, rounded)


def fakequant_mxfp4(x: Tensor) -> Tensor:
    def rounded(block: list[float]) -> list[float]:
        scale = power_above(max(6 * 2.0**-126, *map(abs, block)), 6)
        return [nearest(v / scale, E2M1) * scale for v in block]

    return blockwise(x, 32, rounded)


def fakequant_nvfp4(x: Tensor) -> Tensor:
    def rounded(block: list[float]) -> list[float]:
        # The format divides in float32: both quotients are rounded before they are looked up.
        amax = float(np.float32(max(map(abs, block))) / np.float32(6))
        scale = nearest(min(max(amax, 2.0**-9), 448.0), E4M3)
        return [nearest(float(np.float32(v) / np.float32(scale)), E2M1) * scale for v in block]

    return blockwise(x, 16, rounded)


def fp8_values(w: Tensor) -> Tensor:
    table = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)
    return table[w.contiguous().view(torch.uint8).long()]


def scale_values(s: Tensor) -> Tensor:
    return torch.tensor([2.0 ** (byte - 127) for byte in range(256)], dtype=torch.float64)[s.long()]


def dequantize_fp8_tile(w: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    n, k = torch.meshgrid(torch.arange(w.shape[0]), torch.arange(w.shape[1]), indexing="ij")
    return fp8_values(w) * scale_values(scale)[n // 32, k // 32]


def dequantize_fp8_row(w: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return fp8_values(w) * scale_values(scale)[:, torch.arange(w.shape[1]) // 32]


def dequantize_mxfp4(w: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    values = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)
    out = torch.empty(w.shape[0], 2 * w.shape[1], dtype=torch.float64)
    raw = w.view(torch.uint8).long()
    out[:, 0::2], out[:, 1::2] = values[raw % 16], values[raw // 16]
    return out * scale_values(scale)[:, torch.arange(out.shape[1]) // 32]


# norms, rotation, products


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = [r / math.sqrt(float((r * r).mean()) + eps) * weight.double() for r in x.double()]
    return torch.stack(rows) if rows else x.double()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    out = x.double().clone()
    pairs = cos.shape[1]
    for t in range(x.shape[0]):
        for i in range(pairs):
            turn = complex(float(cos[t, i]), float(sin[t, i]))
            first = x.shape[-1] - 2 * pairs + 2 * i
            z = torch.complex(out[t, ..., first], out[t, ..., first + 1]) * (turn.conjugate() if inverse else turn)
            out[t, ..., first], out[t, ..., first + 1] = z.real, z.imag
    return out


def linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.from_numpy(np.einsum("tk,nk->tn", x.double().numpy(), w.double().numpy()))


def linear_fp8_tile(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return linear(x, dequantize_fp8_tile(w, scale, torch.float64))


def grouped_linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([linear(x[:, g], w[g]) for g in range(w.shape[0])], dim=1)


def grouped_linear_fp8_tile(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    values = dequantize_fp8_tile(w, scale, torch.float64)
    return grouped_linear(x, values.view(x.shape[1], -1, x.shape[2]))


def pool_group(values: Tensor, gates: Tensor) -> Tensor:
    weight = torch.exp(gates.double() - gates.double().amax(1, keepdim=True))
    return (weight * values.double()).sum(1) / weight.sum(1)


def store_rows(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    for row, value in zip(rows.tolist(), values):
        for i, v in enumerate(value):
            pool[row, i] = v


def rotate_round(x: Tensor, cos: Tensor, sin: Tensor, rounding: int) -> Tensor:
    turned = rotate(x, cos, sin).to(x.dtype)  # an entry's codes are decided on rounded values
    if rounding == 0 or not x.numel():
        return turned
    return (fakequant_mxfp8, fakequant_mxfp4, fakequant_nvfp4)[rounding - 1](turned)


def norm_rotate_round(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, rounding: int) -> Tensor:
    return rotate_round(rms_norm(x, weight, eps).to(x.dtype), cos, sin, rounding)


# streams


def mixes(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    s, b, c = streams.shape[1], base.double(), scale.double()
    pre, post = torch.empty(2, streams.shape[0], s, dtype=torch.float64)
    comb = torch.empty(streams.shape[0], s, s, dtype=torch.float64)
    for t, r in enumerate(streams.double()):
        flat = torch.cat(list(r))  # stream 0 first
        m = fn.double() @ flat / math.sqrt(float((flat * flat).mean()) + eps)
        for i in range(s):
            pre[t, i] = 1 / (1 + math.exp(-(m[i] * c[0] + b[i]))) + hc_eps
            post[t, i] = 2 / (1 + math.exp(-(m[s + i] * c[1] + b[s + i])))
        rows = [[math.exp(m[2 * s + s * i + j] * c[2] + b[2 * s + s * i + j]) for j in range(s)] for i in range(s)]
        rows = [[v / sum(row) + hc_eps for v in row] for row in rows]
        rows = columns_normed(rows, hc_eps)
        for _ in range(iterations - 1):
            rows = columns_normed([[v / (sum(row) + hc_eps) for v in row] for row in rows], hc_eps)
        comb[t] = torch.tensor(rows, dtype=torch.float64)
    return pre, post, comb


def columns_normed(rows: list[list[float]], hc_eps: float) -> list[list[float]]:
    sums = [sum(row[j] for row in rows) for j in range(len(rows))]
    return [[v / (total + hc_eps) for v, total in zip(row, sums)] for row in rows]


def collapse(streams: Tensor, carry: Tensor) -> Tensor:
    out = torch.zeros(streams.shape[0], streams.shape[2], dtype=torch.float64)
    for s in range(streams.shape[1]):
        out += carry[:, s, None].double() * streams[:, s].double()
    return out


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out = torch.empty(streams.shape, dtype=torch.float64)
    for b in range(streams.shape[1]):
        out[:, b] = post[:, b, None].double() * y.double()
        for a in range(streams.shape[1]):
            out[:, b] += comb[:, a, b, None].double() * streams[:, a].double()
    return out


# experts


def gate(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    experts, weights = [], []
    for row in logits.double().tolist():
        score = [math.sqrt(v if v > 20 else math.log1p(math.exp(v))) for v in row]
        biased = [s + b for s, b in zip(score, bias.double().tolist())]
        chosen = sorted(range(len(row)), key=lambda e: (-biased[e], e))[:k]
        total = sum(score[e] for e in chosen) + 1e-20
        experts.append(chosen)
        weights.append([score[e] / total * scale for e in chosen])
    return torch.tensor(experts, dtype=torch.int64).view(-1, k), torch.tensor(weights, dtype=torch.float64).view(-1, k)


def clamped_swiglu(gate_part: Tensor, up_part: Tensor, limit: float) -> Tensor:
    g, u = gate_part.double().clamp(max=limit), up_part.double().clamp(-limit, limit)
    return g / (1 + torch.exp(-g)) * u


def experts_dense(x: Tensor, expert: Tensor, weight: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    inner = w2.shape[2]
    for t in range(x.shape[0]):
        for e, share in zip(expert[t].tolist(), weight[t].tolist()):
            gate_part, up_part = w13[e, :inner].double() @ x[t].double(), w13[e, inner:].double() @ x[t].double()
            out[t] += share * (w2[e].double() @ clamped_swiglu(gate_part, up_part, limit))
    return out


def experts_mxfp4(
    x: Tensor, expert: Tensor, weight: Tensor, w13: Tensor, scale13: Tensor, w2: Tensor, scale2: Tensor, limit: float
) -> Tensor:
    wide13, wide2 = (torch.stack([dequantize_mxfp4(a, b, torch.float64) for a, b in zip(w, s)]) for w, s in ((w13, scale13), (w2, scale2)))
    return experts_dense(x, expert, weight, wide13, wide2, limit)


def experts_mxfp4_onto(base: Tensor, *args: Any) -> Tensor:
    return base.double() + experts_mxfp4(*args)


def swiglu_fp8_tile(x: Tensor, w1: Tensor, scale1: Tensor, w3: Tensor, scale3: Tensor, limit: float) -> Tensor:
    return clamped_swiglu(linear_fp8_tile(x, w1, scale1), linear_fp8_tile(x, w3, scale3), limit)


# n-grams


def hash_rows(compressed: Tensor, pad: int, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    out = []
    for ids in compressed.tolist():
        if -1 in ids:
            first = ids.index(-1)
            ids = ids[:first] + [pad] * (len(ids) - first)
        products = [i * m for i, m in zip(ids, multipliers.tolist())]
        assert max(products) < 2**63
        rows, h = [], products[0]
        for n in range(primes.shape[0]):
            h ^= products[n + 1]
            rows += [h % p + o for p, o in zip(primes[n].tolist(), offsets[n].tolist())]
        out.append(rows)
    return torch.tensor(out, dtype=torch.int64).view(len(out), primes.numel())


def gather_dense(table: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(rows.shape[0], rows.shape[1] * table.shape[1], dtype=torch.float64)
    for t, picked in enumerate(rows.tolist()):
        out[t] = torch.cat([table[row].double() for row in picked])
    return out


def gather_fp8(table: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return gather_dense(dequantize_fp8_row(table, scale, torch.float64), rows, torch.float64)


def inject(streams: Tensor, keys: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    out = streams.double().clone()
    for t in range(streams.shape[0]):
        for s in range(streams.shape[1]):
            r, k = streams[t, s].double(), keys[t, s].double()
            d = float((r * q_weight[s].double() * k_weight[s].double() * k).sum())
            d *= 1 / math.sqrt(float((r * r).mean()) + eps) / math.sqrt(float((k * k).mean()) + eps) / math.sqrt(len(r))
            g = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(d), 1e-6)), d)))
            out[t, s] = r + g * value[t].double()
    return out


# attention


def sparse_mqa(
    q: Tensor, window_kv: Tensor, window_index: Tensor, main_kv: Tensor | None, main_index: Tensor | None, sink: Tensor, scale: float
) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        keys = [window_kv[row] for row in window_index[t].tolist() if row >= 0]
        if main_kv is not None and main_index is not None:
            keys += [main_kv[row] for row in main_index[t].tolist() if row >= 0]
        if not keys:
            continue
        keys_KD = torch.stack(keys).double()
        for head in range(q.shape[1]):
            logit = keys_KD @ q[t, head].double() * scale
            top = max(float(logit.max()), float(sink[head]))
            weight = torch.exp(logit - top)
            out[t, head] = (weight @ keys_KD) / (weight.sum() + math.exp(float(sink[head]) - top))
    return out


Search = tuple[Tensor, Tensor, Tensor, Tensor, int, Tensor, Tensor, int]


def scores(q: Tensor, w: Tensor, pool: Tensor, table: Tensor, per_block: int, request: Tensor, num_visible: Tensor) -> list[list[float]]:
    out = []
    for t in range(q.shape[0]):
        row = []
        for j in range(int(num_visible[t])):
            key = pool[int(table[request[t], j // per_block]) * per_block + j % per_block].double()
            row.append(sum(float(w[t, h]) * max(0.0, float(q[t, h].double() @ key)) for h in range(q.shape[1])))
        out.append(row)
    return out


def best(row: list[float], allowed: list[int], k: int) -> list[int]:
    return sorted(sorted(allowed, key=lambda j: (-row[j], j))[:k])


def padded(lists: list[list[int]], width: int) -> Tensor:
    return torch.tensor([row + [-1] * (width - len(row)) for row in lists], dtype=torch.int64).view(len(lists), width)


def select(*args: Any) -> Tensor:
    *search, max_visible, k = args
    return padded([best(row, list(range(len(row))), k) for row in scores(*search)], min(k, max_visible))


def select_with_candidates(*args: Any) -> tuple[Tensor, Tensor]:
    *search, max_visible, k, num_blocks, block_size = args
    candidates = []
    for row in scores(*search):
        block = [max(row[b : b + block_size]) for b in range(0, len(row), block_size)]
        if block:
            block[-1] = math.inf
        candidates.append(best(block, list(range(len(block))), num_blocks))
    return select(*search, max_visible, k), padded(candidates, min(num_blocks, -(-max_visible // block_size)))


def select_within(*args: Any) -> Tensor:
    *search, max_visible, k, candidates, block_size = args
    lists = []
    for t, row in enumerate(scores(*search)):
        kept = set(candidates[t].tolist())
        lists.append(best(row, [j for j in range(len(row)) if j // block_size in kept], k))
    return padded(lists, min(k, max_visible))


# sampling


def random_bits(seed: Tensor, position: Tensor, purpose: int, vocab_size: int) -> Tensor:
    def mix64(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    def mix32(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    ids = np.arange(vocab_size, dtype=np.uint64) * 0x9E3779B9 % 2**32
    out = []
    for s, p in zip(seed.tolist(), position.tolist()):
        key = mix64(mix64((s + 0x9E3779B97F4A7C15) % 2**64) ^ ((p << 8) | purpose))
        out.append(mix32(mix32((ids + key % 2**32) % 2**32) ^ np.uint64(key >> 32)).astype(np.uint32).view(np.int32))
    return torch.from_numpy(np.stack(out)) if out else torch.empty(0, vocab_size, dtype=torch.int32)


def exponential_noise(seed: Tensor, position: Tensor, purpose: int, vocab_size: int) -> Tensor:
    # u is a float32 by definition; near 1 its rounding shows.
    u = ((random_bits(seed, position, purpose, vocab_size).long() % 2**31).double() + 0.5) * 2.0**-31
    return -torch.log1p(-u.float().double().clamp(max=1 - 2.0**-24))


def in_order(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def apply_bitmask(logits: Tensor, bits: Tensor) -> Tensor:
    out = logits.double().clone()
    for i, words in enumerate(bits.tolist()):
        as_one = sum((word % 2**32) << (32 * w) for w, word in enumerate(words))
        for v in range(out.shape[-1]):
            if not as_one >> v & 1:
                out[i, v] = -math.inf
    return out


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = [max(range(len(row)), key=lambda i: (row[i], -i)) for row in logits.tolist()]
    best_of = [row[i] for row, i in zip(logits.tolist(), ids)]
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(best_of, dtype=torch.float64)


def penalise(logits: Tensor, counts: Tensor, seen: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor) -> Tensor:
    out = logits.double().clone()
    for i in range(len(out)):
        factor = float(repetition[i])
        out[i][seen[i]] = torch.where(out[i] > 0, out[i] / factor, out[i] * factor)[seen[i]]
        out[i] -= counts[i] * float(frequency[i]) + (counts[i] > 0) * float(presence[i])
    return out


def count_tokens(ids: Tensor, valid: Tensor, vocab_size: int) -> Tensor:
    return torch.tensor(np.stack([np.bincount(row[ok].numpy(), minlength=vocab_size) for row, ok in zip(ids, valid)]))


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    out = torch.full(logits.shape, -math.inf, dtype=torch.float64)
    for i, row in enumerate(logits.tolist()):
        order = in_order(row)[: int(top_k[i])]
        share = np.exp(np.array([row[j] for j in order]) - row[order[0]])
        share /= share.sum()
        reached = 0.0
        for j, p in zip(order, share.tolist()):
            if float(top_p[i]) < 1 and reached >= float(top_p[i]):
                break
            out[i, j], reached = row[j], reached + p
    return out


def draw(logits: Tensor, seed: Tensor, position: Tensor, purpose: int) -> Tensor:
    noise = exponential_noise(seed, position, purpose, logits.shape[1])
    return argmax(logits.double() - noise.log())[0]


def top_ids(values: Tensor, k: int) -> Tensor:
    return torch.tensor([in_order(row)[:k] for row in values.tolist()], dtype=torch.int64).view(-1, k)


def rank(values: Tensor, ids: Tensor) -> Tensor:
    return torch.tensor([in_order(row).index(i) + 1 for row, i in zip(values.tolist(), ids.tolist())], dtype=torch.int64)


def chance(seed: Tensor, position: Tensor, row: int, place: int) -> float:
    """The number that judges the draft at `place`: purpose 1, in the bits above it the place."""
    bits = random_bits(seed[row : row + 1], position[row : row + 1] + place, 1 + 4 * place, 1)
    return (int(bits) % 2**31 + 0.5) / 2**31


def accept_standard(target: Tensor, ids: Tensor, probs: Tensor, seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    counts, rests = [], []
    for r, drafts in enumerate(ids.tolist()):
        drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
        p, q = target[r].double(), probs[r].double()
        kept = 0
        while kept < len(drafts) and chance(seed, position, r, kept) < p[kept, drafts[kept]] / q[kept, drafts[kept]]:
            kept += 1
        counts.append(kept)
        rests.append(p[kept] if kept == len(drafts) else (p[kept] - q[kept]).clamp(min=0))
    return torch.tensor(counts, dtype=torch.int64), torch.stack(rests) if rests else target[:, 0].double()


def accept_block(target: Tensor, ids: Tensor, probs: Tensor, seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    counts, rests = [], []
    for r, drafts in enumerate(ids.tolist()):
        drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
        p, q = target[r].double(), probs[r].double()
        kept, rest, weight = 0, (p[0] - q[0]).clamp(min=0) if drafts else p[0], 1.0
        for i, draft in enumerate(drafts, 1):
            weight = min(1.0, weight * float(p[i - 1, draft] / q[i - 1, draft]))
            is_last = i == len(drafts)
            more = p[i] if is_last else (weight * p[i] - q[i]).clamp(min=0)
            share = weight if is_last else float(more.sum()) / (float(more.sum()) + 1 - weight)
            if chance(seed, position, r, i - 1) < share:
                kept, rest = i, weight * p[i] if is_last else more
        counts.append(kept)
        rests.append(rest)
    return torch.tensor(counts, dtype=torch.int64), torch.stack(rests) if rests else target[:, 0].double()


NAIVE: dict[str, Callable[..., Any]] = {
    "attention.sparse_mqa": sparse_mqa,
    "compress.pool_group": pool_group,
    "engram.gather_dense": gather_dense,
    "engram.gather_fp8": gather_fp8,
    "engram.hash_rows": hash_rows,
    "engram.inject": inject,
    "gemm.grouped_linear": grouped_linear,
    "gemm.grouped_linear_fp8_tile": grouped_linear_fp8_tile,
    "gemm.linear": linear,
    "gemm.linear_float32": linear,
    "gemm.linear_fp8_tile": linear_fp8_tile,
    "indexer.select": select,
    "indexer.select_with_candidates": select_with_candidates,
    "indexer.select_within": select_within,
    "kv_store.store_rows": store_rows,
    "latent.norm_rotate_round": norm_rotate_round,
    "latent.rotate_round": rotate_round,
    "mhc.collapse": collapse,
    "mhc.expand": expand,
    "mhc.mixes": mixes,
    "moe.clamped_swiglu": clamped_swiglu,
    "moe.experts_dense": experts_dense,
    "moe.experts_mxfp4": experts_mxfp4,
    "moe.experts_mxfp4_onto": experts_mxfp4_onto,
    "moe.gate": gate,
    "moe.swiglu_fp8_tile": swiglu_fp8_tile,
    "norm.rms_norm": rms_norm,
    "quant.dequantize_fp8_row": dequantize_fp8_row,
    "quant.dequantize_fp8_tile": dequantize_fp8_tile,
    "quant.dequantize_mxfp4": dequantize_mxfp4,
    "quant.fakequant_mxfp4": fakequant_mxfp4,
    "quant.fakequant_mxfp8": fakequant_mxfp8,
    "quant.fakequant_nvfp4": fakequant_nvfp4,
    "rope.rotate": rotate,
    "sampling.accept_block": accept_block,
    "sampling.accept_standard": accept_standard,
    "sampling.apply_bitmask": apply_bitmask,
    "sampling.argmax": argmax,
    "sampling.count_tokens": count_tokens,
    "sampling.draw": draw,
    "sampling.exponential_noise": exponential_noise,
    "sampling.keep_top": keep_top,
    "sampling.penalise": penalise,
    "sampling.random_bits": random_bits,
    "sampling.rank": rank,
    "sampling.top_ids": top_ids,
}
