# SPDX-License-Identifier: Apache-2.0
"""Krill's own continuations of many prompts at once, with everything the draft learns from: features, final states, who wrote each token.

All rows stand at the same position, so a step is one token for thousands of rows. A row is a stream as in the training text: prompt,
answer up to its end or a cap, next prompt. Selection and cache rounding are those of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from training.model import FUNCTIONS, Attention, Block, Krill, Pass, _straight_through, _top
from training.prepare import BOS_ID, EOS_ID, SPECIAL_TOKENS

END_THINK_ID = SPECIAL_TOKENS.index("</think>")


class Prompts(NamedTuple):
    """Prompts that rows take one after the other."""

    ids: Tensor
    """[S, L] int16, filled up with anything."""
    lengths: Tensor
    """[S]"""


def chat_prompts(tokens: np.ndarray, longest: int, device: str) -> Prompts:
    """Every turn of the chat stream up to the point where the model answers; later turns follow earlier ones, as they were."""
    ends = np.flatnonzero(tokens == EOS_ID)
    starts = np.concatenate(([0], ends[:-1] + 1))
    answers = np.flatnonzero(tokens == END_THINK_ID)
    at = np.searchsorted(answers, starts)
    inside = at < len(answers)
    starts, ends, at = starts[inside], ends[inside], answers[at[inside]]
    lengths = at - starts + 1
    fits = (at < ends) & (lengths <= longest)
    return _gather(tokens, starts[fits], lengths[fits], longest, device)


def text_prompts(tokens: np.ndarray, count: int, shortest: int, longest: int, rng: np.random.Generator, device: str) -> Prompts:
    """Pieces of text of random length, half of them from a document's beginning."""
    starts = rng.integers(0, len(tokens) - longest, count)
    documents = np.flatnonzero(tokens[:-longest] == BOS_ID)
    starts[::2] = rng.choice(documents, len(starts[::2]))
    return _gather(tokens, starts, rng.integers(shortest, longest + 1, count), longest, device)


def _gather(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, longest: int, device: str) -> Prompts:
    places = np.minimum(starts[:, None] + np.arange(longest), len(tokens) - 1)
    return Prompts(torch.from_numpy(tokens[places].astype(np.int16)).to(device), torch.from_numpy(lengths.astype(np.int64)).to(device))


