# SPDX-License-Identifier: Apache-2.0
"""Claims about Engram's constants: they equal the ones printed in design note deepseek-v41 §3.10 and §8."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from whalefall.core.errors import ConfigError
from whalefall.models.deepseek_v41.engram_tables import compressed_vocab, hash_multipliers, table_offsets, table_primes


def word_tokenizer(words: list[str]) -> Tokenizer:
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))


def test_multipliers_equal_the_published_ones() -> None:
    assert hash_multipliers(1, 99092, 4) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert hash_multipliers(14, 99092, 4) == (67716810739261, 51510806800915, 30921347202721, 82619226485591)


def test_products_with_any_compressed_id_stay_in_int64() -> None:
    for vocab in (1, 2, 421, 99092, 2**31):
        assert max(hash_multipliers(3, vocab, 4)) * (vocab - 1) < 2**63


def test_primes_equal_the_published_ones() -> None:
    first, second = table_primes(16_000_000, 2, 4, 8)
    assert [p - 16_000_000 for p in first[:9]] == [57, 79, 81, 97, 121, 129, 133, 183, 189]
    assert [p - 16_000_000 for p in second[-8:]] == [781, 799, 813, 819, 841, 877, 879, 889]
    assert (sum(first), sum(second)) == (384006168, 384016682)
    assert table_primes(1000, 2, 4, 2) == ((1009, 1013, 1019, 1021, 1031, 1033), (1039, 1049, 1051, 1061, 1063, 1069))


def test_primality_agrees_with_trial_division() -> None:
    trial = [n for n in range(2, 3000) if all(n % d for d in range(2, int(n**0.5) + 1))]
    assert list(table_primes(2, 1, 2, len(trial))[0]) == trial


def test_offsets_are_running_sums() -> None:
    assert table_offsets((5, 7, 11)) == (0, 5, 12)


def test_case_accents_width_and_blanks_fold() -> None:
    words = ["<unk>", "Cafe", "café", "ＣＡＦＥ", " cafe ", "cafe\tcafe", "cafe  cafe", " ", "\n\n", "", "x"]
    made = compressed_vocab(word_tokenizer(words), vocab_size=13)
    assert made.map_V.tolist() == [0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 5, -1, -1]
    assert made.count == 6


def test_a_text_that_normalises_to_nothing_keeps_itself_as_key() -> None:
    made = compressed_vocab(word_tokenizer(["<unk>", "\u0301", "\u0300"]), vocab_size=3)
    assert made.map_V.tolist() == [0, 1, 2]


def test_undecodable_halves_of_characters_do_not_fold() -> None:
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    halves = [backend.token_to_id(letter) for letter in ("Ã", "Ä", "Å")]
    made = compressed_vocab(backend, vocab_size=256)
    assert all("\ufffd" in backend.decode([half]) for half in halves)
    assert len({int(made.map_V[half]) for half in halves}) == 3
    assert made.map_V[backend.token_to_id("A")] == made.map_V[backend.token_to_id("a")]


def test_unreadable_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        compressed_vocab(tmp_path / "tokenizer.json", 10)
