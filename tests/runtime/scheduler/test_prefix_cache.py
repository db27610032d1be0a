# SPDX-License-Identifier: Apache-2.0
"""The prefix cache through the scheduler: hits, edges, tenants, faults, resets; and what users of other engines have reported.

Blocks of 4 tokens and a window of 6 unless said otherwise. Every run is checked by the fake worker: stale windows and wrong blocks fail.
"""

from __future__ import annotations

import random

import pytest

from whalefall.core.plan import RequestResult, StepResult
from whalefall.core.request import EngineRequest, FinishReason
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler import Scheduler, SchedulerConfig
from whalefall.testing.fakes import FakeWorker, expected_answer
from whalefall.testing.simulation import Outcome, Simulation

BLOCK, WINDOW, VOCAB = 4, 6, 200


class Engine(Simulation):
    """A simulation that is asked one prompt after another."""

    def __init__(
        self,
        *,
        num_blocks: int = 400,
        num_slots: int = 9,
        budget: int = 64,
        block: int = BLOCK,
        window: int = WINDOW,
        replay: str = "bounded",
        one_step_ahead: bool = False,
        max_model_len: int = 2_000,
    ) -> None:
        config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=num_slots,
            max_num_batched_tokens=budget,
            decoder_window=window or None,
            replay=replay,  # type: ignore[arg-type]
            prefix_caching=True,
            replay_rows=window,
            has_fixed_state=window > 0,
        )
        cache = CacheManager(num_blocks, block, num_slots + one_step_ahead)
        worker = FakeWorker(block_tokens=block, vocab_size=VOCAB, window=window)
        super().__init__(Scheduler(config, cache), worker, one_step_ahead=one_step_ahead)

    def send(self, name: str, prompt: list[int], *, num_tokens: int = 1, scores: bool = False, **request: object) -> None:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0, prompt_logprobs=1 if scores else None)
        self.add(EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, **request))  # type: ignore[arg-type]

    def ask(self, prompt: list[int], **request: object) -> Outcome:
        name = f"r{len(self.outcomes)}"
        self.send(name, prompt, **request)  # type: ignore[arg-type]
        self.finish()
        outcome = self.outcomes[name]
        assert outcome.token_ids == list(expected_answer(outcome.request, 10**9, VOCAB)[0])
        return outcome

    def cached(self, prompt: list[int], **request: object) -> int:
        last = self.ask(prompt, **request).last
        assert last is not None
        return last.num_cached_tokens

    def rows_of(self, name: str) -> int:
        return sum(step.num_tokens for plan in self.plans for step in plan.steps if step.request_id == name)


def ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB), k=count)


# What a hit is.


@pytest.mark.parametrize(
    ("known", "asked", "hit"),
    [(40, 41, 40), (40, 40, 36), (41, 43, 40), (43, 44, 40), (39, 60, 36), (7, 20, 0), (8, 9, 8), (8, 8, 0), (11, 12, 8)],
)
def test_hit_is_whole_blocks_and_leaves_a_token_to_compute(known: int, asked: int, hit: int) -> None:
    engine = Engine()
    engine.ask(ids(known))

    assert engine.cached(ids(asked)) == hit
    assert engine.rows_of("r1") == asked - hit + (WINDOW if hit else 0)


@pytest.mark.parametrize(("window", "block"), [(6, 4), (8, 4), (9, 4), (0, 4), (3, 8), (128, 256)])
def test_smallest_hit_is_the_one_that_the_start_prints(window: int, block: int) -> None:
    """D3: no hits below some unit that nobody names."""
    engine = Engine(window=window, block=block, num_blocks=40)
    least = engine.scheduler.config.min_hit_tokens(block)
    measured = []
    for count in range(1, 5):
        prompt = ids(count * block + 1, seed=count)
        engine.ask(prompt)
        measured.append(engine.cached(prompt))

    assert min(hit for hit in measured if hit) == least
    assert least <= 2 * (window + block)


def test_an_answer_is_part_of_the_next_prompt() -> None:
    engine = Engine()
    first = engine.ask(ids(21), num_tokens=20)

    assert engine.cached([*ids(21), *first.token_ids, *ids(5, 1)]) == 40  # the last token of an answer was never a row


def test_requests_of_one_moment_compute_one_block_each_for_themselves_and_leave_it_once() -> None:
    engine = Engine(budget=200)
    for name in "abc":
        engine.send(name, ids(40), num_tokens=3)
    engine.finish()

    counters = engine.scheduler.cache.counters
    assert (counters.stored_blocks, counters.duplicate_blocks, engine.scheduler.cache.num_cached_blocks) == (10, 20, 10)
    assert engine.cached(ids(41)) == 40


