# SPDX-License-Identifier: Apache-2.0
"""Cards by name: how much memory their driver reports, and what they can run."""

from __future__ import annotations

from dataclasses import dataclass

from whalefall.core.errors import ConfigError

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB
"""What a CUDA context with its libraries takes before the first tensor."""


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    memory_bytes: int
    """Total, as the driver reports it."""
    capability: tuple[int, int]
    is_measured: bool = False
    """Whether this project has run on one."""


CARDS = {
    "h100": Card("NVIDIA H100 80GB", 81_559 * MIB, (9, 0)),
    "h200": Card("NVIDIA H200", 143_771 * MIB, (9, 0), is_measured=True),
    "b200": Card("NVIDIA B200", 183_359 * MIB, (10, 0)),
    "a100": Card("NVIDIA A100 80GB", 81_920 * MIB, (8, 0)),
    "l40s": Card("NVIDIA L40S", 46_068 * MIB, (8, 9)),
}


def find_card(name: str) -> Card:
    """
    Raises:
        ConfigError: the name is unknown.
    """
    card = CARDS.get(name.lower())
    if card is None:
        raise ConfigError(f"gpu is {name!r}, must be one of {', '.join(CARDS)}")
    return card
