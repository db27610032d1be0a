# SPDX-License-Identifier: Apache-2.0
"""Drafters for tests: right, wrong, random, a mixture; with probabilities or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whalefall.core.batch import CacheTensors, DraftRequests, Drafts

Oracle = Callable[[Sequence[int]], int]
"""The token after a sequence."""


class FakeDrafter:
    """Right with a chance of `skill`, else random; random numbers by what is known of the request, so that every road sees the same drafts.

    Args:
        oracle: what is right; None: all is random.
        probabilities: draws from a distribution of its own through the runtime's chooser, and hands it over.
        shortest: 0: sometimes fewer drafts than asked for, or none.
    """

    def __init__(
        self, vocab_size: int, *, oracle: Oracle | None = None, skill: float = 0.6, probabilities: bool = False, shortest: int = 0
    ) -> None:
        self.max_draft_tokens = 8
        self._vocab_size, self._oracle, self._skill, self._shortest = vocab_size, oracle, skill, shortest
        self._probabilities = probabilities

    def draft(self, requests: DraftRequests, cache: CacheTensors, k: int) -> Drafts:
        ids_RK = torch.full((len(requests.slot_R), k), -1)
        histories, generators = [], []
        for slot, position, latest in zip(requests.slot_R.tolist(), requests.position_R.tolist(), requests.latest_id_R.tolist()):
            history = requests.token_ids_SP[slot, : position + 1].tolist()
            assert history[-1] == latest and position <= requests.max_position
            histories.append(history)
            generators.append(torch.Generator().manual_seed(hash(tuple(history)) % 2**31))
        probs = []
        for i in range(k):
            logits_RV = torch.stack([self._opinion(h, g) for h, g in zip(histories, generators)])
            ids_R, probs_RV = requests.choose(logits_RV, i) if self._probabilities else (logits_RV.argmax(-1), None)
            probs.append(probs_RV)
            ids_RK[:, i] = ids_R
            for history, token_id in zip(histories, ids_R.tolist()):
                history.append(token_id)
        if self._probabilities and probs[0] is not None:
            return Drafts(ids_RK=ids_RK, probs_RKV=torch.stack(probs, 1))
        for r, generator in enumerate(generators):
            if self._shortest < k and torch.rand((), generator=generator) < 0.3:
                ids_RK[r, int(torch.randint(self._shortest, k, (), generator=generator)) :] = -1
        return Drafts(ids_RK=ids_RK)

    def _opinion(self, history: Sequence[int], generator: torch.Generator) -> Tensor:
        logits_V = torch.randn(self._vocab_size, generator=generator)
        if self._oracle is not None and torch.rand((), generator=generator) < self._skill:
            logits_V[self._oracle(history)] += 20
        return logits_V
