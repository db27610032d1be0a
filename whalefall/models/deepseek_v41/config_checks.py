# SPDX-License-Identifier: Apache-2.0
"""The assertions that tie a V4.1 config's keys to one another.

Called by `DeepseekV41Config.from_hf` after every key has been read; a check whose keys were already reported is skipped, so that one
slip gives one line. Source: design note deepseek-v41 §1.4, §2.1, §3.10, §6.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whalefall.models.config_reader import ConfigReader
from whalefall.models.deepseek_v41.engram_tables import table_primes

Values = Mapping[str, Any]


def check(text: ConfigReader, root: ConfigReader, v: Values) -> None:
    """Add every broken rule to the readers' problems."""
    _check_token_ids(text, root, v)
    _check_sizes(text, v)
    if text.are_sound("compress_ratios", "num_hidden_layers", "num_nextn_predict_layers") and _check_ratios(text, v):
        if text.are_sound("kv_source_layer_ids", "index_source_layer_ids") and _check_sources(text, v):
            _check_sharing(text, v)
            _check_candidates(text, v)
        _check_placement(text, v)
    _check_engram_tables(text, v)


def _check_token_ids(text: ConfigReader, root: ConfigReader, v: Values) -> None:
    if not text.are_sound("vocab_size"):
        return
    allowed = f"an id below vocab_size {v['vocab_size']}"
    for key in ("bos_token_id", "pad_token_id", "image_token_id"):
        if root.are_sound(key) and v[key] is not None and v[key] >= v["vocab_size"]:
            root.fail(key, f"found {v[key]}", allowed)
    if root.are_sound("eos_token_id") and any(i >= v["vocab_size"] for i in v["eos_token_ids"]):
        root.fail("eos_token_id", f"found {list(v['eos_token_ids'])}", allowed)
    text_ids = {"engram_pad_token_id": v["engram_layer_ids"], "dspark_noise_token_id": v["num_nextn_predict_layers"]}
    for key, used in text_ids.items():
        if used and text.are_sound(key) and v[key] >= v["vocab_size"]:
            text.fail(key, f"found {v[key]}", allowed)


def _check_sizes(text: ConfigReader, v: Values) -> None:
    _at_most(text, v, "qk_rope_head_dim", "head_dim")
    _at_most(text, v, "qk_rope_head_dim", "index_head_dim")
    _at_most(text, v, "num_experts_per_tok", "n_routed_experts")
    if v["num_nextn_predict_layers"]:
        _at_most(text, v, "dspark_num_experts_per_tok", "dspark_n_routed_experts")
    if text.are_sound("num_attention_heads", "o_groups") and v["num_attention_heads"] % v["o_groups"]:
        text.fail("o_groups", f"found {v['o_groups']}", f"a divisor of num_attention_heads {v['num_attention_heads']}")
    if text.are_sound("index_topk", "candidate_topk_blocks", "candidate_block_size"):
        held = v["candidate_topk_blocks"] * v["candidate_block_size"]
        if held < v["index_topk"]:
            text.fail(
                "candidate_topk_blocks",
                f"found {v['candidate_topk_blocks']} blocks of {v['candidate_block_size']} entries",
                f"blocks that hold at least index_topk {v['index_topk']} entries",
            )


def _at_most(text: ConfigReader, v: Values, key: str, limit: str) -> None:
    if text.are_sound(key, limit) and v[key] > v[limit]:
        text.fail(key, f"found {v[key]}", f"at most {limit} {v[limit]}")


def _check_ratios(text: ConfigReader, v: Values) -> bool:
    """One ratio per layer, 2 before the first 1 and never after it, none in the draft."""
    ratios, num_layers, num_drafts = v["compress_ratios"], v["num_hidden_layers"], v["num_nextn_predict_layers"]
    key = "compress_ratios"
    if len(ratios) != num_layers + num_drafts:
        allowed = f"{num_layers + num_drafts} (num_hidden_layers {num_layers} + num_nextn_predict_layers {num_drafts})"
        text.fail(key, f"found {len(ratios)} entries", allowed)
        return False
    if any(ratios[num_layers:]):
        text.fail(key, f"found {list(ratios[num_layers:])} for the draft layers", "0 for each draft layer")
    backbone = ratios[:num_layers]
    if 1 not in backbone:
        text.fail(key, "found no layer of ratio 1", "at least one: the first of them begins the decoder")
    elif 2 in backbone[backbone.index(1) :]:
        text.fail(key, f"found ratio 2 after layer {backbone.index(1)}, the first of ratio 1", "ratios 0 and 1 from there on")
    return text.are_sound(key)


