# SPDX-License-Identifier: Apache-2.0
"""An engine whose answers are written down beforehand: real loop, scheduler and fronts around a worker that reads from a script."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import tokenizers
from tokenizers import decoders, models

from whalefall.core.plan import NewRequest, RequestResult, RequestStep, StepPlan, StepResult
from whalefall.core.request import TokenLogprobs
from whalefall.core.seams import Clock, MonotonicClock
from whalefall.engine.core import EngineCore
from whalefall.engine.opened import OpenModel
from whalefall.engine.resolve import ResolvedConfig
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler.config import SchedulerConfig
from whalefall.runtime.scheduler.scheduler import Scheduler
from whalefall.runtime.worker.memory import WorkerMemory
from whalefall.testing.tokenizer import BOS, EOS
from whalefall.text.tokenizer import BYTE_OF_LETTER, Tokenizer

_LETTER_OF_BYTE = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}


def piece_tokenizer(pieces: Sequence[str | bytes]) -> Tokenizer:
    """A vocabulary of whole pieces: id 0 begins, id 1 ends a sequence, id 2 + i is piece i."""
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    spelled = ["".join(_LETTER_OF_BYTE[byte] for byte in piece) for piece in raw]
    vocab = {token: i for i, token in enumerate([BOS, EOS, *spelled])}
    assert len(vocab) == 2 + len(pieces), "pieces must differ"
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=EOS))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    return Tokenizer(backend.to_str(), {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True})


class ScriptedWorker:
    """Token i of a request's answer is `script(new_request)[i]`; its log-probability is -(i + 1)."""

    def __init__(self, script: Callable[[NewRequest], Sequence[int]]) -> None:
        self._script = script
        self._slots: dict[int, NewRequest] = {}
        self.fail_with: Exception | None = None
        """Raised by the next launch."""
        self.faults: dict[str, str] = {}
        """Beginning of a request id -> fault of this request in its next step."""
        self.permits: threading.Semaphore | None = None
        """When set, every launch takes one, and waits for it."""
        self.num_launches = 0

    def launch(self, plan: StepPlan) -> _Done:
        self.num_launches += 1
        if self.permits is not None:
            assert self.permits.acquire(timeout=60)
        if self.fail_with is not None:
            raise self.fail_with
        self._slots.update({new.slot: new for new in plan.new_requests})
        return _Done(StepResult(step_id=plan.step_id, results=tuple(map(self._answer, plan.steps))))

    def _answer(self, step: RequestStep) -> RequestResult:
        fault = next((text for name, text in self.faults.items() if step.request_id.startswith(name)), None)
        if fault is not None:
            return RequestResult(fault=fault)
        new = self._slots[step.slot]
        end = step.start + step.num_tokens
        prompt = new.token_ids[: new.num_prompt_tokens]
        scored = range(step.start + 1, min(end, len(prompt) - 1) + 1)
        prompt_logprobs = tuple(_logprobs(prompt[p], -float(p)) for p in scored) if step.wants_prompt_logprobs else None
        if not step.samples:
            return RequestResult(prompt_logprobs=prompt_logprobs)
        index = end - new.num_prompt_tokens
        token_id = self._script(new)[index]
        wants = new.sampling.logprobs is not None
        logprobs = (_logprobs(token_id, -float(index + 1)),) if wants else None
        return RequestResult(token_ids=(token_id,), logprobs=logprobs, prompt_logprobs=prompt_logprobs)


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


def _logprobs(token_id: int, logprob: float) -> TokenLogprobs:
    none = np.zeros(0, np.int32)
    return TokenLogprobs(token_id=token_id, logprob=logprob, rank=1, top_ids=none, top_logprobs=none.astype(np.float32))


def small_config(**changes: Any) -> ResolvedConfig:
    """A resolved config of a small engine; the memory figures are made up."""
    memory = WorkerMemory(num_blocks=33, num_slots=9, block_bytes=0, slot_bytes=0, table_bytes=0, step_logits_bytes=0)
    values: dict[str, Any] = {
        "model_name": "scripted",
        "family": "scripted",
        "device": "cpu",
        "dtype": "float32",
        "weights": "dense",
        "kv_cache_dtype": "unrounded",
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "num_blocks": memory.num_blocks,
        "num_slots": memory.num_slots,
        "replay": "exact",
        "decoder_window": None,
        "async_scheduling": False,
        "max_logprobs": 20,
        "seed": None,
        "stats_interval_s": 0.0,
        "vocab_size": 264,
        "history_tokens": 0,
        "weights_bytes": 0,
        "mapped_bytes": 0,
        "memory": memory,
        "chosen_by": {},
    }
    return ResolvedConfig(**(values | changes))


def scripted_engine(worker: Any, tokenizer: Tokenizer, config: ResolvedConfig, clock: Clock | None = None) -> tuple[OpenModel, EngineCore]:
    """What `LLM.from_parts` and `AsyncLLM` are made from."""
    scheduler_config = SchedulerConfig(
        max_model_len=config.max_model_len, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
    )
    scheduler = Scheduler(scheduler_config, CacheManager(config.num_blocks, config.block_size, config.num_slots))
    core = EngineCore(scheduler, worker, clock=clock or MonotonicClock(), is_one_step_ahead=config.async_scheduling)
    facts = cast(Any, SimpleNamespace(eos_token_ids=(1,), vocab_size=config.vocab_size, chat_format="none"))
    opened = OpenModel(model_dir=Path("."), definition=facts, model_config=facts, tokenizer=tokenizer, config=config)
    return opened, core


def script_by_prompt(answers: Mapping[tuple[int, ...], Sequence[int]]) -> Callable[[NewRequest], Sequence[int]]:
    """A script that looks the answer up by the prompt."""
    return lambda new: answers[tuple(new.token_ids[: new.num_prompt_tokens])]