def test_what_follows_a_copy_of_a_block_is_found_too() -> None:
    """The second of two equal prompts keeps its own blocks; what it goes on to say must still hang on a chain that can be found."""
    engine = Engine()
    engine.send("a", ids(20), num_tokens=1)
    engine.send("b", ids(20), num_tokens=30)
    engine.finish()

    assert engine.cached([*ids(20), *engine.outcomes["b"].token_ids]) == 48


def test_prompt_scores_take_no_hit_and_leave_one() -> None:
    engine = Engine()
    first, second = engine.cached(ids(40), scores=True), engine.cached(ids(40), scores=True)

    assert (first, second, engine.cached(ids(41))) == (0, 0, 40)


def test_request_may_opt_out_of_hits() -> None:
    engine = Engine()
    engine.ask(ids(40))

    assert engine.cached(ids(40), use_prefix_cache=False) == 0
    assert engine.rows_of("r1") == 40


def test_tenants_of_different_salt_never_meet() -> None:
    engine = Engine()
    engine.ask(ids(40), cache_salt="a")

    assert [engine.cached(ids(41), cache_salt=salt) for salt in ("b", "", "a")] == [0, 0, 40]


def test_cached_tokens_are_those_of_the_first_entry() -> None:
    """A preempted request finds its own blocks again; that is no saving for its user."""
    engine = Engine(num_blocks=14, num_slots=4)
    for name in "abc":
        engine.send(name, ids(12, seed=ord(name)), num_tokens=25)
    engine.finish()

    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.cache.counters.readmitted_hit_tokens > 0
    assert [o.last.num_cached_tokens for o in engine.outcomes.values() if o.last] == [0, 0, 0]


# Bounded replay in numbers.


def test_replay_begins_a_window_before_the_hit_and_writes_nothing() -> None:
    engine = Engine(budget=5)
    engine.ask(ids(20))
    engine.ask(ids(30))
    steps = [step for plan in engine.plans for step in plan.steps if step.request_id == "r1"]

    assert [(s.start, s.num_tokens) for s in steps] == [(14, 5), (19, 5), (24, 5), (29, 1)]
    assert {(s.window_start, s.write_start, s.decoder_start) for s in steps} == {(14, 20, 24)}


def test_decoder_rows_never_begin_below_the_replay() -> None:
    engine = Engine()
    engine.ask(ids(20))
    engine.ask(ids(21))

    assert engine.plans[-1].steps[0].decoder_start == 15  # 21 - 6, within the replay that begins at 14
    engine.scheduler.reset_prefix_cache()
    wide = Engine(window=6)
    object.__setattr__(wide.scheduler.config, "decoder_window", 12)
    wide.ask(ids(20))
    wide.ask(ids(21))
    assert wide.plans[-1].steps[0].decoder_start == 14


def test_exact_mode_ends_its_steps_at_block_borders_and_starts_where_the_hit_ends() -> None:
    engine = Engine(replay="exact")
    engine.ask(ids(10))
    engine.ask(ids(13))
    steps = [step for plan in engine.plans for step in plan.steps]

    assert [(s.start, s.num_tokens, bool(s.snapshot_block)) for s in steps] == [
        (0, 4, True),
        (4, 4, True),
        (8, 2, False),
        (8, 4, True),
        (12, 1, False),
    ]
    assert engine.plans[-2].new_requests[0].start == 8 and engine.plans[-2].new_requests[0].restore_block > 0
    assert {(s.window_start, s.decoder_start) for s in steps} == {(0, 0)}


# Faults and resets.


def fault_result(plan_steps: int, step_id: int, *, is_cache_sound: bool) -> StepResult:
    return StepResult(step_id=step_id, results=(RequestResult(fault="broken", is_cache_sound=is_cache_sound),) * plan_steps)


@pytest.mark.parametrize(("is_cache_sound", "left"), [(False, 0), (True, 40)])
def test_fault_that_may_lie_in_the_cache_takes_its_blocks_out(is_cache_sound: bool, left: int) -> None:
    """Or everybody who hits them would fail the same way, for ever."""
    engine = Engine(budget=40)
    engine.ask(ids(40))
    engine.send("bad", ids(44))
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    engine._take(engine.scheduler.commit(plan, fault_result(1, plan.step_id, is_cache_sound=is_cache_sound), 0.0))
    engine.scheduler.cache.check()

    assert engine.outcomes["bad"].finish_reason is FinishReason.ERROR
    assert len(engine.scheduler.cache.match(engine.scheduler.cache.chain(ids(41)), 41)) * BLOCK == left


def test_reset_forgets_all_and_disturbs_nobody() -> None:
    engine = Engine(one_step_ahead=True)
    engine.ask(ids(40))
    engine.send("running", ids(41), num_tokens=20)
    for _ in range(3):
        engine.turn()

    engine.scheduler.reset_prefix_cache()
    engine.finish()

    assert engine.outcomes["running"].finish_reason is FinishReason.LENGTH
    assert engine.scheduler.cache.num_cached_blocks == 0  # what was begun before is not remembered either
    assert (engine.cached(ids(41)), engine.cached(ids(41))) == (0, 40)


