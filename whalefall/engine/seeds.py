# SPDX-License-Identifier: Apache-2.0
"""Seeds for requests that bring none: fresh by default, repeatable in order when the engine has a seed of its own."""

from __future__ import annotations

import random
from collections.abc import Callable


def seed_source(seed: int | None) -> Callable[[], int]:
    """Draws 64-bit seeds. With a seed, the same sequence in every run; never the same seed twice in a row for all requests."""
    source: random.Random = random.SystemRandom() if seed is None else random.Random(seed)
    return lambda: source.getrandbits(64)
