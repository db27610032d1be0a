# SPDX-License-Identifier: Apache-2.0
"""Claims about drawn weights: a directory without shards runs, every tensor comes once, and none depends on another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from whalefall import LLM, SamplingParams
from whalefall.core.errors import ConfigError
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.random_weights import draw
from whalefall.models.deepseek_v41.weights import weight_map
from whalefall.testing.checkpoint import QUANTIZATION_CONFIG, TINY_CONFIG
from whalefall.testing.toy_checkpoint import write_toy_checkpoint
from whalefall.testing.v41_tokenizer import write_v41_tokenizer
from whalefall.weights.mapped import TORCH_DTYPES
from whalefall.weights.random import fill_randomly
from whalefall.weights.spec import WeightMap


class Sink:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.finished = 0

    def put(self, name: str, tensor: torch.Tensor) -> None:
        assert name not in self.tensors
        self.tensors[name] = tensor

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """config.json and a tokenizer; no shards."""
    config = dict(TINY_CONFIG, quantization_config=QUANTIZATION_CONFIG)
    write_v41_tokenizer(tmp_path, config["text_config"]["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_directory_without_shards_generates_and_repeats_itself(folder: Path) -> None:
    answers = []
    for weights in ("packed", "dense"):
        llm = LLM(model=folder, load_format="random", device="cpu", dtype="float32", weights=weights, kv_cache_memory_bytes=1 << 24)
        outputs = llm.generate({"prompt_token_ids": [3, 4, 5, 6]}, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        answers.append(outputs[0].outputs[0].token_ids)
        llm.shutdown()
    assert len(answers[0]) == 8 and answers[0] == answers[1]


def test_without_the_option_the_missing_shards_are_an_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors"):
        LLM(model=folder, device="cpu")


def test_a_family_that_cannot_draw_says_so(tmp_path: Path) -> None:
    write_toy_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"load_format is random.*toy"):
        LLM(model=tmp_path, device="cpu", load_format="random")


def test_every_tensor_is_what_a_checkpoint_would_hold_and_depends_on_its_name_alone() -> None:
    config = DeepseekV41Config.from_hf(dict(TINY_CONFIG, quantization_config=QUANTIZATION_CONFIG))
    whole = weight_map(config, with_draft=True)
    first, again = Sink(), Sink()
    report = fill_randomly(Path("none"), whole, draw, first, torch.device("cpu"))
    assert report.num_tensors == len(first.tensors) == len(whole.tensors) and first.finished == 1
    for name, spec in whole.tensors.items():
        assert first.tensors[name].shape == spec.shape and first.tensors[name].dtype == TORCH_DTYPES[spec.dtypes[0]], name
    backwards = WeightMap(dict(reversed(weight_map(config).tensors.items())))
    fill_randomly(Path("none"), backwards, draw, again, torch.device("cpu"))
    for name, tensor in again.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), first.tensors[name].view(torch.uint8)), name


def test_the_router_spreads_tokens_over_the_experts() -> None:
    """Scores, not the bias, choose: normed hidden states of unit scale meet logits of unit scale and a bias of 0.02."""
    config = DeepseekV41Config.from_hf(dict(TINY_CONFIG, quantization_config=QUANTIZATION_CONFIG))
    sink = Sink()
    fill_randomly(Path("none"), weight_map(config), draw, sink, torch.device("cpu"))
    weight = sink.tensors["layers.0.ffn.gate.weight"].float()
    bias = sink.tensors["layers.0.ffn.gate.bias"].float()
    x_TH = torch.randn(2048, config.hidden_size, generator=torch.Generator().manual_seed(0))
    score = torch.nn.functional.softplus(x_TH @ weight.T).sqrt() + bias
    counts = torch.bincount(score.topk(2).indices.flatten(), minlength=config.n_routed_experts) / 2048 / 2
    assert (counts - 1 / config.n_routed_experts).abs().max() < 0.05
