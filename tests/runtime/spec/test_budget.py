# SPDX-License-Identifier: Apache-2.0
"""The budget of drafts: finds the best number, rests where none pays, gives prefixes, looks at nothing that could bias the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalefall.runtime.spec.budget import DraftBudget, _largest
from whalefall.runtime.spec.costs import LEAST_SAMPLES, NUM_LEVELS, CostTable

K = 5


class Machine:
    """Serves R requests for ever; a draft is accepted with the chance that its confidence names, a step takes what `cost` says."""

    def __init__(self, num_requests: int, chance: float, cost: Callable[[int, int, bool], float], costs: CostTable | None = None) -> None:
        self.now = 0.0
        self.costs = costs or CostTable()
        self.budget = DraftBudget(K, self.costs, lambda: self.now)
        self.num_requests, self.chance, self.cost = num_requests, chance, cost
        self.rng = np.random.default_rng(0)
        self.has_drafts = False

    def run(self, num_steps: int, *, fixed: int | None = None) -> float:
        """Tokens a second; `fixed` plays a number of drafts instead of asking."""
        begun, tokens = self.now, 0
        for _ in range(num_steps):
            confidence_RK = np.clip(self.rng.normal(self.chance, 0.1, (self.num_requests, K)), 0.01, 0.99)
            counts_R = np.full(self.num_requests, fixed) if fixed is not None else self._ask(confidence_RK)
            wants = fixed is None and self.budget.wants_drafts if fixed is None else fixed > 0
            accepted_R = np.minimum((self.rng.random((self.num_requests, K)) < confidence_RK).cumprod(1).sum(1), counts_R)
            if fixed is None:
                self.budget.learn(np.cumprod(confidence_RK, 1), counts_R, accepted_R)
            tokens += int(accepted_R.sum()) + self.num_requests
            self.now += self.cost(self.num_requests, int(counts_R.sum()), wants)
            self.has_drafts = wants
        return tokens / (self.now - begun)

    def _ask(self, confidence_RK: np.ndarray) -> np.ndarray:
        product_RK = self.budget.products(confidence_RK, np.full(self.num_requests, K if self.has_drafts else 0))
        return self.budget.allot(product_RK, is_decode=True, has_confidence=True)


def launch_bound(requests: int, drafts: int, wants: bool) -> float:
    return 0.010 + 0.0001 * (requests + drafts) + (0.002 if wants else 0)


def row_bound(requests: int, drafts: int, wants: bool) -> float:
    return 0.001 * (requests + drafts) + (0.0005 * requests if wants else 0)


@pytest.mark.parametrize("cost", (launch_bound, row_bound))
@pytest.mark.parametrize("chance", (0.15, 0.5, 0.9))
@pytest.mark.parametrize("num_requests", (1, 8, 64))
def test_it_comes_near_the_best_fixed_number_or_beats_it(num_requests: int, chance: float, cost: Callable[[int, int, bool], float]) -> None:
    best = max(Machine(num_requests, chance, cost).run(600, fixed=k) for k in range(K + 1))
    machine = Machine(num_requests, chance, cost)
    machine.run(150)  # measures
    assert machine.run(1500) > 0.95 * best


@pytest.mark.parametrize("num_requests", (1, 8))
def test_a_noisy_clock_does_not_turn_it_round(num_requests: int) -> None:
    """Steps of a fifth more or less; one request's round alone would often say that drafts do not pay."""
    rng = np.random.default_rng(3)
    best = max(Machine(num_requests, 0.6, launch_bound).run(600, fixed=k) for k in range(K + 1))
    machine = Machine(num_requests, 0.6, lambda r, d, w: launch_bound(r, d, w) * float(np.exp(rng.normal(0, 0.2))))
    machine.run(150)
    assert machine.run(1200) > 0.93 * best
    assert machine.budget.num_rested < 100


def test_where_drafts_never_pay_it_rests_ever_longer_and_counts_that() -> None:
    machine = Machine(8, 0.1, row_bound)
    machine.run(400)
    before = machine.budget.num_rested
    machine.run(1000)
    assert machine.budget.num_rested - before > 950


