# SPDX-License-Identifier: Apache-2.0
"""`whalefall bench ablate`, and its table, CSV, JSON and picture. The engine is imported when it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whalefall.bench.offline_command import (
    ADMISSION_SLACK_TOKENS,
    EngineOption,
    InputLen,
    Model,
    OutputLen,
    Seed,
    engine_config,
    machine_facts,
    to_csv,
)
from whalefall.bench.picture import Bars, draw_bars
from whalefall.bench.report import write_files

if TYPE_CHECKING:
    from whalefall.bench.ablate import Ablation, Row

SHOWN = (
    ("agents, few", "tokens/s", "agent_low", "output_tokens_per_s", True),
    ("agents, many", "tokens/s", "agent_many", "output_tokens_per_s", True),
    ("prompts, many", "tokens/s", "plain_many", "output_tokens_per_s", True),
    ("TTFT, few", "ms", "agent_low", "ttft_ms_mean", False),
    ("TTFT, many", "ms", "agent_many", "ttft_ms_mean", False),
)
"""Column, unit, phase, figure, whether more is better."""


def ablate_command(
    model: Model = None,
    requests: Annotated[int, typer.Option(min=1, help="Agents, and independent prompts, at once.")] = 16,
    low: Annotated[int, typer.Option(min=1, help="Agents at once in the quiet phase.")] = 1,
    system: Annotated[int, typer.Option(min=0, help="Length of the agents' shared system prompt.")] = 1_024,
    turns: Annotated[int, typer.Option(min=2, help="Median turns of a session.")] = 4,
    tool_result: Annotated[int, typer.Option(min=1, help="Median length of a tool's result.")] = 96,
    answer: Annotated[int, typer.Option(min=1, help="Median length of an answer.")] = 16,
    max_context: Annotated[int, typer.Option(min=64, help="Agents compact their context before it grows past this.")] = 4_096,
    input_len: InputLen = 256,
    output_len: OutputLen = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rows take turns this many times; medians are shown.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Rows for this switch only, beside the first and the baseline.")] = None,
    engine: EngineOption = None,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for ablate.json, ablate.csv and ablate.svg.")] = None,
) -> None:
    """Switch off one optimisation at a time, then all of them, and report what each is worth."""
    settings = {k: v for k, v in locals().items() if k not in ("out", "as_json")} | {"model": None if model is None else str(model)}
    longest = max(max_context, input_len + output_len) + ADMISSION_SLACK_TOKENS
    base = engine_config(model, {"max_model_len": longest, "max_num_seqs": requests}, engine)
    from whalefall.bench.ablate import Workload, ablate, small_shape

    shape = small_shape(system=system, turns=turns, tool_result=tool_result, answer=answer, max_context=max_context)
    workload = Workload(requests=requests, low=low, shape=shape, input_len=input_len, output_len=output_len, seed=seed)
    made = ablate(base, workload, rounds=rounds, only=only or (), on_row=_tell)
    first = made.rows[0].config
    facts = machine_facts(first["device"]) | {"model": first["model_name"], "dtype": first["dtype"]}
    body = to_json(made, facts, settings)
    typer.echo(body if as_json else to_table(made))
    if out is not None:
        csv_text, svg = to_csv(csv_rows(made, facts)), to_picture(made, f"one optimisation off at a time, {facts['device']}")
        files = write_files(out, {"ablate.json": body, "ablate.csv": csv_text, "ablate.svg": svg})
        typer.echo("wrote " + ", ".join(map(str, files)), err=as_json)
    raise typer.Exit(int(any(row.failed for row in made.rows)))


def to_table(made: Ablation) -> str:
    full, base = made.rows[0], made.rows[-1]
    lines = [" " * 28 + "".join(f"{name:>22}" for name, *_ in SHOWN), " " * 28 + "".join(f"{unit:>22}" for _, unit, *_ in SHOWN)]
    for row in made.rows:
        if row.refused is not None:
            lines.append(f"{row.name:<28}  did not run: {row.refused}")
            continue
        cells = []
        for _, _, phase, name, more_is_better in SHOWN:
            value, share = row.figure(phase, name), gain(full, row, phase, name, more_is_better)
            text = "-" if value is None else f"{value:,.1f}" + ("" if row is full or share is None else f" ({share:.2f}x)")
            cells.append(f"{text:>22}")
        lines.append(f"{row.name:<28}" + "".join(cells))
    lines.append(f"In brackets: how many times better everything on is. The baseline goes without: {', '.join(base.off) or 'nothing'}.")
    lines += [f"no row for {name}: {why}" for name, why in made.absent]
    lines += [f"{row.failed} requests failed in the row {row.name!r}" for row in made.rows if row.failed]
    return "\n".join(lines)


def gain(full: Row, row: Row, phase: str, name: str, more_is_better: bool) -> float | None:
    """How many times better everything on is than this row."""
    ours, theirs = full.figure(phase, name), row.figure(phase, name)
    if not ours or not theirs:
        return None
    return ours / theirs if more_is_better else theirs / ours


def csv_rows(made: Ablation, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """One per row and phase, medians over the rounds; a row that did not run has empty figures and its reason."""
    from whalefall.bench.ablate import PHASES, Phase

    names = list(Phase.__dataclass_fields__)
    rows = []
    for row in made.rows:
        for phase in PHASES:
            figures = {name: row.figure(phase, name) for name in names}
            rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
            rows.append({**facts, "row": row.name, "off": "; ".join(row.off), "phase": phase, **rounded, "refused": row.refused})
    return rows


def to_json(made: Ablation, facts: dict[str, Any], settings: dict[str, Any]) -> str:
    full = made.rows[0]
    rows = [
        asdict(row)
        | {"gain_of_everything_on": {f"{phase}.{name}": gain(full, row, phase, name, better) for _, _, phase, name, better in SHOWN}}
        for row in made.rows
    ]
    body = {"facts": facts, "settings": settings, "rows": rows, "no_row": [{"name": n, "why": w} for n, w in made.absent]}
    return json.dumps(body, indent=1, default=str)


def to_picture(made: Ablation, title: str) -> str:
    groups = [
        Bars(f"{column}, {unit}", [(row.name, row.figure(phase, name)) for row in made.rows]) for column, unit, phase, name, _ in SHOWN
    ]
    return draw_bars(title, groups)


def _tell(name: str, number: int) -> None:
    print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
