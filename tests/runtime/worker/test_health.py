# SPDX-License-Identifier: Apache-2.0
"""A fault that a model has noticed becomes a number in production and an error in debug."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from whalefall.core.batch import CacheTensors, ForwardBatch
from whalefall.runtime.worker.health import HealthProbe


class Plain:
    def forward(self, batch: ForwardBatch, cache: CacheTensors) -> Tensor:
        raise AssertionError("not run here")


class Counting(Plain):
    def __init__(self) -> None:
        self.lost = torch.zeros((), dtype=torch.int64)

    def health_counters(self) -> Mapping[str, Tensor]:
        return {"lost_rows": self.lost}


def test_model_without_counters_has_none() -> None:
    probe = HealthProbe(Plain(), is_debug=True)
    probe.after_launch()
    assert probe.read(0) == {}


def test_rise_is_reported_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Counting()
    probe = HealthProbe(model)
    assert probe.read(0) == {"lost_rows": 0}
    with caplog.at_level(logging.ERROR):
        model.lost += 3
        assert probe.read(1) == {"lost_rows": 3}
        model.lost += 1
        assert probe.read(2) == {"lost_rows": 4}
    assert [record.getMessage() for record in caplog.records] == [
        "lost_rows rose by 3 by step 1: some answers may be a little worse than they should be; please report it"
    ]


def test_rise_is_an_error_in_debug() -> None:
    model = Counting()
    model.lost += 2  # before this worker's time
    probe = HealthProbe(model, is_debug=True)
    assert probe.read(0) == {"lost_rows": 2}
    model.lost += 5
    with pytest.raises(RuntimeError, match="lost_rows rose by 5 to 7 by step 1: the cache bookkeeping has a fault"):
        probe.read(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits_for_the_counters() -> None:
    model = Counting()
    model.lost = model.lost.cuda()
    probe = HealthProbe(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.lost += 1
        probe.after_launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()  # stands for reading the step's ids
    assert probe.read(0) == {"lost_rows": 1}
