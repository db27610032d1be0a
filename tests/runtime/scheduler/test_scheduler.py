# SPDX-License-Identifier: Apache-2.0
"""The scheduler through its public face: each test is one rule."""

from __future__ import annotations

import pytest

from whalefall.core.errors import BadSampling, ConfigError, PromptTooLong, RequestError
from whalefall.core.plan import RequestResult, StepPlan, StepResult
from whalefall.core.request import EngineRequest, FinishReason, RequestUpdate
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler import Scheduler, SchedulerConfig
from whalefall.testing.fakes import prompt_score

EOS = 1


def make_scheduler(
    *,
    num_blocks: int = 101,
    num_slots: int = 16,
    max_model_len: int = 100,
    max_num_batched_tokens: int = 50,
    max_num_seqs: int = 16,
    decoder_window: int | None = 8,
    replay: str = "bounded",
) -> Scheduler:
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        decoder_window=decoder_window,
        replay=replay,
    )
    return Scheduler(config, CacheManager(num_blocks, 4, num_slots))


def a_request(name: str = "a", num_prompt: int = 3, **sampling: object) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": 5, **sampling})
    return EngineRequest(
        request_id=name, prompt_token_ids=tuple(range(10, 10 + num_prompt)), sampling=params, eos_token_ids=(EOS,), arrival_s=0.5
    )


def answer(plan: StepPlan, token_id: int = 42, **by_request: RequestResult) -> StepResult:
    """Every request that samples gets `token_id`, and prompt scores are given as asked, unless `by_request` says otherwise."""
    results = []
    for step in plan.steps:
        first, end = step.start + 1, step.start + step.num_tokens + (0 if step.samples else 1)  # the row that samples scores no prompt
        scores = tuple(prompt_score([0] * 1_000, position) for position in range(first, end)) if step.wants_prompt_logprobs else None
        plain = RequestResult(token_ids=(token_id,) if step.samples else (), prompt_logprobs=scores)
        results.append(by_request.get(step.request_id, plain))
    return StepResult(step_id=plan.step_id, results=tuple(results))


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(1.0)
    assert plan is not None
    return plan


def run_step(scheduler: Scheduler, token_id: int = 42, **by_request: RequestResult) -> list[RequestUpdate]:
    plan = plan_of(scheduler)
    return scheduler.commit(plan, answer(plan, token_id, **by_request), 2.0)


def run_to_end(scheduler: Scheduler, token_id: int = 42) -> list[RequestUpdate]:
    updates: list[RequestUpdate] = []
    while scheduler.has_work:
        updates += run_step(scheduler, token_id)
    assert scheduler.cache.is_pristine
    return updates


def shares(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(step.request_id, step.start, step.num_tokens, step.samples) for step in plan.steps]


# Order and budgets.


def test_decodes_come_first_then_running_prompts_then_waiting_ones_in_order() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(a_request("a", 4))
    scheduler.add(a_request("b", 12))
    scheduler.add(a_request("c", 5))
    scheduler.add(a_request("d", 5))

    first = plan_of(scheduler)
    scheduler.commit(first, answer(first), 2.0)
    second = plan_of(scheduler)

    assert shares(first) == [("a", 0, 4, True), ("b", 0, 6, False)]
    assert shares(second) == [("a", 4, 1, True), ("b", 6, 6, True), ("c", 0, 3, False)]


def test_small_request_does_not_overtake_a_large_one_that_waits_for_blocks() -> None:
    scheduler = make_scheduler(num_blocks=11)
    scheduler.add(a_request("a", 20))
    run_step(scheduler)
    scheduler.add(a_request("large", 24))
    scheduler.add(a_request("small", 2))

    assert shares(plan_of(scheduler)) == [("a", 20, 1, True)]


def test_no_more_requests_run_than_allowed() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(a_request(name))

    assert [step.request_id for step in plan_of(scheduler).steps] == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_no_more_requests_run_than_there_are_slots() -> None:
    scheduler = make_scheduler(num_slots=1)
    scheduler.add(a_request("a"))
    scheduler.add(a_request("b"))

    assert [step.request_id for step in plan_of(scheduler).steps] == ["a"]


def test_entry_leaves_one_free_block_for_each_running_request() -> None:
    scheduler = make_scheduler(num_blocks=8)  # 7 usable
    scheduler.add(a_request("a", 8))
    scheduler.add(a_request("b", 8))
    scheduler.add(a_request("c", 8))

    assert [step.request_id for step in plan_of(scheduler).steps] == ["a", "b"]  # 3 are left, c wants 2, a and b one each


