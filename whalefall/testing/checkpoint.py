# SPDX-License-Identifier: Apache-2.0
"""Small V4.1 checkpoints with random weights, in the official layout: for tests, examples and first runs.

The recipe keeps every branch of the model alive (design note deepseek-v41 §8). Each tensor has its own seed, made of its name, so a
value depends neither on the order of writing nor on the form: the plain form holds exactly the dequantised values of the quantised one.
"""

from __future__ import annotations

import copy
import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from whalefall.kernels.quant import reference as quant
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.weights import Parameter, draft_parameters, parameters, vision_parameters
from whalefall.testing.v41_tokenizer import IMAGE, MARKER_IDS, write_v41_tokenizer
from whalefall.weights.safetensors import INDEX_FILE, SINGLE_FILE

QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "expert_dtype": "fp4",
}

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": MARKER_IDS[IMAGE],
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 512,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_groups": 4,
        "o_lora_rank": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 1024,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64},
        "sliding_window": 16,
        "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [1, 3, 4],
        "index_source_layer_ids": [1, 3, 4, 6],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": [6126, 6332],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_vocab_size": 1000,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 483,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 511,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    },
}
"""The tiny configuration of the note's §8. One difference: its identity map of the vocabulary is replaced by the real compression of
the byte tokenizer, so `engram_compressed_vocab_size` is what that tokenizer gives."""


def write_checkpoint(path: str | Path, config: Mapping[str, Any], seed: int = 0, *, quantised: bool = True, shards: int = 2) -> Path:
    """Write a complete model directory: config.json, tokenizer, shards, index.

    Args:
        path: the folder; made if missing.
        config: content of config.json; its quantization_config is set or removed to match `quantised`.
        shards: 1 writes a single model.safetensors without an index.
    Returns:
        The folder.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    values = copy.deepcopy(dict(config))
    values.pop("quantization_config", None)
    if quantised:
        values["quantization_config"] = QUANTIZATION_CONFIG
    parsed = DeepseekV41Config.from_hf(values)
    write_v41_tokenizer(folder, parsed.vocab_size)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    write_shards(folder, random_tensors(parsed, seed), shards)
    return folder


def random_tensors(config: DeepseekV41Config, seed: int) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, as stored."""
    logical = parameters(config) | draft_parameters(config) | vision_parameters(config)
    tensors: dict[str, Tensor] = {}
    for name, parameter in logical.items():
        value = _draw(name, parameter, seed)
        if parameter.format in ("plain", "f32"):
            tensors[name] = value.to(torch.bfloat16) if parameter.format == "plain" else value
            continue
        weight, scale = _QUANTISERS[parameter.format](value)
        if config.is_quantised:
            tensors[f"{name}.weight"], tensors[f"{name}.scale"] = weight, scale.view(torch.float8_e8m0fnu)
        else:
            tensors[f"{name}.weight"] = _DEQUANTISERS[parameter.format](weight, scale, torch.bfloat16)
    return tensors


def write_shards(folder: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    """Deal the tensors to so many files of nearly equal count."""
    if shards == 1:
        save_file(dict(tensors), folder / SINGLE_FILE, metadata={"format": "pt"})
        return
    names = list(tensors)
    placed: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[len(names) * i // shards : len(names) * (i + 1) // shards]
        save_file({name: tensors[name] for name in chosen}, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(chosen, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


_QUANTISERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "fp8_tile": quant.quantize_fp8_tile,
    "fp8_row": quant.quantize_fp8_row,
    "fp4_expert": quant.quantize_mxfp4,
}
_DEQUANTISERS: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
    "fp8_tile": quant.dequantize_fp8_tile,
    "fp8_row": quant.dequantize_fp8_row,
    "fp4_expert": quant.dequantize_mxfp4,
}


def _draw(name: str, parameter: Parameter, seed: int) -> Tensor:
    """float32 values of one logical parameter."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) * 2**31 + seed)
    normal = torch.randn(parameter.shape, generator=generator)
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", ".q_weight", ".k_weight")):
        return 1 + 0.1 * normal
    if name.endswith("_scale"):
        return torch.full(parameter.shape, 0.5)
    for ending, deviation in _DEVIATIONS.items():
        if name.endswith(ending):
            return deviation * normal
    return normal / math.sqrt(parameter.shape[-1])


_DEVIATIONS = {
    "markov_head.embed.weight": 0.1,
    "markov_head.head.weight": 0.1,
    "confidence_head.proj.weight": 0.1,
    "embed.weight": 0.5,
    "engram.embed": 0.5,
    "_fn": 0.02,
    "_base": 0.1,
    "attn_sink": 0.5,
    "gate.bias": 0.1,
    "gate.bias_vl": 0.1,
}
"""Standard deviation by ending of the name, first match wins; all other tensors are linear weights, normal / sqrt(inputs)."""
