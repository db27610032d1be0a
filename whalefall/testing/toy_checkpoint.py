# SPDX-License-Identifier: Apache-2.0
"""Toy models for tests: built in memory, or written as a checkpoint directory that takes the full loader's road."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from whalefall.core.seams import LocalComm
from whalefall.models.definition import BuildContext, Model
from whalefall.models.toy import DEFINITION
from whalefall.models.toy.config import ToyConfig
from whalefall.models.toy.weights import random_weights
from whalefall.testing.tokenizer import write_byte_tokenizer


def write_toy_checkpoint(model_dir: Path, config: ToyConfig | None = None, *, seed: int = 0) -> Path:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json; gives `model_dir` back."""
    config = config or ToyConfig()
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    save_file(random_weights(config, seed), model_dir / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(model_dir)
    return model_dir


def toy_context(dtype: torch.dtype = torch.float32, model_dir: Path = Path(".")) -> BuildContext:
    return BuildContext(
        dtype=dtype, device=torch.device("cpu"), weights="dense", kv_cache_dtype="unrounded", comm=LocalComm(), model_dir=model_dir
    )


def toy_model(config: ToyConfig | None = None, *, seed: int = 0, context: BuildContext | None = None) -> Model:
    """A toy with seeded weights and no files: the same weights as `write_toy_checkpoint` with this seed."""
    config = config or ToyConfig()
    built = DEFINITION.build(config, context or toy_context())
    for name, tensor in random_weights(config, seed).items():
        built.sink.put(name, tensor)
    built.sink.finish()
    return built.model
