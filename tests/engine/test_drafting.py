# SPDX-License-Identifier: Apache-2.0
"""What --draft and --drafter mean for a checkpoint, and where the costs of an adaptive run are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whalefall.engine.config import EngineConfig
from whalefall.engine.drafting import costs_path, plan_drafts
from whalefall.models.deepseek_v41 import DEFINITION

V41: Any = SimpleNamespace(num_nextn_predict_layers=2, dspark_block_size=5)
WITHOUT: Any = SimpleNamespace(num_nextn_predict_layers=0, dspark_block_size=0)


def plan(config: Any, **options: Any) -> Any:
    return plan_drafts(EngineConfig(model="m", **options), DEFINITION, config)


def test_adaptive_takes_the_whole_block_of_the_checkpoints_own_draft() -> None:
    made = plan(V41, draft="adaptive")
    assert (made.drafter, made.num_drafts, made.is_adaptive, made.is_own) == ("dspark", 5, True, True)
    assert "as many as pay" in made.text


def test_adaptive_without_a_draft_model_looks_for_repetition() -> None:
    made = plan(WITHOUT, draft="adaptive")
    assert (made.drafter, made.num_drafts, made.is_adaptive, made.is_own) == ("ngram", 8, True, False)


def test_fixed_is_not_adaptive_and_off_is_nothing() -> None:
    made = plan(V41, draft="fixed:3")
    assert (made.num_drafts, made.is_adaptive) == (3, False) and "as many as pay" not in made.text
    assert plan(V41) is None


def test_costs_lie_in_the_cache_folder_under_a_name_for_all_they_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, two = costs_path("model", "float32", "cpu"), costs_path("model", "float32", "gpu")
    assert one != two and one == costs_path("model", "float32", "cpu")
    assert one.parent == tmp_path / "whalefall" / "draft-costs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert costs_path("m").parent == Path.home() / ".cache" / "whalefall" / "draft-costs"
