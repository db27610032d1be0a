# SPDX-License-Identifier: Apache-2.0
"""DraftBudget: how many drafts a step verifies, and of whom; and when it is better not to draft at all.

A step has R requests with up to K drafts each. Draft i of a request survives if it and those before it are accepted; the product of the
drafter's confidences up to i says how likely that is. Two questions, answered from different knowledge:

    how many?   The number B that promises most tokens a second: (R + the B largest products) / cost of such a step.
                The products are those of rounds *before*, few requests' smoothed over several; the cost is measured (costs.py).
    of whom?    The B largest products of the drafts *at hand*. Products fall along a request, so each gets a prefix of its drafts.

Why this cannot bias what comes out. Rejection sampling is exact if whether draft i is looked at does not depend on what draft i (or a
later one) is. Confidence i is computed before draft i is drawn, from the drafts before it: whether draft i is among the B largest depends
on B, on products of this request up to i, and on those of other requests, whose drafts are independent of this one's. Its own later
products are no larger than product i (ties go to the earlier draft), so they never push it out. B would see draft i if it were computed
from the products at hand, whose later entries depend on draft i: so it comes from rounds before, whose drafts have all been judged.
The corrections learned from how earlier drafts fared, and the clock, know nothing of drafts at hand either. Under exact acceptance even
that is not needed: there a draft stays only where it is what the target draws anyway.

Where no number of drafts pays, drafting rests for some steps, longer each time, and is tried again for a few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whalefall.runtime.spec.costs import LEAST_SAMPLES, NUM_LEVELS, CostTable

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FIRST_REST, LONGEST_REST = 24, 1024
"""Steps."""
TRIAL = 6
"""Steps with drafts after a rest, at least; more for few requests, of whom a step tells less."""
MARGIN, CLEAR = 1.02, 1.15
"""Resting must promise so much more before it is done, the measurements being noisy; and so much to end a trial early."""
LOOK_AROUND_EVERY = 40
_GAIN = 0.03


@dataclass(frozen=True, slots=True)
class _Step:
    """What the latest step was, for the clock."""

    begun_s: float
    num_requests: int
    level: int | None
    """None: of no kind that is measured."""


class DraftBudget:
    def __init__(self, num_drafts: int, costs: CostTable, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self._num_drafts, self._costs, self._clock = num_drafts, costs, clock
        self.wants_drafts = True
        """Whether this step shall draft for the next one."""
        self.num_rested = 0
        """Steps that ran without drafting because it did not pay."""
        self._survival_K = 0.5 ** np.arange(1.0, num_drafts + 1)
        """How often the draft at each place was accepted, drafters without confidences being judged by this alone."""
        self._predicted_K = self._survival_K.copy()
        """What the confidences said of the same drafts."""
        self._promise: FloatArray | None = None
        """Accepted drafts to expect per request at each level, by the products of earlier rounds."""
        self._advantage = 1.0
        """Of the best number of drafts over none, smoothed: one request's round says little."""
        self._latest: _Step | None = None
        self._rest_left, self._next_rest, self._trial_left = 0, FIRST_REST, TRIAL
        self._rest_requests, self._trial_done = 0, 0
        self._num_steps = 0

    def products(self, confidence_RK: FloatArray | None, num_drafts_R: IntArray) -> FloatArray:
        """Survival of each draft at hand, [R, K]; 0 where there is none."""
        place_K = np.arange(self._num_drafts)
        is_there_RK = place_K < num_drafts_R[:, None]
        if confidence_RK is None:
            return np.where(is_there_RK, self._survival_K, 0.0)
        return np.where(is_there_RK, np.cumprod(confidence_RK, 1), 0.0)

    def allot(self, product_RK: FloatArray, *, is_decode: bool, has_confidence: bool) -> IntArray:
        """How many drafts each request verifies in the step that begins now.

        Args:
            is_decode: the step has no rows but one for each request and its drafts, so that its time says something.
        """
        now, num_requests = self._clock(), len(product_RK)
        self._measure(now, num_requests, is_decode)
        corrected_RK = product_RK * self._correction() if has_confidence else product_RK
        at_hand = int((product_RK > 0).sum())
        level, resting = self._choose(num_requests, at_hand)
        budget = self._budget(num_requests, level)
        counts_R = _largest(corrected_RK, min(at_hand, budget))
        if at_hand:
            self._look_at(corrected_RK)
        measured: int | None = None
        if is_decode and (not at_hand if resting else at_hand >= 0.9 * budget):
            measured = level
        self._latest = _Step(now, num_requests, measured)
        self.wants_drafts = not resting
        self.num_rested += resting
        self._num_steps += 1
        return counts_R

    def learn(self, product_RK: FloatArray, num_verified_R: IntArray, num_accepted_R: IntArray) -> None:
        """How the drafts of an earlier step fared."""
        for place in range(self._num_drafts):
            tried_R = num_verified_R > place
            if not tried_R.any():
                continue
            gain = 1 - (1 - _GAIN) ** int(tried_R.sum())
            self._survival_K[place] += gain * ((num_accepted_R[tried_R] > place).mean() - self._survival_K[place])
            self._predicted_K[place] += gain * (product_RK[tried_R, place].mean() - self._predicted_K[place])

    def _correction(self) -> FloatArray:
        """Per place; never rising along a block, so that products still fall."""
        return np.minimum.accumulate(np.clip(self._survival_K / np.maximum(self._predicted_K, 1e-3), 0.05, 1.5))

    def _measure(self, now: float, num_requests: int, is_decode: bool) -> None:
        latest = self._latest
        if latest is not None and latest.level is not None and is_decode and latest.num_requests == num_requests:
            self._costs.note(num_requests, latest.level, now - latest.begun_s)

    def _choose(self, num_requests: int, at_hand: int) -> tuple[int, bool]:
        """The level of this step, and whether drafting rests."""
        if self._rest_left and max(num_requests, self._rest_requests) > 1.7 * min(num_requests, self._rest_requests):
            self._begin_trial(num_requests)  # what was found holds for another load
        if self._rest_left:
            self._rest_left -= 1
            if not self._rest_left:
                self._begin_trial(num_requests)
            return 0, True
        levels = self._levels(num_requests)
        unknown = next((at for at in levels if not self._costs.is_known(num_requests, at) and self._is_measured_first(at, levels)), None)
        if unknown is not None or self._promise is None or not at_hand:
            return unknown or NUM_LEVELS, False
        if not self._costs.is_known(num_requests, 0):
            return self._rest(num_requests, LEAST_SAMPLES + 1)
        best, rate = max(((level, self._rate(num_requests, level)) for level in levels), key=lambda pair: pair[1])
        idle_s = self._costs.seconds(num_requests, 0)
        assert idle_s is not None
        if self._trial_left:
            self._trial_left, self._trial_done = self._trial_left - 1, self._trial_done + 1
        self._advantage += _weight(num_requests) * (rate * idle_s / num_requests - self._advantage)
        if self._advantage * MARGIN < 1:
            is_clear = self._trial_done >= TRIAL and self._advantage * CLEAR < 1
            if self._trial_left and not is_clear:
                return best, False
            self._trial_left = 0
            length, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
            return self._rest(num_requests, length)
        if not self._trial_left:
            self._next_rest = FIRST_REST
        if self._num_steps % LOOK_AROUND_EVERY == 0:
            aside = 1 if self._num_steps // LOOK_AROUND_EVERY % 2 else -1
            best = levels[min(len(levels) - 1, max(0, levels.index(best) + aside))]
        return best, False

    def _rest(self, num_requests: int, length: int) -> tuple[int, bool]:
        self._rest_left, self._rest_requests = length, num_requests
        return 0, True

    def _begin_trial(self, num_requests: int) -> None:
        self._rest_left, self._trial_done, self._advantage = 0, 0, 1.0
        self._trial_left = max(TRIAL, round(2 / _weight(num_requests)))

    def _look_at(self, product_RK: FloatArray) -> None:
        num_requests = len(product_RK)
        summed = np.concatenate(([0.0], np.cumsum(np.sort(product_RK, axis=None)[::-1]))) / num_requests
        fresh = summed[[self._budget(num_requests, level) for level in range(NUM_LEVELS + 1)]]
        self._promise = fresh if self._promise is None else self._promise + _weight(num_requests) * (fresh - self._promise)

    def _budget(self, num_requests: int, level: int) -> int:
        return -(-level * num_requests * self._num_drafts // NUM_LEVELS)

    def _levels(self, num_requests: int) -> list[int]:
        """Those that differ for so many requests, few drafts first."""
        return sorted({self._budget(num_requests, level): level for level in range(1, NUM_LEVELS + 1)}.values())

    def _is_measured_first(self, level: int, levels: list[int]) -> bool:
        """The ends and the middle; between them costs are read off a line until they are measured by use."""
        return level in (levels[0], levels[len(levels) // 2], levels[-1])

    def _rate(self, num_requests: int, level: int) -> float:
        """Tokens a second that this level promises."""
        seconds = self._costs.seconds(num_requests, level)
        if seconds is None or self._promise is None:
            return 0.0
        return num_requests * (1 + float(self._promise[level])) / seconds


def _weight(num_requests: int) -> float:
    """Of a round against the ones before it: with many requests a round is a good sample by itself."""
    return min(1.0, max(0.08, num_requests / 32))


def _largest(product_RK: FloatArray, budget: int) -> IntArray:
    """[R] counts whose prefixes hold the `budget` largest products; equal ones go to the earlier draft, then to the earlier request."""
    if budget <= 0:
        return np.zeros(len(product_RK), np.int64)
    order = np.argsort(-product_RK.T.ravel(), kind="stable")[:budget]  # by place first
    chosen = np.bincount(order % len(product_RK), minlength=len(product_RK))
    counts_R: IntArray = np.minimum(chosen, (product_RK > 0).sum(1)).astype(np.int64)
    return counts_R
