# SPDX-License-Identifier: Apache-2.0
"""LLM on the toy model: every form of prompt, the parameters' meanings, errors, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from whalefall import LLM, RequestOutput, SamplingParams
from whalefall.core.errors import BadSampling, ConfigError, EngineDead, PromptTooLong, RequestError
from whalefall.core.request import RequestUpdate
from whalefall.engine.outputs import VocabLogprobs

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXTS = ["The whale", "falls", "", "slowly to the floor of the sea", "é🐋"]


def ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def one(llm: LLM, prompt: object, params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate(prompt, params, use_tqdm=False)  # type: ignore[arg-type]
    return output


def test_every_form_of_a_prompt_gives_the_same_answer(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode("whale", add_bos=True, allow_special=True)
    forms = ["whale", ["whale"], {"prompt": "whale"}, {"prompt_token_ids": token_ids}, [{"prompt_token_ids": token_ids}], token_ids]
    forms += [[token_ids], np.array(token_ids), {"prompt_token_ids": np.array(token_ids)}, tuple(token_ids)]
    outputs = [one(llm, form, GREEDY) for form in forms]
    assert {tuple(o.prompt_token_ids) for o in outputs} == {tuple(token_ids)}
    assert {tuple(o.outputs[0].token_ids) for o in outputs} == {tuple(outputs[0].outputs[0].token_ids)}
    assert outputs[0].prompt == "whale" and outputs[3].prompt is None
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_answers_come_in_the_order_of_the_prompts_with_their_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 2, 7)]
    outputs = llm.generate(TEXTS, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == TEXTS
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 5, 2, 7]
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7, "async_scheduling": True},
        {"max_num_seqs": 1},
        {"kv_cache_memory_bytes": 20 * 8 * 512, "max_model_len": 64},
        {"kv_cache_memory_bytes": 20 * 8 * 512, "max_model_len": 64, "async_scheduling": True},
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_road_does_not_change_the_tokens(make_llm: Callable[..., LLM], options: dict[str, object], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=11, n=2, max_tokens=24, ignore_eos=True)
    expected = [one(make_llm(), text, params) for text in TEXTS]
    assert ids(make_llm(**options).generate(TEXTS, params, use_tqdm=False)) == ids(expected)


def test_a_crowd_that_does_not_fit_is_preempted_and_keeps_its_tokens(make_llm: Callable[..., LLM]) -> None:
    tight = make_llm(kv_cache_memory_bytes=17 * 8 * 512, max_model_len=128)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, ignore_eos=True)
    before = tight.core.gauges.num_preemptions
    outputs = tight.generate(TEXTS, params, use_tqdm=False)
    assert tight.core.gauges.num_preemptions > before
    assert ids(outputs) == ids([one(make_llm(), text, params) for text in TEXTS])


def test_seeds_repeat_an_answer_and_choices_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=20, ignore_eos=True)
    first, again = one(llm, "whale", params), one(llm, "whale", params)
    crowd = llm.generate([*TEXTS, "whale", *TEXTS], params, use_tqdm=False)[len(TEXTS)]
    assert ids([first]) == ids([again]) == ids([crowd])
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 3
    free = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    assert ids([one(llm, "whale", free)]) != ids([one(llm, "whale", free)])


def test_the_engines_own_seed_makes_a_program_repeatable(toy_dir: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    runs = []
    for _ in range(2):
        with LLM(toy_dir, device="cpu", block_size=8, max_num_seqs=2, seed=5, use_tqdm=False) as llm:
            runs.append([ids([one(llm, "whale", params)]) for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_logprobs_agree_with_scoring_the_whole_text_as_a_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    answered = one(llm, "whale", params)
    choice = answered.outputs[0]
    whole = [*answered.prompt_token_ids, *choice.token_ids]
    scored = one(llm, {"prompt_token_ids": whole}, SamplingParams(max_tokens=0, prompt_logprobs=-1))
    assert answered.prompt_logprobs is not None and scored.prompt_logprobs is not None and choice.logprobs is not None
    assert scored.prompt_logprobs[0] is None and len(scored.prompt_logprobs) == len(whole)
    assert scored.outputs[0].token_ids == [] and scored.outputs[0].finish_reason == "length"
    for position, (got, expected) in enumerate(zip([*answered.prompt_logprobs[1:], *choice.logprobs], scored.prompt_logprobs[1:])):
        assert isinstance(got, VocabLogprobs) and isinstance(expected, VocabLogprobs)
        np.testing.assert_allclose(got.values_V, expected.values_V, atol=1e-4)
        assert next(iter(got)) == whole[position + 1]
        assert np.exp(got.values_V.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-4)
    assert [position[token].rank for position, token in zip(choice.logprobs, choice.token_ids)] == [1] * 8
    total = sum(position[token].logprob for position, token in zip(choice.logprobs, choice.token_ids))
    assert choice.cumulative_logprob == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("batched", [3, 2048])
def test_k_alternatives_are_the_head_of_the_whole_vocabulary(make_llm: Callable[..., LLM], batched: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    output = one(make_llm(max_num_batched_tokens=batched), TEXTS[3], params)
    whole = one(make_llm(), TEXTS[3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=-1, prompt_logprobs=-1))
    assert output.prompt_logprobs is not None and whole.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None and whole.outputs[0].logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    rows = [*zip(output.prompt_logprobs[1:], whole.prompt_logprobs[1:]), *zip(output.outputs[0].logprobs, whole.outputs[0].logprobs)]
    for few, all_of_them in rows:
        assert few is not None and all_of_them is not None
        assert 2 <= len(few) <= 4
        for token, entry in few.items():
            assert entry.logprob == pytest.approx(all_of_them[token].logprob, abs=1e-4)
            assert entry.rank == all_of_them[token].rank


def test_stop_strings_and_stop_ids_end_an_answer_where_they_stand(llm: LLM) -> None:
    free = one(llm, "whale", GREEDY).outputs[0]
    stop = free.text[2:5]
    assert stop
    stopped = one(llm, "whale", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[stop], logprobs=0))  # type: ignore[arg-type]
    choice = stopped.outputs[0]
    assert choice.text == free.text[: free.text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids) < 12
    by_id = one(llm, "whale", SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(free.token_ids[3],))).outputs[0]
    end = free.token_ids.index(free.token_ids[3])
    assert by_id.token_ids == free.token_ids[: end + 1]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", free.token_ids[3])


def test_without_detokenize_there_are_ids_and_no_text(llm: LLM) -> None:
    choice = one(llm, "whale", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)).outputs[0]
    assert choice.text == "" and len(choice.token_ids) == 5


def test_an_answer_ends_at_the_context_limit(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=16)
    choice = one(llm, {"prompt_token_ids": list(range(2, 12))}, SamplingParams(max_tokens=None, ignore_eos=True)).outputs[0]
    assert (len(choice.token_ids), choice.finish_reason) == (6, "length")


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ({"prompt_token_ids": []}, GREEDY, RequestError, "prompt has no tokens"),
        ({"prompt_token_ids": [0, 264]}, GREEDY, RequestError, r"prompt token 1 is 264, token ids are integers in \[0, 264\)"),
        ({"prompt_token_ids": [0, -1]}, GREEDY, RequestError, "prompt token 1 is -1"),
        ({"prompt_token_ids": [0, "a"]}, GREEDY, RequestError, "prompt token 1 is 'a'"),
        ({"prompt_token_ids": [0] * 128}, GREEDY, PromptTooLong, r"prompt has 128 tokens, limit 128 \(max_model_len\)"),
        ({"text": "a"}, GREEDY, RequestError, "holds 'prompt' or 'prompt_token_ids'"),
        (7, GREEDY, RequestError, "a prompt is text, token ids or a mapping"),
        ("a", SamplingParams(stop_token_ids=(264,)), BadSampling, "stop_token_ids names token 264"),
        ("a", SamplingParams(logit_bias={300: 1.0}), BadSampling, "logit_bias names token 300"),
    ],
)
def test_bad_requests_are_refused_by_name_before_anything_starts(
    llm: LLM, prompt: object, params: SamplingParams, error: type[RequestError], words: str
) -> None:
    num_steps = llm.core.gauges.num_steps
    with pytest.raises(error, match=words):
        llm.generate(["fine", prompt] if prompt != 7 else prompt, params, use_tqdm=False)  # type: ignore[list-item, arg-type]
    assert llm.core.gauges.num_steps == num_steps


def test_as_many_params_as_prompts_are_needed(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY], use_tqdm=False)


def test_a_logprobs_limit_holds_when_set(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_logprobs=5)
    with pytest.raises(BadSampling, match=r"logprobs is 6, limit 5 \(max_logprobs\)"):
        one(llm, "a", SamplingParams(logprobs=6))
    with pytest.raises(BadSampling, match=r"prompt_logprobs is -1 \(the whole vocabulary\), limit 5"):
        one(llm, "a", SamplingParams(prompt_logprobs=-1))


def test_a_parameter_that_cannot_be_met_ends_its_request_only(llm: LLM) -> None:
    forbid_all = SamplingParams(temperature=0.0, max_tokens=3, stop_token_ids=tuple(range(264)), min_tokens=1)
    outputs = llm.generate(["whale", "whale"], [forbid_all, GREEDY], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].error is not None and "forbid every token" in outputs[0].error
    assert ids(outputs[1:]) == ids([one(llm, "whale", GREEDY)])


def test_chat_renders_one_or_several_conversations(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    (single,) = llm.chat(talk, GREEDY, use_tqdm=False)
    double = llm.chat([talk, [{"role": "user", "content": "Ho"}]], GREEDY, use_tqdm=False)
    assert single.prompt == "user: Hi\nassistant:"
    assert ids([single]) == ids(double[:1]) and double[1].prompt == "user: Ho\nassistant:"
    with pytest.raises(RequestError, match="messages"):
        llm.chat([], GREEDY, use_tqdm=False)


def test_timings_run_forward(llm: LLM) -> None:
    metrics = one(llm, "whale", GREEDY).metrics
    assert metrics is not None and metrics.first_scheduled_time is not None and metrics.finished_time is not None
    times = [metrics.arrival_time, metrics.first_scheduled_time, *metrics.token_times[0], metrics.finished_time]
    assert times == sorted(times) and len(metrics.token_times[0]) == 12
    assert metrics.time_in_queue is not None and metrics.time_in_queue >= 0


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_interrupted_call_leaves_nothing_behind_and_the_engine_usable(
    make_llm: Callable[..., LLM], is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, rng = make_llm(async_scheduling=is_ahead), random.Random(4)
    expected = ids([one(llm, "whale", GREEDY)])
    turn = llm.core.turn
    for _ in range(15):
        left = rng.randrange(12)

        def interrupting_turn() -> list[RequestUpdate]:
            nonlocal left
            left -= 1
            if left == -1:
                raise Interrupted
            return turn()

        monkeypatch.setattr(llm.core, "turn", interrupting_turn)
        with pytest.raises(Interrupted):
            llm.generate(TEXTS * 3, SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
        assert llm.core.scheduler.cache.is_pristine
        assert not llm.core.has_work
    monkeypatch.undo()
    assert ids([one(llm, "whale", GREEDY)]) == expected


def test_a_failing_step_kills_the_engine_and_says_so_from_then_on(toy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(toy_dir, device="cpu", block_size=8, max_num_seqs=2, use_tqdm=False)
    monkeypatch.setattr(llm.core._worker, "launch", lambda plan: 1 / 0)
    for _ in range(2):
        with pytest.raises(EngineDead, match="ZeroDivisionError"):
            llm.generate("whale", GREEDY, use_tqdm=False)
    assert llm.core.scheduler.cache.is_pristine


def test_after_shutdown_the_engine_is_dead(toy_dir: Path) -> None:
    with LLM(toy_dir, device="cpu", block_size=8, max_num_seqs=2, use_tqdm=False) as llm:
        pass
    with pytest.raises(EngineDead, match="shut down"):
        llm.generate("whale", GREEDY, use_tqdm=False)


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: not found"):
        LLM(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        LLM(tmp_path / "none")
    with pytest.raises(ConfigError, match="unknown option 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(tmp_path, max_num_seq=1)