def test_another_load_ends_a_rest() -> None:
    machine = Machine(64, 0.5, lambda r, d, w: row_bound(r, d, w) if r > 4 else launch_bound(r, d, w))
    machine.run(600)
    assert machine.budget.num_rested > 300
    machine.num_requests = 1
    rested = machine.budget.num_rested
    machine.run(200)
    assert machine.budget.num_rested - rested < 20


products = st.lists(st.lists(st.sampled_from([0.1, 0.5, 0.9, 1.0]), min_size=K, max_size=K), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(products, st.integers(0, 30))
def test_the_largest_products_are_prefixes_and_use_the_whole_budget(confidence: list[list[float]], budget: int) -> None:
    product_RK = np.cumprod(np.array(confidence), 1)
    counts_R = _largest(product_RK, budget)
    assert counts_R.sum() == min(budget, product_RK.size)
    taken = np.arange(K) < counts_R[:, None]
    if taken.any() and not taken.all():
        assert product_RK[taken].min() >= product_RK[~taken].max() - 1e-12


@settings(max_examples=60, deadline=None)
@given(products, st.integers(1, 30), st.integers(0, 5), st.integers(0, K - 1), st.floats(0.0, 1.0))
def test_whether_a_draft_is_looked_at_does_not_depend_on_what_comes_after_it(
    confidence: list[list[float]], budget: int, row: int, place: int, other: float
) -> None:
    one = np.array(confidence)
    row %= len(one)
    two = one.copy()
    two[row, place + 1 :] = other  # confidences behind draft `place` are all that may depend on it
    looked = [_largest(np.cumprod(c, 1), budget)[row] > place for c in (one, two)]
    assert looked[0] == looked[1]


def test_the_number_comes_from_the_round_before() -> None:
    seen = []
    for at_hand in (0.05, 0.95):
        machine = Machine(8, 0.6, launch_bound)
        machine.run(200)
        assert machine.has_drafts
        product_RK = machine.budget.products(np.full((8, K), at_hand), np.full(8, K))
        seen.append(machine.budget.allot(product_RK, is_decode=True, has_confidence=True).sum())
    assert seen[0] == seen[1] > 0


def test_a_drafter_without_confidences_is_judged_by_how_it_fares() -> None:
    budget = DraftBudget(K, CostTable(), lambda: 0.0)
    for _ in range(200):
        budget.learn(np.ones((4, K)), np.full(4, K), np.array([5, 5, 0, 0]))
    product_RK = budget.products(None, np.array([5, 2, 0]))
    assert product_RK[0] == pytest.approx([0.5] * K, abs=0.05)
    assert product_RK[1, 2] == 0 and product_RK[2, 0] == 0


def test_costs_outlive_the_process_and_a_spoilt_file_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.json"
    table = CostTable(path)
    for _ in range(LEAST_SAMPLES):
        table.note(8, NUM_LEVELS, 0.5)
        table.note(8, 2, 0.1)
    table.save()
    again = CostTable(path)
    assert again.seconds(8, NUM_LEVELS) == pytest.approx(0.5)
    assert again.seconds(8, 6) == pytest.approx(0.3), "between two levels lies their line"
    assert again.seconds(8, 0) is None and again.seconds(64, 2) is None
    path.write_text("{")
    assert CostTable(path).seconds(8, 2) is None


def test_batch_sizes_lend_each_other_their_costs() -> None:
    table = CostTable()
    for _ in range(LEAST_SAMPLES):
        table.note(4, 0, 0.4)
        table.note(8, 0, 0.4)
    assert table.is_known(6, 0) and not table.is_known(16, 0) and not table.is_known(6, 2)
    seconds = table.seconds(6, 0)
    assert seconds is not None and 6 * 0.05 < seconds < 6 * 0.1


def test_a_hiccup_hardly_moves_a_cost_and_a_pause_not_at_all() -> None:
    table = CostTable()
    for seconds in (0.1, 0.1, 0.1, 0.7, 60.0):
        table.note(1, 0, seconds)
    assert table.seconds(1, 0) == pytest.approx(0.106)
