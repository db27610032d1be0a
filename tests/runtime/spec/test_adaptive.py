# SPDX-License-Identifier: Apache-2.0
"""With an adaptive number of drafts, whoever drafts and however it fares, every request gets what it gets without."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.runtime.spec.test_same_answers import DRAFTERS, alone, assert_same, some_requests
from tests.runtime.worker.driver import Engine
from whalefall.core.batch import CacheTensors, DraftRequests, Drafts
from whalefall.core.seams import Drafter


class Confident:
    """Another drafter's drafts, with confidences that are right on average or have nothing to do with anything."""

    def __init__(self, inner: Drafter, confidence: float | None) -> None:
        self._inner, self._confidence = inner, confidence
        self.max_draft_tokens = inner.max_draft_tokens
        self._generator = torch.Generator().manual_seed(0)
        self.num_calls = 0

    def draft(self, requests: DraftRequests, cache: CacheTensors, k: int) -> Drafts:
        self.num_calls += 1
        drafts = self._inner.draft(requests, cache, k)
        shape = drafts.ids_RK.shape
        confidence_RK = torch.rand(shape, generator=self._generator) if self._confidence is None else torch.full(shape, self._confidence)
        return replace(drafts, confidence_RK=confidence_RK)


@pytest.mark.parametrize("one_step_ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [200, 30])
@pytest.mark.parametrize("drafter", ["good", "random", "ngram", "good at random confidence", "random at full confidence"])
def test_answers_are_those_without_drafts(drafter: str, num_blocks: int, one_step_ahead: bool) -> None:
    inner = DRAFTERS[drafter.split()[0]]
    made: Drafter = inner if " at " not in drafter else Confident(inner, None if "random conf" in drafter else 0.99)
    rng = random.Random(drafter)
    engine = Engine(drafter=made, num_drafts=4, num_blocks=num_blocks, num_slots=6, one_step_ahead=one_step_ahead, is_adaptive=True)
    requests = some_requests()
    for name in sorted(requests):
        engine.add(name, requests[name][0], **requests[name][1])

    def on_turn(turn: int) -> None:
        if rng.random() < 0.03:
            engine.abort(rng.choice(sorted(requests)))

    for name, answer in engine.run(on_turn).items():
        assert_same(answer, alone(name))
