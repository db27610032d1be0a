# SPDX-License-Identifier: Apache-2.0
"""Scheduler, cache and worker around a loaded model, turned by hand: prompts in, tokens and whole log-probabilities out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whalefall.core.plan import StepPlan
from whalefall.core.request import EngineRequest, FinishReason
from whalefall.core.sampling import SamplingParams
from whalefall.core.seams import Drafter
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler import Scheduler, SchedulerConfig
from whalefall.runtime.spec.rounds import SpecConfig
from whalefall.runtime.worker.step_handle import StepHandle
from whalefall.runtime.worker.worker import Worker, WorkerConfig
from whalefall.testing.drive import LoadedModel

MAX_MODEL_LEN = 512


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    """float32 [V] per token."""
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None

    @property
    def logprobs_TV(self) -> Tensor:
        return torch.stack(self.logprobs)


class CachedEngine:
    def __init__(
        self,
        loaded: LoadedModel,
        *,
        replay: str,
        prefix_caching: bool = True,
        block_tokens: int = 4,
        num_blocks: int = 129,
        num_slots: int = 4,
        budget: int = 512,
        drafter: Drafter | None = None,
        one_step_ahead: bool = False,
        unrolls_drafts: bool = False,
    ) -> None:
        """drafter: judges as many drafts as the model was loaded for (BuildContext.max_draft_tokens)."""
        spec = loaded.definition.cache_spec(loaded.config, loaded.context, block_tokens)
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_slots,
            max_num_batched_tokens=budget,
            replay=replay,  # type: ignore[arg-type]
            decoder_window=loaded.config.decoder_window,
            prefix_caching=prefix_caching,
            replay_rows=spec.replay_rows,
            has_fixed_state=spec.snapshot_bytes > 0,
            num_drafts=0 if drafter is None else loaded.context.max_draft_tokens,
        )
        self.loaded = loaded
        self.cache = CacheManager(num_blocks, block_tokens, num_slots)
        self.scheduler = Scheduler(config, self.cache)
        worker_config = WorkerConfig(
            num_blocks=num_blocks,
            num_slots=num_slots,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=loaded.config.vocab_size,
            history_tokens=loaded.config.history_tokens,
            keeps_snapshots=config.takes_snapshots,
            unrolls_drafts=unrolls_drafts,
        )
        speculation = None if drafter is None else SpecConfig(num_drafts=loaded.context.max_draft_tokens)
        self.worker = Worker(loaded.model, spec, worker_config, drafter=drafter, speculation=speculation)
        self.num_accepted = 0
        self._may_fail = False
        self._one_step_ahead = one_step_ahead
        self._pending: tuple[StepPlan, StepHandle] | None = None
        self.plans: list[StepPlan] = []
        self.answers: dict[str, Answer] = {}

    def add(
        self, name: str, prompt: Sequence[int], *, num_tokens: int = 4, params: Mapping[str, Any] | None = None, **request: Any
    ) -> None:
        """params: of the sampler, where they are not greedy. An error then is an end like another."""
        self._may_fail |= params is not None
        values: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": -1}
        sampling = SamplingParams(**{**values, **(params or {})})
        self.answers[name] = Answer()
        self.scheduler.add(EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, **request))

    def turn(self) -> None:
        plan = self.scheduler.plan(0.0)
        assert plan is not None or self._pending is not None
        launched = None
        if plan is not None:
            self.plans.append(plan)
            launched = plan, self.worker.launch(plan)
        due, self._pending = (self._pending, launched) if self._one_step_ahead else (launched, None)
        if due is None:
            return
        result = due[1].wait()
        self.num_accepted += sum(max(0, len(gave.token_ids) - 1) for gave in result.results)
        for update in self.scheduler.commit(due[0], result, 0.0):
            answer = self.answers[update.request_id]
            assert update.error is None or self._may_fail, update.error
            answer.token_ids += update.new_token_ids
            answer.logprobs += [torch.from_numpy(entry.top_logprobs) for entry in update.logprobs or ()]
            answer.num_cached_tokens, answer.finish_reason = update.num_cached_tokens, update.finish_reason
        self.cache.check()

    def run(self) -> dict[str, Answer]:
        while self.scheduler.has_work:
            self.turn()
        assert self.cache.is_pristine
        return self.answers

    def ask(self, prompt: Sequence[int], *, num_tokens: int = 4, **request: Any) -> Answer:
        """One request, alone."""
        name = f"r{len(self.answers)}"
        self.add(name, prompt, num_tokens=num_tokens, **request)
        return self.run()[name]

    def num_rows(self, name: str) -> int:
        """Rows that ran for a request."""
        return sum(step.num_tokens for plan in self.plans for step in plan.steps if step.request_id == name)

    def published(self) -> dict[bytes, list[Tensor]]:
        """Content of every published block, by key: one tensor per growing field."""
        content = {}
        for node in self.cache.index:
            parts = []
            for pool in self.worker.cache.growing.values():
                per_block = pool.shape[0] // self.cache.num_blocks
                parts.append(pool[node.block_id * per_block : (node.block_id + 1) * per_block].clone())
            content[node.key] = parts
        return content
