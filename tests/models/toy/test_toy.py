# SPDX-License-Identifier: Apache-2.0
"""The template is complete: config, weight map, cache, forward, and the loader's whole road."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.runtime.worker.driver import BLOCK_TOKENS, CONFIG, Engine, ask, make_prompt
from whalefall.core.errors import ConfigError
from whalefall.models.registry import find_definition, read_config
from whalefall.models.toy import DEFINITION
from whalefall.models.toy.config import ToyConfig
from whalefall.models.toy.weights import random_weights
from whalefall.testing.toy_checkpoint import toy_context, toy_model, write_toy_checkpoint
from whalefall.text.tokenizer import Tokenizer
from whalefall.weights.loader import load_checkpoint


def test_a_checkpoint_on_disk_gives_the_same_tokens_as_weights_in_memory(tmp_path: Path) -> None:
    model_dir = write_toy_checkpoint(tmp_path / "toy", seed=3)
    values = read_config(model_dir)
    definition = find_definition(values)
    assert definition is DEFINITION
    config = definition.parse_config(values, "config.json")
    assert config == CONFIG
    built = definition.build(config, toy_context(model_dir=model_dir))
    load_checkpoint(model_dir, definition.weight_map(config), built.sink)
    loaded = ask(make_prompt(30), engine=Engine(model=built.model))
    assert loaded.token_ids == ask(make_prompt(30), engine=Engine(model=toy_model(seed=3))).token_ids
    assert loaded.token_ids != ask(make_prompt(30), engine=Engine(model=toy_model(seed=4))).token_ids


def test_the_tokenizer_fits_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(write_toy_checkpoint(tmp_path))
    assert tokenizer.vocab_size <= CONFIG.vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (CONFIG.bos_token_id, CONFIG.eos_token_ids[0])
    ids = tokenizer.encode("hello wörld", add_bos=True, allow_special=False)
    assert max(ids) < CONFIG.vocab_size
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello wörld"


def test_every_weight_has_its_place_and_is_needed() -> None:
    weights = random_weights(CONFIG, 0)
    assert {name: tuple(w.shape) for name, w in weights.items()} == {n: t.shape for n, t in DEFINITION.weight_map(CONFIG).tensors.items()}
    built = DEFINITION.build(CONFIG, toy_context())
    for name, tensor in list(weights.items())[:-1]:
        built.sink.put(name, tensor)
    with pytest.raises(ConfigError, match=r"head\.weight"):
        built.sink.finish()


def test_config_survives_the_file() -> None:
    config = ToyConfig(vocab_size=300, hidden_size=24, num_attention_heads=3, num_hidden_layers=1, eos_token_ids=(7,))
    assert ToyConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_a_broken_config_lists_every_problem() -> None:
    values = CONFIG.to_hf() | {"hidden_size": 33, "num_hidden_layers": 0, "sliding_window": 8}
    del values["vocab_size"]
    with pytest.raises(ConfigError) as caught:
        ToyConfig.from_hf(values, "here/config.json")
    assert len(caught.value.problems) == 4
    assert all(problem.startswith("here/config.json: ") for problem in caught.value.problems)
    assert [key for key in ("vocab_size", "hidden_size", "num_hidden_layers", "sliding_window") if key not in str(caught.value)] == []


def test_cache_holds_key_and_value_of_every_layer() -> None:
    spec = DEFINITION.cache_spec(CONFIG, toy_context(torch.bfloat16), BLOCK_TOKENS)
    assert spec.block_bytes == BLOCK_TOKENS * CONFIG.num_hidden_layers * 2 * CONFIG.hidden_size * 2
    assert spec.slot_bytes == 0


def test_bfloat16_stays_close_to_float32() -> None:
    prompt = make_prompt(50)
    context = toy_context(torch.bfloat16)
    engine = Engine(model=toy_model(context=context), spec=DEFINITION.cache_spec(CONFIG, context, BLOCK_TOKENS))
    half = ask(prompt, engine=engine, prompt_logprobs=0, max_tokens=0).prompt_logprobs
    full = ask(prompt, prompt_logprobs=0, max_tokens=0).prompt_logprobs
    differences = torch.tensor([a.logprob - b.logprob for a, b in zip(half, full)]).abs()
    assert 0 < differences.mean() < 0.1


def test_what_lies_beyond_a_request_is_never_read() -> None:
    """NaN in every block, the null block too: only rows that the request wrote itself may count."""
    engine = Engine()
    for pool in engine.worker.cache.growing.values():
        pool[:] = torch.nan
    engine.add("neighbour", make_prompt(70))
    assert ask(make_prompt(9), engine=engine).token_ids == ask(make_prompt(9)).token_ids
