# SPDX-License-Identifier: Apache-2.0
"""One visit to the doctor: read the facts, judge, print, give the exit code. Shared by the command and by `python -m`."""

from __future__ import annotations

from pathlib import Path

from whalefall.cli.doctor.checks import examine
from whalefall.cli.doctor.machine import read_machine
from whalefall.cli.doctor.packages import Environment, current_sites
from whalefall.cli.doctor.report import Report, print_report, to_json

DEFAULT_PORT = 8000


def run_doctor(*, as_json: bool, strict: bool, expect_gpu: bool, port: int, disk: Path | None = None) -> int:
    report = examine(Environment(current_sites()), read_machine(port=port, disk=disk or Path.cwd()), expect_gpu=expect_gpu)
    return show(report, as_json=as_json, strict=strict)


def show(report: Report, *, as_json: bool, strict: bool) -> int:
    if as_json:
        print(to_json(report, strict))
    else:
        print_report(report, strict)
    return report.exit_code(strict)
