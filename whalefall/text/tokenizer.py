# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: text to ids and back, from tokenizer.json and tokenizer_config.json.

Owns the begin-of-sequence rule and the border between text and control tokens: text from a user is encoded with `allow_special=False`
and can then never become a control token, whatever it spells. Knows no chat format; detokenizer.py decodes streams.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from whalefall.core.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    def __init__(self, definition_json: str, config: Mapping[str, Any], *, source: str = TOKENIZER_FILE) -> None:
        """
        Args:
            definition_json: content of tokenizer.json.
            config: content of tokenizer_config.json; may be empty.
            source: file name for messages.
        """
        try:
            self._backend = tokenizers.Tokenizer.from_str(definition_json)
        except Exception as error:  # the library raises bare Exception for everything
            raise ConfigError(f"{source}: not a tokenizer definition: {error}") from error
        self._definition = json.loads(definition_json)
        self._source = source
        added = self._backend.get_added_tokens_decoder()
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the highest id; a model's vocabulary may be larger, its extra ids have no text."""
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that `skip_special_tokens` leaves out."""
        self.control_ids = frozenset(i for i, token in added.items() if _is_control(token.content, token.special))
        """Ids that user text never becomes: special ones and other markers (DeepSeek's `<think>` is not "special" in the file)."""
        self.bos_token_id = self._named_id(config, "bos_token")
        self.eos_token_id = self._named_id(config, "eos_token")
        self.pad_token_id = self._named_id(config, "pad_token")
        self.adds_bos = self.bos_token_id is not None and self._bos_rule(config)
        """What tokenizer_config.json says under add_bos_token; without it, what tokenizer.json's template does."""
        self.thinks_by_default: bool = config.get("thinking", True) is not False
        """What tokenizer_config.json says under thinking: whether a chat opens a thinking block when the request does not say."""
        self.chat_template = _template(config.get("chat_template"))
        """How a family without a protocol of its own writes a conversation: a Jinja template, or None."""
        self.parsers: dict[str, str] = {kind: config[f"{kind}_parser"] for kind in ("reasoning", "tool") if f"{kind}_parser" in config}
        """Names of the parsers that read answers, where tokenizer_config.json has a word for it (reasoning_parser, tool_parser)."""
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes | None] = {}

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """
        Raises:
            ConfigError: tokenizer.json is missing, or one of the files cannot be read.
        """
        folder = Path(path)
        definition = folder / TOKENIZER_FILE
        if not definition.is_file():
            raise ConfigError(f"{definition}: not found; a model directory needs {TOKENIZER_FILE}")
        config_file = folder / CONFIG_FILE
        config: Any = {}
        if config_file.is_file():
            try:
                config = json.loads(config_file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{config_file}: not JSON: {error}") from error
            if not isinstance(config, dict):
                raise ConfigError(f"{config_file}: must hold an object, found {type(config).__name__}")
        template_file = folder / TEMPLATE_FILE
        if template_file.is_file():
            config = {**config, "chat_template": template_file.read_text(encoding="utf-8")}
        return cls(definition.read_text(encoding="utf-8"), config, source=str(definition))

    def encode(self, text: str, *, add_bos: bool, allow_special: bool) -> list[int]:
        """Ids of a text.

        Args:
            add_bos: put the begin-of-sequence id in front if this tokenizer does so (`adds_bos`); never a second one.
            allow_special: the markers of control tokens in the text mean those tokens; False makes them plain text.
        """
        backend = self._backend if allow_special else self._plain_backend
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        if add_bos and self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of all ids at once; ids without text give none, bytes that are no whole character give U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id (byte-level letters, not text), or None."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """Text of one id alone, special tokens spelled out; a part of a character shows as U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._backend.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """UTF-8 bytes of one id, which may be part of a character; None for an id without text or without byte-level spelling."""
        if not self.is_byte_level:
            token = self.token_text(token_id)
            return token.encode() if token and "\ufffd" not in token else None
        if token_id not in self._bytes:  # asked for every token of every answer
            spelling = self._backend.id_to_token(token_id)
            self._bytes[token_id] = None if spelling is None else bytes_of_spelling(spelling)
        return self._bytes[token_id]

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether decoding is the join of each id's own bytes."""
        decoder = self._definition.get("decoder") or {}
        return bool(decoder.get("type") == "ByteLevel")

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer with no control tokens to find in a text."""
        if not self.control_ids:
            return self._backend
        definition = dict(self._definition)
        definition["added_tokens"] = [t for t in definition["added_tokens"] if not _is_control(t["content"], t["special"])]
        # A template post-processor names special tokens, which are gone here; nothing of it applies without add_special_tokens.
        definition["post_processor"] = None
        return tokenizers.Tokenizer.from_str(json.dumps(definition))

    def _named_id(self, config: Mapping[str, Any], name: str) -> int | None:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if content is None:
            return None
        token_id = self._backend.token_to_id(content)
        if token_id is None:
            raise ConfigError(f"{self._source}: {CONFIG_FILE} names the {name} {content!r}, which is not in the vocabulary")
        return token_id

    def _bos_rule(self, config: Mapping[str, Any]) -> bool:
        rule = config.get("add_bos_token")
        if rule is None:
            return self._backend.encode("", add_special_tokens=True).ids[:1] == [self.bos_token_id]
        return bool(rule)


def bytes_of_spelling(spelling: str) -> bytes:
    """Bytes of a byte-level vocabulary entry; an entry with any other letter (a control token) stands for its own UTF-8."""
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in spelling)
    except KeyError:
        return spelling.encode()


def _template(given: Any) -> str | None:
    """One template, or the one called default among several."""
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}.get("default")
    return given if isinstance(given, str) else None


def _is_control(content: str, special: bool) -> bool:
    # Some vocabularies add runs of blanks as tokens that are not special; those are text. Every other added token is a marker.
    return special or bool(content.strip())


def _byte_letters() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for the code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF_LETTER = _byte_letters()
"""Letter of the byte-level alphabet -> the byte it stands for."""
