# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - one table of names is wider than the page
"""Makes everything training reads: the tokenizer, and token shards (uint16, xz) for text, chat, held-out text and held-out chat.

Usage: python -m training.prepare --raw training/.work/raw --out training/.work/data
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.chat import conversations
from training.corpus import DEBIAN_PACKAGES, Document, documents, fetch

VOCAB_SIZE = 4096
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<think>", "</think>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "｜DSML｜",
    "<｜image｜>", "<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>", "<｜noise｜>",
)  # fmt: skip
IMAGE_ID, NOISE_ID = SPECIAL_TOKENS.index("<｜image｜>"), SPECIAL_TOKENS.index("<｜noise｜>")


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE; digits stand alone, words take their leading space with them; any bytes survive a round trip."""
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE and tokenizer.token_to_id(SPECIAL_TOKENS[NOISE_ID]) == NOISE_ID
    return tokenizer


def save_tokens(path: Path, sequences: Iterable[list[int]]) -> int:
    tokens = np.array([token for sequence in sequences for token in sequence], dtype=np.uint16)
    path.write_bytes(lzma.compress(tokens.tobytes(), preset=6))
    return len(tokens)


def load_tokens(path: Path) -> np.ndarray:
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.uint16)


def _tokenizer_sample(texts: list[Document], chats: list[str], rng: random.Random) -> list[str]:
    """A third of the corpus; code is thinned, so that English words get their share of the vocabulary."""
    share = {"python-tests": 0.05, "python-stdlib": 0.2}
    return [d.text for d in texts if rng.random() < share.get(d.source, 0.4)] + [chat for chat in chats if rng.random() < 0.1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", type=Path, default=Path("training/.work/raw"))
    parser.add_argument("--out", type=Path, default=Path("training/.work/data"))
    args = parser.parse_args()
    if not all((args.raw / name).exists() for name in DEBIAN_PACKAGES):
        fetch(args.raw)
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    everything = list(documents(args.raw))
    rng.shuffle(everything)
    train, held_out = [d for d in everything if not d.held_out], [d for d in everything if d.held_out]
    chats, chats_held_out = list(conversations(args.raw, 1, False)), list(conversations(args.raw, 2, True))
    tokenizer = train_tokenizer(_tokenizer_sample(train, chats, rng))
    tokenizer.save(str(args.out / "tokenizer.json"))
    stats: dict[str, object] = {"characters": Counter()}
    for name, part in (("text", train), ("text-held-out", held_out)):
        ids = [[BOS_ID, *encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch([d.text for d in part])]
        stats[name] = {
            "documents": len(part),
            "bytes": sum(len(d.text.encode()) for d in part),
            "tokens": save_tokens(args.out / f"{name}.xz", ids),
        }
        stats[f"{name} bytes by source"] = dict(sum((Counter({d.source: len(d.text.encode())}) for d in part), Counter()))
    for name, part in (("chat", chats), ("chat-held-out", chats_held_out)):
        ids = [encoding.ids for encoding in tokenizer.encode_batch(part, add_special_tokens=False)]
        stats[name] = {
            "conversations": len(part),
            "bytes": sum(len(chat.encode()) for chat in part),
            "tokens": save_tokens(args.out / f"{name}.xz", ids),
        }
    del stats["characters"]
    (args.out / "held-out.json").write_text(json.dumps([[d.source, d.text] for d in held_out]), encoding="utf-8")
    (args.out / "chat-held-out.json").write_text(json.dumps(chats_held_out[:2000]), encoding="utf-8")
    (args.out / "stats.json").write_text(json.dumps(stats, indent=1))
    print(json.dumps(stats, indent=1))


if __name__ == "__main__":
    main()
