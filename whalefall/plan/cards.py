# SPDX-License-Identifier: Apache-2.0
"""Cards by name: how much memory CUDA finds on them, and what they can run."""

from __future__ import annotations

from dataclasses import dataclass

from whalefall.core.errors import ConfigError, not_among

GIB = 1 << 30
CONTEXT_BYTES = 640 << 20
"""What a CUDA context with its libraries takes before the first tensor: 621 MiB on an H200 with torch 2.11 for CUDA 13.0."""


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    memory_bytes: int
    """Total as the CUDA runtime reports it, which is some hundred MiB less than nvidia-smi says: the driver keeps a part."""
    capability: tuple[int, int]
    is_measured: bool = False
    """Whether this project has run on one; else the total is what others have reported, to two digits."""


CARDS = {
    "h100": Card("NVIDIA H100 80GB", int(79.11 * GIB), (9, 0)),
    "h200": Card("NVIDIA H200", 150_109_880_320, (9, 0), is_measured=True),
    "b200": Card("NVIDIA B200", int(178.35 * GIB), (10, 0)),
    "a100": Card("NVIDIA A100 80GB", int(79.15 * GIB), (8, 0)),
    "l40s": Card("NVIDIA L40S", int(44.39 * GIB), (8, 9)),
}


def find_card(name: str) -> Card:
    """
    Raises:
        ConfigError: the name is unknown.
    """
    card = CARDS.get(name.lower())
    if card is None:
        raise ConfigError(not_among("gpu", name, CARDS))
    return card
