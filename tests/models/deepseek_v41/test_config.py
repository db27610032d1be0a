# SPDX-License-Identifier: Apache-2.0
"""Claims about reading a V4.1 config: the released one is understood, every broken one is answered with lines that name the key."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.models.deepseek_v41.released_config import RELEASED
from whalefall.core.errors import ConfigError
from whalefall.models.deepseek_v41.config import DeepseekV41Config, _say_once

TEXT_KEYS = sorted(RELEASED["text_config"])
QUANT_KEYS = sorted(RELEASED["quantization_config"])
ROPE_KEYS = sorted(RELEASED["text_config"]["rope_scaling"])
ALL_PATHS = [
    *((key,) for key in sorted(RELEASED)),
    *(("text_config", key) for key in TEXT_KEYS),
    *(("quantization_config", key) for key in QUANT_KEYS),
    *(("text_config", "rope_scaling", key) for key in ROPE_KEYS),
]
NOT_READ = {("text_config", "initializer_range"), ("text_config", "use_cache")}
HAS_DEFAULT = {
    *(("architectures",), ("model_type",), ("dtype",)),
    *(("quantization_config", key) for key in QUANT_KEYS if key != "quant_method"),
    *(("text_config", "rope_scaling", key) for key in ("rope_type", "beta_fast", "beta_slow")),
    *(
        ("text_config", key)
        for key in """model_type hidden_act attention_bias attention_dropout num_key_value_heads n_shared_experts scoring_func topk_method
        norm_topk_prob tie_word_embeddings rms_norm_eps rope_theta compress_rope_theta hc_mult hc_sinkhorn_iters hc_eps""".split()  # noqa: SIM905
    ),
}
MEANS_NONE = {("bos_token_id",), ("pad_token_id",), ("image_token_id",), ("quantization_config",), ("vision_config",), *NOT_READ}


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The released config with one value replaced."""
    config = copy.deepcopy(RELEASED)
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return config


