# SPDX-License-Identifier: Apache-2.0
"""DeepseekV41Config: the facts of a V4.1 checkpoint, flattened from config.json, with every derived map and every assertion.

Fields are named as in the checkpoint's text_config. `from_hf` reads the whole file, refuses what this version does not compute, and
reports all problems in one ConfigError. Source: design note deepseek-v41 §1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

from whalefall.core.errors import ConfigError
from whalefall.models.config_reader import ConfigReader
from whalefall.models.deepseek_v41 import config_checks
from whalefall.observe.log import get_logger

log = get_logger(__name__)

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"
QUANT_BLOCK = 32
"""Channels per scale in every quantised format of this family, of weights, activations and caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """YaRN, applied only together with compress_rope_theta."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """Sizes of the image encoder. Read so that its tensors can be named; the encoder itself is not used yet."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekV41Config:
    # vocabulary
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    image_token_id: int | None
    # sizes
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    """Rotated dims: the last ones of any query, key, latent or index vector."""
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    max_position_embeddings: int
    sliding_window: int
    """Rows a query sees in its window, itself included."""
    # experts
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    # numerics
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    # who owns what
    compress_ratios: tuple[int, ...]
    """One per backbone layer, then one per draft layer."""
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    # engram
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    # drafts
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    # storage
    is_quantised: bool
    """The file has a quantization_config: FP8 tiles, FP4 experts and FP8 rows instead of plain tensors."""
    vision: VisionConfig | None
    defaults_used: tuple[str, ...] = ()
    """One line per key that the file lacks and that was given its default."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], file: str = "config.json") -> Self:
        """Read a config.json object; `file` names it in messages.

        Raises:
            ConfigError: every problem of the file, one line each.
        """
        root = ConfigReader(values, file)
        read = _read_root(root)
        text = root.section("text_config")
        read |= _read_text(text)
        read |= _read_engram(text)
        read |= _read_draft(text)
        if text.are_sound():
            config_checks.check(text, root, read)
        text.finish(harmless=("dtype", "bos_token_id", "eos_token_id", "pad_token_id", "index_k_source_layer_ids"))
        root.finish()
        if root.problems:
            raise ConfigError(root.problems)
        for line in root.defaults_used:
            _say_once(line)
        return cls(**read, defaults_used=tuple(root.defaults_used))

    @property
    def num_encoder_layers(self) -> int:
        """Layers before the first of ratio 1; the others are the decoder."""
        return self.compress_ratios.index(1)

    @property
    def history_tokens(self) -> int:
        return self.engram_max_ngram_size - 1 if self.engram_layer_ids else 0

    @property
    def decoder_window(self) -> int:
        return self.sliding_window

    @property
    def candidate_layer_ids(self) -> tuple[int, ...]:
        """Index sources that search inside the candidate blocks only."""
        return tuple(layer for layer in self.index_source_layer_ids if layer > self.candidate_source_layer_id)

    def ratio(self, layer: int) -> int:
        return self.compress_ratios[layer]

    def kv_src(self, layer: int) -> int:
        """The layer whose compressed KV a layer of ratio > 0 reads."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def idx_src(self, layer: int) -> int:
        """The layer whose top-k list a layer of ratio > 0 uses."""
        return max(source for source in self.index_source_layer_ids if source <= layer)

    def uses_candidates(self, layer: int) -> bool:
        return layer in self.index_source_layer_ids and layer > self.candidate_source_layer_id


@cache  # a config is read again on the way from the command line to the engine
def _say_once(line: str) -> None:
    log.warning("%s", line)


def _read_root(root: ConfigReader) -> dict[str, Any]:
    root.choice("architectures", [ARCHITECTURE], default=[ARCHITECTURE])
    root.choice("model_type", MODEL_TYPE, default=MODEL_TYPE)
    root.choice("dtype", "bfloat16", "float32", "float16", default="bfloat16")
    root.choice("tie_word_embeddings", False, default=False, say=False)  # the released file says it in text_config
    _read_quantization(root)
    return {
        "bos_token_id": root.optional_integer("bos_token_id"),
        "eos_token_ids": _read_eos(root),
        "pad_token_id": root.optional_integer("pad_token_id"),
        "image_token_id": root.optional_integer("image_token_id"),
        "is_quantised": root.has("quantization_config"),
        "vision": _read_vision(root),
    }


