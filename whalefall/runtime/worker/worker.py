# SPDX-License-Identifier: Apache-2.0
"""The worker: owns the pools, the slot tables and the sampling parameters, and turns a StepPlan into a StepResult.

    launch(plan)   new requests -> blocks -> batch -> forward -> sample -> ids into the token table -> draft  (nothing is read back)
    handle.wait()  device -> host: ids, log-probabilities, faults per request                               (the only read, but for
                   the latest ids of requests with a grammar: sampling/slot_grammars.py, and with drafts two counts: spec/table.py)

The engine may launch plan N + 1 before it waits for N: what N drew is already where N + 1 looks for it. On the CPU a launch has
finished when it returns. Called from the step loop's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from whalefall.core.batch import ForwardBatch
from whalefall.core.cache_spec import CacheSpec
from whalefall.core.plan import RequestStep, StepPlan
from whalefall.core.seams import Drafter
from whalefall.models.definition import Model
from whalefall.observe.log import get_logger
from whalefall.runtime.kvcache import pools
from whalefall.runtime.sampling.grammar import GrammarStore
from whalefall.runtime.sampling.logprobs import LogprobRows, logprobs_of
from whalefall.runtime.sampling.params import NOT_WANTED, SlotParams
from whalefall.runtime.sampling.sampler import processed_logits, sample
from whalefall.runtime.sampling.slot_grammars import GrammarMasks, SlotGrammars
from whalefall.runtime.spec.rounds import Rounds, SpecConfig
from whalefall.runtime.spec.verify import Blocks, Judged
from whalefall.runtime.worker.batch_builder import BatchBuilder, LogitRows, unrolled
from whalefall.runtime.worker.graphs import GraphRunner, NotCapturable
from whalefall.runtime.worker.health import HealthProbe
from whalefall.runtime.worker.model_runner import ModelRunner
from whalefall.runtime.worker.step_handle import Drawn, StepHandle
from whalefall.runtime.worker.tables import SlotTables

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    num_blocks: int
    """Physical blocks, counting the null block 0."""
    num_slots: int
    """Requests that may hold state at once."""
    max_model_len: int
    """Longest context in tokens, prompt and output together."""
    vocab_size: int
    history_tokens: int = 0
    """Ids before a row that the model wants to see."""
    keeps_snapshots: bool = False
    """Room for a copy of the fixed state beside each block (exact replay with a prefix cache)."""
    max_graph_rows: int = 0
    """Requests of a decode step that may run as a captured CUDA graph; 0: no graphs. With graphs the last slot is no request's."""
    unrolls_drafts: bool = False
    """Lay out a decode step with drafts as one row per request, which is what graphs are captured for (batch_builder.unrolled)."""
    reports_processed: bool = False
    """Log-probabilities are of what a token was chosen from; else of the model's raw logits."""
    is_debug: bool = False
    """A fault that the model has noticed and masked ends the step with an error."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Worker:
    def __init__(
        self,
        model: Model,
        spec: CacheSpec,
        config: WorkerConfig,
        grammars: GrammarStore | None = None,
        *,
        drafter: Drafter | None = None,
        speculation: SpecConfig | None = None,
    ) -> None:
        """
        Args:
            grammars: compiles what structured requests ask for; None: such a request ends with a fault.
            drafter, speculation: both, or neither for one token per step.
        """
        self.config = config
        self.cache = pools.allocate(spec, config.num_blocks, config.num_slots, config.device, with_snapshots=config.keeps_snapshots)
        self._tables = SlotTables(config.num_slots, config.max_model_len, spec.block_tokens, config.device)
        self._params = SlotParams(config.num_slots, config.vocab_size)
        self._grammars = SlotGrammars(grammars, config.vocab_size)
        self._rounds: Rounds | None = None
        if drafter is not None and speculation is not None:
            self._rounds = Rounds(drafter, speculation, self._params, self._tables.token_ids)
        self._health = HealthProbe(model, is_debug=config.is_debug)
        self._runner = self._make_runner(model)
        self._builder = BatchBuilder(
            self._tables, self._params.num_prompt, history_tokens=config.history_tokens, block_tokens=spec.block_tokens
        )

    @torch.inference_mode()
    def _make_runner(self, model: Model) -> ModelRunner | GraphRunner:
        config = self.config
        if not config.max_graph_rows:
            return ModelRunner(model, self.cache, config.vocab_size)
        runner = GraphRunner(
            model,
            self.cache,
            config.vocab_size,
            max_rows=config.max_graph_rows,
            max_context=config.max_model_len,
            spare_slot=config.num_slots - 1,
            history_tokens=config.history_tokens,
        )
        begin_s = time.monotonic()
        try:
            num_graphs = runner.capture()
        except NotCapturable as error:
            log.warning("decode steps run without graphs, which is several times slower for few requests: %s", error)
            return ModelRunner(model, self.cache, config.vocab_size)
        log.info("captured %d decode graphs in %.1f s", num_graphs, time.monotonic() - begin_s)
        return runner

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Run the step. Plans must come in the order in which they were made; `plan.steps` is not empty and names each slot once."""
        for request in plan.new_requests:
            pools.reset_slot(self.cache, request.slot)
            if request.restore_block:
                pools.restore_snapshot(self.cache, request.slot, request.restore_block, request.start)
            self._tables.admit(request)
            self._params.set(request)
            self._grammars.set(request)
            if self._rounds is not None:
                self._rounds.admit(request.slot)
        self._tables.append_blocks(plan.steps)
        steps: Sequence[RequestStep] = plan.steps
        if self._rounds is not None:
            steps = self._rounds.settle(steps)
            self._rounds.place(steps)
        batch, wanted = self._build(steps)
        logits_LV = self._runner.run(batch)
        ending = [step for step in steps if step.snapshot_block]
        if ending:
            pools.take_snapshots(self.cache, [step.slot for step in ending], [step.snapshot_block for step in ending])
        drawn = self._sample(logits_LV[: wanted.num_sampled], wanted, steps)
        scored = self._score_prompt(logits_LV[wanted.num_sampled :], wanted)
        self._health.after_launch()
        return StepHandle(plan, steps, wanted, drawn, scored, self._clean_up, self._health)

    def _build(self, steps: Sequence[RequestStep]) -> tuple[ForwardBatch, LogitRows]:
        rows = unrolled(steps) if self.config.unrolls_drafts else None
        if rows is None:
            return self._builder.build(steps)
        batch, wanted = self._builder.build(rows)
        return batch, wanted.of_blocks(np.array([step.num_tokens for step in steps], np.int64))

    def _sample(self, logits_SV: Tensor, wanted: LogitRows, steps: Sequence[RequestStep]) -> Drawn:
        blocks = Blocks(wanted.sample_slot_S[wanted.first_row_R], wanted.num_rows_R)
        masks = self._masks(wanted, steps)
        rows = self._params.rows(wanted.sample_slot_S, wanted.sample_position_S).with_grammar(masks)
        if self._rounds is not None:
            judged = self._rounds.judge(logits_SV, rows, blocks)
        else:
            sampled = sample(logits_SV, rows, self._tables.token_ids)
            judged = Judged(sampled.ids_L, torch.ones_like(sampled.ids_L), sampled.fault_L)
        self._grammars.note(blocks.slot_R, judged.ids_L, blocks.first_R, judged.num_new_R)
        where = torch.from_numpy(np.stack([wanted.sample_slot_S, wanted.sample_position_S])).to(logits_SV.device, non_blocking=True)
        self._tables.token_ids[where[0], where[1]] = judged.ids_L.to(torch.int32)
        if self._rounds is not None:
            self._rounds.draft(rows, blocks, judged, self.cache)
        faults = {} if masks is None else masks.faults
        reporting = np.flatnonzero(rows.num_logprobs_L != NOT_WANTED)
        if not len(reporting):
            return Drawn(judged, reporting, None, faults)
        index = torch.from_numpy(reporting).to(logits_SV.device, non_blocking=True)
        logits_XV = logits_SV[index]
        if self.config.reports_processed:
            logits_XV = processed_logits(logits_XV, rows, reporting, self._tables.token_ids)
        logprobs = logprobs_of(logits_XV, judged.ids_L[index], rows.num_logprobs_L[reporting])
        return Drawn(judged, reporting, logprobs, faults)

    def _masks(self, wanted: LogitRows, steps: Sequence[RequestStep]) -> GrammarMasks | None:
        drafts = None
        if self._rounds is not None and not self._grammars.is_empty:
            drafts = self._rounds.drafts_by_slot(steps, self._grammars.slots)
        return self._grammars.masks(wanted.sample_slot_S, wanted.sample_position_S, drafts)

    def _score_prompt(self, logits_XV: Tensor, wanted: LogitRows) -> LogprobRows | None:
        if not len(logits_XV):
            return None
        where = torch.from_numpy(np.stack([wanted.prompt_slot_X, wanted.prompt_position_X])).to(logits_XV.device, non_blocking=True)
        ids_X = self._tables.token_ids[where[0], where[1]].long()
        return logprobs_of(logits_XV, ids_X, self._params.num_prompt_logprobs[wanted.prompt_slot_X])

    @torch.inference_mode()
    def _clean_up(self, slot: int) -> None:
        pools.scrub(self.cache, slot, self._tables.blocks_of(slot), self.config.num_blocks)
