# SPDX-License-Identifier: Apache-2.0
"""Any sequence of adds, aborts, faults and turns, in any engine: hypothesis writes the sequences and shortens those that fail."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from whalefall.core.request import EngineRequest, FinishReason
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler import Scheduler, SchedulerConfig
from whalefall.testing.fakes import FakeWorker, expected_answer, prompt_score
from whalefall.testing.simulation import Simulation

VOCAB_SIZE = 40
MAX_MODEL_LEN = 30
CUT_SHORT = (FinishReason.ABORT, FinishReason.ERROR)


class SchedulerLife(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 14),
        block_tokens=st.integers(1, 5),
        num_slots=st.integers(1, 5),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 40),
        decoder_window=st.one_of(st.none(), st.integers(1, 12)),
        one_step_ahead=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_tokens: int,
        num_slots: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decoder_window: int | None,
        one_step_ahead: bool,
    ) -> None:
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            decoder_window=decoder_window,
        )
        self.cache = CacheManager(num_blocks, block_tokens, num_slots)
        worker = FakeWorker(block_tokens=block_tokens, vocab_size=VOCAB_SIZE)
        self.simulation = Simulation(Scheduler(config, self.cache), worker, one_step_ahead=one_step_ahead)

    @rule(
        num_prompt=st.integers(1, 5),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        scores=st.booleans(),
        seed=st.integers(0, 5),
        fault_after=st.one_of(st.none(), st.integers(0, 8)),
    )
    def add(self, num_prompt: int, max_tokens: int | None, scores: bool, seed: int, fault_after: int | None) -> None:
        name = f"r{len(self.simulation.outcomes)}"
        sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if scores else None, seed=seed)
        if fault_after is not None and seed == 0:
            self.simulation.worker.fault_at[name] = fault_after
        prompt = tuple(range(5, 5 + num_prompt))
        self.simulation.add(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, eos_token_ids=(0, 1)))

    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        self.simulation.abort([f"r{index}"])

    @rule()
    def turn(self) -> None:
        self.simulation.turn()

    @rule(index=st.integers(0, 20))
    def turn_with_an_abort_inside(self, index: int) -> None:
        self.simulation.launch()
        self.simulation.abort([f"r{index}"])
        self.simulation.collect()

    @invariant()
    def blocks_and_slots_have_one_place(self) -> None:
        self.cache.check()

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        self.simulation.finish()
        max_context = min(MAX_MODEL_LEN, self.cache.capacity_tokens + 1)
        for outcome in self.simulation.outcomes.values():
            token_ids, reason = expected_answer(outcome.request, max_context, VOCAB_SIZE)
            scores, prompt = outcome.prompt_logprobs, outcome.request.prompt_token_ids
            is_cut = outcome.finish_reason in CUT_SHORT
            assert outcome.token_ids == list(token_ids[: len(outcome.token_ids)] if is_cut else token_ids)
            assert is_cut or outcome.finish_reason is reason
            assert scores == [prompt_score(prompt, position) for position in range(1, len(scores) + 1)]
            assert is_cut or outcome.request.sampling.prompt_logprobs is None or len(scores) == len(prompt) - 1


TestSchedulerLife = SchedulerLife.TestCase
TestSchedulerLife.settings = settings(max_examples=80, stateful_step_count=50, deadline=None, derandomize=True)
