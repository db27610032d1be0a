# SPDX-License-Identifier: Apache-2.0
"""What happens to published blocks, for whoever keeps an account of them elsewhere (a router, another tier). Plain data."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Tier(StrEnum):
    """Of which an account can be kept. Not the disk: others write and remove there too."""

    DEVICE = "device"
    HOST = "host"


class BlocksStored(NamedTuple):
    """Blocks of one sequence have become findable, in order."""

    keys: tuple[bytes, ...]
    parent_key: bytes | None
    """Key of the block before the first; None at the start of a sequence, and in the host's tier."""
    token_ids: tuple[int, ...]
    """Of all these blocks, end to end; none in the host's tier, where keys say it all: whoever wants to know has heard of them before."""
    salt: str = ""
    """Of the sequence; it makes the key of the first block another."""
    tier: Tier = Tier.DEVICE


class BlocksRemoved(NamedTuple):
    keys: tuple[bytes, ...]
    tier: Tier = Tier.DEVICE


class AllBlocksCleared(NamedTuple):
    """Nothing can be found any more, on the device or in the host's memory."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared
