# SPDX-License-Identifier: Apache-2.0
"""A toy checkpoint on disk, and engines on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from whalefall import LLM
from whalefall.models.toy.config import ToyConfig
from whalefall.testing.toy_checkpoint import write_toy_checkpoint

SMALL = {"device": "cpu", "dtype": "float32", "block_size": 8, "max_num_seqs": 8}


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"), ToyConfig(max_position_embeddings=128), seed=3)


@pytest.fixture(scope="session")
def make_llm(toy_dir: Path) -> Iterator[Callable[..., LLM]]:
    """LLM on the toy, one per set of options for the whole session; whatever the tests did to it, nothing may be left behind."""
    made: dict[str, LLM] = {}

    def make(**options: Any) -> LLM:
        name = json.dumps(options, sort_keys=True)
        if name not in made:
            made[name] = LLM(toy_dir, **SMALL | options)
        return made[name]

    yield make
    for llm in made.values():
        llm.core.scheduler.cache.check()
        assert llm.core.scheduler.cache.is_pristine
        llm.shutdown()


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()
