# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from whalefall.kernels.registry import Device, Op, reference_only, twins_on


@pytest.fixture
def op_with_twin() -> Op:
    def reference(x: Tensor) -> str:
        return "reference"

    made: Op = Op(reference, "made.up", None)
    made.impl("gpu", needs=Device(type="cuda"))(lambda x: "gpu")
    made.impl("cpu", needs=Device(type="cpu"))(lambda x: "cpu")
    return made


def test_first_twin_that_the_device_can_run_is_chosen(op_with_twin: Op) -> None:
    assert op_with_twin(torch.zeros(1)) == "cpu"


def test_reference_only_passes_every_twin_over_on_all_threads_and_ends(op_with_twin: Op) -> None:
    seen: list[str] = []
    with reference_only():
        other = threading.Thread(target=lambda: seen.append(op_with_twin(torch.zeros(1))))
        other.start()
        other.join()
        with reference_only():
            pass
        seen.append(op_with_twin(torch.zeros(1)))
    assert seen == ["reference", "reference"]
    assert op_with_twin(torch.zeros(1)) == "cpu"


def test_reference_only_ends_when_what_it_holds_fails(op_with_twin: Op) -> None:
    with pytest.raises(RuntimeError, match="inside"), reference_only():
        raise RuntimeError("inside")
    assert op_with_twin(torch.zeros(1)) == "cpu"


def test_twins_on_a_device_are_those_it_can_run() -> None:
    assert "cpu_tiles" in twins_on(torch.device("cpu"))["attention.sparse_mqa"]
    with reference_only():
        assert twins_on(torch.device("cpu")) == {}
    assert twins_on(torch.device("meta")) == {}