def _read_eos(root: ConfigReader) -> tuple[int, ...]:
    """An id or a list of ids: Hugging Face writes both."""
    if root.is_list("eos_token_id"):
        return root.integers("eos_token_id", at_least=1)
    return (root.integer("eos_token_id"),)


def _read_quantization(root: ConfigReader) -> None:
    """Only the family's own formats exist; the headers of the shards are checked against them later."""
    quant = root.optional_section("quantization_config")
    if quant is None:
        return
    quant.choice("quant_method", "fp8")
    quant.choice("fmt", "e4m3", default="e4m3", say=False)
    quant.choice("scale_fmt", "ue8m0", default="ue8m0")
    quant.choice("activation_scheme", "dynamic", default="dynamic")
    quant.choice("weight_block_size", [QUANT_BLOCK, QUANT_BLOCK], default=[QUANT_BLOCK, QUANT_BLOCK])
    quant.choice("expert_dtype", "fp4", default="fp4")
    quant.finish()


def _read_vision(root: ConfigReader) -> VisionConfig | None:
    vision = root.optional_section("vision_config")
    if vision is None:
        return None
    vision.choice("model_type", "deepseek_v41_vision", default="deepseek_v41_vision", say=False)
    made = VisionConfig(
        num_hidden_layers=vision.integer("num_hidden_layers", default=32),
        hidden_size=vision.integer("hidden_size", low=1, default=1024),
        intermediate_size=vision.integer("intermediate_size", low=1, default=2816),
        patch_size=vision.integer("patch_size", low=1, default=14),
        downsample_ratio=vision.integer("downsample_ratio", low=1, default=3),
    )
    # These shape no tensor, and images are refused at the door for now.
    vision.finish(harmless=("num_attention_heads", "rope_theta", "max_image_tokens", "min_pixels", "max_wh_ratio", "dtype"))
    return made


def _read_text(text: ConfigReader) -> dict[str, Any]:
    text.choice("model_type", "deepseek_v41_text", default="deepseek_v41_text")
    _refuse_unsupported(text)
    vocab_size = text.integer("vocab_size", low=1)
    num_layers = text.integer("num_hidden_layers", low=1)
    last_layer = num_layers - 1 if text.are_sound("num_hidden_layers") else None
    return {
        "vocab_size": vocab_size,
        "hidden_size": text.integer("hidden_size", low=1, multiple=QUANT_BLOCK),
        "num_hidden_layers": num_layers,
        "num_attention_heads": text.integer("num_attention_heads", low=1),
        "head_dim": text.integer("head_dim", low=1, multiple=QUANT_BLOCK),
        "qk_rope_head_dim": text.integer("qk_rope_head_dim", low=2, multiple=2),
        "q_lora_rank": text.integer("q_lora_rank", low=1, multiple=QUANT_BLOCK),
        "o_groups": text.integer("o_groups", low=1),
        "o_lora_rank": text.integer("o_lora_rank", low=1, multiple=QUANT_BLOCK),
        "max_position_embeddings": text.integer("max_position_embeddings", low=1),
        "sliding_window": text.integer("sliding_window", low=1),
        "moe_intermediate_size": text.integer("moe_intermediate_size", low=1, multiple=QUANT_BLOCK),
        "n_routed_experts": text.integer("n_routed_experts", low=1),
        "num_experts_per_tok": text.integer("num_experts_per_tok", low=1),
        "routed_scaling_factor": text.number("routed_scaling_factor", above=True),
        "swiglu_limit": text.number("swiglu_limit", above=True),
        "rms_norm_eps": text.number("rms_norm_eps", default=1e-20),
        "rope_theta": text.number("rope_theta", low=1, above=True, default=10_000.0),
        "compress_rope_theta": text.number("compress_rope_theta", low=1, above=True, default=160_000.0),
        "rope_scaling": _read_rope_scaling(text),
        "hc_mult": text.integer("hc_mult", low=1, default=4),
        "hc_sinkhorn_iters": text.integer("hc_sinkhorn_iters", low=1, default=20),
        "hc_eps": text.number("hc_eps", default=1e-6),
        "compress_ratios": text.integers("compress_ratios", high=2),
        "kv_source_layer_ids": text.integers("kv_source_layer_ids", high=last_layer),
        "index_source_layer_ids": text.integers("index_source_layer_ids", high=last_layer),
        "index_n_heads": text.integer("index_n_heads", low=1),
        "index_head_dim": text.integer("index_head_dim", low=1, multiple=QUANT_BLOCK),
        "index_topk": text.integer("index_topk", low=1),
        "candidate_source_layer_id": text.integer("candidate_source_layer_id", high=last_layer),
        "candidate_topk_blocks": text.integer("candidate_topk_blocks", low=1),
        "candidate_block_size": text.integer("candidate_block_size", low=1),
    }


