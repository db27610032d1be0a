# SPDX-License-Identifier: Apache-2.0
"""Loading must not be the slower way: what was measured decides, and a way that was too slow gets another chance now and then."""

from __future__ import annotations

from whalefall.runtime.kvcache.tiers.cost import TRY_AGAIN_AFTER, CostEstimate


def estimate(*, compute_s: float, load_s: float, fetch_s: float) -> CostEstimate:
    """Seconds per block of 100 tokens."""
    cost = CostEstimate(100)
    cost.note_step(1_000, 10 * compute_s)
    cost.note_load(4, 4 * load_s)
    cost.note_fetch(4, 4 * fetch_s)
    return cost


def test_with_nothing_seen_yet_loading_is_worth_a_try() -> None:
    cost = CostEstimate(100)
    assert cost.is_fetch_worthwhile(1) and cost.is_load_worthwhile(1) and cost.compute_s(1) is None


def test_a_disk_slower_than_the_device_is_not_asked_but_the_host_is() -> None:
    cost = estimate(compute_s=0.010, load_s=0.001, fetch_s=0.020)
    assert cost.is_load_worthwhile(5) and not cost.is_fetch_worthwhile(5)


def test_fetching_counts_the_load_that_follows() -> None:
    assert not estimate(compute_s=0.010, load_s=0.006, fetch_s=0.006).is_fetch_worthwhile(1)
    assert estimate(compute_s=0.010, load_s=0.002, fetch_s=0.006).is_fetch_worthwhile(1)


def test_a_slow_way_is_tried_again_now_and_then() -> None:
    cost = estimate(compute_s=0.010, load_s=0.001, fetch_s=0.020)
    tries = [cost.is_fetch_worthwhile(5) for _ in range(2 * TRY_AGAIN_AFTER)]
    assert sum(tries) == 2
    for _ in range(30):
        cost.note_fetch(4, 4 * 0.001)
    assert cost.is_fetch_worthwhile(5)


def test_steps_of_a_few_rows_say_nothing_about_prompts() -> None:
    cost = estimate(compute_s=0.010, load_s=0.001, fetch_s=0.002)
    cost.note_step(1, 5.0)
    assert abs((cost.compute_s(3) or 0.0) - 0.030) < 1e-9
