# SPDX-License-Identifier: Apache-2.0
"""CostTable: what a decode step costs, measured while serving, by how many requests are in it and how many drafts it verifies.

The cost of a step is the time from its begin to the begin of the next one: forward, sampling, drafting, and all that the host does in
between. It is kept per request, so that neighbouring batch sizes may share a cell. The file outlives the process: a restart begins with
what the last run knew.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from whalefall.observe.log import get_logger

log = get_logger(__name__)

NUM_LEVELS = 10
"""Drafts verified per step in tenths of all that could be; level 0 neither verifies nor drafts."""
LEAST_SAMPLES = 3
NEAR_CELLS = 3
"""Batch sizes within a factor of about two lend each other their costs."""
PAUSE = 8
"""Times the usual cost: no step."""
SAVE_EVERY_S = 30.0
_GAIN_DOWN, _GAIN_UP = 0.12, 0.03
_FORMAT = 1


class CostTable:
    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """path: where it is kept; None: nowhere. A file that cannot be read is as good as none."""
        self._path, self._clock = path, clock
        self._cells: dict[tuple[int, int], tuple[float, int]] = {}
        """(batch cell, level) -> seconds per request, samples."""
        self._saved_at = clock()
        if path is not None and path.exists():
            self._load(path)

    def note(self, num_requests: int, level: int, seconds: float) -> None:
        """One step. The first few count by their best: a first call may have compiled something or filled a cache."""
        key, each = (_cell(num_requests), level), seconds / num_requests
        mean, count = self._cells.get(key, (each, 0))
        if count < LEAST_SAMPLES:
            mean = min(mean, each)
        elif each > PAUSE * mean:
            return  # the engine had nothing to do in between
        else:  # near the lower fifth: what a step costs when nothing disturbs it; a hiccup must not turn the policy round
            mean += (_GAIN_DOWN if each < mean else _GAIN_UP) * (min(each, 3 * mean) - mean)
        self._cells[key] = (mean, count + 1)
        if self._path is not None and (count + 1 == LEAST_SAMPLES or self._clock() - self._saved_at > SAVE_EVERY_S):
            self.save()

    def is_known(self, num_requests: int, level: int) -> bool:
        """Measured, for so many requests or for somewhat fewer and somewhat more."""
        return self._each(_cell(num_requests), level) is not None

    def seconds(self, num_requests: int, level: int) -> float | None:
        """Of a step; between measured levels on the line through them. None where nothing near was measured."""
        cell = _cell(num_requests)
        each = self._each(cell, level)
        if each is None and level > 0:  # without drafting: no neighbour of level 1
            known = {at: mean for at in range(1, NUM_LEVELS + 1) if (mean := self._each(cell, at)) is not None}
            each = _on_line(known, level)
            if each is None and known:
                each = known[min(known, key=lambda at: abs(at - level))]
        return None if each is None else each * num_requests

    def _each(self, cell: int, level: int) -> float | None:
        """Seconds per request, from this cell or from one below and one above it."""
        near = range(cell - NEAR_CELLS, cell + NEAR_CELLS + 1)
        known = {at: self._cells[at, level][0] for at in near if self._cells.get((at, level), (0.0, 0))[1] >= LEAST_SAMPLES}
        return _on_line(known, cell)

    def save(self) -> None:
        """Write the file, whole or not at all. A full or read-only disk costs the memory of it, nothing else."""
        self._saved_at = self._clock()
        if self._path is None:
            return
        cells = [[*key, *value] for key, value in sorted(self._cells.items())]
        part = self._path.with_suffix(f".{os.getpid()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"format": _FORMAT, "cells": cells}))
            part.replace(self._path)
        except OSError as error:
            log.warning("the measured costs of drafts cannot be kept in %s: %s", self._path, error)
            self._path = None

    def _load(self, path: Path) -> None:
        try:
            read = json.loads(path.read_text())
            if read["format"] == _FORMAT:
                self._cells = {(int(c), int(level)): (float(mean), int(count)) for c, level, mean, count in read["cells"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is not a table of costs and is measured anew: %s", path, error)


def _on_line(known: Mapping[int, float], at: int) -> float | None:
    """What is known there, or on the line between the nearest on either side; None with no neighbour on one side."""
    if at in known:
        return known[at]
    below, above = max((k for k in known if k < at), default=None), min((k for k in known if k > at), default=None)
    if below is None or above is None:
        return None
    share = (at - below) / (above - below)
    return known[below] * (1 - share) + known[above] * share


def _cell(num_requests: int) -> int:
    """Batch sizes that share a cell differ by less than a third."""
    return round(2.5 * math.log2(num_requests))
