# SPDX-License-Identifier: Apache-2.0
"""`whalefall bench throughput | latency | decode`, and what `ablate` shares with them.

The engine is imported when one of them runs, so that `bench serve` stays light.
"""

from __future__ import annotations

import csv
import io
import json
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whalefall.bench.metrics import Spread
from whalefall.bench.report import spread_table
from whalefall.core.errors import ConfigError

if TYPE_CHECKING:
    from whalefall.engine.config import EngineConfig

ADMISSION_SLACK_TOKENS = 256
"""The scheduler keeps a spare block for each running request before it admits another: without room for it a batch runs in two parts."""

Model = Annotated[Path | None, typer.Argument(help="Checkpoint directory; the embedded model when left out.")]
EngineOption = Annotated[list[str] | None, typer.Option("--engine", "-e", help="An engine option, e.g. dtype=float32; may be repeated.")]
InputLen = Annotated[int, typer.Option(min=1)]
OutputLen = Annotated[int, typer.Option(min=1)]
Seed = Annotated[int, typer.Option()]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def throughput_command(
    model: Model = None,
    num_prompts: Annotated[int, typer.Option(min=1)] = 64,
    input_len: InputLen = 512,
    output_len: OutputLen = 128,
    engine: EngineOption = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Hand in all prompts at once and report tokens per second."""
    from whalefall.bench.offline import random_prompts, run_throughput

    llm = _load(model, engine, input_len + output_len)
    made = run_throughput(llm, random_prompts(num_prompts, input_len, llm.config.vocab_size, seed), output_len)
    if as_json:
        typer.echo(json.dumps(asdict(made), indent=1))
        return
    typer.echo(f"{made.requests} requests, {made.prompt_tokens:,} + {made.output_tokens:,} tokens in {made.duration_s:.3f} s")
    rates = f"{made.output_tokens_per_s:,.1f} output tokens/s, {made.total_tokens_per_s:,.1f} total tokens/s"
    typer.echo(f"{made.requests_per_s:.3f} requests/s, {rates}")
    _echo_spread("time to first token", made.ttft_ms)


def latency_command(
    model: Model = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    input_len: InputLen = 512,
    output_len: OutputLen = 128,
    num_rounds: Annotated[int, typer.Option(min=1)] = 10,
    num_warmup: Annotated[int, typer.Option(min=0)] = 2,
    engine: EngineOption = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Run one batch at a time, with new prompts each round, and report how long a batch takes."""
    from whalefall.bench.offline import random_prompts, run_latency

    llm = _load(model, engine, input_len + output_len)
    rounds = num_rounds + num_warmup
    prompts = random_prompts(rounds * batch_size, input_len, llm.config.vocab_size, seed)
    batches = [prompts[i * batch_size : (i + 1) * batch_size] for i in range(rounds)]
    made = run_latency(llm, batches, output_len, num_warmup)
    if as_json:
        typer.echo(json.dumps(None if made is None else asdict(made), indent=1))
        return
    typer.echo(f"{num_rounds} rounds of {batch_size} x ({input_len} in + {output_len} out)")
    _echo_spread("batch latency", made)


def decode_command(
    model: Model = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once; may be repeated.")] = None,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Tokens before the measured steps; may be repeated.")] = None,
    num_steps: Annotated[int, typer.Option(min=1, help="Steps measured per row.")] = 50,
    engine: EngineOption = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this CSV file.")] = None,
) -> None:
    """Report the time of a decode step at each batch and context, one CSV row each."""
    from whalefall.bench.offline import as_row, random_prompts, run_decode

    batches, contexts = batch or [1, 8, 32], context or [1_024]
    options = [f"max_num_seqs={max(batches)}", *(engine or [])]
    llm = _load(model, options, max(contexts) + num_steps + 2 * ADMISSION_SLACK_TOKENS)
    facts, rows = run_facts(llm), []
    for tokens in contexts:
        for size in batches:
            prompts = random_prompts(size, tokens, llm.config.vocab_size, seed + size * 1_000_003 + tokens)
            rows.append(as_row(facts, run_decode(llm, prompts, num_steps)))
            if rows[-1]["num_steps"] == 0:
                typer.echo(f"batch {size} at {tokens} tokens never ran all at once: the cache holds fewer requests", err=True)
    text = to_csv(rows)
    typer.echo(text, nl=False)
    if out is not None:
        is_new = not out.exists()
        with out.open("a", encoding="utf-8") as file:
            file.write(text if is_new else text.split("\n", 1)[1])


def run_facts(llm: Any) -> dict[str, Any]:
    """Where and with what a row was measured."""
    config = llm.config
    return machine_facts(config.device) | {"model": config.model_name, "dtype": config.dtype, "weights": config.weights}


def machine_facts(device: str) -> dict[str, Any]:
    import torch

    from whalefall import __version__

    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {"date": time.strftime("%Y-%m-%d"), "whalefall": __version__, "torch": torch.__version__, "device": name}


def to_csv(rows: list[dict[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _load(model: Path | None, options: list[str] | None, max_model_len: int) -> Any:
    """The engine, with room for what will be asked unless the user gave a length."""
    chosen = engine_config(model, {"max_model_len": max_model_len}, options)
    from whalefall import LLM

    return LLM(**{f.name: getattr(chosen, f.name) for f in fields(chosen)})


def engine_config(model: Path | None, defaults: dict[str, Any], options: list[str] | None) -> EngineConfig:
    """What was asked for with -e, over the defaults of a command.

    Raises:
        ConfigError: a name or value that no model could make right, before torch is imported.
    """
    from whalefall.bench.offline import engine_options
    from whalefall.engine.config import EngineConfig, check_options
    from whalefall.engine.embedded import embedded_model_dir

    config = EngineConfig.from_options({"model": model or embedded_model_dir(), **defaults, **engine_options(options or [])})
    if problems := check_options(config):
        raise ConfigError(problems)
    return config


def _echo_spread(title: str, made: Spread | None) -> None:
    if made is not None:
        typer.echo("\n".join(spread_table([(title, made)], "ms")))
