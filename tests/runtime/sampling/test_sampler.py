# SPDX-License-Identifier: Apache-2.0
"""The batched sampler does what the documentation says, row by row, whatever stands beside a row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.sampling import by_the_book
from whalefall.core.plan import NewRequest
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.sampling import sampler
from whalefall.runtime.sampling.params import SlotParams
from whalefall.runtime.sampling.sampler import Fault, Sampled, sample

VOCAB = 24
PROMPT = (3, 4, 5, 3)
EOS = (1,)


def make_request(slot: int, **sampling: object) -> NewRequest:
    params = SamplingParams(**{"seed": slot, "max_tokens": 64, **sampling})
    return NewRequest(request_id=str(slot), slot=slot, token_ids=PROMPT, num_prompt_tokens=len(PROMPT), sampling=params, eos_token_ids=EOS)


def sample_rows(logits_LV: Tensor, requests: Sequence[NewRequest], outputs: Sequence[Sequence[int]]) -> Sampled:
    """One row per request; the requests lie in slots 0, 1, ..."""
    vocab_size = logits_LV.shape[-1]
    slots = SlotParams(len(requests), vocab_size)
    table = torch.zeros((len(requests), 100), dtype=torch.int32)
    for request, output in zip(requests, outputs):
        slots.set(request)
        known = (*PROMPT, *output)
        table[request.slot, : len(known)] = torch.tensor(known)
    slot_L = np.array([request.slot for request in requests], np.int64)
    position_L = np.array([len(PROMPT) + len(output) for output in outputs], np.int64)
    return sample(logits_LV, slots.rows(slot_L, position_L), table)


def random_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


some_params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.2, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 1, 2, 5, 100]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9]),
        "min_p": st.sampled_from([0.01, 0.2, 1.0]),
        "seed": st.sampled_from([0, 7, 2**64 - 1, -(2**63)]),
        "min_tokens": st.sampled_from([0, 1, 3]),
        "stop_token_ids": st.sampled_from([(2,), (5, 6)]),
        "ignore_eos": st.booleans(),
        "presence_penalty": st.sampled_from([-2.0, 1.5]),
        "frequency_penalty": st.sampled_from([-1.0, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.7]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -3.0, 4.0, 100.0]), max_size=4),
    },
)
some_output = st.lists(st.integers(0, VOCAB - 1), max_size=5)


@settings(deadline=None, max_examples=150)
@given(rows=st.lists(st.tuples(some_params, some_output), min_size=1, max_size=5), seed=st.integers(0, 1_000))
def test_every_row_gets_the_token_of_the_book(rows: list[tuple[dict[str, object], list[int]]], seed: int) -> None:
    logits_LV = random_logits(len(rows), seed)
    requests = [make_request(slot, **params) for slot, (params, _) in enumerate(rows)]
    outputs = [output for _, output in rows]
    got = sample_rows(logits_LV, requests, outputs)
    expected = [by_the_book.choose(logits_LV[row].tolist(), request, outputs[row]) for row, request in enumerate(requests)]
    assert got.ids_L.tolist() == expected
    assert not got.fault_L.any()


def test_tiles_do_not_change_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_LV = random_logits(7)
    requests = [make_request(slot, top_p=0.9, presence_penalty=0.5, min_tokens=1) for slot in range(7)]
    whole = sample_rows(logits_LV, requests, [()] * 7).ids_L
    monkeypatch.setitem(sampler.TILE_ELEMENTS, "cpu", 2 * VOCAB)
    assert torch.equal(sample_rows(logits_LV, requests, [()] * 7).ids_L, whole)


def test_raw_logits_are_left_alone() -> None:
    logits_LV = random_logits(2)
    before_LV = logits_LV.clone()
    sample_rows(logits_LV, [make_request(0, logit_bias={2: 5.0}), make_request(1, repetition_penalty=2.0)], [(), (3,)])
    assert torch.equal(logits_LV, before_LV)


def test_greedy_ties_go_to_the_lower_id() -> None:
    logits_LV = torch.zeros(1, VOCAB)
    assert sample_rows(logits_LV, [make_request(0, temperature=0.0)], [()]).ids_L.tolist() == [0]
    assert sample_rows(logits_LV, [make_request(0, temperature=0.0, min_tokens=1, stop_token_ids=(0,))], [()]).ids_L.tolist() == [2]


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_seeded_draw_does_not_depend_on_the_company(seed: int) -> None:
    row_V = random_logits(1, seed=1, vocab_size=1_000)
    alone = sample_rows(row_V, [make_request(0, seed=seed)], [()]).ids_L[0]
    company_LV = torch.cat([random_logits(9, seed=2, vocab_size=1_000), row_V])
    requests = [make_request(slot, top_k=5, min_p=0.1, presence_penalty=1.0) for slot in range(9)] + [make_request(9, seed=seed)]
    assert sample_rows(company_LV, requests, [()] * 10).ids_L[-1] == alone


def test_seeds_and_positions_give_different_tokens() -> None:
    logits_LV = torch.zeros(40, 1_000)
    by_seed = sample_rows(logits_LV, [make_request(slot) for slot in range(40)], [()] * 40).ids_L
    by_position = sample_rows(logits_LV, [make_request(slot, seed=7) for slot in range(40)], [(2,) * n for n in range(40)]).ids_L
    assert len(set(by_seed.tolist())) > 30
    assert len(set(by_position.tolist())) > 30


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_tiny_temperature_acts_as_greedy(temperature: float) -> None:
    logits_LV = 1e4 * random_logits(3)
    got = sample_rows(logits_LV, [make_request(slot, temperature=temperature, top_p=0.5) for slot in range(3)], [()] * 3)
    assert got.ids_L.tolist() == logits_LV.argmax(-1).tolist()
    assert not got.fault_L.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_non_finite_row_faults_alone(temperature: float, poison: float) -> None:
    logits_LV = random_logits(3)
    requests = [make_request(slot, temperature=temperature) for slot in range(3)]
    healthy = sample_rows(logits_LV, requests, [()] * 3)
    logits_LV[1, slice(None) if poison == -math.inf else slice(4, 5)] = poison
    got = sample_rows(logits_LV, requests, [()] * 3)
    assert got.fault_L.tolist() == [Fault.NONE, Fault.NON_FINITE, Fault.NONE]
    assert got.ids_L[::2].tolist() == healthy.ids_L[::2].tolist()
    assert 0 <= got.ids_L[1] < VOCAB


def test_masked_logits_are_no_fault_and_never_drawn() -> None:
    logits_LV = random_logits(50)
    logits_LV[:, ::2] = -math.inf
    got = sample_rows(logits_LV, [make_request(slot, temperature=2.0) for slot in range(50)], [()] * 50)
    assert not got.fault_L.any()
    assert (got.ids_L % 2 == 1).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidding_every_token_is_a_fault_of_that_row(temperature: float) -> None:
    everything = tuple(range(VOCAB))
    requests = [make_request(0, temperature=temperature, min_tokens=1, stop_token_ids=everything), make_request(1, temperature=temperature)]
    assert sample_rows(random_logits(2), requests, [(), ()]).fault_L.tolist() == [Fault.ALL_FORBIDDEN, Fault.NONE]


def test_bias_forbids_and_forces() -> None:
    logits_LV = random_logits(100)
    best = int(logits_LV[0].argmax())
    forced = sample_rows(logits_LV, [make_request(slot, logit_bias={9: 100.0}) for slot in range(100)], [()] * 100)
    assert forced.ids_L.tolist() == [9] * 100
    forbidden = sample_rows(logits_LV[:1], [make_request(0, temperature=0.0, logit_bias={best: -100.0})], [()])
    assert forbidden.ids_L[0] == logits_LV[0].topk(2).indices[1]


def test_ids_outside_the_vocabulary_do_not_break_the_step() -> None:
    params = {"logit_bias": {VOCAB + 5: 3.0}, "stop_token_ids": (VOCAB + 9,), "min_tokens": 2}
    assert not sample_rows(random_logits(1), [make_request(0, **params)], [()]).fault_L.any()


def test_a_slot_forgets_its_last_request() -> None:
    logits_LV = random_logits(1)
    slots, table = SlotParams(1, VOCAB), torch.zeros((1, 100), dtype=torch.int32)
    slots.set(make_request(0, logit_bias={9: 100.0}, min_tokens=5, top_k=1, presence_penalty=1.0, logprobs=3))
    slots.set(make_request(0, temperature=0.0))
    rows = slots.rows(np.array([0]), np.array([len(PROMPT)]))
    assert rows.is_plain_L.all()
    assert rows.num_logprobs_L.tolist() == [-2]
    assert sample(logits_LV, rows, table).ids_L[0] == logits_LV[0].argmax()