def _refuse_unsupported(text: ConfigReader) -> None:
    """Settings that change the computation and have one supported value, which is also the family's own."""
    for key, supported in {
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }.items():
        text.choice(key, supported, default=supported)
    for key, supported in {
        "hc_shifted": True,
        "use_fp4_sparse_kv": True,
        "dspark_target_attn_input": True,
        "tokenizer_compatibility": "release",
    }.items():
        if text.has(key):  # absent from the released file: no default to report
            text.choice(key, supported)


def _read_rope_scaling(text: ConfigReader) -> RopeScaling:
    scaling = text.section("rope_scaling")
    scaling.choice("rope_type", "yarn", default="yarn")
    if scaling.has("type"):
        scaling.choice("type", "yarn")
    made = RopeScaling(
        factor=scaling.number("factor", low=1),
        beta_fast=scaling.number("beta_fast", above=True, default=32),
        beta_slow=scaling.number("beta_slow", above=True, default=1),
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings", low=1),
    )
    scaling.finish()
    return made


def _read_engram(text: ConfigReader) -> dict[str, Any]:
    # Without the ids the tables would silently go unused: the key may be absent only together with all the others.
    layer_ids = text.integers("engram_layer_ids", **_needed_if(text.has_any("engram_"), ()))
    used = bool(layer_ids)
    low = 1 if used else 0  # a model without Engram may write zeros
    return {
        "engram_layer_ids": layer_ids,
        "engram_num_embeddings": text.integers("engram_num_embeddings", low=1, **_needed_if(used, ())),
        "engram_max_ngram_size": text.integer("engram_max_ngram_size", low=2 * low, high=16, **_needed_if(used, 4)),
        "engram_n_heads": text.integer("engram_n_heads", low=low, high=1024, **_needed_if(used, 8)),
        "engram_head_dim": text.integer("engram_head_dim", low=low, multiple=QUANT_BLOCK, **_needed_if(used, 256)),
        "engram_vocab_size": text.integer("engram_vocab_size", low=2 * low, high=2**40, **_needed_if(used, 0)),
        "engram_pad_token_id": text.integer("engram_pad_token_id", **_needed_if(used, 2)),
        "engram_compressed_vocab_size": text.integer("engram_compressed_vocab_size", low=low, **_needed_if(used, 0)),
    }


def _read_draft(text: ConfigReader) -> dict[str, Any]:
    num_blocks = text.integer("num_nextn_predict_layers", **_needed_if(text.has_any("dspark_"), 0))
    used = num_blocks > 0 and text.are_sound("num_nextn_predict_layers")
    low = 1 if used else 0
    return {
        "num_nextn_predict_layers": num_blocks,
        "dspark_block_size": text.integer("dspark_block_size", low=low, **_needed_if(used, 0)),
        "dspark_noise_token_id": text.integer("dspark_noise_token_id", **_needed_if(used, 0)),
        "dspark_target_layer_ids": text.integers("dspark_target_layer_ids", at_least=low, **_needed_if(used, ())),
        "dspark_markov_rank": text.integer("dspark_markov_rank", low=low, **_needed_if(used, 0)),
        "dspark_n_routed_experts": text.integer("dspark_n_routed_experts", low=low, **_needed_if(used, 0)),
        "dspark_num_experts_per_tok": text.integer("dspark_num_experts_per_tok", low=low, **_needed_if(used, 0)),
    }


def _needed_if(used: bool, stand_in: Any) -> dict[str, Any]:
    """A key that belongs to a part of the model: required where the part exists, silently absent where it does not."""
    return {} if used else {"default": stand_in, "say": False}