def test_first_request_may_take_the_whole_pool() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(a_request("a", 12, max_tokens=1))

    assert shares(plan_of(scheduler)) == [("a", 0, 12, True)]


def test_oldest_request_decodes_when_the_budget_is_less_than_the_requests() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2)
    for name in "abc":
        scheduler.add(a_request(name, 1, max_tokens=4))
    run_step(scheduler)

    assert [step.request_id for step in plan_of(scheduler).steps] == ["a", "b"]


def test_idle_scheduler_plans_nothing() -> None:
    scheduler = make_scheduler()

    assert scheduler.plan(1.0) is None
    assert not scheduler.has_work


# Rows, samples and the decoder.


def test_only_the_last_chunk_samples() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(a_request("a", 10))

    plans = [plan_of(scheduler)]
    scheduler.commit(plans[0], answer(plans[0]), 2.0)
    plans.append(plan_of(scheduler))
    scheduler.commit(plans[1], answer(plans[1]), 2.0)
    plans.append(plan_of(scheduler))

    assert [shares(plan)[0][1:] for plan in plans] == [(0, 4, False), (4, 4, False), (8, 2, True)]


def test_first_plan_names_the_request_and_brings_blocks_for_its_whole_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(a_request("a", 10))

    first = plan_of(scheduler)
    scheduler.commit(first, answer(first), 2.0)
    second = plan_of(scheduler)

    assert [(new.request_id, new.token_ids, new.num_prompt_tokens) for new in first.new_requests] == [("a", tuple(range(10, 20)), 10)]
    assert first.new_requests[0].eos_token_ids == (EOS,)
    assert (len(first.steps[0].new_block_ids), 0 in first.steps[0].new_block_ids) == (3, False)
    assert (second.new_requests, second.steps[0].new_block_ids, second.steps[0].slot) == ((), (), first.steps[0].slot)


def test_decode_brings_a_block_when_the_last_one_is_full() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a", 3))
    run_step(scheduler)

    inside, across = plan_of(scheduler), plan_of(scheduler)

    assert (len(inside.steps[0].new_block_ids), len(across.steps[0].new_block_ids)) == (0, 1)


@pytest.mark.parametrize(
    "replay, window, num_prompt, scores, start",
    [
        ("bounded", 8, 20, None, 12),
        ("bounded", 8, 8, None, 0),
        ("bounded", 8, 5, None, 0),
        ("bounded", None, 20, None, 0),
        ("bounded", 8, 20, 0, 0),
        ("exact", 8, 20, None, 0),
    ],
)
def test_decoder_rows_begin_a_window_before_the_end_of_the_prompt(
    replay: str, window: int | None, num_prompt: int, scores: int | None, start: int
) -> None:
    scheduler = make_scheduler(replay=replay, decoder_window=window)
    scheduler.add(a_request("a", num_prompt, prompt_logprobs=scores))

    starts = []
    for _ in range(3):
        plan = plan_of(scheduler)
        starts.append(plan.steps[0].decoder_start)
        scheduler.commit(plan, answer(plan), 2.0)

    assert starts == [start] * 3


def test_chunk_without_decoder_rows_still_runs() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(a_request("a", 30))

    step = plan_of(scheduler).steps[0]

    assert (step.start, step.num_tokens, step.decoder_start, step.samples) == (0, 10, 22, False)


# Ends.


def test_end_of_sequence_stops_and_is_part_of_the_answer() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a"))
    run_step(scheduler)

    (update,) = run_step(scheduler, EOS)

    assert (update.new_token_ids, update.finish_reason, update.stop_token_id) == ((EOS,), FinishReason.STOP, None)
    assert scheduler.cache.is_pristine and not scheduler.has_work


def test_end_of_sequence_as_only_token_is_one_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a"))

    (update,) = run_step(scheduler, EOS)

    assert (update.new_token_ids, update.finish_reason) == ((EOS,), FinishReason.STOP)


def test_ignored_end_of_sequence_does_not_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a", ignore_eos=True, max_tokens=3))

    updates = run_to_end(scheduler, EOS)

    assert [update.finish_reason for update in updates] == [None, None, FinishReason.LENGTH]


