# SPDX-License-Identifier: Apache-2.0
"""DSpark in the engine equals the golden drafts, whatever road the prompt takes, whoever shares the batch and whatever was refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.goldens.conftest import golden_dir
from whalefall.core.batch import DraftRequests, Drafts
from whalefall.testing.drive import Driver, LoadedModel, Track, load_model

SET, BLOCK = "v41-a-quant", 4


@cache
def loaded(kv_cache_dtype: Any = "unrounded", dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(golden_dir(SET), kv_cache_dtype=kv_cache_dtype, max_draft_tokens=BLOCK, dtype=dtype)


class Keep:
    """Chooses greedily and keeps what it was shown."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, logits_RV: Tensor, index: int) -> tuple[Tensor, Tensor | None]:
        assert index == len(self.logits)
        self.logits.append(logits_RV)
        return logits_RV.argmax(-1), None


def drafts_of(driver: Driver, model: LoadedModel, waiting: Sequence[tuple[Track, int]], k: int = BLOCK) -> tuple[Drafts, list[Tensor]]:
    """For tracks and the token that each drew."""
    assert model.drafter is not None
    keep = Keep()
    position_R = torch.tensor([len(track.ids) for track, _ in waiting])
    requests = DraftRequests(
        slot_R=torch.tensor([track.slot for track, _ in waiting]),
        position_R=position_R,
        latest_id_R=torch.tensor([token for _, token in waiting]),
        token_ids_SP=torch.zeros(8, 512, dtype=torch.int32),
        max_position=int(position_R.max()),
        choose=keep,
    )
    return model.drafter.draft(requests, driver.cache, k), keep.logits


@pytest.mark.parametrize("n", (33, 70))
@pytest.mark.parametrize("chunk", (None, 7, 1), ids=("whole", "chunks-of-7", "token-by-token"))
def test_a_block_equals_the_golden_one(n: int, chunk: int | None, expected: Any) -> None:
    gold, driver = expected(SET), Driver(loaded())
    ids, track = gold.ids(n), driver.open()
    for start in range(0, n - 1, chunk or n - 1):
        driver.forward((track, ids[start : min(n - 1, start + (chunk or n - 1))]))
    drafts, logits = drafts_of(driver, loaded(), [(track, ids[-1])])
    assert (torch.cat(logits) - gold.tensors[f"dspark.{n}.logits"]).abs().max() < 1e-3
    assert drafts.ids_RK[0].tolist() == gold.tensors[f"dspark.{n}.tokens"].tolist()
    assert drafts.confidence_RK is not None
    assert (drafts.confidence_RK[0] - gold.tensors[f"dspark.{n}.confidence_raw"].sigmoid()).abs().max() < 1e-3


def test_with_rounded_caches_it_equals_the_rounded_reference(expected: Any) -> None:
    gold, model = expected(SET, "expected_cacheq.safetensors"), loaded("model")
    ids, driver = expected(SET).ids(33), Driver(model)
    track = driver.open()
    driver.forward((track, ids[:-1]))
    _, logits = drafts_of(driver, model, [(track, ids[-1])])
    error = (torch.cat(logits) - gold.tensors["dspark.33.logits"]).abs().amax(-1)
    assert error.median() < 2e-2, "more than roundings that flip"
    assert (torch.cat(logits) - expected(SET).tensors["dspark.33.logits"]).abs().median() > 1e-3, "the rows were not rounded"


def test_requests_of_one_round_do_not_touch_each_other(expected: Any) -> None:
    gold, driver = expected(SET), Driver(loaded())
    waiting = []
    for n in (70, 2, 33, 16):
        track = driver.open()
        driver.forward((track, gold.ids(n)[:-1]))
        waiting.append((track, gold.ids(n)[-1]))
    together, _ = drafts_of(driver, loaded(), waiting)
    assert together.ids_RK[0].tolist() == gold.tensors["dspark.70.tokens"].tolist()
    assert together.confidence_RK is not None
    for row, one in enumerate(waiting):
        alone, _ = drafts_of(driver, loaded(), [one])
        assert alone.ids_RK[0].tolist() == together.ids_RK[row].tolist()
        assert alone.confidence_RK is not None
        assert torch.allclose(alone.confidence_RK[0], together.confidence_RK[row], atol=1e-5)


def test_fewer_drafts_are_the_first_ones(expected: Any) -> None:
    gold, driver = expected(SET), Driver(loaded())
    track = driver.open()
    driver.forward((track, gold.ids(33)[:-1]))
    for k in range(1, BLOCK + 1):
        drafts, _ = drafts_of(driver, loaded(), [(track, gold.ids(33)[-1])], k)
        assert drafts.ids_RK[0].tolist() == gold.tensors["dspark.33.tokens"].tolist()[:k]


@pytest.mark.parametrize("num_refused", range(BLOCK + 1))
def test_rows_of_refused_drafts_leave_no_trace(num_refused: int, expected: Any) -> None:
    gold, driver = expected(SET), Driver(loaded())
    ids, track = gold.ids(70), driver.open()
    last = 69 - (BLOCK + 1 - num_refused)
    driver.forward((track, ids[:last]))
    wrong = [7] * num_refused
    driver.forward((track, ids[last:69] + wrong))  # 1 + BLOCK rows of which the last are refused
    del track.ids[69:]
    drafts, _ = drafts_of(driver, loaded(), [(track, ids[69])])
    assert drafts.ids_RK[0].tolist() == gold.tensors["dspark.70.tokens"].tolist()


def test_bounded_replay_feeds_the_window_that_it_runs(expected: Any) -> None:
    gold, driver = expected(SET), Driver(loaded())
    ids = gold.ids(70)
    track = driver.open(decoder_start=69 - loaded().config.sliding_window)
    driver.forward((track, ids[:40]))
    driver.forward((track, ids[40:-1]))
    drafts, logits = drafts_of(driver, loaded(), [(track, ids[-1])])
    assert all(row.isfinite().all() for row in logits) and drafts.ids_RK.shape == (1, BLOCK)
    assert (torch.cat(logits) - gold.tensors["dspark.70.logits"]).abs().max() > 1e-3, "trimming changed nothing: were all rows run?"


def test_a_neighbours_nan_is_never_read(expected: Any) -> None:
    gold, driver = expected(SET), Driver(loaded())
    driver.poison()
    track = driver.open()
    driver.forward((track, gold.ids(2)[:-1]))
    _, logits = drafts_of(driver, loaded(), [(track, gold.ids(2)[-1])])
    assert all(row.isfinite().all() for row in logits)


def test_the_footprint_knows_the_draft_to_the_byte() -> None:
    model = loaded()
    assert model.definition.footprint is not None
    kinds = {kind.name: kind.num_bytes for kind in model.definition.footprint(model.config, model.context) if kind.place == "device"}
    assert isinstance(model.model, torch.nn.Module)
    tensors = {t.data_ptr(): t for t in (*model.model.parameters(), *model.model.buffers())}
    assert kinds["draft blocks"] > 0 and sum(kinds.values()) == sum(t.numel() * t.element_size() for t in tensors.values())
