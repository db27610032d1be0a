# SPDX-License-Identifier: Apache-2.0
"""What the bookkeeping asks to be copied between tiers, and what it is told when that is done. Plain data: keys, rows and block numbers.

`TierLedger` (ledger.py) makes moves, `Mover` (mover.py) carries them out in background threads. Each move is answered by exactly one
`MoveReport`, whatever happened; until then what it names (device blocks, host rows) stays where it is.

    device block ──Store──► host row ──Write──► disk
    device block ◄──Load─── host row ◄──Fetch── disk      Probe asks how many of some keys the disk has
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Write(NamedTuple):
    """Host to disk."""

    move_id: int
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]


class Store(NamedTuple):
    """Device to host: published blocks, immutable and pinned while the copy runs."""

    move_id: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    then: Write | None = None
    """Begins when this has ended, without asking: what was computed reaches the disk even if no further step runs. Reported for itself."""


class Load(NamedTuple):
    """Host to device: into blocks that nobody reads before the report."""

    move_id: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]


class Probe(NamedTuple):
    """How many of these keys, counted from the first, does the disk seem to have?"""

    move_id: int
    keys: tuple[bytes, ...]


class Fetch(NamedTuple):
    """Disk to host, in order, up to the first key that is not there or not whole."""

    move_id: int
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]


class Remove(NamedTuple):
    """From the disk: these records are under suspicion."""

    move_id: int
    keys: tuple[bytes, ...]


Move: TypeAlias = Store | Load | Write | Probe | Fetch | Remove


class MoveReport(NamedTuple):
    move_id: int
    num_done: int
    """Keys that were moved (or found), counted from the first. Fewer than asked for is no error: the rest is computed instead."""
    elapsed_s: float = 0.0
    """What the copying took, without the time in the queue."""