def test_stop_id_stops_and_is_named() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a", stop_token_ids=(42,)))

    (update,) = run_step(scheduler, 42)

    assert (update.finish_reason, update.stop_token_id) == (FinishReason.STOP, 42)


def test_stop_id_counts_though_end_of_sequence_is_ignored() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a", stop_token_ids=(EOS,), ignore_eos=True))

    (update,) = run_step(scheduler, EOS)

    assert (update.finish_reason, update.stop_token_id) == (FinishReason.STOP, EOS)


def test_nothing_stops_before_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a", min_tokens=2, stop_token_ids=(42,)))

    reasons = [run_step(scheduler, token_id)[0].finish_reason for token_id in (EOS, 42, EOS)]

    assert reasons == [None, None, FinishReason.STOP]


def test_end_of_sequence_at_the_limit_is_a_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a", max_tokens=1))

    (update,) = run_step(scheduler, EOS)

    assert update.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [None, 500])
def test_context_limit_clips_the_answer(max_tokens: int | None) -> None:
    scheduler = make_scheduler(max_model_len=10)
    scheduler.add(a_request("a", 7, max_tokens=max_tokens))

    updates = run_to_end(scheduler)

    assert [update.finish_reason for update in updates] == [None, None, FinishReason.LENGTH]


def test_longest_prompt_gets_one_token() -> None:
    scheduler = make_scheduler(max_model_len=10)
    scheduler.add(a_request("a", 9))

    assert [update.new_token_ids for update in run_to_end(scheduler)] == [(42,)]


def test_answer_ends_where_a_small_cache_is_full() -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=100)  # 8 positions; the 9th token needs none
    scheduler.add(a_request("a", 6, max_tokens=None))

    updates = run_to_end(scheduler)

    assert len(updates) == 3 and updates[-1].finish_reason is FinishReason.LENGTH


def test_fault_ends_its_request_only() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a"))
    scheduler.add(a_request("b"))

    updates = run_step(scheduler, a=RequestResult(fault="non-finite logits"))

    assert [(u.request_id, u.finish_reason, u.error) for u in updates] == [
        ("a", FinishReason.ERROR, "non-finite logits"),
        ("b", None, None),
    ]
    assert [step.request_id for step in plan_of(scheduler).steps] == ["b"]


def test_failure_of_the_engine_ends_everybody_and_frees_everything() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(a_request("a"))
    scheduler.add(a_request("b"))
    launched = [plan_of(scheduler), plan_of(scheduler)]

    updates = scheduler.fail_all("the worker is gone")

    assert [(u.request_id, u.finish_reason, u.error) for u in updates] == [
        ("a", FinishReason.ERROR, "the worker is gone"),
        ("b", FinishReason.ERROR, "the worker is gone"),
    ]
    assert scheduler.cache.is_pristine and not scheduler.has_work
    assert scheduler.commit(launched[0], answer(launched[0]), 2.0) == []


def test_abort_ends_waiting_and_running_requests_once() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(a_request("a"))
    scheduler.add(a_request("b"))
    run_step(scheduler)

    updates = scheduler.abort(["b", "a", "a", "unknown"])

    assert [(u.request_id, u.finish_reason) for u in updates] == [("b", FinishReason.ABORT), ("a", FinishReason.ABORT)]
    assert scheduler.abort(["a", "b"]) == []
    assert scheduler.cache.is_pristine and not scheduler.has_work


def test_stop_string_seen_outside_ends_as_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a"))
    run_step(scheduler)

    (update,) = scheduler.abort(["a"], FinishReason.STOP)

    assert update.finish_reason is FinishReason.STOP


def test_prompt_is_scored_without_sampling() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=3)
    scheduler.add(a_request("a", 7, max_tokens=0, prompt_logprobs=0))

    updates = run_to_end(scheduler)

    assert [len(update.prompt_logprobs or ()) for update in updates] == [3, 3, 0]
    assert [update.finish_reason for update in updates] == [None, None, FinishReason.LENGTH]
    assert all(update.new_token_ids == () for update in updates)


def test_updates_carry_timings() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a", max_tokens=2))
    plan = scheduler.plan(1.0)
    (first,) = scheduler.commit(plan, answer(plan), 1.5)
    plan = scheduler.plan(2.0)
    (last,) = scheduler.commit(plan, answer(plan), 2.5)

    assert (first.timings.arrival_s, first.timings.first_scheduled_s, first.timings.first_token_s) == (0.5, 1.0, 1.5)
    assert (last.timings.first_scheduled_s, last.timings.last_token_s, last.timings.token_s) == (1.0, 2.5, (1.5, 2.5))


