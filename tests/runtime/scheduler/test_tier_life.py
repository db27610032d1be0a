# SPDX-License-Identifier: Apache-2.0
"""Random lives over three tiers: moves end when they like, fail, stall; requests come, hit, are preempted, aborted and reset meanwhile.
Everybody gets the tokens of a run alone, no record lands in a wrong place, nobody starves, and nothing leaks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.runtime.scheduler.test_prefix_cache_life import SETTINGS, VOCAB_SIZE, Setting, converse, live
from whalefall.core.request import EngineRequest, FinishReason
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.kvcache.tiers.ledger import LedgerConfig, TierLedger
from whalefall.runtime.kvcache.tiers.moves import MoveReport
from whalefall.runtime.scheduler import Scheduler, TraceWriter, rerun
from whalefall.testing.fake_mover import BlockRecord, FakeMover
from whalefall.testing.fakes import expected_answer
from whalefall.testing.simulation import Simulation

SMALL, LARGE = SETTINGS[1], SETTINGS[0]
EXACT = SETTINGS[7]


@dataclass
class Tiers:
    num_rows: int
    has_store: bool = True
    failure_rate: float = 0.0
    stall_rate: float = 0.0
    max_wait_s: float = 2.0
    disk: dict[bytes, BlockRecord] = field(default_factory=dict)

    def simulation(self, setting: Setting, seed: int, trace: TraceWriter | None = None) -> Simulation:
        plain = setting.simulation()
        cache, config = plain.scheduler.cache, plain.scheduler.config
        min_hit = config.replay_rows if config.replay == "bounded" else 0
        tiers = TierLedger(
            cache, LedgerConfig(num_rows=self.num_rows, has_store=self.has_store, min_hit_tokens=min_hit, max_wait_s=self.max_wait_s)
        )
        mover = FakeMover(plain.worker, random.Random(seed), self.disk, self.failure_rate, self.stall_rate)
        scheduler = Scheduler(config, cache, tiers=tiers, trace=trace)
        return Simulation(scheduler, plain.worker, one_step_ahead=plain.one_step_ahead, mover=mover)


def check_answers(simulation: Simulation, setting: Setting) -> None:
    for outcome in simulation.outcomes.values():
        token_ids, reason = expected_answer(outcome.request, setting.max_context, VOCAB_SIZE)
        is_whole = outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert outcome.token_ids == list(token_ids if is_whole else token_ids[: len(outcome.token_ids)])
        assert outcome.finish_reason is reason or not is_whole


LIVES = [
    (SMALL, Tiers(num_rows=200)),
    (SMALL, Tiers(num_rows=200, has_store=False)),
    (SMALL, Tiers(num_rows=12)),
    (SMALL, Tiers(num_rows=1)),
    (SMALL, Tiers(num_rows=40, failure_rate=0.3)),
    (SMALL, Tiers(num_rows=40, stall_rate=0.9, max_wait_s=0.1)),
    (SETTINGS[3], Tiers(num_rows=60, failure_rate=0.1)),
    (SETTINGS[5], Tiers(num_rows=60)),
    (SETTINGS[8], Tiers(num_rows=30)),
    (EXACT, Tiers(num_rows=100)),
    (EXACT, Tiers(num_rows=20, failure_rate=0.2, stall_rate=0.5)),
]


@pytest.mark.parametrize("seed, setting, tiers", [(seed, *life) for seed, life in enumerate(LIVES)])
def test_random_lives_over_tiers_keep_every_invariant(seed: int, setting: Setting, tiers: Tiers) -> None:
    simulation = tiers.simulation(setting, seed)

    live(simulation, random.Random(seed), num_turns=600, longest=40)

    check_answers(simulation, setting)
    ledger = simulation.scheduler.tiers
    assert ledger is not None and not ledger.has_moves
    assert ledger.counters.stored_blocks > 20
    if tiers.num_rows >= 40 and tiers.stall_rate == 0:
        assert ledger.counters.loaded_blocks > 10
    assert (ledger.counters.disk_hits > 0) <= tiers.has_store
    assert (ledger.counters.num_timeouts > 0) >= (tiers.max_wait_s < 1)


@pytest.mark.parametrize("setting", [LARGE, EXACT, SETTINGS[8]])
def test_a_restart_finds_on_disk_what_was_computed_before(setting: Setting) -> None:
    tiers = Tiers(num_rows=60)
    before, after, cold = (tiers.simulation(setting, seed) for seed in (1, 2, 3))
    cold.mover.disk = {}  # type: ignore[union-attr]
    for i, simulation in enumerate((before, after, cold)):
        for n in range(3):
            prompt = tuple(2 + (n * 37 + at * at) % 150 for at in range(30))
            simulation.add(EngineRequest(request_id=f"{i}-{n}", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=3, seed=0)))
            simulation.finish()

    answers = [[outcome.token_ids for outcome in s.outcomes.values()] for s in (before, after, cold)]
    assert answers[0] == answers[1] == answers[2]
    hits = [s.scheduler.cache.counters.hit_tokens for s in (before, after, cold)]
    assert hits == [0, 3 * 28, 0]
    assert after.worker.num_rows < cold.worker.num_rows


def test_engines_that_share_a_disk_hit_what_the_other_wrote() -> None:
    tiers = Tiers(num_rows=60)
    engines = [tiers.simulation(LARGE, seed) for seed in (1, 2)]
    talk = [7] * 9
    for turn in range(6):
        engine = engines[turn % 2]
        sampling = SamplingParams(max_tokens=9, ignore_eos=True, seed=0)
        engine.add(EngineRequest(request_id=str(turn), prompt_token_ids=tuple(talk), sampling=sampling))
        engine.finish()
        talk += engine.outcomes[str(turn)].token_ids
    assert min(e.scheduler.tiers.counters.disk_hits for e in engines) >= 3  # type: ignore[union-attr]
    for engine in engines:
        check_answers(engine, LARGE)


def test_a_conversation_that_outgrew_the_device_is_loaded_from_the_host() -> None:
    few_blocks = Setting(num_blocks=24, max_num_seqs=2, max_num_batched_tokens=16)
    with_host, without = Tiers(num_rows=400, has_store=False).simulation(few_blocks, 1), few_blocks.simulation()

    talks = [converse(simulation, random.Random(11), num_talks=5, num_turns=6) for simulation in (with_host, without)]

    assert talks[0] == talks[1]
    assert with_host.worker.num_rows < 0.8 * without.worker.num_rows


def test_an_abort_in_the_middle_of_a_load_keeps_the_blocks_until_the_report() -> None:
    tiers = Tiers(num_rows=60)
    first = tiers.simulation(LARGE, 1)
    prompt = tuple(range(2, 34))
    first.add(EngineRequest(request_id="a", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1, seed=0)))
    first.finish()

    simulation = tiers.simulation(LARGE, 2)
    ledger, cache = simulation.scheduler.tiers, simulation.scheduler.cache
    assert ledger is not None
    simulation.add(EngineRequest(request_id="b", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1, seed=0)))
    while not ledger.loading_blocks:
        simulation.turn()
    loading = len(ledger.loading_blocks)
    simulation.abort(["b"])
    cache.check()
    assert cache.num_free_blocks == cache.num_usable_blocks - loading
    simulation.finish()
    assert cache.num_cached_blocks == loading  # loaded for nobody, yet good


def test_a_record_that_never_comes_stops_nobody() -> None:
    tiers = Tiers(num_rows=60)
    first = tiers.simulation(LARGE, 1)
    prompt = tuple(range(2, 34))
    request = EngineRequest(request_id="a", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=2, seed=0))
    first.add(request)
    first.finish()

    simulation = tiers.simulation(LARGE, 2)
    assert simulation.mover is not None and simulation.scheduler.tiers is not None
    simulation.mover.stall_rate = 1.0
    simulation.add(request)
    while simulation.outcomes["a"].finish_reason is None:
        assert simulation.num_turns < 250  # of 0.01 s; max_wait_s is 2
        simulation.turn()
    assert simulation.outcomes["a"].token_ids == first.outcomes["a"].token_ids
    assert simulation.scheduler.tiers.counters.num_timeouts == 1
    simulation.mover.stall_rate = 0.0
    simulation.finish()


def test_requests_that_fit_alone_but_not_together_end_one_after_another() -> None:
    """Case I4: hits in a lower tier that cannot be used yet must not be looked for for ever."""
    setting = Setting(num_blocks=10, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=40)
    tiers = Tiers(num_rows=60)
    for seed in (1, 2):
        simulation = tiers.simulation(setting, seed)
        for n in range(4):
            prompt = tuple(2 + (n * 31 + at) % 150 for at in range(25))
            sampling = SamplingParams(max_tokens=8, ignore_eos=True, seed=0)
            simulation.add(EngineRequest(request_id=str(n), prompt_token_ids=prompt, sampling=sampling))
        simulation.finish()
        check_answers(simulation, setting)
        assert [len(o.token_ids) for o in simulation.outcomes.values()] == [8] * 4
    assert simulation.scheduler.cache.counters.hit_tokens > 0


def test_a_trace_with_moves_lived_again_is_byte_identical() -> None:
    recorded: list[str] = []
    simulation = Tiers(num_rows=30, failure_rate=0.1).simulation(SMALL, 5, TraceWriter(recorded.append))
    live(simulation, random.Random(5), num_turns=300, longest=40)

    assert rerun(recorded) == recorded
    assert any('"moved"' in line for line in recorded)


def test_records_under_suspicion_leave_every_tier() -> None:
    tiers = Tiers(num_rows=60)
    simulation = tiers.simulation(LARGE, 1)
    ledger = simulation.scheduler.tiers
    assert ledger is not None
    simulation.worker.fault_at["bad"] = 30
    prompt = tuple(range(2, 42))
    for name in ("good", "bad"):
        simulation.add(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1, seed=0)))
        if name == "good":
            simulation.finish()
            assert len(tiers.disk) == 10 and ledger.book.num_listed == 10
    simulation.finish()
    assert simulation.outcomes["bad"].finish_reason is FinishReason.ERROR
    assert tiers.disk == {} and ledger.book.num_listed == 0


def test_a_reset_forgets_the_host_and_leaves_the_disk() -> None:
    tiers = Tiers(num_rows=60)
    simulation = tiers.simulation(LARGE, 1)
    ledger = simulation.scheduler.tiers
    assert ledger is not None
    simulation.add(EngineRequest(request_id="a", prompt_token_ids=tuple(range(2, 34)), sampling=SamplingParams(max_tokens=1, seed=0)))
    simulation.finish()
    simulation.scheduler.reset_prefix_cache()
    assert ledger.book.num_listed == 0 and ledger.book.num_available == 60 and len(tiers.disk) == 8


def test_a_report_that_comes_twice_is_a_slip() -> None:
    simulation = Tiers(num_rows=60).simulation(LARGE, 1)
    with pytest.raises(AssertionError, match="reported twice"):
        simulation.scheduler.moved(MoveReport(1, 1))
