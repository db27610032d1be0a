# SPDX-License-Identifier: Apache-2.0
"""The one place that knows everybody: from a directory and a config to an engine that is ready to step.

`open_model` reads config.json, shard headers and the tokenizer, checks all of them and resolves the config: seconds, no weights.
`load_engine` builds the model, fills it and wires scheduler, caches and worker into an EngineCore.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from whalefall.core.cache_spec import CacheSpec
from whalefall.core.errors import ConfigError
from whalefall.core.seams import Clock, Drafter, LocalComm, MonotonicClock
from whalefall.engine.config import EngineConfig
from whalefall.engine.core import EngineCore
from whalefall.engine.drafting import DraftPlan, costs_path, plan_drafts
from whalefall.engine.facts import ModelFacts, WeightFootprint, find_device, weight_facts
from whalefall.engine.kv_events import KvEventPublisher
from whalefall.engine.opened import OpenModel, read_folder
from whalefall.engine.resolve import ResolvedConfig, resolve
from whalefall.engine.tiers import build_tiers, name_weights
from whalefall.models.definition import BuildContext, BuiltModel, ModelConfig, ModelDefinition, WeightKind
from whalefall.observe.log import get_logger
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler.config import SchedulerConfig
from whalefall.runtime.scheduler.scheduler import Scheduler
from whalefall.runtime.spec.ngram import NgramDrafter
from whalefall.runtime.spec.rounds import SpecConfig
from whalefall.runtime.worker.graphs import ROW_SIZES
from whalefall.runtime.worker.row_by_row import RowByRow
from whalefall.runtime.worker.worker import Worker, WorkerConfig
from whalefall.weights.check import check_checkpoint
from whalefall.weights.loader import LoadReport, format_report, load_checkpoint
from whalefall.weights.random import fill_randomly
from whalefall.weights.safetensors import ShardSet
from whalefall.weights.spec import WeightMap

__all__ = ["OpenModel", "build_engine", "load_engine", "open_model"]

log = get_logger(__name__)
DEBUG_VARIABLE = "WHALEFALL_DEBUG"
"""1: a fault that could be masked ends the step with an error instead. For tests and for finding faults."""
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def build_engine(config: EngineConfig, *, progress: Progress | None = None, clock: Clock | None = None) -> EngineCore:
    """Everything at once, for who needs no tokenizer.

    Raises:
        ConfigError: every problem of directory, checkpoint, machine and options found at the first stage that has one.
    """
    return load_engine(open_model(config), progress=progress, clock=clock)


def open_model(config: EngineConfig) -> OpenModel:
    folder = read_folder(config)
    drafts = plan_drafts(config, folder.definition, folder.model_config)
    facts = _model_facts(folder.model_dir, folder.definition, folder.model_config, drafts, is_random=config.load_format == "random")
    return folder.opened(resolve(config, facts, find_device(config.device)))


def load_engine(opened: OpenModel, *, progress: Progress | None = None, clock: Clock | None = None) -> EngineCore:
    config, definition, model_config = opened.config, opened.definition, opened.model_config
    context = _build_context(opened.model_dir, config.device, config.dtype, config.weights, config.kv_cache_dtype, config.drafts)
    built = definition.build(model_config, context)
    report = _fill(opened, built, context, progress)
    log.info("%s", format_report(report))
    spec, scheduler_config = definition.cache_spec(model_config, context, config.block_size), _scheduler_config(config)
    grammars = opened.grammar_store()
    worker = Worker(
        RowByRow(built.model) if config.is_deterministic else built.model,
        spec,
        _worker_config(config, scheduler_config, context.device),
        grammars,
        drafter=_drafter(config.drafts, built),
        speculation=_speculation(config, opened),
    )
    cache = CacheManager(
        config.num_blocks,
        config.block_size,
        config.num_slots - int(config.has_graphs),
        fingerprint=name_weights(config, opened.model_dir),
        layout=_layout_name(config, spec),
    )
    log.info("memory at start:\n%s", config.memory_table(_module_bytes(built.model)))
    log.info("%s", _about_prefix_cache(config, scheduler_config))
    log.info("speculation: %s", "off" if config.drafts is None else config.drafts.text)
    ledger, mover = build_tiers(config, spec, worker.cache, cache) or (None, None)
    return EngineCore(
        Scheduler(scheduler_config, cache, tiers=ledger),
        worker,
        mover=mover,
        clock=clock or MonotonicClock(),
        is_one_step_ahead=config.async_scheduling,
        stats_interval_s=config.stats_interval_s,
        grammars=grammars,
        kv_events=KvEventPublisher(config.kv_events, config.block_size) if config.kv_events is not None else None,
    )


def _fill(opened: OpenModel, built: BuiltModel, context: BuildContext, progress: Progress | None) -> LoadReport:
    definition = opened.definition
    weight_map = _weight_map(definition, opened.model_config, opened.config.drafts)
    if opened.config.load_format == "auto":
        return load_checkpoint(opened.model_dir, weight_map, built.sink, progress=progress)
    assert definition.draw is not None, "open_model refuses a family that cannot draw its weights"
    log.warning("load_format is random: weights are drawn, answers mean nothing")
    return fill_randomly(opened.model_dir, weight_map, definition.draw, built.sink, context.device, progress=progress)


def _model_facts(
    model_dir: Path, definition: ModelDefinition, model_config: ModelConfig, drafts: DraftPlan | None = None, *, is_random: bool = False
) -> ModelFacts:
    def cache_spec(dtype: str, weights: Any, kv_cache_dtype: Any, block_tokens: int) -> CacheSpec:
        return definition.cache_spec(model_config, _build_context(model_dir, "cpu", dtype, weights, kv_cache_dtype, drafts), block_tokens)

    weight_map = _weight_map(definition, model_config, drafts)
    headers: dict[str, tuple[str, tuple[int, ...], int]]
    if is_random:
        if definition.draw is None:
            raise ConfigError(f"load_format is random, and the family {definition.name} does not say how to draw its weights: use auto")
        headers = {name: (spec.dtypes[0], spec.shape, spec.num_bytes) for name, spec in weight_map.tensors.items()}
    else:
        shards = ShardSet.open(model_dir)
        check_checkpoint(shards, weight_map)  # the loader checks again; here it comes before seconds of building
        headers = {t.name: (t.dtype, t.shape, t.num_bytes) for t in shards.all_tensors()}
    return ModelFacts(
        name=model_dir.resolve().name,
        family=definition.name,
        vocab_size=model_config.vocab_size,
        max_position_embeddings=model_config.max_position_embeddings,
        decoder_window=model_config.decoder_window,
        history_tokens=model_config.history_tokens,
        weights=_weight_sizes(model_dir, definition, model_config, drafts) or weight_facts(headers, weight_map.tensors),
        cache_spec=cache_spec,
        drafts=drafts,
        is_capturable=definition.is_capturable,
    )


def _weight_map(definition: ModelDefinition, model_config: ModelConfig, drafts: DraftPlan | None) -> WeightMap:
    if drafts is None or not drafts.is_own:
        return definition.weight_map(model_config)
    assert definition.weight_map_with_drafter is not None, f"{definition.name} offers a drafter and does not say which tensors it needs"
    return definition.weight_map_with_drafter(model_config)


def _weight_sizes(
    model_dir: Path, definition: ModelDefinition, model_config: ModelConfig, drafts: DraftPlan | None
) -> WeightFootprint | None:
    footprint = definition.footprint
    if footprint is None:
        return None

    @cache
    def kinds(dtype: str, weights: Literal["packed", "dense"]) -> tuple[WeightKind, ...]:
        return footprint(model_config, _build_context(model_dir, "cpu", dtype, weights, "unrounded", drafts))

    return WeightFootprint(kinds)


def _drafter(drafts: DraftPlan | None, built: BuiltModel) -> Drafter | None:
    if drafts is None:
        return None
    if not drafts.is_own:
        return NgramDrafter(max_draft_tokens=drafts.num_drafts)
    assert built.drafter is not None, f"the family says that this checkpoint brings {drafts.drafter}, and has not built it"
    return built.drafter


def _speculation(config: ResolvedConfig, opened: OpenModel) -> SpecConfig | None:
    drafts = config.drafts
    if drafts is None:
        return None
    path = None
    if drafts.is_adaptive:
        device = torch.cuda.get_device_name() if config.device.startswith("cuda") else f"cpu x{torch.get_num_threads()}"
        about = (str(opened.model_dir.resolve()), drafts, config.dtype, config.weights, config.kv_cache_dtype, device, torch.__version__)
        path = costs_path(*map(str, about))
    return SpecConfig(num_drafts=drafts.num_drafts, acceptance=drafts.acceptance, is_adaptive=drafts.is_adaptive, costs_path=path)


def _build_context(
    model_dir: Path, device: str, dtype: str, weights: Any, kv_cache_dtype: Any, drafts: DraftPlan | None = None
) -> BuildContext:
    return BuildContext(
        dtype=getattr(torch, dtype),
        device=torch.device(device),
        weights=weights,
        kv_cache_dtype=kv_cache_dtype,
        comm=LocalComm(),
        model_dir=model_dir,
        max_draft_tokens=0 if drafts is None else drafts.num_drafts,
        uses_own_drafter=drafts is not None and drafts.is_own,
    )


def _scheduler_config(config: ResolvedConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        replay=config.replay,
        decoder_window=config.decoder_window,
        prefix_caching=config.prefix_caching,
        replay_rows=config.replay_rows,
        has_fixed_state=config.has_fixed_state,
        num_drafts=0 if config.drafts is None else config.drafts.num_drafts,
    )


def _layout_name(config: ResolvedConfig, spec: CacheSpec) -> str:
    """Everything but the weights and the ids that decides what a block holds. Bounded replay is part of it: what is computed after a hit
    differs a little from a cold run, and exact mode must never adopt that."""
    return f"{spec} {config.dtype} {config.kv_cache_dtype} {config.weights} {config.replay}"


def _about_prefix_cache(config: ResolvedConfig, scheduler: SchedulerConfig) -> str:
    if not config.prefix_caching:
        return f"prefix cache: off ({config.chosen_by.get('enable_prefix_caching', 'default')})"
    least = scheduler.min_hit_tokens(config.block_size)
    rows = f", {config.replay_rows} rows run again after a hit" if config.replay == "bounded" and config.replay_rows else ""
    return f"prefix cache: on, blocks of {config.block_size} tokens, smallest hit {least} tokens{rows}"


def _worker_config(config: ResolvedConfig, scheduler: SchedulerConfig, device: torch.device) -> WorkerConfig:
    return WorkerConfig(
        num_blocks=config.num_blocks,
        num_slots=config.num_slots,
        max_graph_rows=_max_graph_rows(config) if config.has_graphs else 0,
        unrolls_drafts=config.has_graphs,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        history_tokens=config.history_tokens,
        keeps_snapshots=scheduler.takes_snapshots,
        reports_processed=config.logprobs_mode == "processed_logprobs",
        is_debug=os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"),
        device=device,
    )


def _max_graph_rows(config: ResolvedConfig) -> int:
    """Every request's row and its drafts, as far as graphs are made for so many rows; larger steps run as they are written."""
    rows = config.max_num_seqs * (1 if config.drafts is None else 1 + config.drafts.num_drafts)
    return max(config.max_num_seqs, min(rows, ROW_SIZES[-1]))


def _module_bytes(model: Any) -> int | None:
    """Bytes of parameters and buffers, each storage once; None for a model that is no torch module."""
    if not isinstance(model, torch.nn.Module):
        return None
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
