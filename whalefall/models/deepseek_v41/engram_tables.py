# SPDX-License-Identifier: Apache-2.0
"""The arithmetic behind Engram's hashed tables: primes, row offsets, multipliers, and the compressed vocabulary.

Everything here follows from the config and the tokenizer alone, so it is computed once at start and never stored in a checkpoint.
Source: design note deepseek-v41 §3.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, normalizers

from whalefall.core.errors import ConfigError

SENTINEL = -1
"""Compressed id of anything that is no vocabulary entry; it blocks the look-back."""


@dataclass(frozen=True, slots=True)
class CompressedVocab:
    map_V: npt.NDArray[np.int64]
    """Token id -> compressed id, SENTINEL where the tokenizer has no such id."""
    count: int
    """Number of different compressed ids, numbered by first appearance."""


@lru_cache(maxsize=32)
def table_primes(vocab_size: int, num_layers: int, max_ngram_size: int, num_heads: int) -> tuple[tuple[int, ...], ...]:
    """Table sizes per Engram layer, slot order: n-gram sizes 2..max, inside a size the heads.

    One increasing run of primes from `vocab_size` on, shared by all layers, so that no two tables have the same size.
    """
    num_slots = (max_ngram_size - 1) * num_heads
    primes: list[int] = []
    candidate = vocab_size
    while len(primes) < num_layers * num_slots:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return tuple(tuple(primes[layer * num_slots : (layer + 1) * num_slots]) for layer in range(num_layers))


def table_offsets(primes: Sequence[int]) -> tuple[int, ...]:
    """First row of each slot in the layer's joined table."""
    offsets = [0]
    for prime in primes[:-1]:
        offsets.append(offsets[-1] + prime)
    return tuple(offsets)


def hash_multipliers(layer: int, compressed_vocab_size: int, max_ngram_size: int) -> tuple[int, ...]:
    """One odd multiplier per look-back distance; products with any compressed id stay below 2^63."""
    bound = max(1, ((2**63 - 1) // compressed_vocab_size) // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram_size, dtype=np.int64)
    return tuple(int(m) * 2 + 1 for m in drawn)


def compressed_vocab(source: Path | Tokenizer, vocab_size: int) -> CompressedVocab:
    """Fold token ids whose text differs only in case, accents, width or blanks onto one compressed id.

    Args:
        source: a tokenizer.json, or the tokenizer made from it.
        vocab_size: length of the map; ids that the tokenizer does not have map to SENTINEL.
    Raises:
        ConfigError: the file cannot be read as a tokenizer.
    """
    tokenizer = source if isinstance(source, Tokenizer) else _read_tokenizer(source)
    num_ids = min(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    texts = tokenizer.decode_batch([[i] for i in range(num_ids)], skip_special_tokens=False)
    normalizer = _normalizer()
    map_V = np.full(vocab_size, SENTINEL, dtype=np.int64)
    numbers: dict[str, int] = {}
    for token_id, text in enumerate(texts):
        token = tokenizer.id_to_token(token_id)
        if token is None:
            continue
        # Half of a character decodes to U+FFFD; two different halves must not fold, so their raw spelling is the key.
        key = token if "\ufffd" in text else normalizer.normalize_str(text) or text
        map_V[token_id] = numbers.setdefault(key, len(numbers))
    return CompressedVocab(map_V, len(numbers))


def _normalizer() -> normalizers.Normalizer:
    keeps_one_space = "\ue000"  # stands for a text that is exactly one space while the blanks around other texts are stripped
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), keeps_one_space),
            normalizers.Strip(),
            normalizers.Replace(keeps_one_space, " "),
        ]
    )


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception for a missing and for a malformed file alike
        raise ConfigError(f"{path.name}: cannot be read as a tokenizer ({error}); allowed: a tokenizer.json") from error


_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def _is_prime(n: int) -> bool:
    """Miller-Rabin; these witnesses decide exactly for n < 3.3e24."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(n, w, odd, twos) for w in _WITNESSES)


def _passes(n: int, witness: int, odd: int, twos: int) -> bool:
    x = pow(witness, odd, n)
    if x in (1, n - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % n
        if x == n - 1:
            return True
    return False
