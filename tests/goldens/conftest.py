# SPDX-License-Identifier: Apache-2.0
"""Where the golden sets are, and how to ask an engine for the log-probabilities they hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from whalefall import LLM, SamplingParams

LENGTHS = (1, 2, 3, 7, 16, 33, 70, 130, 300)
HERE = Path(__file__).parent
DEFAULTS = {"dtype": "float32", "replay": "exact", "block_size": 32, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}


def golden_dir(name: str) -> Path:
    """A set inside the repository, else in $WHALEFALL_GOLDENS or ../shared/goldens; skips the test where it is nowhere."""
    root = HERE.parents[1]
    for base in (HERE, Path(os.environ.get("WHALEFALL_GOLDENS", root / ".." / "shared" / "goldens"))):
        if (base / name).is_dir():
            return base / name
    pytest.skip(f"golden set {name} is not in this checkout; set WHALEFALL_GOLDENS")


@dataclass(frozen=True)
class Expected:
    tensors: dict[str, Tensor]

    def ids(self, n: int) -> list[int]:
        return self.tensors[f"prompt.{n}.input_ids"].tolist()

    def logprobs(self, n: int) -> Tensor:
        """float32 [n, V]: log-softmax of the stored logits."""
        return self.tensors[f"prompt.{n}.logits"].log_softmax(-1)


@pytest.fixture(scope="session")
def expected() -> Callable[..., Expected]:
    cache: dict[Path, Expected] = {}

    def load(name: str, file: str = "expected.safetensors") -> Expected:
        path = golden_dir(name) / file
        return cache.setdefault(path, Expected(load_file(path)))

    return load


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(name: str, **options: Any) -> LLM:
        llm = LLM(model=str(golden_dir(name)), **{**DEFAULTS, **options})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.shutdown()


def vocabulary(entries: list[Any]) -> Tensor:
    """float32 [n, V] of log-probability entries that hold the whole vocabulary; spot checks that the mapping says the same."""
    for entry in entries:
        assert entry[len(entry) - 1].logprob == pytest.approx(float(entry.values_V[-1]), abs=1e-7)
    return torch.from_numpy(np.stack([entry.values_V for entry in entries]))


def all_rows(llm: LLM, prompts: list[list[int]]) -> list[Tensor]:
    """Log-probabilities [n, V] of every row of every prompt, all prompts at once, through the public API.

    Row i < n - 1 is the prompt_logprobs entry of token i + 1; the last row is the logprobs entry of the first generated token.
    """
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    rows = []
    for output in outputs:
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        rows.append(vocabulary(entries))
    return rows
