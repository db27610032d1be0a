# SPDX-License-Identifier: Apache-2.0
"""The `whalefall doctor` command line."""

from __future__ import annotations

from typing import Annotated

import typer

from whalefall.cli.doctor.run import DEFAULT_PORT, run_doctor


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as failures.")] = False,
    no_gpu: Annotated[bool, typer.Option("--no-gpu", help="No GPU is expected here: an image build or a CPU host.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port that will be served.")] = DEFAULT_PORT,
) -> None:
    """Say what is installed, what fits together, what is wrong, and the command that mends it."""
    raise typer.Exit(run_doctor(as_json=as_json, strict=strict, expect_gpu=not no_gpu, port=port))
