# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a V4.1 checkpoint: name, logical shape, storage format. Reads nothing but the config.

`parameters` lists the logical parameters of the text backbone, `draft_parameters` those of DSpark, `vision_parameters` those of a part
that is not used yet; `stored_tensors` turns a list into what lies in the file, quantised or plain. `weight_map` is what the loader checks.
Source: design note deepseek-v41 §2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from whalefall.models.deepseek_v41.config import QUANT_BLOCK, DeepseekV41Config
from whalefall.weights.spec import IgnoreRule, TensorSpec, WeightMap

Format = Literal["plain", "f32", "fp8_tile", "fp4_expert", "fp8_row"]
"""How a checkpoint with a quantization_config stores a parameter; without one, all but "f32" are "plain"."""

PLAIN_DTYPES = ("BF16", "F32")
F32_DTYPES = ("F32", "BF16")
"""The release stores these as F32; a plain copy in BF16 is accepted too. The first entry is what the release has."""
FP8_DTYPES = ("F8_E4M3",)
FP4_DTYPES = ("I8", "U8")
SCALE_DTYPES = ("F8_E8M0", "U8")


@dataclass(frozen=True, slots=True)
class Parameter:
    shape: tuple[int, ...]
    """Logical, as in an unquantised checkpoint."""
    format: Format


def weight_map(config: DeepseekV41Config, *, with_draft: bool = False) -> WeightMap:
    """What loading consumes, and what it leaves alone."""
    draft = stored_tensors(draft_parameters(config), config.is_quantised)
    vision = vision_parameters(config)
    num_encoder = sum(not name.startswith("image_") for name in vision)
    draft_rule = IgnoreRule("mtp.", "draft blocks are not used: speculation is off, or has another drafter", len(draft))
    rules = (
        *(() if with_draft else (draft_rule,)),
        IgnoreRule("vision.", "the image encoder is not used: text only", num_encoder - 4 if num_encoder else 0),
        IgnoreRule("aligner.", "the image encoder is not used: text only", 4 if num_encoder else 0),
        IgnoreRule("image_", "image vectors are not used: text only", len(vision) - num_encoder),
    )
    return WeightMap(stored_tensors(parameters(config), config.is_quantised) | (draft if with_draft else {}), rules)


def stored_tensors(logical: Mapping[str, Parameter], is_quantised: bool) -> dict[str, TensorSpec]:
    """Parameter name (without ".weight" where it is quantised) -> checkpoint tensors."""
    return {name + suffix: spec for name, parameter in logical.items() for suffix, spec in _stored(parameter, is_quantised)}


def parameters(config: DeepseekV41Config) -> dict[str, Parameter]:
    """The text backbone: three global tensors, then layer by layer. A quantisable name stands without its ".weight"."""
    c = config
    found = {
        "embed.weight": Parameter((c.vocab_size, c.hidden_size), "plain"),
        "head.weight": Parameter((c.vocab_size, c.hidden_size), "plain"),
        "norm.weight": Parameter((c.hidden_size,), "plain"),
    }
    for layer in range(c.num_hidden_layers):
        prefix = f"layers.{layer}."
        found |= _prefixed(prefix, _block(c, c.n_routed_experts))
        if layer in c.kv_source_layer_ids:
            found |= _prefixed(prefix + "attn.", _kv_source(c, c.ratio(layer)))
        if layer in c.index_source_layer_ids:
            found |= _prefixed(prefix + "attn.indexer.", _index_source(c))
        if layer in c.engram_layer_ids:
            rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
            found |= _prefixed(prefix + "engram.", _engram(c, rows))
    return found


def draft_parameters(config: DeepseekV41Config) -> dict[str, Parameter]:
    """The draft blocks `mtp.*`: main_* in the first, norm and the two heads in the last."""
    c, last = config, config.num_nextn_predict_layers - 1
    found: dict[str, Parameter] = {}
    for i in range(c.num_nextn_predict_layers):
        found |= _prefixed(f"mtp.{i}.", _block(c, c.dspark_n_routed_experts))
    if found:
        markov = Parameter((c.vocab_size, c.dspark_markov_rank), "plain")
        found |= {
            "mtp.0.main_proj": Parameter((c.hidden_size, c.hidden_size * len(c.dspark_target_layer_ids)), "fp8_tile"),
            "mtp.0.main_norm.weight": Parameter((c.hidden_size,), "plain"),
            f"mtp.{last}.norm.weight": Parameter((c.hidden_size,), "plain"),
            f"mtp.{last}.markov_head.embed.weight": markov,
            f"mtp.{last}.markov_head.head.weight": markov,
            f"mtp.{last}.confidence_head.proj.weight": Parameter((1, c.hidden_size + c.dspark_markov_rank), "plain"),
        }
    return found


