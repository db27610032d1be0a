# SPDX-License-Identifier: Apache-2.0
"""The `whalefall plan` command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from whalefall.core.errors import ConfigError
from whalefall.engine.config import EngineConfig, check_options
from whalefall.plan.cards import CARDS, find_card


def plan(
    model: Annotated[Path, typer.Argument(help="Directory with config.json; shards are compared when they are there.")],
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(CARDS)}.")] = "h200",
    count: Annotated[int, typer.Option(help="Cards.")] = 1,
    weights: Annotated[str, typer.Option(help="auto, packed or dense")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests at the same time.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of a card's memory to use.")] = 0.9,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model needs and what fits on cards that need not be here: weights, caches, contexts, requests, flags."""
    chosen: dict[str, Any] = {
        "weights": weights,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    card, options = find_card(gpu), EngineConfig(model=model, **chosen)
    if problems := check_options(options):
        raise ConfigError(problems)
    from whalefall.plan.planner import plan_model  # torch comes with it: a wrong flag is told before
    from whalefall.plan.report import to_dict, to_text

    made = plan_model(model, card, count, options)
    typer.echo(json.dumps(to_dict(made, card), indent=1) if as_json else to_text(made, card))
    raise typer.Exit(0 if made.config is not None else 1)
