# SPDX-License-Identifier: Apache-2.0
"""Detokenizer: the text of a growing list of ids, token by token, never with half a character.

What `push` and `flush` return, joined, equals `Tokenizer.decode` of all ids, however they were split into steps. Byte-level vocabularies
(DeepSeek, GLM) take the exact byte road. Any other decoder takes the general road over a small window of ids, which keeps the promise as
far as the decoder does not take back text it gave (a byte-fallback decoder does, for a run of bytes that turns out to be broken).
"""

from __future__ import annotations

import codecs
from typing import Protocol

from whalefall.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Text that became certain with this id; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """At the end: what was held back, as U+FFFD where bytes never became a character."""
        ...


def make_detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Detokenizer:
    kind = ByteLevelDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, skip_special_tokens=skip_special_tokens)


class ByteLevelDetokenizer:
    """Each id has its own bytes; only an unfinished UTF-8 sequence waits."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Both this decoder and the library's replace each maximal invalid part by one U+FFFD.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._bytes_of(token_id)
        return self._decoder.decode(piece) if piece else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes the ids since the last emitted piece together with that piece, since a decoder may look at its neighbours."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown: list[int] = []
        """Ids whose text was emitted last."""
        self._held: list[int] = []
        """Ids after those, whose text is not out yet."""

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        return self._take(is_final=False)

    def flush(self) -> str:
        return self._take(is_final=True)

    def _take(self, *, is_final: bool) -> str:
        before = self._decode(self._shown)
        text = self._decode(self._shown + self._held)
        if len(text) <= len(before) or (text.endswith(REPLACEMENT) and not is_final):
            return ""
        self._shown, self._held = self._held, []
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
