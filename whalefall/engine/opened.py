# SPDX-License-Identifier: Apache-2.0
"""What can be known of a checkpoint without torch: family, parsed config, tokenizer. The API process needs no more than this.

`ModelFolder` is read in either process. With a resolved config, which only the process with the device can make, it is an `OpenModel`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whalefall.core.errors import ConfigError
from whalefall.engine.config import EngineConfig
from whalefall.engine.resolve import ResolvedConfig
from whalefall.models.definition import ModelConfig, ModelDefinition
from whalefall.models.registry import find_definition
from whalefall.runtime.sampling.grammar import GrammarCompiler, GrammarStore
from whalefall.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModel:
    """A checkpoint that was looked at and found good, and how it will run."""

    model_dir: Path
    definition: ModelDefinition
    model_config: ModelConfig
    tokenizer: Tokenizer
    config: ResolvedConfig

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's, and the tokenizer's if it names another."""
        own = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys((*self.model_config.eos_token_ids, *(() if own is None else (own,)))))

    def grammar_store(self) -> GrammarStore:
        """For answers of a given shape. Nothing is loaded before the first of them."""

        def make_compiler() -> GrammarCompiler:
            from whalefall.runtime.sampling.llguidance_grammar import LLGuidanceCompiler

            return LLGuidanceCompiler(self.tokenizer, self.config.vocab_size, self.eos_token_ids)

        return GrammarStore(make_compiler)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """A checkpoint's own words about itself."""

    model_dir: Path
    definition: ModelDefinition
    model_config: ModelConfig
    tokenizer: Tokenizer

    def opened(self, config: ResolvedConfig) -> OpenModel:
        return OpenModel(
            model_dir=self.model_dir,
            definition=self.definition,
            model_config=self.model_config,
            tokenizer=self.tokenizer,
            config=config,
        )


def read_folder(config: EngineConfig) -> ModelFolder:
    """
    Raises:
        ConfigError: the folder, its config.json or its tokenizer cannot be used.
    """
    model_dir = Path(config.model)
    values, config_file = _read_config(model_dir)
    definition = find_definition(values, config_file)
    return ModelFolder(
        model_dir=model_dir,
        definition=definition,
        model_config=definition.parse_config(values, config_file),
        tokenizer=Tokenizer.from_dir(config.tokenizer or model_dir),
    )


def _read_config(model_dir: Path) -> tuple[dict[str, Any], str]:
    file = model_dir / "config.json"
    if not model_dir.is_dir():
        raise ConfigError(f"{model_dir}: no such directory; give the directory of a checkpoint")
    if not file.is_file():
        raise ConfigError(f"{file}: not found; a checkpoint needs config.json, *.safetensors and tokenizer.json")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: must hold an object, found {type(values).__name__}")
    return values, str(file)