def problems_of(config: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        DeepseekV41Config.from_hf(config, "config.json")
    return caught.value.problems


def test_released_config_gives_the_maps_of_the_design_note() -> None:
    config = DeepseekV41Config.from_hf(RELEASED, "config.json")
    assert config.num_encoder_layers == 20
    assert [config.kv_src(layer) for layer in (2, 7, 8, 13, 19, 20, 39)] == [2, 2, 8, 8, 14, 20, 20]
    assert [config.idx_src(layer) for layer in (3, 20, 23, 24, 27, 39)] == [2, 20, 20, 24, 24, 36]
    assert [layer for layer in range(40) if config.uses_candidates(layer)] == [24, 28, 32, 36]
    assert config.candidate_layer_ids == (24, 28, 32, 36)
    assert [config.ratio(layer) for layer in (0, 2, 19, 20, 39, 42)] == [0, 2, 2, 1, 1, 0]
    assert (config.history_tokens, config.decoder_window, config.eos_token_ids) == (3, 128, (1,))
    assert config.is_quantised
    assert config.defaults_used == ()


@pytest.mark.parametrize("path", ALL_PATHS, ids=".".join)
def test_missing_key_has_a_stated_default_or_is_named(path: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    config = copy.deepcopy(RELEASED)
    place = config
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    dotted = ".".join(path)
    if path in HAS_DEFAULT:
        _say_once.cache_clear()
        used = DeepseekV41Config.from_hf(config, "config.json").defaults_used
        DeepseekV41Config.from_hf(config, "config.json")
        assert [record.message for record in caplog.records] == list(used)
        assert len(used) == 1 and used[0].startswith(f"config.json: {dotted}: missing, using "), used
    elif path in MEANS_NONE:
        assert DeepseekV41Config.from_hf(config, "config.json").defaults_used == ()
    else:
        found = problems_of(config)
        assert any(f"{dotted}: missing, allowed: " in line for line in found), found


@pytest.mark.parametrize("value", [None, -1, "banana", True, [], {}], ids=repr)
@pytest.mark.parametrize("path", sorted(set(ALL_PATHS) - NOT_READ), ids=".".join)
def test_wrong_value_is_answered_with_one_line_that_names_it(path: tuple[str, ...], value: Any) -> None:
    legal = {(("text_config", "norm_topk_prob"), "True"), (("text_config", "engram_layer_ids"), "[]"), (("vision_config",), "{}")}
    if (path, repr(value)) in legal:
        return
    lines = [line for line in problems_of(changed(path, value)) if line.startswith(f"config.json: {'.'.join(path)}")]
    assert lines, "the key is not named"
    assert all(": found " in line or ": missing" in line for line in lines) and all(", allowed: " in line for line in lines), lines


def test_all_problems_come_at_once() -> None:
    config = changed(("text_config", "hidden_size"), "5120")
    config["text_config"]["head_dim"] = True
    config["text_config"]["kv_source_layer_ids"] = [2, 8, 14, 19]
    config["quantization_config"]["weight_block_size"] = [128, 128]
    config["eos_token_id"] = [1, 999_999]
    found = "\n".join(problems_of(config))
    for key in ("hidden_size", "head_dim", "kv_source_layer_ids", "weight_block_size", "eos_token_id"):
        assert key in found
    assert found.count("\n") == 4, "one line per slip"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("architectures",), ["DeepseekV4ForCausalLM"], "DeepseekV41ForCausalLM"),
        (("model_type",), "deepseek_v4", "deepseek_v41"),
        (("tie_word_embeddings",), True, "false"),
        (("text_config", "tie_word_embeddings"), True, "false"),
        (("text_config", "hc_shifted"), False, "true"),
        (("text_config", "use_fp4_sparse_kv"), False, "true"),
        (("text_config", "dspark_target_attn_input"), False, "true"),
        (("text_config", "tokenizer_compatibility"), "beta", "release"),
        (("text_config", "index_k_source_layer_ids"), [2, 8], "[2, 8, 14, 20]"),
        (("text_config", "scoring_func"), "sigmoid", "sqrtsoftplus"),
        (("text_config", "norm_topk_prob"), False, "true"),
        (("text_config", "num_key_value_heads"), 8, "1"),
        (("text_config", "n_shared_experts"), 2, "1"),
        (("quantization_config", "quant_method"), "awq", '"fp8"'),
        (("quantization_config", "expert_dtype"), "fp8", '"fp4"'),
        (("quantization_config", "weight_block_size"), [128, 128], "[32, 32]"),
        (("quantization_config", "modules_to_not_convert"), ["head"], "understands"),
        (("text_config", "rope_scaling"), {"rope_type": "linear", "factor": 4, "original_max_position_embeddings": 8}, "yarn"),
        (("text_config", "sliding_windows"), 64, "did you mean sliding_window?"),
        (("text_config", "compress_ratios"), [0, 0] + [4] * 18 + [1] * 20 + [0] * 3, "from 0 to 2"),
        (("text_config", "compress_ratios"), [0, 0] + [2] * 18 + [1] * 20, "43"),
        (("text_config", "compress_ratios"), [0, 0] + [2] * 18 + [1] * 20 + [1] * 3, "draft"),
        (("text_config", "compress_ratios"), [0, 0] + [2] * 38 + [0] * 3, "ratio 1"),
        (("text_config", "compress_ratios"), [0, 0] + [2] * 18 + [1] * 19 + [2] + [0] * 3, "ratio 2"),
        (("text_config", "kv_source_layer_ids"), [2, 8, 14], "ratio"),
        (("text_config", "kv_source_layer_ids"), [8, 14, 20], "layer 2"),
        (("text_config", "kv_source_layer_ids"), [2, 8, 14, 20, 24], "no source after layer 20"),
        (("text_config", "kv_source_layer_ids"), [20, 14, 8, 2], "rising"),
        (("text_config", "kv_source_layer_ids"), [1, 2, 8, 14, 20], "ratio 1 or 2"),
        (("text_config", "index_source_layer_ids"), [2, 8, 20, 24], "every id"),
        (("text_config", "candidate_source_layer_id"), 21, "index_source_layer_ids"),
        (("text_config", "candidate_source_layer_id"), 14, "20"),
        (("text_config", "candidate_topk_blocks"), 63, "512"),
        (("text_config", "engram_num_embeddings"), [384006168, 384016683], "384016682"),
        (("text_config", "engram_layer_ids"), [1, 20], "below 20"),
        (("text_config", "engram_compressed_vocab_size"), 129281, "129280"),
        (("text_config", "engram_pad_token_id"), 129280, "129280"),
        (("text_config", "dspark_target_layer_ids"), [19, 38, 39], "20 to 39"),
        (("text_config", "dspark_num_experts_per_tok"), 129, "128"),
        (("text_config", "num_experts_per_tok"), 385, "384"),
        (("text_config", "qk_rope_head_dim"), 63, "multiple of 2"),
        (("text_config", "qk_rope_head_dim"), 256, "index_head_dim 128"),
        (("text_config", "hidden_size"), 5121, "multiple of 32"),
        (("text_config", "o_groups"), 7, "divisor"),
        (("text_config", "rope_theta"), float("nan"), "number"),
        (("eos_token_id",), [], "at least 1"),
        (("image_token_id",), 129280, "129280"),
    ],
)
def test_unsupported_or_contradictory_setting_is_refused(path: tuple[str, ...], value: Any, words: str) -> None:
    found = problems_of(changed(path, value))
    assert any(path[-1] in line and words in line for line in found), found


def test_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the whole file: found \[1\], allowed: an object"):
        DeepseekV41Config.from_hf([1], "config.json")  # type: ignore[arg-type]


def test_model_without_engram_and_drafts_needs_none_of_their_keys() -> None:
    config = copy.deepcopy(RELEASED)
    text = config["text_config"]
    for key in [key for key in text if key.startswith(("engram_", "dspark_", "num_nextn"))]:
        del text[key]
    text["compress_ratios"] = text["compress_ratios"][:40]
    parsed = DeepseekV41Config.from_hf(config, "config.json")
    assert (parsed.history_tokens, parsed.num_nextn_predict_layers, parsed.engram_layer_ids) == (0, 0, ())