def _check_sources(text: ConfigReader, v: Values) -> bool:
    """Source lists rise, name layers that have a compressed cache, and each KV source also publishes an index."""
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = v[key]
        if list(ids) != sorted(set(ids)):
            text.fail(key, f"found {list(ids)}", "rising layer ids without repeats")
        elif bare := [layer for layer in ids if v["compress_ratios"][layer] == 0]:
            text.fail(key, f"found {bare}, where compress_ratios has 0", "layers of ratio 1 or 2")
    missing = sorted(set(v["kv_source_layer_ids"]) - set(v["index_source_layer_ids"]))
    if missing and text.are_sound("kv_source_layer_ids", "index_source_layer_ids"):
        text.fail("index_source_layer_ids", f"found no {missing}", "every id of kv_source_layer_ids")
    if text.has("index_k_source_layer_ids"):
        given = text.integers("index_k_source_layer_ids")
        if text.are_sound("index_k_source_layer_ids") and given != v["kv_source_layer_ids"]:
            text.fail(
                "index_k_source_layer_ids", f"found {list(given)}", f"the same as kv_source_layer_ids {list(v['kv_source_layer_ids'])}"
            )
    return text.are_sound("kv_source_layer_ids", "index_source_layer_ids")


def _check_sharing(text: ConfigReader, v: Values) -> None:
    """Every layer with a ratio reads a cache of its own ratio, which also keeps it on its side of the encoder/decoder border."""
    ratios, sources = v["compress_ratios"], v["kv_source_layer_ids"]
    key, found = "kv_source_layer_ids", f"found {list(sources)}"
    for layer in range(v["num_hidden_layers"]):
        below = [source for source in sources if source <= layer]
        if ratios[layer] and not below:
            return text.fail(key, found, f"a source at or below layer {layer}, which has ratio {ratios[layer]}")
        if ratios[layer] and ratios[below[-1]] != ratios[layer]:
            read = f"layer {layer} of ratio {ratios[layer]} would read layer {below[-1]} of ratio {ratios[below[-1]]}"
            return text.fail(key, f"{found}: {read}", "a source of the reader's own ratio")
    border = ratios.index(1)
    if sources[-1] != border:
        text.fail(key, found, f"no source after layer {border}: the decoder shares the cache of its first layer")


def _check_candidates(text: ConfigReader, v: Values) -> None:
    """Block ids of the candidate source must mean the same entries to every layer that searches inside them."""
    key, source = "candidate_source_layer_id", v["candidate_source_layer_id"]
    if not text.are_sound(key, "kv_source_layer_ids"):
        return
    if source not in v["index_source_layer_ids"]:
        text.fail(key, f"found {source}", f"one of index_source_layer_ids {list(v['index_source_layer_ids'])}")
        return
    ratios = v["compress_ratios"]
    crossing = [kv for kv in v["kv_source_layer_ids"] if kv > source]
    if crossing:
        found = f"found {source} of ratio {ratios[source]}"
        text.fail(key, found, f"at or after the last KV source {crossing[-1]}, whose entries the later index sources search")


def _check_placement(text: ConfigReader, v: Values) -> None:
    """Engram sits in the encoder and drafts tap the decoder: only then may a prefill trim the decoder's rows."""
    border, last = v["compress_ratios"].index(1), v["num_hidden_layers"] - 1
    engram, taps = v["engram_layer_ids"], v["dspark_target_layer_ids"]
    if text.are_sound("engram_layer_ids") and (list(engram) != sorted(set(engram)) or any(layer >= border for layer in engram)):
        text.fail("engram_layer_ids", f"found {list(engram)}", f"rising ids of encoder layers, below {border}")
    uses_taps = v["num_nextn_predict_layers"] and text.are_sound("dspark_target_layer_ids")
    if uses_taps and (list(taps) != sorted(set(taps)) or any(not border <= layer <= last for layer in taps)):
        text.fail("dspark_target_layer_ids", f"found {list(taps)}", f"rising ids of decoder layers, {border} to {last}")


def _check_engram_tables(text: ConfigReader, v: Values) -> None:
    keys = ("engram_layer_ids", "engram_num_embeddings", "engram_vocab_size", "engram_max_ngram_size", "engram_n_heads")
    if not v["engram_layer_ids"] or not text.are_sound(*keys):
        return
    primes = table_primes(v["engram_vocab_size"], len(v["engram_layer_ids"]), v["engram_max_ngram_size"], v["engram_n_heads"])
    rows = [sum(layer) for layer in primes]
    if list(v["engram_num_embeddings"]) != rows:
        allowed = f"{rows}, the sums of the primes from engram_vocab_size {v['engram_vocab_size']} on"
        text.fail("engram_num_embeddings", f"found {list(v['engram_num_embeddings'])}", allowed)
    _at_most(text, v, "engram_compressed_vocab_size", "vocab_size")
