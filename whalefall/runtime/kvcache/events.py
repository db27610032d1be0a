# SPDX-License-Identifier: Apache-2.0
"""What happens to published blocks, for whoever keeps an account of them elsewhere (a router, another tier). Plain data."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class BlocksStored(NamedTuple):
    """Blocks of one sequence have become findable, in order."""

    keys: tuple[bytes, ...]
    parent_key: bytes | None
    """Key of the block before the first; None at the start of a sequence."""
    token_ids: tuple[int, ...]
    """Of all these blocks, end to end."""


class BlocksRemoved(NamedTuple):
    keys: tuple[bytes, ...]


class AllBlocksCleared(NamedTuple):
    """Nothing can be found any more."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared
