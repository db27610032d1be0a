# SPDX-License-Identifier: Apache-2.0
"""Speculation does not change what is drawn: whole short answers, a hundred thousand draws for each way to accept and to shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.runtime.spec.chances import VOCAB, answers, chances, chi_square
from whalefall.runtime.spec.verify import Acceptance

NUM_ANSWERS = 34_000
"""Of three tokens."""


def neighbours(token_id: int) -> set[int]:
    return {token_id, (token_id + 1) % VOCAB, (token_id + 3) % VOCAB}


SHAPES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-p, top-k": {"temperature": 1.0, "top_p": 0.8, "top_k": 4},
    "penalties, bias, min_tokens": {
        "temperature": 1.1,
        "frequency_penalty": 0.9,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.4,
        "logit_bias": {2: 0.7},
        "min_tokens": 2,
    },
    "mask": {"temperature": 1.0, "rule": neighbours, "min_p": 0.05},
}


@pytest.mark.parametrize("acceptance", ["standard", "block"])
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_answers_are_as_likely_as_without_drafts(acceptance: Acceptance, shape: str) -> None:
    drawn, accepted = answers(acceptance, NUM_ANSWERS, **SHAPES[shape])

    assert abs(chi_square(drawn, chances(**SHAPES[shape]))) < 4
    assert 0.2 < accepted < 0.95, "nothing was at stake"


def test_the_measure_sees_a_drafter_that_misstates_its_chances() -> None:
    drawn, _ = answers("standard", NUM_ANSWERS, lies=True, temperature=0.8)
    assert chi_square(drawn, chances(temperature=0.8)) > 20


def test_blocks_keep_no_fewer_drafts_than_single_tests_and_more_than_the_same_noise() -> None:
    kept = {a: answers(a, 8_000, k=4, temperature=0.8)[1] for a in ("exact", "standard", "block")}
    assert kept["exact"] < kept["standard"] < kept["block"] + 0.003


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_acceptance_gives_each_seed_its_own_tokens(shape: str) -> None:
    plain, _ = answers("exact", 300, k=1, **SHAPES[shape])
    drafted, accepted = answers("exact", 300, k=5, **SHAPES[shape])
    assert np.array_equal(plain, drafted) and accepted > 0.1
