# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: the BOS rule, the border between text and control tokens, ids without text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalefall.core.errors import ConfigError
from whalefall.testing.tokenizer import BOS, EOS, MARKERS, byte_tokenizer, byte_tokenizer_config, byte_tokenizer_json, write_byte_tokenizer
from whalefall.text.tokenizer import Tokenizer

TOKENIZER = byte_tokenizer()
BOS_ID, EOS_ID = 0, 1


@given(st.lists(st.one_of(st.text(), st.sampled_from([BOS, EOS, *MARKERS])), max_size=6).map("".join))
def test_user_text_never_becomes_a_control_token_and_is_kept_exactly(text: str) -> None:
    ids = TOKENIZER.encode(text, add_bos=False, allow_special=False)
    assert not TOKENIZER.control_ids.intersection(ids)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_markers_are_control_tokens_when_allowed_even_if_the_file_calls_them_plain() -> None:
    ids = TOKENIZER.encode(f"{BOS}<think>a</think>{EOS}", add_bos=False, allow_special=True)
    think, a, end_think = (TOKENIZER.token_to_id(t) for t in ("<think>", "a", "</think>"))
    assert ids == [BOS_ID, think, a, end_think, EOS_ID]
    assert TOKENIZER.special_ids == {BOS_ID, EOS_ID}
    assert think in TOKENIZER.control_ids
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_bos_comes_first_once() -> None:
    assert TOKENIZER.encode("a", add_bos=True, allow_special=True)[0] == BOS_ID
    assert TOKENIZER.encode(BOS + "a", add_bos=True, allow_special=True).count(BOS_ID) == 1
    assert TOKENIZER.encode("", add_bos=True, allow_special=False) == [BOS_ID]
    spelled_out = TOKENIZER.encode(BOS + "a", add_bos=True, allow_special=False)
    assert spelled_out[0] == BOS_ID and spelled_out.count(BOS_ID) == 1 and len(spelled_out) > 3
    assert BOS_ID not in TOKENIZER.encode("a", add_bos=False, allow_special=True)


def test_a_tokenizer_that_adds_no_bos_never_does() -> None:
    tokenizer = byte_tokenizer(byte_tokenizer_config(add_bos_token=False))
    assert tokenizer.bos_token_id == BOS_ID
    assert tokenizer.encode("a", add_bos=True, allow_special=True) == tokenizer.encode("a", add_bos=False, allow_special=True)


def test_without_a_rule_the_template_of_the_tokenizer_decides() -> None:
    config = {"bos_token": {"content": BOS}}
    assert not Tokenizer(byte_tokenizer_json(), config).adds_bos
    definition = json.loads(byte_tokenizer_json())
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [BOS_ID], "tokens": [BOS]}},
    }
    tokenizer = Tokenizer(json.dumps(definition), config)
    assert tokenizer.adds_bos
    assert tokenizer.encode("<think>", add_bos=True, allow_special=False)[0] == BOS_ID


def test_ids_without_text_give_no_text() -> None:
    a = TOKENIZER.encode("a", add_bos=False, allow_special=False)
    beyond = TOKENIZER.vocab_size
    assert TOKENIZER.decode([*a, beyond, *a, 10**6], skip_special_tokens=True) == "aa"
    assert TOKENIZER.id_to_token(beyond) is None
    assert TOKENIZER.token_text(beyond) == ""
    assert TOKENIZER.token_bytes(beyond) is None


def test_token_bytes_are_the_bytes_of_parts_of_a_character() -> None:
    ids = TOKENIZER.encode("é", add_bos=False, allow_special=False)
    assert [TOKENIZER.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9"]
    assert TOKENIZER.token_text(ids[0]) == "\ufffd"
    assert TOKENIZER.token_bytes(BOS_ID) == BOS.encode()


def test_from_dir_reads_both_files_and_names_a_missing_or_broken_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not found"):
        Tokenizer.from_dir(tmp_path)
    write_byte_tokenizer(tmp_path)
    assert Tokenizer.from_dir(tmp_path).eos_token_id == EOS_ID
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not JSON"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer definition"):
        Tokenizer.from_dir(tmp_path)


def test_a_named_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bos_token '<s>', which is not in the vocabulary"):
        Tokenizer(byte_tokenizer_json(), {"bos_token": "<s>"})