def vision_parameters(config: DeepseekV41Config) -> dict[str, Parameter]:
    """The image encoder, the aligner and the three image vectors; empty when the model has no encoder layers."""
    v = config.vision
    if v is None or v.num_hidden_layers == 0:
        return {}
    text, size, inner = config.hidden_size, v.hidden_size, v.intermediate_size
    block: dict[str, tuple[int, ...]] = {
        "norm1.weight": (size,),
        "norm2.weight": (size,),
        "attn.wqkv.weight": (3 * size, size),
        "attn.wqkv.bias": (3 * size,),
        "attn.wo.weight": (size, size),
        "attn.wo.bias": (size,),
        "mlp.w1.weight": (2 * inner, size),
        "mlp.w2.weight": (size, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (size, 3 * v.patch_size**2),
        "vision.patch_embed.proj.bias": (size,),
        **{f"vision.blocks.{i}.{name}": shape for i in range(v.num_hidden_layers) for name, shape in block.items()},
        "vision.norm.weight": (size,),
        "aligner.w1.weight": (text, size * v.downsample_ratio**2),
        "aligner.w1.bias": (text,),
        "aligner.w2.weight": (text, text),
        "aligner.w2.bias": (text,),
        **{f"image_{part}": (text,) for part in ("start", "end", "newline")},
    }
    return {name: Parameter(shape, "plain") for name, shape in shapes.items()}


def _block(c: DeepseekV41Config, num_experts: int) -> dict[str, Parameter]:
    """What every block has, of the backbone and of the draft."""
    hidden, inner, heads = c.hidden_size, c.moe_intermediate_size, c.num_attention_heads
    num_mixes = (2 + c.hc_mult) * c.hc_mult
    group_in = heads * c.head_dim // c.o_groups
    found = {
        "attn_norm.weight": Parameter((hidden,), "plain"),
        "ffn_norm.weight": Parameter((hidden,), "plain"),
        "attn.wq_a": Parameter((c.q_lora_rank, hidden), "fp8_tile"),
        "attn.q_norm.weight": Parameter((c.q_lora_rank,), "plain"),
        "attn.wq_b": Parameter((heads * c.head_dim, c.q_lora_rank), "fp8_tile"),
        "attn.wkv": Parameter((c.head_dim, hidden), "fp8_tile"),
        "attn.kv_norm.weight": Parameter((c.head_dim,), "plain"),
        "attn.attn_sink": Parameter((heads,), "f32"),
        "attn.wo_a": Parameter((c.o_groups * c.o_lora_rank, group_in), "fp8_tile"),
        "attn.wo_b": Parameter((hidden, c.o_groups * c.o_lora_rank), "fp8_tile"),
        "ffn.gate.weight": Parameter((num_experts, hidden), "plain"),
        "ffn.gate.bias": Parameter((num_experts,), "f32"),
        "ffn.gate.bias_vl": Parameter((num_experts,), "f32"),
    }
    for sublayer in ("attn", "ffn"):
        found[f"hc_{sublayer}_fn"] = Parameter((num_mixes, c.hc_mult * hidden), "f32")
        found[f"hc_{sublayer}_base"] = Parameter((num_mixes,), "f32")
        found[f"hc_{sublayer}_scale"] = Parameter((3,), "f32")
    found |= _prefixed("ffn.shared_experts.", _expert(hidden, inner, "fp8_tile"))
    one_expert = _expert(hidden, inner, "fp4_expert")
    for e in range(num_experts):
        found |= _prefixed(f"ffn.experts.{e}.", one_expert)
    return found


def _expert(hidden: int, inner: int, stored: Format) -> dict[str, Parameter]:
    """w1 = gate, w2 = down, w3 = up projection."""
    up = Parameter((inner, hidden), stored)
    return {"w1": up, "w2": Parameter((hidden, inner), stored), "w3": up}


def _kv_source(c: DeepseekV41Config, ratio: int) -> dict[str, Parameter]:
    projection = Parameter((c.head_dim, c.hidden_size), "plain")
    found = {
        "compressor.wkv.weight": projection,
        "compressor.norm.weight": Parameter((c.head_dim,), "plain"),
        "indexer.wk.weight": Parameter((c.index_head_dim, c.head_dim), "plain"),
        "indexer.k_norm.weight": Parameter((c.index_head_dim,), "plain"),
    }
    return found | {"compressor.wgate.weight": projection} if ratio == 2 else found


def _index_source(c: DeepseekV41Config) -> dict[str, Parameter]:
    return {
        "wq_b": Parameter((c.index_n_heads * c.index_head_dim, c.q_lora_rank), "fp8_tile"),
        "weights_proj.weight": Parameter((c.index_n_heads, c.hidden_size), "plain"),
    }


def _engram(c: DeepseekV41Config, rows: int) -> dict[str, Parameter]:
    width = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    gain = Parameter((c.hc_mult, c.hidden_size), "plain")
    return {
        "embed": Parameter((rows, c.engram_head_dim), "fp8_row"),
        "wkv": Parameter(((c.hc_mult + 1) * c.hidden_size, width), "fp8_tile"),
        "q_weight": gain,
        "k_weight": gain,
    }


@cache  # few different parameters stand behind the release's 96,085 tensors
def _stored(parameter: Parameter, is_quantised: bool) -> tuple[tuple[str, TensorSpec], ...]:
    """Name suffixes and tensors of one parameter (§2.1)."""
    if parameter.format == "plain":
        return (("", TensorSpec(parameter.shape, PLAIN_DTYPES)),)
    if parameter.format == "f32":
        return (("", TensorSpec(parameter.shape, F32_DTYPES)),)
    if not is_quantised:
        return ((".weight", TensorSpec(parameter.shape, PLAIN_DTYPES)),)
    n, k = parameter.shape
    assert k % QUANT_BLOCK == 0, f"{parameter} has a row length that is no multiple of {QUANT_BLOCK}"
    scale_rows = -(-n // QUANT_BLOCK) if parameter.format == "fp8_tile" else n
    is_fp4 = parameter.format == "fp4_expert"
    weight = TensorSpec((n, k // 2), FP4_DTYPES) if is_fp4 else TensorSpec((n, k), FP8_DTYPES)
    return ((".weight", weight), (".scale", TensorSpec((scale_rows, k // QUANT_BLOCK), SCALE_DTYPES)))


def _prefixed(prefix: str, found: Mapping[str, Parameter]) -> dict[str, Parameter]:
    return {prefix + name: parameter for name, parameter in found.items()}
