# SPDX-License-Identifier: Apache-2.0
"""The walk over the registry: every op has cases, its reference equals an independent account, and every twin equals the reference.

A new kernel is tested by being registered. On a machine without a device for any twin the walk still holds the references to the truth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.naive import NAIVE
from whalefall.kernels import compare
from whalefall.kernels.cases import normal, rows_apart
from whalefall.kernels.registry import Device, Impl, Op, load_all

OPS = load_all()
TWINS = [(op, impl) for op in OPS.values() for impl in op.impls]
TWIN_CHECK = compare.vs_torch(2.0)
ROUNDED_INSIDE = ("moe.experts_dense", "moe.experts_mxfp4")
"""Ops with float32 results whose intermediate values are rounded to the activations' dtype."""


def device_for(impl: Impl[Any, Any]) -> torch.device | None:
    """A device of this machine that the twin can run on."""
    if impl.needs.type == "cuda" and not torch.cuda.is_available():
        return None
    device = torch.device(impl.needs.type)
    return device if impl.needs.is_met_by(device) else None


def fresh_cases(op: Op[Any, Any]) -> Iterator[tuple[Any, ...]]:
    assert op.cases is not None
    return op.cases()


def truth_of(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    return compare.run(NAIVE[name], args)


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_has_cases_and_an_independent_account(name: str) -> None:
    assert OPS[name].cases is not None, f"{name}: give op() its cases"
    assert name in NAIVE, f"{name}: write it a second time in tests/kernels/naive.py"
    assert sum(1 for _ in fresh_cases(OPS[name])) >= 3
    assert OPS[name].__doc__, f"{name}: the docstring is the contract of every twin"


@pytest.mark.parametrize("name", sorted(OPS))
def test_the_reference_tells_the_truth(name: str) -> None:
    for i, (args, again) in enumerate(zip(fresh_cases(OPS[name]), fresh_cases(OPS[name]))):
        try:
            limit = compare.REFERENCE_LIMIT[args[0].dtype] if name in ROUNDED_INSIDE else None
            compare.check_reference(compare.run(OPS[name].reference, args), truth_of(name, again), limit)
        except Exception as error:
            raise AssertionError(f"{name}, case {i}: {error}") from error


@pytest.mark.parametrize(("op", "impl"), TWINS, ids=[f"{op.name}-{impl.name}" for op, impl in TWINS])
def test_every_twin_equals_the_reference(op: Op[Any, Any], impl: Impl[Any, Any]) -> None:
    device = device_for(impl)
    if device is None:
        pytest.skip(f"needs {impl.needs}")
    num_run = check_twin(op, impl, device)
    assert num_run, "no case is within the twin's range"


def check_twin(op: Op[Any, Any], impl: Impl[Any, Any], device: torch.device) -> int:
    """Compares on every case that the twin accepts; how many these were."""
    num_run = 0
    for i, (args, for_plain, for_truth) in enumerate(zip(fresh_cases(op), fresh_cases(op), fresh_cases(op))):
        on_device = compare.to_device(args, device)
        if impl.when is not None and not impl.when(*on_device):
            continue
        num_run += 1
        twin, plain = compare.run(impl.fn, on_device), compare.run(op.reference, for_plain)
        try:
            TWIN_CHECK(twin, plain, truth_of(op.name, for_truth))
        except compare.Mismatch as error:
            raise AssertionError(f"{op.name} {impl.name}, case {i}: {error}") from error
    return num_run


# The walk itself must be able to fail.


def test_a_wrong_twin_is_found() -> None:
    right = OPS["norm.rms_norm"]

    def forgets_eps(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        return right.reference(x_TH, weight_H, 0.0).nan_to_num(0.0)

    def writes_into_its_input(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        y_TH = right.reference(x_TH, weight_H, eps)
        x_TH.zero_()
        return y_TH

    def rounds_twice(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        return right.reference(x_TH, weight_H, eps).half().to(x_TH.dtype)

    cpu = Device(type="cpu")
    assert check_twin(right, Impl("same", right.reference, cpu, None), torch.device("cpu"))
    for wrong in (forgets_eps, writes_into_its_input, rounds_twice):
        with pytest.raises(AssertionError, match=r"norm\.rms_norm wrong, case"):
            check_twin(right, Impl("wrong", wrong, cpu, None), torch.device("cpu"))


def test_a_twin_outside_its_range_is_passed_over() -> None:
    op = OPS["gemm.linear"]
    never = Impl("never", op.reference, Device(type="cpu"), lambda x_TK, w_NK: False)
    assert check_twin(op, never, torch.device("cpu")) == 0


def test_ids_compare_exactly_and_floats_by_their_own_error() -> None:
    ids = [torch.tensor([1, 2])]
    with pytest.raises(compare.Mismatch, match=r"1 of 2 differ, first at \(1,\): 3 and 2"):
        TWIN_CHECK([torch.tensor([1, 3])], ids, ids)
    truth = [normal(4, 64).double()]
    plain = [(truth[0] * (1 + 1e-6)).float()]
    TWIN_CHECK([(truth[0] * (1 + 1.9e-6)).float()], plain, truth)
    with pytest.raises(compare.Mismatch, match="exceeds"):
        TWIN_CHECK([(truth[0] * (1 + 2.5e-6)).float()], plain, truth)


def test_small_rows_count_and_not_a_number_is_an_error() -> None:
    truth = torch.tensor([[1.0, 2.0], [1e-12, 2e-12]])
    assert compare.error(truth, truth) == 0
    assert compare.error(truth + torch.tensor([[0.0], [1e-12]]), truth) == pytest.approx(0.5, rel=1e-3)
    for wrong in (torch.nan, torch.inf):
        assert compare.error(torch.tensor([[1.0, wrong], [1e-12, 2e-12]]), truth) == torch.inf
    same = torch.tensor([torch.nan, -torch.inf, 1.0])
    assert compare.error(same, same) == 0


def test_copies_keep_strides() -> None:
    for x in (rows_apart(normal(3, 5)), normal(4, 6).T, normal(3, 1, 4).expand(-1, 2, -1), normal(0, 3)):
        (copy,) = compare.to_device((x,), torch.device("cpu"))
        assert copy.stride() == x.stride()
        assert torch.equal(copy, x)
        if x.numel():
            assert copy.data_ptr() != x.data_ptr()
