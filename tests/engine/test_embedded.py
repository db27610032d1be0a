# SPDX-License-Identifier: Apache-2.0
"""Claims about the embedded model: whole, small, of every kind of layer, fitting its tokenizer, and able to answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from whalefall import LLM, SamplingParams
from whalefall.core.errors import ConfigError
from whalefall.engine import embedded
from whalefall.engine.embedded import embedded_model_dir
from whalefall.engine.inspection import inspect_model
from whalefall.models.deepseek_v41.engram_tables import compressed_vocab


def test_embedded_model_can_be_loaded_and_fits_its_tokenizer() -> None:
    folder = embedded_model_dir()
    report = inspect_model(folder)
    config = report.config
    assert report.problems == () and 15_000_000 <= report.num_parameters <= 30_000_000
    assert config["is_quantised"] and config["defaults_used"] == () and config["sliding_window"] == 128
    assert {0, 1, 2} == set(config["compress_ratios"]) and config["dspark_block_size"] == 5 and len(config["engram_layer_ids"]) == 2
    assert config["candidate_topk_blocks"] * config["candidate_block_size"] < 4096 <= config["max_position_embeddings"]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert compressed_vocab(tokenizer, config["vocab_size"]).count == config["engram_compressed_vocab_size"]
    assert tokenizer.id_to_token(config["image_token_id"]) == "<｜image｜>"


def test_whole_folder_stays_under_16_megabytes_and_has_its_card() -> None:
    folder = embedded_model_dir()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 16_000_000
    assert "often wrong" in (folder / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_missing_data_files_name_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "engine" / "embedded.py"))
    with pytest.raises(ConfigError, match="name a checkpoint directory"):
        embedded_model_dir()


def test_it_answers_and_ends_its_turn() -> None:
    llm = LLM(embedded_model_dir(), dtype="float32", use_tqdm=False, max_model_len=512)
    asked = [[{"role": "user", "content": text}] for text in ("What is 7 + 5?", "Write a Python function that reverses a string.")]
    outputs = llm.chat(asked, SamplingParams(temperature=0, max_tokens=64), thinking={"type": "disabled"})
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "stop"]
    assert outputs[0].outputs[0].text == "7 + 5 = 12"
    assert "return text[::-1]" in outputs[1].outputs[0].text
