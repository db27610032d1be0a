# SPDX-License-Identifier: Apache-2.0
"""Phases: where the seconds of a start go. Counted from the moment the process began, interpreter and imports included."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Phases:
    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []
        """Name and length of each phase, in order; they leave no gap."""
        self._last_s = self._began_s = time.monotonic() - process_age_s()

    def mark(self, name: str) -> None:
        """The phase that ends now."""
        now_s = time.monotonic()
        self.seconds.append((name, now_s - self._last_s))
        self._last_s = now_s

    @property
    def total_s(self) -> float:
        """Since the process began."""
        return time.monotonic() - self._began_s


def show_phases(seconds: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {length:.1f} s" for name, length in seconds)


def process_age_s() -> float:
    """Seconds since this process began, within a hundredth; 0 where the system does not say."""
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
