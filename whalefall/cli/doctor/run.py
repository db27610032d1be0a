# SPDX-License-Identifier: Apache-2.0
"""One visit to the doctor without a model: read the facts and judge. Shared by the command and by `python -m`."""

from __future__ import annotations

from pathlib import Path

from whalefall.cli.doctor.checks import examine
from whalefall.cli.doctor.machine import read_machine
from whalefall.cli.doctor.packages import Environment, current_sites
from whalefall.cli.doctor.report import Report

DEFAULT_PORT = 8000


def look_around(*, expect_gpu: bool, port: int, disk: Path | None = None, installed_only: bool = False) -> Report:
    """
    Args:
        disk: the folder whose disk matters; the current one when None.
    """
    machine = read_machine(port=port, disk=disk or Path.cwd())
    return examine(Environment(current_sites()), machine, expect_gpu=expect_gpu, installed_only=installed_only)
