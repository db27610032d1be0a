# SPDX-License-Identifier: Apache-2.0
"""Draws the loss curve of a run: python -m training.picture LOG.jsonl OUT.png STEP=LABEL ..."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    log, out, *marks = sys.argv[1:]
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    figure, axis = plt.subplots(figsize=(7, 3.6))
    axis.plot([r["step"] for r in rows], [r["loss"] for r in rows], color="#1b6ca8", linewidth=1.2)
    for mark in marks:
        step, label = mark.split("=")
        axis.axvline(int(step), color="#999999", linewidth=0.8, linestyle=":")
        axis.text(int(step), 4.9, " " + label, va="top", fontsize=8)
    axis.set(xlabel="step (65,536 tokens each)", ylabel="training loss (nats per token)", ylim=(1, 5), title="Krill, backbone")
    figure.savefig(out, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
