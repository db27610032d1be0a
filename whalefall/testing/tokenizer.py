# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers for tests and for model authors: every byte is a token, plus control tokens and a few merges."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from whalefall.text.tokenizer import BYTE_OF_LETTER, CONFIG_FILE, TOKENIZER_FILE, Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CONTROL_TOKENS = (BOS, EOS)
MARKERS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
"""Added tokens that the file does not call special, as in DeepSeek's own."""


def byte_tokenizer_json(*, merges: Sequence[tuple[str, str]] = (("h", "e"), ("l", "l"))) -> str:
    """tokenizer.json of a byte-level BPE: ids 0-1 control, 2-257 bytes in order, then merges, then markers."""
    letters = sorted(BYTE_OF_LETTER, key=BYTE_OF_LETTER.__getitem__)
    vocab = {token: i for i, token in enumerate([*CONTROL_TOKENS, *letters])}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in MARKERS])
    return tokenizer.to_str()


def byte_tokenizer_config(*, add_bos_token: bool = True) -> dict[str, Any]:
    return {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "add_bos_token": add_bos_token}


def byte_tokenizer(config: Mapping[str, Any] | None = None) -> Tokenizer:
    return Tokenizer(byte_tokenizer_json(), byte_tokenizer_config() if config is None else config)


def write_byte_tokenizer(folder: Path, *, add_bos_token: bool = True) -> None:
    """Write tokenizer.json and tokenizer_config.json into a model directory."""
    (folder / TOKENIZER_FILE).write_text(byte_tokenizer_json(), encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(byte_tokenizer_config(add_bos_token=add_bos_token)), encoding="utf-8")