# Refusals.


def test_prompt_over_the_limit_is_refused_with_both_numbers() -> None:
    scheduler = make_scheduler(max_model_len=8_192, num_blocks=10_000)

    with pytest.raises(PromptTooLong, match=r"prompt has 9,100 tokens, limit 8,192 \(max_model_len\)"):
        scheduler.add(a_request("a", 9_100))
    with pytest.raises(PromptTooLong):
        scheduler.add(a_request("a", 8_192))
    assert not scheduler.has_work


def test_prompt_that_fits_no_pool_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=5)

    with pytest.raises(RequestError, match="prompt has 17 tokens, the KV cache holds 16") as refusal:
        scheduler.add(a_request("a", 17))
    assert refusal.value.code == "kv_cache_too_small"
    scheduler.add(a_request("a", 16))


def test_empty_prompt_repeated_id_and_many_choices_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a"))

    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(a_request("a"))
    with pytest.raises(RequestError, match="no tokens"):
        scheduler.add(a_request("b", 0))
    with pytest.raises(BadSampling, match="n is 2"):
        scheduler.add(a_request("c", n=2))
    assert scheduler.num_waiting == 1


def test_config_lists_every_problem() -> None:
    with pytest.raises(ConfigError) as refusal:
        SchedulerConfig(max_model_len=1, max_num_seqs=0, max_num_batched_tokens=0, decoder_window=0, replay="maybe")
    assert [problem.split()[0] for problem in refusal.value.problems] == [
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "replay",
        "decoder_window",
    ]


# One step ahead.


def test_token_in_flight_is_planned_by_position() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a", 3))

    first, second = plan_of(scheduler), plan_of(scheduler)

    assert (shares(first), shares(second)) == ([("a", 0, 3, True)], [("a", 3, 1, True)])
    assert second.new_requests == ()


def test_third_plan_without_a_commit_is_a_slip() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a"))
    plan_of(scheduler), plan_of(scheduler)

    with pytest.raises(AssertionError, match="before the commit"):
        scheduler.plan(1.0)


def test_end_that_can_be_counted_is_not_planned_past() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a", max_tokens=1))
    first = plan_of(scheduler)

    assert scheduler.plan(1.0) is None
    assert scheduler.has_work
    scheduler.commit(first, answer(first), 2.0)
    assert not scheduler.has_work


def test_token_after_the_end_is_discarded_and_blocks_wait_for_its_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a"))
    first, second = plan_of(scheduler), plan_of(scheduler)

    (end,) = scheduler.commit(first, answer(first, EOS), 2.0)
    is_free_early = scheduler.cache.is_pristine
    discarded = scheduler.commit(second, answer(second, 77), 3.0)

    assert (end.new_token_ids, end.finish_reason) == ((EOS,), FinishReason.STOP)
    assert (is_free_early, discarded, scheduler.cache.is_pristine) == (False, [], True)


def test_slot_of_an_aborted_request_is_not_reused_while_its_step_runs() -> None:
    scheduler = make_scheduler()
    scheduler.add(a_request("a"))
    launched = plan_of(scheduler)
    scheduler.abort(["a"])
    scheduler.add(a_request("a", num_prompt=4))  # the id may come back at once; results go by request, not by name

    again = plan_of(scheduler)
    stale = scheduler.commit(launched, answer(launched), 2.0)
    (update,) = scheduler.commit(again, answer(again, 55), 2.0)

    assert again.steps[0].slot != launched.steps[0].slot
    assert set(again.steps[0].new_block_ids).isdisjoint(launched.steps[0].new_block_ids)
    assert (stale, update.new_token_ids) == ([], (55,))


# Preemption.


def under_pressure(**sampling: object) -> Scheduler:
    """Two requests of two full blocks each in a pool of five, both with their first token: one of the next rows finds no block."""
    scheduler = make_scheduler(num_blocks=6, max_model_len=20)
    scheduler.add(a_request("old", 8, **sampling))
    scheduler.add(a_request("new", 7, **sampling))
    run_step(scheduler)
    run_step(scheduler)
    return scheduler


