# SPDX-License-Identifier: Apache-2.0
"""v41-cut: DeepSeek-V4.1-Flash's real layer sizes in 12 of its 40 layers, for measuring on one GPU with `--load-format random`.

The layers are 0, 1, 2, 3, 8, 9 and 20, 21, 24, 25, 28, 29, renumbered: every kind of layer, with the Engram table shrunk to 100,776 rows.
`config-dspark.json` adds three draft blocks. Compare engines on this cut; do not scale a figure to 40 layers: window-only layers and index
sources are over-represented, and the head is undiluted.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

VOCABULARY, CLASSES, IMAGE = 129_280, 99_092, 129_264
"""Entries of the tokenizer, how many differ in more than case (Engram folds case), and the image marker's id."""
_SPECIAL = {0: "<bos>", 1: "<eos>", 2: "<pad>", IMAGE: "<｜deepseek_image｜>"}


def write_model_dir(folder: Path, *, with_draft: bool = False) -> Path:
    """A directory that the engine accepts with `load_format="random"`: config.json and a stand-in tokenizer.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).parent / ("config-dspark.json" if with_draft else "config.json"), folder / "config.json")
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(), ensure_ascii=False), encoding="utf-8")
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def _tokenizer() -> dict[str, object]:
    """A word-level vocabulary in which the last words are capitalised twins of the first, so that folding leaves CLASSES."""
    ordinary = [i for i in range(VOCABULARY) if i not in _SPECIAL]
    num_distinct = CLASSES - len(_SPECIAL)
    names = dict(_SPECIAL)
    for rank, i in enumerate(ordinary):
        names[i] = f"w{i}" if rank < num_distinct else f"W{ordinary[rank - num_distinct]}"
    vocabulary = {names[i]: i for i in range(VOCABULARY)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<pad>"},
    }


def expected_experts(tokens: int, experts: int = 384, per_token: int = 6) -> float:
    """Distinct experts that one layer touches in a step of so many tokens, were routing uniform."""
    return experts * (1 - (1 - per_token / experts) ** tokens)
