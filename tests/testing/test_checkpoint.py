# SPDX-License-Identifier: Apache-2.0
"""Claims about written checkpoints: whole, official in layout, equal in both forms, and the loader gives back what was written."""

from __future__ import annotations

from pathlib import Path

import deepseek_recipe as recipe
import pytest
import tokenizers
import torch
from torch import Tensor

from whalefall.kernels.quant import reference as quant
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.engram_tables import compressed_vocab
from whalefall.models.deepseek_v41.weights import weight_map
from whalefall.models.registry import read_config
from whalefall.testing.checkpoint import QUANTIZATION_CONFIG, TINY_CONFIG, random_tensors, write_checkpoint
from whalefall.testing.v41_tokenizer import MARKER_IDS, MIN_VOCAB_SIZE, v41_tokenizer_json
from whalefall.text.tokenizer import Tokenizer
from whalefall.weights.loader import load_checkpoint
from whalefall.weights.safetensors import ShardSet

QUANTISED = DeepseekV41Config.from_hf({**TINY_CONFIG, "quantization_config": QUANTIZATION_CONFIG})
PLAIN = DeepseekV41Config.from_hf(TINY_CONFIG)


class Kept:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor

    def finish(self) -> None:
        pass


@pytest.mark.parametrize(("quantised", "shards"), [(True, 2), (False, 1)])
def test_loader_gives_back_exactly_what_was_written(tmp_path: Path, quantised: bool, shards: int) -> None:
    write_checkpoint(tmp_path, TINY_CONFIG, seed=5, quantised=quantised, shards=shards)
    config = DeepseekV41Config.from_hf(read_config(tmp_path))
    written = random_tensors(config, seed=5)
    kept = Kept()
    load_checkpoint(tmp_path, weight_map(config), kept)
    assert kept.tensors.keys() == {name for name in written if not name.startswith("mtp.")}
    for name, tensor in kept.tensors.items():
        assert torch.equal(tensor.flatten().view(torch.uint8), written[name].flatten().view(torch.uint8)), name


def test_tiny_checkpoint_has_the_count_of_the_note(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY_CONFIG)
    assert sum(1 for _ in ShardSet.open(tmp_path).all_tensors()) == 780


def test_plain_form_holds_the_dequantised_values() -> None:
    quantised, plain = random_tensors(QUANTISED, seed=2), random_tensors(PLAIN, seed=2)
    name = "layers.1.ffn.experts.3.w2"
    dense = quant.dequantize_mxfp4(quantised[f"{name}.weight"], quantised[f"{name}.scale"], torch.float32)
    assert torch.equal(dense, plain[f"{name}.weight"].float())
    name = "layers.1.engram.wkv"
    dense = quant.dequantize_fp8_tile(quantised[f"{name}.weight"], quantised[f"{name}.scale"], torch.float32)
    assert torch.equal(dense, plain[f"{name}.weight"].float())
    assert torch.equal(quantised["layers.0.ffn.gate.weight"], plain["layers.0.ffn.gate.weight"])


def test_values_follow_the_seed_and_the_name() -> None:
    first, again, other = (random_tensors(PLAIN, seed) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert not torch.equal(first["layers.0.ffn.experts.0.w1.weight"], first["layers.0.ffn.experts.1.w1.weight"])


def test_spread_of_values_follows_the_recipe() -> None:
    tensors = random_tensors(PLAIN, seed=0)

    def spread(name: str) -> float:
        return float(tensors[name].float().std())

    assert spread("head.weight") == pytest.approx(256**-0.5, rel=0.05)
    assert spread("layers.0.attn.wq_b.weight") == pytest.approx(64**-0.5, rel=0.05)
    assert spread("layers.1.engram.embed.weight") == pytest.approx(0.5, rel=0.05)
    assert spread("embed.weight") == pytest.approx(0.5, rel=0.05)
    assert spread("mtp.1.markov_head.embed.weight") == pytest.approx(0.1, rel=0.05)
    assert spread("layers.0.hc_attn_fn") == pytest.approx(0.02, rel=0.05)
    assert torch.equal(tensors["layers.0.hc_ffn_scale"], torch.full((3,), 0.5))
    assert float(tensors["layers.1.engram.q_weight"].float().mean()) == pytest.approx(1, abs=0.02)


def test_compressed_vocabulary_of_the_tiny_config_is_its_tokenizers() -> None:
    tokenizer = tokenizers.Tokenizer.from_str(v41_tokenizer_json(512))
    assert compressed_vocab(tokenizer, 512).count == TINY_CONFIG["text_config"]["engram_compressed_vocab_size"]


def test_every_marker_of_the_chat_protocol_is_one_token() -> None:
    kinds = [getattr(recipe.SpecialToken, name) for name in dir(recipe.SpecialToken)]
    spellings = {kind.default_str() for kind in kinds if isinstance(kind, recipe.SpecialToken)}
    tokenizer = Tokenizer(v41_tokenizer_json(), {})
    assert len(spellings) == 18
    assert all(tokenizer.encode(text, add_bos=False, allow_special=True) == [tokenizer.token_to_id(text)] for text in spellings)


def test_markers_spelled_by_a_user_stay_bytes() -> None:
    tokenizer = Tokenizer(v41_tokenizer_json(), {})
    for marker in MARKER_IDS:
        ids = tokenizer.encode(marker, add_bos=False, allow_special=False)
        assert ids and all(3 <= i < 259 for i in ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == marker


def test_tokenizer_has_the_wanted_size() -> None:
    assert Tokenizer(v41_tokenizer_json(512), {}).vocab_size == 512
    with pytest.raises(ValueError, match=f"needs at least {MIN_VOCAB_SIZE}"):
        v41_tokenizer_json(100)
