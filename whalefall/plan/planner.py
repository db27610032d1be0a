# SPDX-License-Identifier: Apache-2.0
"""From a model directory and a number of cards to a Plan. Reads config.json and, where there are any, shard headers; no weights, no GPU.

Several cards: routed experts are shared out evenly, everything else is copied to each, and each card keeps the caches of its own requests
(expert parallelism with data-parallel attention). That layout is planned here and not served yet; one card is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from whalefall.core.cache_spec import CacheSpec
from whalefall.core.errors import ConfigError
from whalefall.core.seams import LocalComm
from whalefall.engine.config import EngineConfig
from whalefall.engine.facts import DeviceFacts, DtypeName, ModelFacts, WeightFootprint, weight_facts
from whalefall.engine.resolve import ResolvedConfig, resolve
from whalefall.models.definition import BuildContext, ModelConfig, ModelDefinition, WeightKind
from whalefall.models.registry import CONFIG_FILE, find_definition, read_config
from whalefall.plan.cards import CONTEXT_BYTES, Card
from whalefall.runtime.worker.memory import blocks_for
from whalefall.weights.check import find_problems
from whalefall.weights.safetensors import ShardSet

USUAL_COUNTS = (2, 4, 8, 16, 32)
CONTEXTS = (4_096, 32_768, 131_072, 1_048_576)


@dataclass(frozen=True, slots=True)
class Fitting:
    """How many requests of one length have room at once."""

    context_tokens: int
    per_card: int
    in_all: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    model: str
    family: str
    path: str
    """The directory, as it was named."""
    source: str
    """What was read: config alone, or shard headers too."""
    card: str
    num_cards: int
    kinds: tuple[WeightKind, ...]
    """Of the whole model, in the storage that was chosen."""
    device_bytes_per_card: int
    config: ResolvedConfig | None
    """None when it does not fit."""
    problems: tuple[str, ...]
    """Why it does not fit."""
    spec: CacheSpec
    fittings: tuple[Fitting, ...]
    notes: tuple[str, ...]
    flags: tuple[str, ...]
    """Of `whalefall serve`, to get what was planned."""

    @property
    def bytes_per_token(self) -> float:
        return self.spec.block_bytes / self.spec.block_tokens

    @property
    def mapped_bytes(self) -> int:
        return sum(kind.num_bytes for kind in self.kinds if kind.place == "mapped")


def plan_model(model_dir: Path, card: Card, num_cards: int = 1, options: EngineConfig | None = None) -> Plan:
    """
    Args:
        options: choices as for `whalefall serve`; None leaves every choice open.
    Raises:
        ConfigError: the directory or its config.json is unusable, or num_cards is no count. Not fitting is a plan with problems.
    """
    if num_cards < 1:
        raise ConfigError(f"count is {num_cards}, must be at least 1")
    values = read_config(model_dir)
    definition = find_definition(values, CONFIG_FILE)
    config = definition.parse_config(values, CONFIG_FILE)
    device = DeviceFacts(kind="cuda", name=card.name, total_bytes=card.memory_bytes, free_bytes=card.memory_bytes - CONTEXT_BYTES)
    asked = replace(options or EngineConfig(model=model_dir), model=model_dir, device="cuda")
    facts, footprint = model_facts(model_dir, definition, config, num_cards)
    resolved, problems = _try(asked, facts, device)
    enough = None if resolved or footprint is None else _enough_cards(asked, facts, footprint, device)
    weights: Literal["packed", "dense"] = resolved.weights if resolved else "packed" if asked.weights == "auto" else asked.weights
    dtype: DtypeName = resolved.dtype if resolved else "bfloat16" if asked.dtype == "auto" else asked.dtype
    kv_cache_dtype: Any = resolved.kv_cache_dtype if resolved else "model"
    return Plan(
        model=facts.name,
        family=definition.name,
        path=str(model_dir),
        source=_source(model_dir, definition, config),
        card=card.name,
        num_cards=num_cards,
        kinds=footprint.kinds(dtype, weights) if footprint else (),
        device_bytes_per_card=facts.weights.dense_bytes(dtype) if weights == "dense" else facts.weights.packed_bytes(dtype),
        config=resolved,
        problems=problems,
        spec=facts.cache_spec(dtype, weights, kv_cache_dtype, asked.block_size),
        fittings=_fittings(resolved, num_cards, facts.max_position_embeddings) if resolved else (),
        notes=(*([f"it fits on {enough} x {card.name}"] if enough else []), *_notes(card, num_cards, facts.weights.mapped_bytes())),
        flags=_flags(resolved) if resolved and num_cards == 1 else (),
    )


def model_facts(
    model_dir: Path, definition: ModelDefinition, config: ModelConfig, num_cards: int = 1
) -> tuple[ModelFacts, WeightFootprint | None]:
    """What `resolve` needs to know, from the config alone: the shapes of all tensors follow from it."""

    def context(dtype: str, weights: Any, kv_cache_dtype: Any) -> BuildContext:
        return BuildContext(
            dtype=getattr(torch, dtype),
            device=torch.device("cpu"),
            weights=weights,
            kv_cache_dtype=kv_cache_dtype,
            comm=LocalComm(),
            model_dir=model_dir,
        )

    @cache
    def kinds(dtype: str, weights: Literal["packed", "dense"]) -> tuple[WeightKind, ...]:
        assert definition.footprint is not None
        return definition.footprint(config, context(dtype, weights, "unrounded"))

    footprint = WeightFootprint(kinds, num_cards) if definition.footprint is not None else None
    tensors = definition.weight_map(config).tensors
    headers = {name: (spec.dtypes[0], spec.shape, spec.num_bytes) for name, spec in tensors.items()}
    facts = ModelFacts(
        name=model_dir.resolve().name,
        family=definition.name,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        decoder_window=config.decoder_window,
        history_tokens=config.history_tokens,
        weights=footprint or weight_facts(headers, tensors),
        cache_spec=lambda dtype, weights, kv, block: definition.cache_spec(config, context(dtype, weights, kv), block),
    )
    return facts, footprint


def _try(asked: EngineConfig, facts: ModelFacts, device: DeviceFacts) -> tuple[ResolvedConfig | None, tuple[str, ...]]:
    try:
        return resolve(asked, facts, device), ()
    except ConfigError as error:
        return None, error.problems


def _enough_cards(asked: EngineConfig, facts: ModelFacts, footprint: WeightFootprint, device: DeviceFacts) -> int | None:
    """The smallest usual number of cards on which the same choices fit."""
    for count in USUAL_COUNTS:
        if count > footprint.num_expert_ranks:
            shared_out = replace(facts, weights=WeightFootprint(footprint.kinds, count))
            if _try(asked, shared_out, device)[0] is not None:
                return count
    return None


def _source(model_dir: Path, definition: ModelDefinition, config: ModelConfig) -> str:
    """Whether the shards that the directory holds agree with the config the plan was made from."""
    shards = ShardSet.open(model_dir)
    if not shards.shards:
        return "config.json alone; no shards here to compare with"
    problems = find_problems(shards, definition.weight_map(config))
    agree = f"but the shards disagree: {problems[0]}" if problems else "and the shards agree"
    return f"config.json, {agree} ({len(shards.shards)} shards, {shards.num_bytes:,} bytes)"


def _fittings(config: ResolvedConfig, num_cards: int, longest: int) -> tuple[Fitting, ...]:
    """No more requests run at once than there are state slots; the scheduler admits one more only while every running one could still
    take a spare block, and block 0 is the null block: n requests need n * (blocks + 1).
    """
    found = []
    for context in CONTEXTS:
        if context <= min(longest, config.max_model_len):
            fit = min(config.num_blocks // (blocks_for(context, config.block_size) + 1), config.max_num_seqs)
            found.append(Fitting(context, fit, fit * num_cards))
    return tuple(found)


def _notes(card: Card, num_cards: int, mapped_bytes: int) -> Sequence[str]:
    notes = []
    if mapped_bytes:
        notes.append(
            f"Engram tables stay in the checkpoint's files and are mapped: give the host {_size(mapped_bytes)} of memory "
            "beyond its other needs, or rows come from the disk; all cards of a host share one copy"
        )
    if num_cards > 1:
        notes.append("routed experts shared out over the cards, everything else copied to each; this version serves on one card only")
    if card.capability < (9, 0):
        notes.append(
            f"kernels are made for compute capability 9.0, {card.name} has {card.capability[0]}.{card.capability[1]}: slow paths run"
        )
    if not card.is_measured:
        notes.append(f"{card.name} was not measured by this project: its memory is what others report")
    return notes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 1e9 else f"{-(-num_bytes // 10**6):,} MB"


def _flags(config: ResolvedConfig) -> tuple[str, ...]:
    return (
        "--device cuda",
        f"--dtype {config.dtype}",
        f"--weights {config.weights}",
        f"--max-model-len {config.max_model_len}",
        f"--max-num-seqs {config.max_num_seqs}",
        f"--max-num-batched-tokens {config.max_num_batched_tokens}",
        f"--kv-cache-memory-bytes {config.memory.pool_bytes}",
    )
