# SPDX-License-Identifier: Apache-2.0
"""Detokenizer: joined pieces equal the full decode, and no piece holds half a character."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from whalefall.testing.tokenizer import byte_tokenizer
from whalefall.text.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer, make_detokenizer
from whalefall.text.tokenizer import Tokenizer

TOKENIZER = byte_tokenizer()
ANY_ID = st.integers(0, TOKENIZER.vocab_size + 3)


def joined(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


@given(st.lists(ANY_ID, max_size=40), st.booleans())
def test_joined_pieces_equal_the_full_decode_of_any_ids(ids: list[int], skip: bool) -> None:
    text = TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert joined(ByteLevelDetokenizer(TOKENIZER, skip_special_tokens=skip), ids) == text
    assert joined(WindowDetokenizer(TOKENIZER, skip_special_tokens=skip), ids) == text


@given(st.text(max_size=30))
def test_no_piece_holds_half_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text, add_bos=False, allow_special=False)
    detokenizer = make_detokenizer(TOKENIZER, skip_special_tokens=True)
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) == text
    assert sum(p.count("\ufffd") for p in pieces) == text.count("\ufffd")
    assert detokenizer.flush() == ""


def test_a_character_cut_off_at_the_end_shows_as_one_replacement() -> None:
    ids = TOKENIZER.encode("a🐋", add_bos=False, allow_special=False)[:-1]
    detokenizer = make_detokenizer(TOKENIZER, skip_special_tokens=True)
    assert [detokenizer.push(i) for i in ids] == ["a", "", "", ""]
    assert detokenizer.flush() == "\ufffd"


def word_tokenizer(decoder: object | None) -> Tokenizer:
    words = ["▁the", "▁whale", "▁falls", "s", "▁", "<0xC3>", "<0xA9>"]
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="▁"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend.to_str(), {})


METASPACE = word_tokenizer(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
JOINED_BY_BLANKS = word_tokenizer(None)


# Ids 5 and 6 are the two bytes of é: whole characters only, as a byte-fallback decoder takes back a run of bytes that turns out broken.
UNITS = st.one_of(st.sampled_from([0, 1, 2, 3, 4, 7, 8]).map(lambda i: [i]), st.just([5, 6]))


@given(st.lists(UNITS, max_size=12), st.booleans(), st.sampled_from([METASPACE, JOINED_BY_BLANKS]))
def test_other_decoders_keep_the_same_promise(units: list[list[int]], skip: bool, tokenizer: Tokenizer) -> None:
    ids = [i for unit in units for i in unit]
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip)
    assert isinstance(detokenizer, WindowDetokenizer)
    assert joined(detokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=skip)
