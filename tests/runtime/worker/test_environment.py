# SPDX-License-Identifier: Apache-2.0
"""Claim: once started, the engine reads no environment variable, so that nothing outside its configuration changes a step."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from whalefall import LLM, SamplingParams
from whalefall.engine.embedded import embedded_model_dir


class Watched(dict[str, str]):
    """An environment that says what was asked of it."""

    asked: list[str]

    def __getitem__(self, name: str) -> str:
        self.asked.append(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.append(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        self.asked.append(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.asked.append("*")
        return super().__iter__()


def test_steps_read_no_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model=embedded_model_dir(), device="cpu", max_model_len=512, max_num_seqs=4)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=6, ignore_eos=True)
    prompts = [{"prompt_token_ids": [60 + i, 71, 72, 73]} for i in range(3)]
    llm.generate(prompts, params, use_tqdm=False)  # what is set up at the first call is no step
    watched = Watched(os.environ)
    watched.asked = []
    monkeypatch.setattr(os, "environ", watched)
    assert os.getenv("NOBODY_SETS_THIS") is None and watched.asked == ["NOBODY_SETS_THIS"], "the watch does not watch"
    watched.asked.clear()
    llm.generate(prompts, params, use_tqdm=False)
    assert watched.asked == []
    monkeypatch.undo()
    llm.shutdown()
