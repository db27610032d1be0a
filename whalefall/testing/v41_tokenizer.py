# SPDX-License-Identifier: Apache-2.0
"""A complete tokenizer for small V4.1 checkpoints: one token per byte, plus every control token that V4.1 chats are written with.

Ids: 0-2 begin, end, pad; 3-258 the bytes; then the markers; then placeholders up to the wanted size, as DeepSeek's own file has them.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from whalefall.text.tokenizer import BYTE_OF_LETTER, CONFIG_FILE, TOKENIZER_FILE

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, NOISE = "<｜image｜>", "<｜noise｜>"
MARKERS = (
    *("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>"),
    *("<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>"),
    *(IMAGE, NOISE),
)
"""Added tokens that the file does not call special, as in DeepSeek's own: they survive `skip_special_tokens`."""

FIRST_BYTE_ID = 3
MARKER_IDS = {marker: FIRST_BYTE_ID + 256 + i for i, marker in enumerate(MARKERS)}
MIN_VOCAB_SIZE = FIRST_BYTE_ID + 256 + len(MARKERS)


def v41_tokenizer_json(vocab_size: int = MIN_VOCAB_SIZE) -> str:
    """Content of tokenizer.json with exactly `vocab_size` ids."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size is {vocab_size}, needs at least {MIN_VOCAB_SIZE} for the bytes and the control tokens")
    letters = sorted(BYTE_OF_LETTER, key=BYTE_OF_LETTER.__getitem__)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate((BOS, EOS, PAD, *letters))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    spare = [f"<｜place▁holder▁no▁{i}｜>" for i in range(vocab_size - MIN_VOCAB_SIZE)]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in (BOS, EOS, PAD)])
    tokenizer.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in (*MARKERS, *spare)])
    return tokenizer.to_str()


def write_v41_tokenizer(folder: Path, vocab_size: int = MIN_VOCAB_SIZE) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / TOKENIZER_FILE).write_text(v41_tokenizer_json(vocab_size), encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
