# SPDX-License-Identifier: Apache-2.0
"""The example runs as a newcomer would run it, and says the same every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_engine.py"


def run_example() -> str:
    return subprocess.run([sys.executable, str(EXAMPLE)], check=True, capture_output=True, text=True, timeout=120).stdout


def test_example_shows_chunks_preemption_and_equal_tokens_every_time() -> None:
    first = run_example()
    *answers, preemptions, verdict = first.splitlines()
    assert [line.split()[0] for line in answers] == ["alone", *(f"crowd-{i}" for i in range(5))]
    assert all(len(line.split()) == 1 + 24 for line in answers)
    assert int(preemptions.removeprefix("preemptions: ")) >= 1
    assert verdict == "same tokens alone and in a crowd: True"
    assert run_example() == first
