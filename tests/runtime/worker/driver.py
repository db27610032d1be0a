# SPDX-License-Identifier: Apache-2.0
"""A step loop over the real scheduler and worker, and the toy model computed in one piece without any cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whalefall.core.cache_spec import CacheSpec
from whalefall.core.plan import StepPlan
from whalefall.core.request import EngineRequest, FinishReason, TokenLogprobs
from whalefall.core.sampling import SamplingParams
from whalefall.core.seams import Drafter
from whalefall.models.definition import Model
from whalefall.models.toy import DEFINITION
from whalefall.models.toy.config import ToyConfig
from whalefall.models.toy.weights import random_weights
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.sampling.grammar import GrammarStore
from whalefall.runtime.scheduler.config import SchedulerConfig
from whalefall.runtime.scheduler.scheduler import Scheduler
from whalefall.runtime.spec.rounds import SpecConfig
from whalefall.runtime.spec.verify import Acceptance
from whalefall.runtime.worker.step_handle import StepHandle
from whalefall.runtime.worker.worker import Worker, WorkerConfig
from whalefall.testing.toy_checkpoint import toy_context, toy_model

CONFIG = ToyConfig()
BLOCK_TOKENS = 16
MAX_MODEL_LEN = 256


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None


class Engine:
    """Turns until everybody has ended."""

    def __init__(
        self,
        *,
        model: Model | None = None,
        spec: CacheSpec | None = None,
        vocab_size: int = CONFIG.vocab_size,
        history_tokens: int = 0,
        budget: int = 8_192,
        num_blocks: int = 200,
        num_slots: int = 16,
        one_step_ahead: bool = False,
        replay: str = "exact",
        decoder_window: int | None = None,
        drafter: Drafter | None = None,
        num_drafts: int = 0,
        acceptance: Acceptance = "exact",
        is_adaptive: bool = False,
        grammars: GrammarStore | None = None,
        unrolls_drafts: bool = False,
    ) -> None:
        spec = spec or DEFINITION.cache_spec(CONFIG, toy_context(), BLOCK_TOKENS)
        self.worker = Worker(
            model or toy_model(),
            spec,
            WorkerConfig(
                num_blocks=num_blocks,
                num_slots=num_slots,
                max_model_len=MAX_MODEL_LEN,
                vocab_size=vocab_size,
                history_tokens=history_tokens,
                unrolls_drafts=unrolls_drafts,
            ),
            grammars,
            drafter=drafter,
            speculation=SpecConfig(num_drafts=num_drafts, acceptance=acceptance, is_adaptive=is_adaptive) if drafter is not None else None,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=num_slots,
                max_num_batched_tokens=budget,
                replay=replay,  # type: ignore[arg-type]
                decoder_window=decoder_window,
                num_drafts=num_drafts,
            ),
            CacheManager(num_blocks, spec.block_tokens, num_slots),
        )
        self.one_step_ahead = one_step_ahead
        self.answers: dict[str, Answer] = {}
        self.num_drafts = 0
        """Verified so far; of them accepted:"""
        self.num_accepted = 0
        self.num_steps = 0

    def add(self, request_id: str, prompt: Sequence[int], **sampling: object) -> None:
        params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 12, "ignore_eos": True, **sampling})
        self.scheduler.add(EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=params, eos_token_ids=(1,)))

    def run(self, on_turn: Callable[[int], None] | None = None) -> dict[str, Answer]:
        """on_turn: called with the number of each turn before it; may add and abort."""
        pending: tuple[StepPlan, StepHandle] | None = None
        for turn in itertools.count():
            if not self.scheduler.has_work:
                break
            if on_turn is not None:
                on_turn(turn)
            plan = self.scheduler.plan(0.0)
            launched = None if plan is None else (plan, self.worker.launch(plan))
            if not self.one_step_ahead:
                pending, launched = launched, None
            if pending is not None:
                self._commit(*pending)
            pending = launched
        assert self.scheduler.cache.is_pristine
        return self.answers

    def abort(self, request_id: str) -> None:
        for update in self.scheduler.abort([request_id]):
            self.answers.setdefault(update.request_id, Answer()).finish_reason = update.finish_reason

    def _commit(self, plan: StepPlan, handle: StepHandle) -> None:
        result = handle.wait()
        self.num_steps += 1
        for gave in result.results:
            self.num_drafts += gave.num_drafts
            self.num_accepted += max(len(gave.token_ids) - 1, 0)
        for update in self.scheduler.commit(plan, result, 0.0):
            answer = self.answers.setdefault(update.request_id, Answer())
            answer.token_ids += update.new_token_ids
            answer.logprobs += update.logprobs or ()
            answer.prompt_logprobs += update.prompt_logprobs or ()
            answer.finish_reason, answer.error = update.finish_reason, update.error


def ask(prompt: Sequence[int], *, engine: Engine | None = None, **sampling: object) -> Answer:
    """One request, alone."""
    engine = engine or Engine()
    engine.add("alone", prompt, **sampling)
    return engine.run()["alone"]


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, CONFIG.vocab_size, (length,), generator=torch.Generator().manual_seed(1_000 * seed + length)).tolist()


def plain_logits(token_ids: Sequence[int], *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The toy in one piece: float64 logits of every position [T, V], from the weights alone."""
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(CONFIG, seed).items()}
    hidden, heads = CONFIG.hidden_size, CONFIG.num_attention_heads

    def norm(x_TH: Tensor, name: str) -> Tensor:
        return x_TH / (x_TH.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt() * weights[name + ".weight"]

    length = len(token_ids)
    angle_TF = torch.arange(length, dtype=dtype)[:, None] * 10_000 ** (-torch.arange(0, hidden, 2, dtype=dtype) / hidden)
    x_TH = weights["embed.weight"][list(token_ids)] + torch.cat([angle_TF.sin(), angle_TF.cos()], -1)
    for layer in range(CONFIG.num_hidden_layers):
        at = f"layers.{layer}."
        q_TH, k_TH, v_TH = (norm(x_TH, at + "attn_norm") @ weights[at + "wqkv.weight"].T).chunk(3, -1)
        q_NTD, k_NTD, v_NTD = (y.view(length, heads, -1).transpose(0, 1) for y in (q_TH, k_TH, v_TH))
        scores_NTT = q_NTD @ k_NTD.transpose(1, 2) / math.sqrt(hidden // heads)
        scores_NTT += torch.full((length, length), -math.inf, dtype=dtype).triu(1)
        x_TH = x_TH + (scores_NTT.softmax(-1) @ v_NTD).transpose(0, 1).reshape(length, hidden) @ weights[at + "wo.weight"].T
        inner_TF = norm(x_TH, at + "ffn_norm") @ weights[at + "w1.weight"].T
        x_TH = x_TH + (inner_TF * inner_TF.sigmoid()) @ weights[at + "w2.weight"].T
    return norm(x_TH, "norm") @ weights["head.weight"].T


def plain_greedy(prompt: Sequence[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(plain_logits(ids)[-1].argmax()))
    return ids[len(prompt) :]
