# SPDX-License-Identifier: Apache-2.0
"""`whalefall model`: look into a checkpoint. Prints what engine/inspection.py found; reads headers, never weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from whalefall.core.errors import MAX_LISTED_PROBLEMS
from whalefall.engine.inspection import ModelReport, inspect_model
from whalefall.weights.inspect import TensorGroup
from whalefall.weights.loader import format_bytes

app = typer.Typer(no_args_is_help=True, help="Look into a checkpoint.")

_SHOWN_FACTS = """vocab_size max_position_embeddings num_hidden_layers num_encoder_layers hidden_size num_attention_heads head_dim
sliding_window kv_source_layer_ids index_source_layer_ids index_topk n_routed_experts num_experts_per_tok engram_layer_ids
num_nextn_predict_layers is_quantised""".split()  # noqa: SIM905
"""Facts of the config worth a line, where a family has them; `--json` gives all."""


@app.callback()
def _root() -> None:
    """Look into a checkpoint."""


@app.command("inspect")
def inspect(
    path: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors shards.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
) -> None:
    """Say what a checkpoint holds, what it costs, and what is wrong with it. Exit code 1 when it cannot be loaded."""
    report = inspect_model(path)
    if as_json:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        Console(highlight=False, soft_wrap=True).print(render(report))
    if report.problems:
        raise typer.Exit(1)


def render(report: ModelReport) -> RenderableType:
    """The report for a terminal."""
    size = (
        f"{report.num_parameters:,} parameters, {report.num_tensors:,} tensors, {report.num_bytes:,} bytes in {report.num_shards} shard(s)"
    )
    parts: list[RenderableType] = [f"[bold]{escape(str(report.model_dir))}[/]  {report.family or 'unknown model family'}", size]
    if report.config:
        parts.append(_facts_table(report))
    if report.kinds:
        parts += [_group_table("kind", report.kinds), _group_table("format", report.formats)]
    for left in report.ignored:
        parts.append(f"not loaded: {left.num_tensors:,} tensors {left.rule.prefix}* ({format_bytes(left.num_bytes)}): {left.rule.reason}")
    for cost in report.caches:
        fixed = format_bytes(cost.bytes_per_request)
        parts.append(f"caches in {cost.dtype}: {cost.bytes_per_token:,.0f} bytes per token of context, {fixed} per request")
    parts += [f"default: {escape(line)}" for line in report.config.get("defaults_used", ())]
    parts += _problem_lines(report)
    return Group(*parts)


def _facts_table(report: ModelReport) -> Table:
    table = Table.grid(padding=(0, 2))
    for name in _SHOWN_FACTS:
        if name in report.config:
            value = report.config[name]
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else f"{value:,}" if type(value) is int else str(value)
            table.add_row(name, escape(shown) or "none")
    return table


def _group_table(title: str, groups: tuple[TensorGroup, ...]) -> Table:
    table = Table(title, box=None, pad_edge=False)
    for column in ("tensors", "parameters", "bytes", ""):
        table.add_column(column, justify="right")
    for group in groups:
        counts = (f"{n:,}" for n in (group.num_tensors, group.num_parameters, group.num_bytes))
        table.add_row(group.name, *counts, format_bytes(group.num_bytes))
    return table


def _problem_lines(report: ModelReport) -> list[str]:
    if not report.problems:
        return ["[green]no problems: it can be loaded[/]"]
    listed = [f"[red]problem:[/] {escape(line)}" for line in report.problems[:MAX_LISTED_PROBLEMS]]
    rest = len(report.problems) - len(listed)
    return listed + ([f"... and {rest} more problems"] if rest else [])
