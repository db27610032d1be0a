# SPDX-License-Identifier: Apache-2.0
"""The engine's log-probabilities equal those of an independent implementation, whatever road the prompt takes through the engine."""

from __future__ import annotations

import pytest
import torch

from tests.goldens.conftest import LENGTHS, all_rows, vocabulary
from whalefall import SamplingParams

FP32_SETS = ("v41-a-quant", "v41-a-fp32", "v41-k-quant")


def worst(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max((a - w).abs().max().item() for a, w in zip(actual, wanted, strict=True))


@pytest.mark.parametrize("name", FP32_SETS)
@pytest.mark.parametrize("chunk", (2048, 7), ids=("whole", "chunks-of-7"))
def test_every_row_of_every_prompt_matches_one_at_a_time(name, chunk, expected, make_llm):
    gold = expected(name)
    llm = make_llm(name, max_num_batched_tokens=chunk)
    for n in LENGTHS:
        assert worst(all_rows(llm, [gold.ids(n)]), [gold.logprobs(n)]) < 1e-3, f"prompt of {n}"


@pytest.mark.parametrize("name", FP32_SETS)
def test_every_row_matches_with_all_prompts_in_one_batch(name, expected, make_llm):
    gold = expected(name)
    actual = all_rows(make_llm(name), [gold.ids(n) for n in LENGTHS])
    assert worst(actual, [gold.logprobs(n) for n in LENGTHS]) < 1e-3


@pytest.mark.parametrize("weights", ("packed", "dense"))
def test_packed_and_dense_weights_both_match(weights, expected, make_llm):
    gold = expected("v41-a-quant")
    actual = all_rows(make_llm("v41-a-quant", weights=weights), [gold.ids(n) for n in LENGTHS])
    assert worst(actual, [gold.logprobs(n) for n in LENGTHS]) < 1e-3


@pytest.mark.parametrize("name", FP32_SETS)
@pytest.mark.parametrize("chunk", (2048, 7), ids=("whole", "chunks-of-7"))
def test_greedy_continuations_match(name, chunk, expected, make_llm):
    gold = expected(name)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    lengths = [n for n in LENGTHS if gold.tensors.get(f"greedy.{n}.min_top1_gap", torch.zeros(1)).item() > 1e-3]
    assert lengths, "the set holds no continuation with a clear winner at every step"
    outputs = make_llm(name, max_num_batched_tokens=chunk).generate(
        [{"prompt_token_ids": gold.ids(n)} for n in lengths], params, use_tqdm=False
    )
    for n, output in zip(lengths, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == gold.tensors[f"greedy.{n}.output_ids"].tolist(), f"prompt of {n}"


@pytest.mark.parametrize("name", FP32_SETS)
@pytest.mark.parametrize("chunk", (2048, 7), ids=("whole", "chunks-of-7"))
def test_bounded_replay_gives_the_trimmed_rows(name, chunk, expected, make_llm):
    gold = expected(name)
    llm = make_llm(name, replay="bounded", max_num_batched_tokens=chunk)
    lengths = [n for n in LENGTHS if f"prompt.{n}.bounded_replay_last_logits" in gold.tensors]
    assert lengths
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": gold.ids(n)} for n in lengths], params, use_tqdm=False)
    for n, output in zip(lengths, outputs, strict=True):
        row = vocabulary(output.outputs[0].logprobs)[0]
        trimmed = gold.tensors[f"prompt.{n}.bounded_replay_last_logits"].log_softmax(-1)
        assert (row - trimmed).abs().max().item() < 1e-3, f"prompt of {n}"
        assert (row - gold.logprobs(n)[-1]).abs().max().item() > 1e-3, "trimming changed nothing: were all rows run?"


@pytest.mark.parametrize(("name", "long_median"), (("v41-a-quant", 2e-2), ("v41-k-quant", 5e-3)))
def test_rounded_caches_match_the_rounded_reference(name, long_median, expected, make_llm):
    # A value within a few 1e-6 of a rounding edge may fall the other way and move all later rows. Such a flip goes away when the sums are
    # rounded otherwise, a fault stays: each row counts by the best of three roads through the engine.
    gold, exact = expected(name, "expected_cacheq.safetensors"), expected(name)
    roads = ({"enable_prefix_caching": False}, {"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 11, "weights": "packed"})
    answers = [all_rows(make_llm(name, kv_cache_dtype="model", **road), [gold.ids(n) for n in LENGTHS]) for road in roads]
    actual = answers[0]
    for n, *rows in zip(LENGTHS, *answers, strict=True):
        error = torch.stack([(row - gold.logprobs(n)).abs().amax(-1) for row in rows]).amin(0)
        bound = 1e-3 if name.startswith("v41-a") and n <= 33 else long_median
        assert error.median().item() <= bound, f"prompt of {n}"
        assert error.max().item() < 2.5, f"prompt of {n}: more than a flipped rounding"
    unrounded = torch.cat([exact.logprobs(n) for n in LENGTHS])
    assert (torch.cat(actual) - unrounded).abs().median().item() > 1e-3, "the caches were not rounded"


def test_bfloat16_stays_within_its_tolerance(expected, make_llm):
    gold = expected("v41-k-quant")
    llm = make_llm("v41-k-quant", dtype="bfloat16", kv_cache_dtype="unrounded", weights="dense")
    actual = torch.cat(all_rows(llm, [gold.ids(n) for n in LENGTHS]))
    logits = torch.cat([gold.tensors[f"prompt.{n}.logits"] for n in LENGTHS])
    wanted = logits.log_softmax(-1)
    # The README's bound is on logits; log-probabilities differ from them by a constant per row, so compare centred rows.
    centred, centred_actual = logits - logits.mean(-1, keepdim=True), actual - actual.mean(-1, keepdim=True)
    error = (centred_actual - centred).norm(dim=-1) / logits.norm(dim=-1)
    margin = torch.cat([gold.tensors[f"prompt.{n}.margin"] for n in LENGTHS])
    assert error.median().item() <= 0.03
    assert error.quantile(0.9).item() <= 0.08
    assert error[margin > 0.05].max().item() <= 0.10
    assert (actual.argmax(-1) == wanted.argmax(-1)).float().mean().item() >= 0.92
