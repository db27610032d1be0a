# SPDX-License-Identifier: Apache-2.0
"""The doctor on a checkpoint: which op runs what and why, and what is said of a sound and of a broken directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from whalefall.cli.doctor.model import OpChoice, choose_op, choose_ops, visit_model
from whalefall.cli.doctor.report import Status
from whalefall.cli.main import build_app
from whalefall.kernels.registry import Device, Op, load_all
from whalefall.testing.toy_checkpoint import write_toy_checkpoint

CPU = torch.device("cpu")


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def cases() -> Iterator[tuple[torch.Tensor]]:
    yield (torch.zeros(4),)
    yield (torch.zeros(4_000),)


def made_op() -> Op:
    return Op(double, "family.double", cases)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("doctor") / "toy")


def test_op_without_twins_runs_its_reference() -> None:
    assert choose_op(made_op(), CPU) == OpChoice("family.double", ("reference",), ())


def test_twin_for_another_device_is_passed_over_with_its_need() -> None:
    op = made_op()
    op.impl("triton", needs=Device("cuda", sm=90))(double)
    assert choose_op(op, CPU) == OpChoice("family.double", ("reference",), (("triton", "needs cuda sm90"),))


def test_twin_for_some_shapes_leaves_the_rest_to_the_next() -> None:
    op = made_op()
    op.impl("small", needs=Device("cpu"), when=lambda x: x.numel() < 100)(double)
    assert choose_op(op, CPU).runs == ("small", "reference")
    op.impl("any", needs=Device("cpu"))(double)
    assert choose_op(op, CPU) == OpChoice("family.double", ("small", "any"), ())
    op.impl("late", needs=Device("cpu"))(double)
    assert choose_op(op, CPU).passed_over == (("late", "an earlier one takes every shape"),)


def test_every_op_of_the_house_has_a_choice_on_a_cpu() -> None:
    choices = choose_ops(load_all(), CPU)
    assert len(choices) > 20
    assert all(choice.runs for choice in choices)


def test_sound_model_fits_and_every_value_names_who_chose_it(toy: Path) -> None:
    visit = visit_model(toy, {"device": "cpu", "max_model_len": 512})
    assert {row.status for row in visit.rows} == {Status.OK}
    assert ("max_model_len", "512", "user") in visit.values
    assert all(who for _, _, who in visit.values)
    assert "total" in visit.memory


def test_every_problem_of_a_broken_model_is_a_failure(toy: Path, tmp_path: Path) -> None:
    config = json.loads((toy / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NobodyKnows"]}))
    (row,) = visit_model(tmp_path).rows
    assert row.status is Status.FAIL
    assert "NobodyKnows" in row.found


def test_command_shows_the_model_after_the_environment(toy: Path) -> None:
    result = CliRunner().invoke(build_app(["doctor"]), ["doctor", str(toy), "--json", "--no-gpu"])
    body = json.loads(result.stdout)
    assert result.exit_code == (0 if body["ok"] else 1)
    subjects = [row["subject"] for row in body["rows"]]
    assert subjects.index("model") > subjects.index("torch")
    assert body["model"]["ops"]
    assert any("total" in line for line in body["model"]["memory"])
