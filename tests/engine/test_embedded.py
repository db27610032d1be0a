# SPDX-License-Identifier: Apache-2.0
"""Claims about the embedded model: made once, whole, safe against two makers, and honest about its weights."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import tokenizers

from whalefall.core.errors import ConfigError
from whalefall.engine import embedded
from whalefall.engine.embedded import embedded_config, embedded_model_dir
from whalefall.engine.inspection import inspect_model
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.engram_tables import compressed_vocab


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHALEFALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_embedded_model_can_be_loaded_and_fits_its_tokenizer(cache: Path) -> None:
    folder = embedded_model_dir()
    report = inspect_model(folder)
    assert folder.is_relative_to(cache) and report.problems == ()
    assert 2_000_000 < report.num_parameters < 4_000_000
    assert report.config["sliding_window"] == 128 and report.config["max_position_embeddings"] == 4096
    assert report.config["is_quantised"] and report.config["defaults_used"] == ()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = DeepseekV41Config.from_hf(embedded_config())
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert compressed_vocab(tokenizer, config.vocab_size).count == config.engram_compressed_vocab_size
    assert tokenizer.id_to_token(config.image_token_id or 0) == "<｜image｜>"


def test_second_call_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedded_model_dir()
    monkeypatch.setattr(embedded, "_write", lambda folder: pytest.fail("written twice"))
    assert embedded_model_dir() == first


def test_two_makers_at_once_end_with_one_whole_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_have_written = threading.Barrier(2, timeout=60)

    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        both_have_written.wait()

    monkeypatch.setattr(embedded, "_write", write)
    made: list[Path] = []
    makers = [threading.Thread(target=lambda: made.append(embedded_model_dir())) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(made) == 2 and made[0] == made[1]
    assert [path.name for path in (cache / "models").iterdir()] == [made[0].name]
    assert (made[0] / "config.json").read_text() == "{}"


def test_failed_maker_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded, "_write", write)
    with pytest.raises(ConfigError, match=r"No space left on device.*WHALEFALL_CACHE"):
        embedded_model_dir()
    assert list((cache / "models").iterdir()) == []


def test_unwritable_cache_names_the_way_out(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="set WHALEFALL_CACHE to a folder that can be written"):
        embedded_model_dir()


def test_folder_follows_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    before = embedded._recipe_digest()
    monkeypatch.setattr(embedded, "_RECIPE_VERSION", embedded._RECIPE_VERSION + 1)
    assert embedded._recipe_digest() != before


def test_model_says_that_its_weights_are_random() -> None:
    assert "random weights" in (embedded_model_dir() / "README.md").read_text()