class Decoder:
    """One token at a time for B rows that share their position, from caches as long as the row."""

    def __init__(self, model: Krill, num_rows: int, length: int) -> None:
        c = model.c
        assert length <= c.candidate_topk_blocks * c.candidate_block_size, "candidate blocks would exclude entries, which is not done here"
        self.model, self.c = model, c
        shape = (num_rows, length, c.head_dim)
        like = {"dtype": model.head.weight.dtype, "device": model.embed.weight.device}
        self.kv = [torch.zeros(shape, **like) for _ in model.layers]
        self.entries = {i: torch.zeros(shape, **like) for i in c.kv_source_layer_ids}
        self.index_keys = {i: torch.zeros((*shape[:2], c.index_head_dim), **like) for i in c.kv_source_layer_ids}
        self.earlier_x: dict[int, Tensor] = {}
        self.selection: dict[int, Tensor | None] = {}

    def step(self, ids: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """ids [B, T]: row t goes in. Returns the normed final state [B, H] and the features [B, taps * H] of that position."""
        model, p = self.model, self.model.make_pass()
        R, carry = model.streams(ids[:, t : t + 1])
        recent = model.compressed[ids[:, max(0, t + 1 - self.c.engram_max_ngram_size) : t + 1]]
        for i, block in enumerate(model.layers):
            if hasattr(block, "engram"):
                g = block.engram
                e = F.embedding(g.rows(recent, model.pad)[:, -1:], g.embed.weight).flatten(-2).to(R.dtype)
                R = FUNCTIONS.engram_inject(R, g.wkv(e), g.q_weight, g.k_weight, self.c.rms_norm_eps)
            if i in self.c.dspark_target_layer_ids:
                p.taps.append(R.float().mean(-2).to(R.dtype))
            R, carry = block(R, carry, p, self._attention(block, p, t))
        h = (carry.unsqueeze(-1) * R.float()).sum(-2).to(R.dtype)
        return FUNCTIONS.rms(h, model.norm.weight, self.c.rms_norm_eps)[:, 0], torch.cat(p.taps, -1)[:, 0]

    def _attention(self, block: Block, p: Pass, t: int) -> Callable[[Tensor], Tensor]:
        return lambda x: self._attend(block.attn, x, p, t)

    def _attend(self, attn: Attention, x: Tensor, p: Pass, t: int) -> Tensor:
        layer, c = attn.layer, self.c
        table = tuple(row[t : t + 1] for row in (p.long if attn.ratio else p.plain))
        qr, q = attn.queries(x, *table)
        self.kv[layer][:, t] = _straight_through(attn.keys(x, *table), "fakequant_mxfp8")[:, 0]
        keys, chosen = self.kv[layer][:, max(0, t + 1 - c.sliding_window) : t + 1], None
        num_window = keys.shape[1]
        if attn.ratio:
            self._compress(attn, x, p, t)
            source = max(i for i in c.kv_source_layer_ids if i <= layer)
            count = (t + 1) // attn.ratio
            chosen = self._select(attn, x, qr, table, source, count)
            keys = torch.cat((keys, self.entries[source][:, :count]), 1)
        logits = torch.einsum("bnd,bkd->bnk", q[:, 0], keys).float() * c.head_dim**-0.5
        if chosen is not None:
            logits[..., num_window:].masked_fill_(~chosen, -torch.inf)
        lse = torch.logsumexp(logits, -1)
        o = torch.einsum("bnk,bkd->bnd", torch.exp(logits - lse.unsqueeze(-1)).to(keys.dtype), keys)
        return attn.output(o.unsqueeze(1), lse.unsqueeze(1), *table)

    def _compress(self, attn: Attention, x: Tensor, p: Pass, t: int) -> None:
        """At the last position of a group its owner writes the entry and the index key."""
        layer, ratio = attn.layer, attn.ratio
        if layer not in self.c.kv_source_layer_ids:
            return
        if (t + 1) % ratio:
            self.earlier_x[layer] = x
            return
        group = torch.cat((self.earlier_x[layer], x), 1) if ratio == 2 else x
        latent = attn.compressor(group)
        table = tuple(row[t + 1 - ratio : t + 2 - ratio] for row in p.long)
        self.entries[layer][:, t // ratio] = _straight_through(FUNCTIONS.rope(latent, *table), "fakequant_nvfp4")[:, 0]
        self.index_keys[layer][:, t // ratio] = attn.indexer.keys(latent, table)[:, 0]

    def _select(self, attn: Attention, x: Tensor, qr: Tensor, table: tuple[Tensor, ...], source: int, count: int) -> Tensor | None:
        """[B, 1, C] bool, or None while the list holds every entry."""
        if attn.layer in self.c.index_source_layer_ids:
            keys = self.index_keys[source][:, :count]
            few = count <= self.c.index_topk
            self.selection[attn.layer] = None if few else _top(attn.indexer.scores(qr, x, keys, table), self.c.index_topk)
        return self.selection[max(i for i in self.c.index_source_layer_ids if i <= attn.layer)]


@dataclass
class Bank:
    """Rows of T tokens with what the frozen backbone made of them; on the device."""

    ids: Tensor
    """[N, T] int16"""
    features: Tensor
    """[N, T, taps * H]"""
    hidden: Tensor
    """[N, T, H], normed: the head's input"""
    written: Tensor
    """[N, T] bool: the model wrote this token (it was no prompt)"""
    temperature: Tensor
    """[N]"""

    @classmethod
    def empty(cls, num_rows: int, length: int, model: Krill) -> Bank:
        c, dtype, device = model.c, model.head.weight.dtype, model.embed.weight.device
        width = len(c.dspark_target_layer_ids) * c.hidden_size
        return cls(
            torch.zeros(num_rows, length, dtype=torch.int16, device=device),
            torch.zeros(num_rows, length, width, dtype=dtype, device=device),
            torch.zeros(num_rows, length, c.hidden_size, dtype=dtype, device=device),
            torch.zeros(num_rows, length, dtype=torch.bool, device=device),
            torch.zeros(num_rows, device=device),
        )

    def rows(self, start: int, stop: int) -> Bank:
        return Bank(*(value[start:stop] for value in vars(self).values()))


@torch.no_grad()
def roll_out(model: Krill, prompts: Prompts, bank: Bank, cap: int, generator: torch.Generator) -> None:
    """Fill `bank` (whose temperatures are set) with streams of prompts and own continuations of at most `cap` tokens.

    generator: on the model's device.
    """
    num_rows, length = bank.ids.shape
    device = bank.ids.device
    decoder = Decoder(model, num_rows, length)
    ids = torch.zeros(num_rows, length + 1, dtype=torch.long, device=device)
    turn = torch.randint(0, len(prompts.ids), (num_rows,), generator=generator, device=device)
    offset, made = torch.zeros_like(turn), torch.zeros_like(turn)
    sampled = torch.zeros_like(turn)
    for t in range(length):
        is_prompt = offset < prompts.lengths[turn]
        token = torch.where(is_prompt, prompts.ids[turn, offset.clamp_max(prompts.ids.shape[1] - 1)].long(), sampled)
        made = torch.where(is_prompt, 0, made + 1)
        ended = ~is_prompt & ((token == EOS_ID) | (made >= cap))
        offset = torch.where(ended, 0, torch.where(is_prompt, offset + 1, offset))
        turn = torch.where(ended, (turn + 1) % len(prompts.ids), turn)
        ids[:, t], bank.ids[:, t], bank.written[:, t] = token, token.short(), ~is_prompt
        bank.hidden[:, t], bank.features[:, t] = decoder.step(ids, t)
        logits = model.logits(bank.hidden[:, t])
        noise = torch.rand(logits.shape, generator=generator, device=device).clamp_min(1e-20).log().neg().log().neg()
        sampled = (logits + bank.temperature.unsqueeze(-1) * noise).argmax(-1)
