# SPDX-License-Identifier: Apache-2.0
"""A plan on paper: lines for people, one object for machines. The parts of a card add up to its memory, and the last line says so."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any

from whalefall.engine.resolve import GPU_WORKSPACE_BYTES
from whalefall.plan.cards import CONTEXT_BYTES, Card
from whalefall.plan.planner import Plan


def to_text(plan: Plan, card: Card) -> str:
    lines = [
        f"{plan.model} ({plan.family}) on {plan.num_cards} x {plan.card}",
        f"read from {plan.source}",
        "",
        "weights, whole model",
        *(_row(kind.name, _where(plan, kind.place, kind.is_split_over_experts), kind.num_bytes) for kind in plan.kinds),
        "",
        "caches",
        _row("per token of context", f"blocks of {plan.spec.block_tokens} tokens", plan.bytes_per_token),
        _row("per request", "window rings, their tags, pending groups", plan.spec.slot_bytes),
        "",
        "one card",
        *(_row(name, how, size) for name, how, size in card_rows(plan, card)),
    ]
    lines += ["", *_fit_lines(plan)]
    lines += [f"note: {note}" for note in plan.notes]
    if plan.flags:
        lines += ["", "to get this:", f"  whalefall serve {shlex.quote(plan.path)} {' '.join(plan.flags)}"]
    return "\n".join(lines)


def card_rows(plan: Plan, card: Card) -> list[tuple[str, str, int]]:
    """What a card's memory goes to; the last row is the card and the sum of all others."""
    rows = [("weights", f"{plan.config.weights}, {plan.config.dtype}" if plan.config else "packed", plan.device_bytes_per_card)]
    if plan.config is not None:
        memory = plan.config.memory
        rows += [
            ("cache blocks", f"{memory.num_blocks:,} of {memory.block_bytes:,} bytes", memory.num_blocks * memory.block_bytes),
            ("rings and state", f"{memory.num_slots:,} requests", memory.num_slots * memory.slot_bytes),
            ("token and block tables", f"{plan.config.max_model_len:,} tokens each", memory.table_bytes),
        ]
        rest = memory.total_bytes - sum(size for _, _, size in rows[1:])
        if rest:
            rows.append(("window snapshots", "one per block, to continue a prefix exactly", rest))
    rows += [
        ("workspace", "activations and logits of a step", GPU_WORKSPACE_BYTES),
        ("CUDA context", "before the first tensor", CONTEXT_BYTES),
    ]
    left = card.memory_bytes - sum(size for _, _, size in rows)
    rows.append(("left free" if left >= 0 else "missing", "gpu_memory_utilization keeps a share" if left >= 0 else "does not fit", left))
    rows.append(("card", card.name, card.memory_bytes))
    return rows


def to_dict(plan: Plan, card: Card) -> dict[str, Any]:
    config = plan.config
    return {
        "model": plan.model,
        "family": plan.family,
        "source": plan.source,
        "card": plan.card,
        "num_cards": plan.num_cards,
        "fits": config is not None,
        "problems": list(plan.problems),
        "weights": [asdict(kind) for kind in plan.kinds],
        "weights_bytes_per_card": plan.device_bytes_per_card,
        "mapped_bytes": plan.mapped_bytes,
        "cache_bytes_per_token": plan.bytes_per_token,
        "cache_bytes_per_request": plan.spec.slot_bytes,
        "cache_tokens_per_card": (config.num_blocks - 1) * config.block_size if config else 0,
        "max_model_len": config.max_model_len if config else 0,
        "max_num_seqs": config.max_num_seqs if config else 0,
        "fittings": [asdict(fitting) for fitting in plan.fittings],
        "one_card": [{"name": name, "how": how, "bytes": size} for name, how, size in card_rows(plan, card)],
        "notes": list(plan.notes),
        "flags": list(plan.flags),
    }


def _fit_lines(plan: Plan) -> list[str]:
    if plan.config is None:
        return ["DOES NOT FIT", *(f"  {problem}" for problem in plan.problems)]
    config = plan.config
    tokens = (config.num_blocks - 1) * config.block_size
    lines = [
        f"fits: {tokens:,} tokens of context a card, {config.max_num_seqs} requests at once, up to {config.max_model_len:,} tokens each"
    ]
    for fit in plan.fittings:
        lines.append(f"  {fit.context_tokens:>9,} tokens each: {fit.per_card:>6,} requests a card, {fit.in_all:>6,} in all")
    return lines


def _where(plan: Plan, place: str, is_split: bool) -> str:
    if place == "mapped":
        return "mapped from files, host memory"
    if plan.num_cards == 1:
        return "on the card"
    return f"shared out over {plan.num_cards} cards" if is_split else "copied to each card"


def _row(name: str, how: str, size: float) -> str:
    return f"  {name:<40}{how:<42}{size:>20,.0f} bytes"
