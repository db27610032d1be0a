# SPDX-License-Identifier: Apache-2.0
"""Krill with its own draft answers as without, at any number of drafts, adaptive too, and needs fewer steps for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whalefall import LLM, SamplingParams
from whalefall.engine.embedded import embedded_model_dir

PROMPTS = ["What is a whale?", "This function returns", "And the king said", "Write a Python function that reverses a string."]
PARAMS = [SamplingParams(temperature=t, seed=5, max_tokens=40) for t in (0, 0, 1.0, 0.7)]
CONFIG: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "dtype": "float32", "block_size": 32, "kv_cache_memory_bytes": 32 << 20}


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def without() -> list[tuple[int, ...]]:
    llm = LLM(str(embedded_model_dir()), **CONFIG)
    try:
        return answers(llm)
    finally:
        llm.shutdown()


@pytest.fixture(params=["fixed:1", "fixed:5", "adaptive"])
def drafting(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llm = LLM(str(embedded_model_dir()), draft=request.param, **CONFIG)
    yield llm
    llm.shutdown()


def test_answers_are_those_without_drafts(drafting: LLM, without: list[tuple[int, ...]]) -> None:
    for _ in range(2):  # adaptive: measuring, then choosing
        assert answers(drafting) == without
    stats = drafting.stats().engine.drafts
    assert stats is not None and stats.accepted_tokens > 0
