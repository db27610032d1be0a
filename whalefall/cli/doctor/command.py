# SPDX-License-Identifier: Apache-2.0
"""The `whalefall doctor` command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from whalefall.cli.doctor.report import Report, print_report, to_json
from whalefall.cli.doctor.run import DEFAULT_PORT, look_around


def doctor(
    model: Annotated[Path | None, typer.Argument(help="A checkpoint directory: does it fit here, and which kernels will run?")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as failures.")] = False,
    no_gpu: Annotated[bool, typer.Option("--no-gpu", help="No GPU is expected here.")] = False,
    installed_only: Annotated[
        bool, typer.Option("--installed-only", help="Judge what is installed, not this machine: image builds.")
    ] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port that will be served.")] = DEFAULT_PORT,
) -> None:
    """Say what is installed, what fits together, what is wrong, and the command that mends it."""
    report = look_around(expect_gpu=not no_gpu, port=port, disk=model, installed_only=installed_only)
    if model is None:
        if as_json:
            print(to_json(report, strict))
        else:
            print_report(report, strict)
        raise typer.Exit(report.exit_code(strict))
    raise typer.Exit(_with_model(report, model, as_json=as_json, strict=strict, no_gpu=no_gpu))


def _with_model(report: Report, model: Path, *, as_json: bool, strict: bool, no_gpu: bool) -> int:
    """The environment first. Torch is imported only when that has no failure, since a broken one would end in a stack trace here."""
    if report.exit_code(False):
        print(to_json(report, strict) if as_json else "", end="")
        if not as_json:
            print_report(report, strict)
            print(f"{model} was not looked at: mend the failures above first")
        return 1
    from whalefall.cli.doctor.model import ops_text, values_text, visit_model

    visit = visit_model(model, {"device": "cpu"} if no_gpu else {})
    whole = Report((*report.rows, *visit.rows), report.mend)
    if as_json:
        print(json.dumps({**json.loads(to_json(whole, strict)), "model": visit.as_dict()}, indent=1, ensure_ascii=False))
        return whole.exit_code(strict)
    print_report(whole, strict)
    if visit.ops:
        print(f"\nvalues, and who chose them:\n{values_text(visit)}\n\nmemory at start:\n{visit.memory}\n\nops:\n{ops_text(visit)}")
    return whole.exit_code(strict)
