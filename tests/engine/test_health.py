# SPDX-License-Identifier: Apache-2.0
"""The real model loses a window row in mid-answer: a counter in production, the end of the engine in debug."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whalefall import LLM, SamplingParams
from whalefall.core.errors import EngineDead
from whalefall.testing.checkpoint import TINY_CONFIG, write_checkpoint

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(20, 60))}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", TINY_CONFIG)


def losing_a_row(model_dir: Path) -> LLM:
    """Before its fourth step every slot forgets one window row."""
    llm = LLM(model_dir, max_model_len=128, max_num_seqs=2, use_tqdm=False)
    worker: Any = llm.core._worker
    launch, count = worker.launch, [0]

    def lossy(plan: Any) -> Any:
        count[0] += 1
        if count[0] == 4:
            tags = worker.cache.tags["encoder"]
            tags[tags == tags.max()] = -1
        return launch(plan)

    worker.launch = lossy
    return llm


def test_lost_window_row_is_counted_and_the_answer_goes_on(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHALEFALL_DEBUG", raising=False)
    with losing_a_row(tiny) as llm:
        (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (8, "length")
        # Each of the five steps from there on misses the row once.
        assert llm.stats().engine.ring_tag_mismatches == 5


def test_lost_window_row_is_an_error_in_debug(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALEFALL_DEBUG", "1")
    with losing_a_row(tiny) as llm, pytest.raises(EngineDead, match="ring_tag_mismatch rose by 1 to 1"):
        llm.generate(PROMPT, PARAMS, use_tqdm=False)


def test_nothing_is_missed_in_health(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALEFALL_DEBUG", "1")
    with LLM(tiny, max_model_len=128, max_num_seqs=2, use_tqdm=False) as llm:
        (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        assert llm.stats().engine.ring_tag_mismatches == 0
