# SPDX-License-Identifier: Apache-2.0
"""Draws the curves of RESULTS.md from the logs.

python -m training.picture backbone LOG.jsonl OUT.png STEP=LABEL ...
python -m training.picture draft DRAFT-LOG.jsonl DRAFT-ACCEPTANCE.json OUT.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, GREY = "#1b6ca8", "#c8641b", "#999999"


def backbone(log: str, out: str, *marks: str) -> None:
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    figure, axis = plt.subplots(figsize=(7, 3.6))
    axis.plot([r["step"] for r in rows], [r["loss"] for r in rows], color=BLUE, linewidth=1.2)
    for mark in marks:
        step, label = mark.split("=")
        axis.axvline(int(step), color=GREY, linewidth=0.8, linestyle=":")
        axis.text(int(step), 4.9, " " + label, va="top", fontsize=8)
    axis.set(xlabel="step (65,536 tokens each)", ylabel="training loss (nats per token)", ylim=(1, 5), title="Krill, backbone")
    figure.savefig(out, dpi=110, bbox_inches="tight")


def draft(log: str, acceptance: str, out: str) -> None:
    """Accepted drafts while training, and how far the confidences can be believed on held-out prompts."""
    rows = [row for row in map(json.loads, Path(log).read_text().splitlines()) if "greedy" in row]
    results = json.loads(Path(acceptance).read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), gridspec_kw={"width_ratios": [3, 2]})
    for name, label, colour in (("greedy", "greedy", BLUE), ("sampled", "temperature 1", ORANGE)):
        left.plot([r["step"] for r in rows], [r[name] for r in rows], color=colour, linewidth=1.0, label=label)
        bins = [b for b in results[f"speculation, {'greedy' if name == 'greedy' else label}"]["calibration"]["bins"] if b[2] >= 20]
        right.plot([b[0] for b in bins], [b[1] for b in bins], "o-", color=colour, markersize=4, linewidth=1.0, label=label)
    left.set(xlabel="step (6,144 blocks each)", ylabel="accepted drafts of 5", ylim=(0, 3), title="while training")
    left.legend(frameon=False)
    right.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
    right.set(xlabel="confidence", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1), title="held-out prompts")
    figure.tight_layout()
    figure.savefig(out, dpi=110, bbox_inches="tight")


def main() -> None:
    {"backbone": backbone, "draft": draft}[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
