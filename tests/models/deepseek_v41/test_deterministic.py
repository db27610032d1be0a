# SPDX-License-Identifier: Apache-2.0
"""Row by row: the same bits alone and in a crowd, in chunks, behind a prefix hit, after preemption, with drafts and one step ahead."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.goldens.conftest import golden_dir
from tests.models.deepseek_v41.cached_engine import Answer, CachedEngine
from tests.runtime.spec.drafters import FakeDrafter
from whalefall.runtime.worker.row_by_row import RowByRow
from whalefall.testing.drive import Driver, LoadedModel, load_model

K = 3


@cache
def loaded() -> LoadedModel:
    model = load_model(golden_dir("v41-a-quant"))
    return replace(model, model=RowByRow(model.model), context=replace(model.context, max_draft_tokens=K))


def some_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, loaded().config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts() -> dict[str, list[int]]:
    return {f"r{n}": some_ids(n, n) for n in (1, 6, 19)}


def run(replay: str = "exact", *, prefix_caching: bool = False, rounds: int = 1, **options: object) -> list[dict[str, Answer]]:
    engine = CachedEngine(loaded(), replay=replay, prefix_caching=prefix_caching, block_tokens=8, **options)  # type: ignore[arg-type]
    found = []
    for _ in range(rounds):
        for name, prompt in prompts().items():
            engine.add(name, prompt, num_tokens=7)
        found.append(dict(engine.run()))
    return found


@cache
def alone(replay: str) -> dict[str, Answer]:
    return run(replay, num_slots=1)[0]


def assert_same_bits(answers: dict[str, Answer], wanted: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        assert answer.token_ids == wanted[name].token_ids
        assert torch.equal(answer.logprobs_TV, wanted[name].logprobs_TV), f"{name}: other bits"


@pytest.mark.parametrize(("replay", "budget"), [("exact", 5), ("exact", 512), ("bounded", 5)])
def test_in_a_crowd_and_in_chunks(replay: str, budget: int) -> None:
    assert_same_bits(run(replay, budget=budget)[0], alone(replay))


def test_after_preemption() -> None:
    found = []
    for num_slots in (2, 1):  # two that outgrow the pool together, then one after the other
        engine = CachedEngine(loaded(), replay="exact", prefix_caching=False, block_tokens=8, num_blocks=7, num_slots=num_slots)
        for name in ("r1", "r6"):
            engine.add(name, prompts()[name], num_tokens=26)
        found.append(engine.run())
        assert (engine.scheduler.num_preemptions > 0) == (num_slots == 2)
    assert_same_bits(*found)


def test_behind_prefix_hits() -> None:
    _, again = run(prefix_caching=True, rounds=2)
    assert sum(answer.num_cached_tokens for answer in again.values()) > 10
    assert_same_bits(again, alone("exact"))


@pytest.mark.parametrize("one_step_ahead", [False, True])
def test_with_drafts(one_step_ahead: bool) -> None:
    wanted = alone("exact")

    def target(history: list[int]) -> int:
        for name, prompt in prompts().items():
            whole = prompt + wanted[name].token_ids
            if whole[: len(history)] == history and len(whole) > len(history):
                return whole[len(history)]
        return 3

    drafter = FakeDrafter(loaded().config.vocab_size, oracle=target, skill=0.6)
    assert_same_bits(run(drafter=drafter, one_step_ahead=one_step_ahead)[0], wanted)


@pytest.mark.parametrize("accepted", range(K + 1))
def test_every_state_after_accepted_drafts(accepted: int) -> None:
    """Window rows, open group and compressed entries, bit for bit."""
    ids = some_ids(18 + K, 5)
    driver = Driver(loaded(), block_tokens=8)
    drafted, plain = driver.open(), driver.open()
    driver.forward((drafted, ids[:17]), (plain, ids[:17]))
    wrong = [(token + 1) % 90 + 3 for token in ids[18 + accepted :]]
    driver.forward((drafted, [*ids[17 : 18 + accepted], *wrong]))
    del drafted.ids[18 + accepted :]
    driver.forward((plain, ids[17 : 18 + accepted]))
    end, spec = 18 + accepted, loaded().definition.cache_spec(loaded().config, loaded().context, 8)
    for ring in spec.rings:
        row_W = torch.arange(max(0, end - ring.rows + ring.num_spare_rows), end) % ring.rows
        one, other = (driver.cache.rings[ring.name][track.slot, row_W] for track in (drafted, plain))
        assert torch.equal(one, other), ring.name
    for field in spec.growing:
        per_block, entry_C = 8 // field.tokens_per_entry, torch.arange(end // field.tokens_per_entry)
        one, other = (
            driver.cache.growing[field.name][torch.tensor(track.blocks)[entry_C // per_block] * per_block + entry_C % per_block]
            for track in (drafted, plain)
        )
        assert torch.equal(one, other), field.name
