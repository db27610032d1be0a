# SPDX-License-Identifier: Apache-2.0
"""The Containerfile and the install page say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whalefall.cli.doctor.checks import DRIVER_FLOOR
from whalefall.cli.main import build_app

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def containerfile() -> str:
    return (ROOT / "Containerfile").read_text()


def test_last_step_of_an_image_is_a_strict_doctor(containerfile: str) -> None:
    last = [line for line in containerfile.splitlines() if line.strip() and not line.startswith("#")][-1]
    assert last == 'RUN ["whalefall", "doctor", "--strict", "--installed-only"]'
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(build_app(["doctor"]), ["doctor", "--help"]).output
    assert "--strict" in shown and "--installed-only" in shown


def test_image_takes_one_cuda_line_and_refuses_others(containerfile: str) -> None:
    assert re.findall(r"([\w.]+)\) line=(\w+)", containerfile) == [("13.0", "cu130"), ("12.9", "cu129"), ("cpu", "cpu")]
    assert "exit 2" in containerfile
    assert "-c /constraints.txt" in containerfile


def test_drivers_on_the_page_are_the_doctors() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    assert f"CUDA 13 wheels need {DRIVER_FLOOR[13]} or newer, CUDA 12 wheels {DRIVER_FLOOR[12]} or newer" in page


def test_files_that_the_page_names_exist() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    for name in ("constraints/cpu.txt", "Containerfile"):
        assert name in page
        assert (ROOT / name).is_file()
