# SPDX-License-Identifier: Apache-2.0
"""Random lives with a prefix cache: shared beginnings, growing conversations, aborts, faults, preemptions, evictions and resets. Everybody
gets the tokens of a run alone, no window is stale, no published cell is written, and nothing leaks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from whalefall.core.request import EngineRequest, FinishReason
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler import Scheduler, SchedulerConfig, TraceWriter, rerun
from whalefall.testing.fakes import FakeWorker, expected_answer
from whalefall.testing.simulation import Simulation

BLOCK_TOKENS = 4
VOCAB_SIZE = 160


@dataclass(frozen=True)
class Setting:
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    replay: str = "bounded"
    window: int = 6
    decoder_window: int | None = 6
    max_model_len: int = 64
    one_step_ahead: bool = True
    num_drafts: int = 0
    min_evictions: int = 0
    min_preemptions: int = 0

    def simulation(self, trace: TraceWriter | None = None, *, prefix_caching: bool = True) -> Simulation:
        config = SchedulerConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            replay=self.replay,  # type: ignore[arg-type]
            decoder_window=self.decoder_window,
            prefix_caching=prefix_caching,
            replay_rows=self.window,
            has_fixed_state=self.window > 0,
            num_drafts=self.num_drafts,
        )
        cache = CacheManager(self.num_blocks, BLOCK_TOKENS, self.max_num_seqs + 1)
        cache.events = []
        worker = FakeWorker(block_tokens=BLOCK_TOKENS, vocab_size=VOCAB_SIZE, window=self.window, num_spare_rows=self.num_drafts)
        return Simulation(Scheduler(config, cache, trace=trace), worker, one_step_ahead=self.one_step_ahead)

    @property
    def max_context(self) -> int:
        return min(self.max_model_len, (self.num_blocks - 1) * BLOCK_TOKENS + 1)


class Users:
    """Whoever sends the requests: some begin with one of a few system prompts, many go on with a conversation they had."""

    def __init__(self, rng: random.Random, longest: int) -> None:
        self._rng = rng
        self._name = rng.randrange(10**9)
        self._longest = longest
        self._systems = [self._ids(rng.randint(3, 24)) for _ in range(3)]
        self._talks: list[list[int]] = []
        self._count = 0

    def request(self) -> EngineRequest:
        rng = self._rng
        self._count += 1
        begin = rng.choice([rng.choice(self._systems), rng.choice(self._talks or [[]]), []])
        prompt = begin[: rng.choice([len(begin), rng.randint(0, len(begin))])] + self._ids(rng.choice([0, 1, 3, 9]))
        prompt = (prompt or self._ids(2))[: self._longest]
        sampling = SamplingParams(
            max_tokens=rng.choice([1, 2, 5, 12, 25]), prompt_logprobs=1 if rng.random() < 0.1 else None, seed=rng.randrange(3)
        )
        return EngineRequest(
            request_id=f"r{self._name}-{self._count}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            eos_token_ids=(0, 1),
            cache_salt=rng.choice(["", "", "other"]),
            use_prefix_cache=rng.random() < 0.9,
        )

    def heard(self, talk: list[int]) -> None:
        self._talks = [*self._talks[-15:], talk]

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(2, VOCAB_SIZE) for _ in range(count)]


def live(simulation: Simulation, rng: random.Random, num_turns: int, longest: int) -> None:
    users = Users(rng, longest)
    heard: set[str] = set()
    for _ in range(num_turns):
        busy = simulation.scheduler.num_running + simulation.scheduler.num_waiting
        for _ in range(rng.choice([0, 0, 1, 3]) if busy < 12 else 0):
            request = users.request()
            if rng.random() < 0.03:
                simulation.worker.fault_at[request.request_id] = rng.randrange(len(request.prompt_token_ids) + 5)
            simulation.add(request)
        simulation.launch()
        if rng.random() < 0.05:
            simulation.abort(rng.sample(sorted(simulation.outcomes)[-12:], 1) if simulation.outcomes else [])
        if rng.random() < 0.005:
            simulation.scheduler.reset_prefix_cache()
        simulation.collect()
        for name, outcome in list(simulation.outcomes.items())[-24:]:
            if outcome.finish_reason is not None and name not in heard:
                heard.add(name)
                users.heard([*outcome.request.prompt_token_ids, *outcome.token_ids])
    simulation.finish()


SETTINGS = [
    Setting(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=64),
    Setting(num_blocks=20, max_num_seqs=8, max_num_batched_tokens=16, min_evictions=100, min_preemptions=10),
    Setting(num_blocks=20, max_num_seqs=8, max_num_batched_tokens=16, one_step_ahead=False, min_evictions=100, min_preemptions=10),
    Setting(num_blocks=17, max_num_seqs=12, max_num_batched_tokens=7, window=3, decoder_window=5, min_evictions=100, min_preemptions=10),
    Setting(num_blocks=40, max_num_seqs=6, max_num_batched_tokens=5, window=8, decoder_window=8, min_evictions=100),
    Setting(num_blocks=40, max_num_seqs=6, max_num_batched_tokens=1, window=0, decoder_window=None, min_evictions=20),
    Setting(num_blocks=40, max_num_seqs=6, max_num_batched_tokens=33, window=5, decoder_window=None, min_evictions=100),
    Setting(num_blocks=20, max_num_seqs=8, max_num_batched_tokens=16, replay="exact", min_evictions=100, min_preemptions=10),
    Setting(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=64, replay="exact", one_step_ahead=False, min_evictions=100),
    Setting(num_blocks=17, max_num_seqs=6, max_num_batched_tokens=3, replay="exact", window=9, min_evictions=50, min_preemptions=3),
    Setting(num_blocks=17, max_num_seqs=6, max_num_batched_tokens=30, replay="exact", window=0, decoder_window=None, min_evictions=50),
    Setting(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=40, num_drafts=3, min_evictions=50),
    Setting(num_blocks=20, max_num_seqs=8, max_num_batched_tokens=16, num_drafts=5, min_evictions=50, one_step_ahead=False),
    Setting(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=64, replay="exact", num_drafts=4, min_evictions=50),
    Setting(num_blocks=20, max_num_seqs=8, max_num_batched_tokens=16, replay="exact", num_drafts=2, min_evictions=50, one_step_ahead=False),
]


@pytest.mark.parametrize("seed, setting", list(enumerate(SETTINGS)))
def test_random_lives_with_hits_keep_every_invariant(seed: int, setting: Setting) -> None:
    simulation = setting.simulation()

    live(simulation, random.Random(seed), num_turns=700, longest=40)

    for outcome in simulation.outcomes.values():
        token_ids, reason = expected_answer(outcome.request, setting.max_context, VOCAB_SIZE)
        is_whole = outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert outcome.token_ids == list(token_ids if is_whole else token_ids[: len(outcome.token_ids)])
        assert outcome.finish_reason is reason or not is_whole
    counters = simulation.scheduler.cache.counters
    assert counters.hit_tokens >= 30 and (counters.num_resets > 0 or setting.num_drafts)
    assert counters.evicted_blocks >= setting.min_evictions
    assert simulation.scheduler.num_preemptions >= setting.min_preemptions
    assert (simulation.num_accepted > 0) == (setting.num_drafts > 0)
    assert (counters.replayed_tokens > 0) == (setting.replay == "bounded" and setting.window > 0)


@pytest.mark.parametrize("setting", [SETTINGS[1], SETTINGS[7]])
def test_a_trace_with_hits_lived_again_is_byte_identical(setting: Setting) -> None:
    recorded: list[str] = []
    simulation = setting.simulation(TraceWriter(recorded.append))
    live(simulation, random.Random(5), num_turns=200, longest=40)
    simulation.scheduler.reset_prefix_cache()
    live(simulation, random.Random(6), num_turns=200, longest=40)

    assert rerun(recorded) == recorded
    assert any('"reset_prefix_cache"' in line for line in recorded)


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[8]])
def test_hits_save_rows_and_change_no_answer(setting: Setting) -> None:
    warm, cold = setting.simulation(), setting.simulation(prefix_caching=False)

    talks = [converse(simulation, random.Random(11), num_talks=5, num_turns=6) for simulation in (warm, cold)]

    assert talks[0] == talks[1]
    assert warm.worker.num_rows < 0.7 * cold.worker.num_rows


def test_without_a_prefix_cache_nothing_is_remembered() -> None:
    simulation = SETTINGS[0].simulation(prefix_caching=False)
    live(simulation, random.Random(3), num_turns=200, longest=40)

    cache = simulation.scheduler.cache
    assert cache.num_cached_blocks == 0 and cache.counters.query_tokens == 0


def converse(simulation: Simulation, rng: random.Random, num_talks: int, num_turns: int) -> list[list[int]]:
    """Several conversations at once; each turn sends all that was said before."""
    talks = [[rng.randrange(2, VOCAB_SIZE) for _ in range(9)] for _ in range(num_talks)]
    for turn in range(num_turns):
        for i, talk in enumerate(talks):
            sampling = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)
            simulation.add(EngineRequest(request_id=f"{i}-{turn}", prompt_token_ids=tuple(talk), sampling=sampling))
        simulation.finish()
        for i, talk in enumerate(talks):
            talk += [*simulation.outcomes[f"{i}-{turn}"].token_ids, rng.randrange(2, VOCAB_SIZE)]
    return talks
