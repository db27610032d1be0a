# SPDX-License-Identifier: Apache-2.0
"""Inside the model, layer by layer: streams, mixes, attention output, experts, lists and cache entries equal the golden trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.goldens.conftest import golden_dir
from whalefall import SamplingParams
from whalefall.layers.moe import Gate
from whalefall.models.deepseek_v41.cache import index_field, main_field
from whalefall.models.deepseek_v41.model import Block
from whalefall.models.deepseek_v41.ngrams import EngramHash
from whalefall.models.deepseek_v41.sparse import SparseAttention

LENGTHS = (1, 2, 3, 7, 33, 130)
TOLERANCE = 1e-4


@dataclass
class Recorder:
    """What the methods of one forward gave back, in layer order."""

    blocks: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    attention: list[Tensor] = field(default_factory=list)
    experts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    lists: list[Tensor] = field(default_factory=list)
    candidates: list[Tensor] = field(default_factory=list)
    engram: list[dict[int, Tensor]] = field(default_factory=list)
    step: Any = None
    cache: Any = None

    def entries(self, name: str, count: int) -> Tensor:
        """The first entries of a growing field of the step's only request, in order."""
        pool = self.cache.growing[name]
        table = self.step.batch.block_table_BP[0]
        per_block = self.cache.block_tokens // (2 if "layers.6" not in name else 1)
        entry = torch.arange(count)
        return pool[table[entry // per_block] * per_block + entry % per_block]


@pytest.fixture
def record(monkeypatch) -> Recorder:
    recorder = Recorder()

    def spy(owner: type, name: str, keep: Any) -> None:
        original = getattr(owner, name)

        def wrapped(self: Any, *args: Any) -> Any:
            result = original(self, *args)
            keep(args, result)
            return result

        monkeypatch.setattr(owner, name, wrapped)

    def keep_list(args: tuple[Any, ...], result: Tensor) -> None:
        recorder.lists.append(result)
        recorder.candidates.append(args[-1].candidates_TM)

    def keep_block(args: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
        recorder.blocks.append(result)
        recorder.step, recorder.cache = args[4], args[5]

    spy(Block, "after_write", keep_block)
    spy(SparseAttention, "look", lambda _, result: recorder.attention.append(result))
    spy(SparseAttention, "_select", keep_list)
    spy(Gate, "forward", lambda _, result: recorder.experts.append(result))
    spy(EngramHash, "__call__", lambda _, result: recorder.engram.append(result))
    return recorder


@pytest.fixture(scope="module")
def trace() -> dict[str, Tensor]:
    return load_file(golden_dir("v41-a-trace") / "trace.safetensors")


def assert_close(actual: Tensor, wanted: Tensor, what: str) -> None:
    assert actual.shape == wanted.shape, what
    if wanted.numel():
        scale = max(1.0, float(wanted.abs().max()) / 8)  # the streams grow to a size at which one float32 rounding is 1e-6
        assert (actual - wanted).abs().max().item() < TOLERANCE * scale, what


@pytest.mark.parametrize("n", LENGTHS)
def test_every_layer_matches_the_trace(n, trace, record, make_llm):
    ids = load_file(golden_dir("v41-a-quant") / "expected.safetensors")[f"prompt.{n}.input_ids"].tolist()
    llm = make_llm("v41-a-quant", enable_prefix_caching=False)  # the whole prompt in one forward
    llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True), use_tqdm=False)
    config, lists = llm.model_config, iter(record.lists)
    hashes = torch.stack([record.engram[0][layer] for layer in config.engram_layer_ids], dim=1)
    assert torch.equal(hashes, trace[f"prompt.{n}.engram.hash_ids"].long())
    for layer in range(config.num_hidden_layers):
        key = f"prompt.{n}.layer.{layer}"
        streams, carry = record.blocks[layer]
        assert_close(streams, trace[f"{key}.streams"], f"{key}.streams")
        assert_close(carry, trace[f"{key}.next_pre_mix"], f"{key}.next_pre_mix")
        assert_close(record.attention[layer], trace[f"{key}.attn_out"], f"{key}.attn_out")
        assert_same_experts(record.experts[layer], trace[f"{key}.expert_ids"], trace[f"{key}.expert_weights"])
        if f"{key}.topk" in trace:
            assert_same_lists(next(lists), trace[f"{key}.topk"], key)
        if f"{key}.compressed_kv" in trace:
            count = trace[f"{key}.compressed_kv"].shape[0]
            assert_close(record.entries(main_field(layer), count), trace[f"{key}.compressed_kv"], f"{key}.compressed_kv")
            assert_close(record.entries(index_field(layer), count), trace[f"{key}.index_keys"], f"{key}.index_keys")
        if f"{key}.candidates" in trace:
            index = config.index_source_layer_ids.index(layer)
            assert_same_candidates(record.candidates[index], trace[f"{key}.candidates"], config.candidate_block_size)


def assert_same_experts(actual: tuple[Tensor, Tensor], ids: Tensor, weights: Tensor) -> None:
    order, wanted_order = actual[0].argsort(-1), ids.argsort(-1)
    assert torch.equal(actual[0].gather(-1, order), ids.long().gather(-1, wanted_order))
    assert_close(actual[1].gather(-1, order), weights.gather(-1, wanted_order), "expert weights")


def assert_same_lists(actual: Tensor, wanted: Tensor, what: str) -> None:
    for row, (mine, theirs) in enumerate(zip(actual.tolist(), wanted.tolist(), strict=True)):
        assert {e for e in mine if e >= 0} == {e for e in theirs if e >= 0}, f"{what} row {row}"


def assert_same_candidates(blocks_TM: Tensor, allowed_TC: Tensor, block_size: int) -> None:
    """The trace marks entries; a block is a candidate when any of its entries is."""
    for mine, theirs in zip(blocks_TM.tolist(), allowed_TC.tolist(), strict=True):
        assert {b for b in mine if b >= 0} == {entry // block_size for entry, is_in in enumerate(theirs) if is_in}
