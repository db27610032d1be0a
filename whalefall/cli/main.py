# SPDX-License-Identifier: Apache-2.0
"""The `whalefall` command. Only the sub-command that was typed is imported, so that `whalefall --help` answers at once.

A user's mistake (ConfigError, RequestError) prints its lines and exits with 2; a stack trace is for our mistakes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import typer

from whalefall.core.errors import WhalefallError

EXIT_USAGE = 2


class _Command(NamedTuple):
    module: str
    attribute: str
    """A function, or a typer app with sub-commands."""
    summary: str


COMMANDS = {
    "serve": _Command("whalefall.cli.serve", "serve", "Serve a model over HTTP, as OpenAI's clients expect it."),
    "generate": _Command("whalefall.cli.generate", "generate", "Continue one or more prompts and print the text."),
    "chat": _Command("whalefall.cli.chat", "chat", "Talk with a model in the terminal."),
    "model": _Command("whalefall.cli.model", "app", "Look into a checkpoint."),
    "bench": _Command("whalefall.bench.command", "app", "Measure a server, or the engine in this process."),
    "plan": _Command("whalefall.plan.command", "plan", "What a model needs and what fits, without a GPU."),
    "doctor": _Command("whalefall.cli.doctor.command", "doctor", "What is installed, what will be used, what is wrong."),
}


def main(argv: Sequence[str] | None = None) -> None:
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        build_app(args)(args, prog_name="whalefall")
    except WhalefallError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None


def build_app(args: Sequence[str]) -> typer.Typer:
    """The app for this command line: the named command is real, the others are their names and summaries."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Whalefall, an LLM inference engine."
    )
    app.callback()(_root)
    named = next((arg for arg in args if not arg.startswith("-")), None)
    for name, command in COMMANDS.items():
        if find_spec(command.module) is None:
            continue
        target = getattr(import_module(command.module), command.attribute) if name == named else _never
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name, help=command.summary)
        else:
            app.command(name, help=_help(target, command))(target)
    return app


def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=lambda on: _version(on)),
) -> None:
    pass


def _version(is_asked: bool) -> None:
    if is_asked:
        from whalefall import __version__

        typer.echo(f"whalefall {__version__}")
        raise typer.Exit


def _never() -> None:
    raise AssertionError("a command that was not typed")


def _help(target: Callable[..., Any], command: _Command) -> str:
    return command.summary if target is _never else (target.__doc__ or command.summary)


if __name__ == "__main__":
    main()
