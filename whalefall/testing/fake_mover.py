# SPDX-License-Identifier: Apache-2.0
"""FakeMover: lower tiers for a FakeWorker. Each move is carried out at a moment of chance and reported at a later one, so that whatever
the ledger does not pin is overwritten in some run, and the FakeWorker trips over it.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from whalefall.runtime.kvcache.tiers.moves import Fetch, Load, Move, MoveReport, Probe, Remove, Store, Write
from whalefall.testing.fakes import BlockRecord, FakeWorker


@dataclass(eq=False)
class _Begun:
    move: Move
    num_done: int | None = None
    """None: not carried out yet."""


@dataclass(eq=False)
class FakeMover:
    worker: FakeWorker
    rng: random.Random
    disk: dict[bytes, BlockRecord] = field(default_factory=dict)
    """May be shared with other movers: a disk that survives, and that several engines use."""
    failure_rate: float = 0.0
    """Of moves, and of records that turn out to be damaged."""
    stall_rate: float = 0.0
    """Of moves that take very long."""
    num_moves: int = 0

    def __post_init__(self) -> None:
        self._rows: dict[int, tuple[bytes, BlockRecord]] = {}
        self._lanes: tuple[deque[_Begun], ...] = (deque(), deque(), deque())

    @property
    def is_idle(self) -> bool:
        return not any(self._lanes)

    def submit(self, moves: list[Move]) -> None:
        for move in moves:
            self.num_moves += 1
            lane = 0 if isinstance(move, Store | Load) else 1 if isinstance(move, Probe | Fetch) else 2
            self._lanes[lane].append(_Begun(move))

    def reports(self) -> list[MoveReport]:
        """What has ended by now; one turn's worth of chance."""
        reports: list[MoveReport] = []
        for lane in self._lanes:
            while lane and self.rng.random() < 0.6:
                if lane[0].num_done is None:
                    lane[0].num_done = self._act(lane[0].move)
                elif self.rng.random() >= self.stall_rate:
                    self._end(lane.popleft(), reports)
        return reports

    def _end(self, begun: _Begun, reports: list[MoveReport]) -> None:
        move, num_done = begun.move, begun.num_done
        assert num_done is not None
        reports.append(MoveReport(move.move_id, num_done, 0.001 * len(move.keys)))
        if isinstance(move, Store) and move.then is not None:
            if num_done:
                self._lanes[2].append(_Begun(move.then))
            else:
                reports.append(MoveReport(move.then.move_id, 0))

    def _act(self, move: Move) -> int:
        if self.rng.random() < self.failure_rate and not isinstance(move, Remove):
            return 0
        match move:
            case Store():
                for key, block_id, row in zip(move.keys, move.block_ids, move.rows, strict=True):
                    self._rows[row] = (key, self.worker.read_block(block_id))
            case Load():
                for key, block_id, row in zip(move.keys, move.block_ids, move.rows, strict=True):
                    assert self._rows[row][0] == key, f"move {move.move_id}: row {row} holds another record"
                    self.worker.write_block(block_id, self._rows[row][1])
            case Write():
                for key, row in zip(move.keys, move.rows, strict=True):
                    assert self._rows[row][0] == key, f"move {move.move_id}: row {row} holds another record"
                    self.disk[key] = self._rows[row][1]
            case Remove():
                for key in move.keys:
                    self.disk.pop(key, None)
            case Probe():
                return next((at for at, key in enumerate(move.keys) if key not in self.disk), len(move.keys))
            case Fetch():
                return self._fetch(move)
        return len(move.keys)

    def _fetch(self, move: Fetch) -> int:
        for at, (key, row) in enumerate(zip(move.keys, move.rows, strict=True)):
            if key not in self.disk or self.rng.random() < self.failure_rate:
                return at
            self._rows[row] = (key, self.disk[key])
        return len(move.keys)
