# SPDX-License-Identifier: Apache-2.0
"""`whalefall generate`: prompts in, text out, no server."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Optional

import typer

from whalefall.cli.options import ModelArgument, engine_config, with_engine_options
from whalefall.core.errors import ConfigError
from whalefall.observe.log import setup_logging


@with_engine_options
def generate(
    model: ModelArgument = None,
    prompt: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Text to continue; may be given several times. Left out: read from standard input."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most, per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Share of probability to choose from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Likeliest tokens to choose from; 0 for all.")] = 0,
    stop: Annotated[Optional[list[str]], typer.Option(help="Text that ends the answer; may be given several times.")] = None,  # noqa: UP045
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of sequence.")] = False,
    **engine_options: Any,
) -> None:
    """Continue one or more prompts and print the text. `--seed` makes the choice of tokens repeatable."""
    setup_logging("WARNING")
    prompts = prompt or [_from_stdin()]
    config = engine_config(model, engine_options)
    from whalefall import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        seed=config.seed,
    )
    options = {name: value for name, value in engine_options.items() if value is not None}
    llm = LLM(config.model, **options)
    for output in llm.generate(prompts, params):
        print(output.outputs[0].text, flush=True)


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise ConfigError("nothing to continue: give --prompt TEXT, or text on standard input")
    return sys.stdin.read()