def test_newest_request_gives_way_and_returns_with_all_its_tokens() -> None:
    scheduler = under_pressure(max_tokens=6)

    plan = plan_of(scheduler)
    waiting = scheduler.num_waiting
    scheduler.commit(plan, answer(plan), 2.0)
    while not plan.new_requests:
        plan = plan_of(scheduler)
        scheduler.commit(plan, answer(plan), 2.0)

    assert (waiting, scheduler.num_preemptions) == (1, 1)
    assert plan.new_requests[0].token_ids == (*range(10, 17), 42, 42)
    assert plan.new_requests[0].num_prompt_tokens == 7
    assert (plan.steps[-1].start, plan.steps[-1].num_tokens, plan.steps[-1].decoder_start, plan.steps[-1].samples) == (0, 9, 1, True)


def test_preempted_request_returns_before_those_that_wait() -> None:
    scheduler = under_pressure(max_tokens=6)
    scheduler.add(a_request("later", 1))
    updates: list[RequestUpdate] = []
    entered: list[str] = []
    while scheduler.has_work:
        plan = plan_of(scheduler)
        entered += [new.request_id for new in plan.new_requests]
        updates += scheduler.commit(plan, answer(plan), 2.0)

    assert entered == ["new", "later"]
    assert {u.request_id: u.finish_reason for u in updates if u.is_finished} == dict.fromkeys(["old", "new", "later"], FinishReason.LENGTH)


def test_token_in_flight_of_a_preempted_request_counts() -> None:
    scheduler = make_scheduler(num_blocks=5, max_model_len=17)
    scheduler.add(a_request("old", 7, max_tokens=8))
    scheduler.add(a_request("new", 4, max_tokens=8))
    first = plan_of(scheduler)  # 3 blocks
    second = plan_of(scheduler)  # new takes the last one
    scheduler.commit(first, answer(first, 41), 2.0)
    third = scheduler.plan(1.0)  # old wants a block, new is preempted while its token of `second` is in flight

    in_flight = scheduler.commit(second, answer(second, 42), 2.0)
    kept = scheduler.cache.num_free_blocks

    assert ([s.request_id for s in second.steps], third is None) == (["old", "new"], True)
    assert [(u.request_id, u.new_token_ids) for u in in_flight] == [("old", (42,)), ("new", (42,))]
    assert (scheduler.num_preemptions, kept) == (1, 2)
    plan = plan_of(scheduler)
    scheduler.commit(plan, answer(plan), 2.0)
    while not plan.new_requests:
        plan = plan_of(scheduler)
        scheduler.commit(plan, answer(plan), 2.0)
    assert plan.new_requests[0].token_ids == (10, 11, 12, 13, 41, 42)


def test_preempted_request_may_end_while_it_waits() -> None:
    scheduler = make_scheduler(num_blocks=5, max_model_len=17)
    scheduler.add(a_request("old", 7, max_tokens=8))
    scheduler.add(a_request("new", 4, max_tokens=8))
    first, second = plan_of(scheduler), plan_of(scheduler)
    scheduler.commit(first, answer(first), 2.0)
    assert scheduler.plan(1.0) is None and scheduler.num_waiting == 1

    updates = scheduler.commit(second, answer(second, new=RequestResult(token_ids=(EOS,))), 2.0)

    assert [(u.request_id, u.finish_reason) for u in updates] == [("old", None), ("new", FinishReason.STOP)]
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    assert [u.request_id for u in run_to_end(scheduler)] == ["old"] * 6


def test_prompt_scores_are_delivered_once_though_rows_run_twice() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=20, max_num_batched_tokens=5)
    scheduler.add(a_request("old", 3, max_tokens=8))
    scheduler.add(a_request("new", 11, max_tokens=3, prompt_logprobs=1))
    plans, updates = [], []
    while scheduler.has_work:
        plans.append(plan_of(scheduler))
        updates += scheduler.commit(plans[-1], answer(plans[-1]), 2.0)

    scores = [score for update in updates if update.request_id == "new" for score in update.prompt_logprobs or ()]
    steps = [step for plan in plans for step in plan.steps if step.request_id == "new"]
    assert scheduler.num_preemptions == 1
    assert [score.logprob for score in scores] == [prompt_score([0] * 20, position).logprob for position in range(1, 11)]
    assert sum(step.start == 0 for step in steps) == 2
    assert not any(step.wants_prompt_logprobs for step in steps[[step.start for step in steps].index(0, 1) :])