# What users of other engines have reported.


@pytest.mark.parametrize("tail", [0, 5, 20, 50])
@pytest.mark.parametrize("replay", ["bounded", "exact"])
def test_resent_prompt_hits_whatever_its_tail(tail: int, replay: str) -> None:
    """D2: an identical re-send with a fresh tail of many blocks got nothing."""
    engine = Engine(num_blocks=1_200, replay=replay)
    system = ids(20 * BLOCK)
    for turn in range(12):
        cached = engine.cached([*system, *ids(tail * BLOCK + 1, seed=turn + 1)])
        assert cached >= (len(system) - BLOCK - WINDOW) * (turn > 0)


@pytest.mark.parametrize("replay", ["bounded", "exact"])
def test_long_session_hits_at_every_turn_among_other_traffic(replay: str) -> None:
    """D5: short requests hit, long growing sessions never did."""
    engine = Engine(num_blocks=200, replay=replay)
    session = ids(3 * BLOCK)
    for turn in range(30):
        before = len(session)
        session = session + ids(3 * BLOCK, seed=100 + turn)
        for other in range(3):
            engine.send(f"short{turn}-{other}", ids(9, seed=1_000 + 10 * turn + other), num_tokens=2)
        cached = engine.cached(session)
        assert cached >= (before - BLOCK - WINDOW) * (turn > 0)


def test_change_near_the_end_costs_the_end() -> None:
    """D9: a few different tokens at the tail cost the whole context."""
    engine = Engine(num_blocks=1_000)
    session = ids(40 * BLOCK)
    engine.ask(session)

    for changed in (len(session) - 5, len(session) // 2):
        resent = [*session[:changed], *(2 + (t - 1) % (VOCAB - 2) for t in session[changed : changed + 5]), *session[changed + 5 :]]
        assert engine.cached(resent) >= changed - BLOCK - WINDOW


def test_two_sessions_do_not_wipe_each_other_out() -> None:
    """D10: with most of the pool free, each turn of either read everything again."""
    engine = Engine(num_blocks=201)
    sessions = {name: ids(50 * BLOCK, seed=i) for i, name in enumerate("ab")}
    for turn in range(3):
        for name in "ab":
            cached = engine.cached(sessions[name])
            assert cached >= (len(sessions[name]) - 2 * BLOCK - WINDOW) * (turn > 0)
            sessions[name] += ids(BLOCK, seed=10 + turn)

    assert engine.scheduler.cache.counters.evicted_blocks == 0


@pytest.mark.parametrize("one_step_ahead", [False, True])
@pytest.mark.parametrize("replay", ["bounded", "exact"])
def test_requests_that_fit_only_one_by_one_all_finish_though_prefixes_fill_the_pool(one_step_ahead: bool, replay: str) -> None:
    """I4: a hit that leaves no room for the rest made requests wait for ever."""
    engine = Engine(num_blocks=21, one_step_ahead=one_step_ahead, replay=replay, max_model_len=81)
    prompts = {name: [*ids(24), *ids(36, seed=ord(name))] for name in "abcd"}
    for _ in range(2):
        engine.outcomes.clear()
        for name, prompt in prompts.items():
            engine.send(name, prompt, num_tokens=20)
        engine.finish()  # asserts that a plan can always be made and that nobody is late
        for name in prompts:
            assert engine.outcomes[name].token_ids == list(expected_answer(engine.outcomes[name].request, 81, VOCAB)[0])


def test_storm_of_a_thousand_requests_with_kills_leaves_the_pools_as_at_start() -> None:
    rng = random.Random(4)
    engine = Engine(num_blocks=60, budget=32, one_step_ahead=True, max_model_len=120)
    systems = [ids(rng.randint(5, 40), seed=50 + i) for i in range(6)]
    for i in range(1_000):
        system = rng.choice(systems)
        engine.send(f"q{i}", [*system[: rng.randint(1, len(system))], *ids(rng.randint(1, 8), seed=i)], num_tokens=rng.randint(1, 15))
        while engine.scheduler.num_waiting > 6:
            engine.launch()
            if rng.random() < 0.3:
                engine.abort([f"q{rng.randint(max(0, i - 12), i)}"])
            engine.collect()
    engine.finish()
    cache = engine.scheduler.cache
    cache.check()

    assert cache.is_pristine and cache.counters.hit_tokens > 0 and cache.counters.evicted_blocks > 0
    engine.scheduler.reset_prefix_cache()
    assert cache.num_free_blocks == cache.num_usable_blocks and cache.num_cached_blocks == 0
