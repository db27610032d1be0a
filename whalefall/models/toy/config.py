# SPDX-License-Identifier: Apache-2.0
"""ToyConfig: config.json of the toy family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from whalefall.core.errors import ConfigError
from whalefall.models.config_reader import ConfigReader

ARCHITECTURE = "WhalefallToyForCausalLM"
MODEL_TYPE = "whalefall_toy"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig:
    vocab_size: int = 264
    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    intermediate_size: int = 64
    max_position_embeddings: int = 2_048
    rms_norm_eps: float = 1e-6
    bos_token_id: int | None = 0
    eos_token_ids: tuple[int, ...] = (1,)
    history_tokens: int = 0
    """The forward needs no ids from before its rows."""
    decoder_window: int | None = None
    """No encoder/decoder split: every row runs through every layer."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], file: str = "config.json") -> Self:
        """Read a config.json object; `file` names it in messages.

        Raises:
            ConfigError: every problem of the file, one line each.
        """
        read = ConfigReader(values, file)
        read.choice("architectures", [ARCHITECTURE])
        read.choice("model_type", MODEL_TYPE, default=MODEL_TYPE)
        read.choice("dtype", "float32", "bfloat16", default="float32")
        num_heads = read.integer("num_attention_heads", low=1)
        made = cls(
            vocab_size=read.integer("vocab_size", low=1),
            hidden_size=read.integer("hidden_size", low=2, multiple=2 * num_heads),
            num_hidden_layers=read.integer("num_hidden_layers", low=1),
            num_attention_heads=num_heads,
            intermediate_size=read.integer("intermediate_size", low=1),
            max_position_embeddings=read.integer("max_position_embeddings", low=2),
            rms_norm_eps=read.number("rms_norm_eps", default=1e-6),
            bos_token_id=read.optional_integer("bos_token_id"),
            eos_token_ids=(read.integer("eos_token_id"),),
        )
        read.finish()
        if read.problems:
            raise ConfigError(read.problems)
        return made

    def to_hf(self) -> dict[str, Any]:
        """The config.json that `from_hf` reads back."""
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
        sizes = {name: getattr(self, name) for name in names}
        ids = {"rms_norm_eps": self.rms_norm_eps, "bos_token_id": self.bos_token_id, "eos_token_id": self.eos_token_ids[0]}
        return {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, "dtype": "float32", **sizes, **ids}
