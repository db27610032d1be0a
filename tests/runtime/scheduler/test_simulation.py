# SPDX-License-Identifier: Apache-2.0
"""Random lives of a scheduler: whatever budgets, pools, aborts, faults and overlap do, everybody gets the same tokens and nothing leaks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from whalefall.core.request import EngineRequest, FinishReason
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler import Scheduler, SchedulerConfig, TraceWriter, rerun
from whalefall.testing.fakes import FakeWorker, expected_answer, prompt_score
from whalefall.testing.simulation import Outcome, Simulation

BLOCK_TOKENS = 4
VOCAB_SIZE = 160
NUM_TURNS = 1_250
"""Of one life; ten thousand in all the settings without drafts."""


@dataclass(frozen=True)
class Setting:
    """One kind of engine to live in."""

    num_blocks: int
    num_slots: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 60
    decoder_window: int | None = 8
    one_step_ahead: bool = True
    num_drafts: int = 0
    min_preemptions: int = 0
    """A pool this small must come under pressure, or the test shows nothing."""

    def simulation(self, trace: TraceWriter | None = None) -> Simulation:
        config = SchedulerConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            decoder_window=self.decoder_window,
            num_drafts=self.num_drafts,
        )
        scheduler = Scheduler(config, CacheManager(self.num_blocks, BLOCK_TOKENS, self.num_slots), trace=trace)
        return Simulation(scheduler, FakeWorker(block_tokens=BLOCK_TOKENS, vocab_size=VOCAB_SIZE), one_step_ahead=self.one_step_ahead)


def some_request(rng: random.Random, name: str, longest: int) -> EngineRequest:
    num_prompt = rng.randint(1, rng.choice([3, 10, longest]))
    scores = rng.random() < 0.2
    max_tokens = rng.choice([1, 2, 5, 12, 30, None] + [0] * scores)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=0 if max_tokens is None else rng.randint(0, min(max_tokens, 4)),
        prompt_logprobs=1 if scores else None,
        stop_token_ids=rng.choice([(), (7,), (7, 8)]),
        ignore_eos=rng.random() < 0.3,
        seed=rng.randrange(2**32),
    )
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_prompt))
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, eos_token_ids=(0, 1))


def live(simulation: Simulation, rng: random.Random, num_turns: int, longest: int) -> set[str]:
    """Random arrivals, aborts and faults between the two halves of every turn; then the rest is worked off. The names of the aborted."""
    aborted: set[str] = set()
    for turn in range(num_turns):
        busy = simulation.scheduler.num_running + simulation.scheduler.num_waiting
        for _ in range(rng.choice([0, 0, 1, 3]) if busy < 12 else 0):
            request = some_request(rng, f"r{turn}-{rng.randrange(10**9)}", longest)
            if rng.random() < 0.05:
                simulation.worker.fault_at[request.request_id] = rng.randrange(len(request.prompt_token_ids) + 5)
            simulation.add(request)
        simulation.launch()
        if rng.random() < 0.05:
            victims = rng.sample(sorted(simulation.outcomes)[-12:], 1)
            aborted.update(name for name in victims if simulation.outcomes[name].finish_reason is None)
            simulation.abort([*victims, "nobody"])
        simulation.collect()
    simulation.finish()
    return aborted


def assert_same_tokens(outcome: Outcome, max_context: int) -> None:
    """Everything a request was told, complete or cut off by an abort or a fault, is what it is told when alone."""
    token_ids, reason = expected_answer(outcome.request, max_context, VOCAB_SIZE)
    prompt = outcome.request.prompt_token_ids
    scores = outcome.prompt_logprobs
    assert scores == [prompt_score(prompt, position) for position in range(1, len(scores) + 1)]
    assert outcome.token_ids == list(token_ids[: len(outcome.token_ids)])
    if outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        assert outcome.token_ids == list(token_ids)
        assert outcome.finish_reason is reason
        assert len(scores) == (0 if outcome.request.sampling.prompt_logprobs is None else len(prompt) - 1)
        assert outcome.last is not None and len(outcome.last.timings.token_s) == len(token_ids)


SETTINGS = [
    Setting(num_blocks=400, num_slots=16, max_num_seqs=16, max_num_batched_tokens=64),
    Setting(num_blocks=16, num_slots=9, max_num_seqs=8, max_num_batched_tokens=16, min_preemptions=20),
    Setting(num_blocks=16, num_slots=8, max_num_seqs=8, max_num_batched_tokens=16, one_step_ahead=False, min_preemptions=20),
    Setting(num_blocks=12, num_slots=12, max_num_seqs=12, max_num_batched_tokens=7, decoder_window=3, min_preemptions=20),
    Setting(num_blocks=11, num_slots=3, max_num_seqs=6, max_num_batched_tokens=2, decoder_window=None),
    Setting(num_blocks=11, num_slots=4, max_num_seqs=4, max_num_batched_tokens=1),
    Setting(num_blocks=11, num_slots=1, max_num_seqs=1, max_num_batched_tokens=100, one_step_ahead=False),
    Setting(num_blocks=17, num_slots=20, max_num_seqs=20, max_num_batched_tokens=128, min_preemptions=20),
    Setting(num_blocks=400, num_slots=16, max_num_seqs=16, max_num_batched_tokens=64, num_drafts=3),
    Setting(num_blocks=16, num_slots=9, max_num_seqs=8, max_num_batched_tokens=24, num_drafts=5, min_preemptions=20),
    Setting(num_blocks=16, num_slots=9, max_num_seqs=8, max_num_batched_tokens=24, num_drafts=2, one_step_ahead=False, min_preemptions=20),
    Setting(num_blocks=11, num_slots=3, max_num_seqs=6, max_num_batched_tokens=5, num_drafts=7, decoder_window=3),
]


@pytest.mark.parametrize("seed, setting", list(enumerate(SETTINGS)))
def test_random_lives_keep_every_invariant(seed: int, setting: Setting) -> None:
    rng = random.Random(seed)
    simulation = setting.simulation()

    aborted = live(simulation, rng, num_turns=NUM_TURNS, longest=36)

    max_context = min(setting.max_model_len, (setting.num_blocks - 1) * BLOCK_TOKENS + 1)
    for outcome in simulation.outcomes.values():
        assert_same_tokens(outcome, max_context)
    reasons = {name: outcome.finish_reason for name, outcome in simulation.outcomes.items()}
    assert aborted == {name for name, reason in reasons.items() if reason is FinishReason.ABORT}
    assert all(simulation.worker.fault_at[name] >= 0 for name, reason in reasons.items() if reason is FinishReason.ERROR)
    assert set(reasons.values()) >= {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}
    assert simulation.scheduler.num_preemptions >= setting.min_preemptions
    if setting.num_drafts:
        assert 0 < simulation.num_accepted < simulation.num_drafts
    assert simulation.num_turns >= NUM_TURNS


@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_do_not_depend_on_the_road(setting: Setting) -> None:
    rng = random.Random(17)
    requests = [some_request(rng, f"r{i}", longest=30) for i in range(40)]
    simulation = setting.simulation()
    for request in requests:
        simulation.add(request)

    simulation.finish()

    for request in requests:
        assert_same_tokens(simulation.outcomes[request.request_id], min(setting.max_model_len, (setting.num_blocks - 1) * BLOCK_TOKENS + 1))
        assert simulation.outcomes[request.request_id].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("setting", SETTINGS[1:4])
def test_a_trace_lived_again_is_byte_identical(setting: Setting) -> None:
    recorded: list[str] = []
    live(setting.simulation(TraceWriter(recorded.append)), random.Random(5), num_turns=300, longest=36)

    again = rerun(recorded)

    assert "\n".join(again).encode() == "\n".join(recorded).encode()
    assert {line.split('"')[3] for line in recorded} == {"start", "add", "abort", "plan", "commit"}


def test_a_trace_shows_a_changed_rule() -> None:
    recorded: list[str] = []
    live(SETTINGS[1].simulation(TraceWriter(recorded.append)), random.Random(5), num_turns=50, longest=36)
    changed = [recorded[0].replace('"decoder_window":8', '"decoder_window":9'), *recorded[1:]]

    again = rerun(changed)

    assert [line for line in again if '"add"' in line] == [line for line in recorded if '"add"' in line]
    assert [line for line in again if '"plan"' in line] != [line for line in recorded if '"plan"' in line]
