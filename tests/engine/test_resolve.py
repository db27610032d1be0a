# SPDX-License-Identifier: Apache-2.0
"""resolve: every None becomes a value, every problem is told at once, and the memory table adds up to what is allocated."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from whalefall import LLM, EngineConfig
from whalefall.core.cache_spec import CacheSpec, GrowingField, RingField
from whalefall.core.errors import ConfigError
from whalefall.engine.config import describe_options
from whalefall.engine.drafting import DraftPlan, plan_drafts
from whalefall.engine.facts import DeviceFacts, ModelFacts, WeightFacts, WeightFootprint, find_device, weight_facts
from whalefall.engine.resolve import GIB, resolve
from whalefall.models.definition import WeightKind
from whalefall.runtime.kvcache.pools import cache_bytes

CPU = DeviceFacts(kind="cpu", name="a desk", total_bytes=32 * GIB, free_bytes=24 * GIB)
GPU = DeviceFacts(kind="cuda", name="a card", total_bytes=140 * GIB, free_bytes=139 * GIB)
SMALL_WEIGHTS = WeightFacts(quantised_bytes=10_000, quantised_elements=16_000, plain_elements=1_000)


def cache_spec(dtype: str, weights: str, kv_cache_dtype: str, block_tokens: int) -> CacheSpec:
    return CacheSpec(
        block_tokens=block_tokens,
        growing=(GrowingField(name="main", width=512, dtype=dtype, tokens_per_entry=2),),
        rings=(RingField(name="window", width=512, dtype=dtype, rows=128, group="w"),),
    )


MODEL = ModelFacts(
    name="m",
    family="toy",
    vocab_size=1_000,
    max_position_embeddings=100_000,
    decoder_window=128,
    history_tokens=3,
    weights=SMALL_WEIGHTS,
    cache_spec=cache_spec,  # type: ignore[arg-type]
)
USER = EngineConfig(model="m")


def problems(user: EngineConfig, model: ModelFacts = MODEL, device: DeviceFacts | None = CPU) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(user, model, device)
    return list(caught.value.problems)


def test_every_open_choice_becomes_a_value_with_a_reason() -> None:
    resolved = resolve(USER, MODEL, CPU)
    values = {f.name: getattr(resolved, f.name) for f in fields(resolved)}
    open_ones = [name for name, value in values.items() if value in (None, "auto")]
    assert open_ones == ["kv_events", "drafts", "load_format", "seed", "tiers"]  # None is a value of these
    assert (resolved.dtype, resolved.weights, resolved.kv_cache_dtype) == ("float32", "dense", "unrounded")
    assert (resolved.max_num_seqs, resolved.num_slots, resolved.async_scheduling) == (256, 256, False)
    assert "user" not in resolved.chosen_by.values() and all(resolved.chosen_by.values())
    assert resolve(replace(USER, max_num_seqs=3), MODEL, CPU).chosen_by["max_num_seqs"] == "user"


def test_a_gpu_runs_bfloat16_one_step_ahead_with_a_spare_slot() -> None:
    resolved = resolve(USER, MODEL, GPU)
    assert (resolved.device, resolved.dtype, resolved.kv_cache_dtype) == ("cuda", "bfloat16", "model")
    assert resolved.async_scheduling and resolved.num_slots == resolved.max_num_seqs + 1


def test_a_gpu_keeps_weights_packed_and_captures_what_can_be_captured() -> None:
    capturable = replace(MODEL, is_capturable=True)
    resolved = resolve(USER, capturable, GPU)
    assert resolved.weights == "packed" and resolved.has_graphs and resolved.num_slots == resolved.max_num_seqs + 2
    for user in (
        replace(USER, enforce_eager=True),
        replace(USER, deterministic=True, replay="exact"),
        replace(USER, dtype="float32"),
        replace(USER, weights="dense"),
    ):
        assert not resolve(user, capturable, GPU).has_graphs
    assert not resolve(USER, MODEL, GPU).has_graphs and not resolve(USER, capturable, CPU).has_graphs


@pytest.mark.parametrize(
    ("elements", "dtype", "weights"),
    [(1e9, "float32", "dense"), (5e9, "float32", "packed"), (20e9, "bfloat16", "packed")],
)
def test_weights_are_dense_and_exact_only_where_they_fit_comfortably(elements: float, dtype: str, weights: str) -> None:
    plain = int(elements * 0.05)
    facts = WeightFacts(quantised_bytes=int(elements * 0.5), quantised_elements=int(elements), plain_elements=plain)
    resolved = resolve(USER, replace(MODEL, weights=facts), CPU)
    assert (resolved.dtype, resolved.weights) == (dtype, weights)


def test_all_problems_are_told_at_once() -> None:
    user = EngineConfig(
        model="m",
        dtype="float16",  # type: ignore[arg-type]
        max_model_len=200_000,
        max_num_seqs=0,
        max_num_batched_tokens="many",  # type: ignore[arg-type]
        block_size=-1,
        gpu_memory_utilization=1.5,
        async_scheduling=1,  # type: ignore[arg-type]
    )
    found = "\n".join(problems(user, device=None))
    for words in (
        "dtype is 'float16', must be one of auto, float32, bfloat16",
        "max_model_len is 200,000, the model goes to 100,000",
        "max_num_seqs is 0, must be at least 1",
        "max_num_batched_tokens is 'many', must be an integer",
        "block_size is -1, must be at least 1",
        r"gpu_memory_utilization is 1.5, must be in (0, 1]",
        "async_scheduling is 1, must be true or false",
        "device is 'cuda', but this machine has no usable GPU",
    ):
        assert words in found


def test_a_block_must_hold_whole_entries() -> None:
    assert problems(replace(USER, block_size=7)) == ["block_size is 7, must be a multiple of the compression ratios [2]"]


def test_memory_that_cannot_hold_one_context_is_refused_with_the_numbers() -> None:
    (problem,) = problems(replace(USER, kv_cache_memory_bytes=10**6, max_model_len=1_000, max_num_seqs=1))
    assert "kv_cache_memory_bytes is 1,000,000" in problem and "max_model_len 1,000" in problem and "needs 1,573" in problem
    heavy = WeightFacts(quantised_bytes=30 * GIB, quantised_elements=60 * GIB, plain_elements=0)
    assert any("leave no room for the KV cache" in p for p in problems(USER, replace(MODEL, weights=heavy)))
    assert any("exceed the" in p for p in problems(replace(USER, kv_cache_memory_bytes=40 * GIB)))


def test_without_a_wish_the_context_is_what_the_memory_holds() -> None:
    resolved = resolve(replace(USER, kv_cache_memory_bytes=20 * 2**20, max_num_seqs=4), MODEL, CPU)
    assert resolved.chosen_by["max_model_len"] == "what the cache memory holds"
    assert resolved.max_model_len == (resolved.num_blocks - 1) * resolved.block_size < 100_000
    assert resolved.memory.pool_bytes <= 20 * 2**20


def sizes(table: str) -> list[int]:
    return [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) bytes$", table, re.MULTILINE)]


def test_the_memory_table_adds_up() -> None:
    resolved = resolve(replace(USER, max_model_len=1_000, max_num_seqs=7), MODEL, CPU)
    *parts, total = sizes(resolved.memory_table())
    assert sum(parts) == total
    assert parts[0] == 17_000 * 4
    assert parts[1] == (7 * 4 + 1) * 128 * 512 * 4
    assert parts[2] == 7 * (128 * 512 * 4 + 128 * 4)


def test_the_memory_table_says_what_is_really_allocated(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=3, async_scheduling=True)
    worker: Any = llm.core._worker
    _, blocks, slots, tables, _ = sizes(llm.config.memory_table())
    assert blocks + slots == cache_bytes(worker.cache)
    assert tables == sum(t.numel() * t.element_size() for t in (worker._tables.token_ids, worker._tables.block_ids))


def test_the_memory_table_calls_an_estimate_so_and_only_an_estimate() -> None:
    exact = WeightFootprint(lambda dtype, weights: (WeightKind(name="all", num_bytes=12_345, place="device"),))
    assert "estimated" in resolve(USER, MODEL, CPU).memory_table()
    assert "estimated" not in resolve(USER, MODEL, CPU).memory_table(weights_bytes=99)
    table = resolve(USER, replace(MODEL, weights=exact), CPU).memory_table()
    assert "estimated" not in table
    assert sizes(table)[0] == 12_345


def test_sizes_of_weights_follow_from_the_headers() -> None:
    headers = {
        "a.weight": ("F8_E4M3", (4, 64), 256),
        "a.scale": ("F8_E8M0", (1, 2), 2),
        "e.weight": ("I8", (4, 32), 128),
        "e.scale": ("F8_E8M0", (4, 2), 8),
        "norm": ("F32", (64,), 256),
        "other": ("BF16", (1000,), 2000),
    }
    facts = weight_facts(headers, [name for name in headers if name != "other"])
    assert facts == WeightFacts(quantised_bytes=394, quantised_elements=512, plain_elements=64)
    assert (facts.packed_bytes("bfloat16"), facts.dense_bytes("float32")) == (394 + 128, 576 * 4)


def test_this_machine_has_a_cpu_with_memory() -> None:
    device = find_device("cpu")
    assert device is not None and device.kind == "cpu" and 0 < device.free_bytes <= device.total_bytes


def test_options_are_described_from_the_fields() -> None:
    options = {option.name: option for option in describe_options(EngineConfig)}
    assert list(options) == [f.name for f in fields(EngineConfig)]
    assert all(option.doc.endswith(".") for option in options.values())
    assert options["model"].default is MISSING and options["model"].kind is str
    assert options["dtype"].choices == ("auto", "float32", "bfloat16")
    assert (options["max_model_len"].kind, options["max_model_len"].is_optional) == (int, True)
    assert (options["async_scheduling"].kind, options["stats_interval_s"].kind) == (bool, float)


def test_an_unknown_option_is_named_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_modellen'; did you mean 'max_model_len'\?"):
        EngineConfig.from_options({"model": "m", "max_modellen": 3})
    with pytest.raises(ConfigError, match="model is missing"):
        EngineConfig.from_options({})


@pytest.mark.parametrize("draft", ["", "on", "fixed", "fixed:0", "fixed:-1", "fixed:x", "fixed:3 ", "3", 3])
def test_a_draft_length_that_is_none_is_refused_at_once(draft: object) -> None:
    (problem,) = problems(replace(USER, draft=draft))  # type: ignore[arg-type]
    assert "draft is" in problem


def test_who_drafts_and_how_far_is_checked_against_the_checkpoint() -> None:
    bare: Any
    own: Any
    bare = SimpleNamespace(own_drafter=None)
    own = SimpleNamespace(own_drafter=lambda config: ("dspark", 5))
    assert plan_drafts(USER, own, None) is None
    user = replace(USER, draft="fixed:5")
    assert plan_drafts(user, bare, None) == DraftPlan(drafter="ngram", num_drafts=5, acceptance="exact")
    plan = plan_drafts(user, own, None)
    assert plan is not None and plan.is_own and plan.drafter == "dspark"
    for wrong, definition, hint in (
        (replace(user, drafter="dspark"), bare, "use --drafter ngram"),
        (replace(user, draft="fixed:6"), own, "fixed:5 or less"),
        (replace(user, draft="fixed:17", drafter="ngram"), own, "fixed:16 or less"),
    ):
        with pytest.raises(ConfigError, match=hint):
            plan_drafts(wrong, definition, None)
