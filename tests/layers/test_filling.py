# SPDX-License-Identifier: Apache-2.0
"""Layers take checkpoint tensors in any order, each exactly once, and say by name what is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from whalefall.core.errors import ConfigError
from whalefall.core.seams import LocalComm
from whalefall.kernels import quant
from whalefall.layers.engram import Engram
from whalefall.layers.linear import Linear, Storage
from whalefall.layers.moe import MoE
from whalefall.layers.norm import RMSNorm
from whalefall.layers.parametric import ModuleSink

H, F, E = 64, 32, 3


def storage(*, is_quantised: bool = True, is_packed: bool = False, dtype: torch.dtype = torch.float32) -> Storage:
    return Storage(dtype=dtype, device=torch.device("cpu"), is_quantised=is_quantised, is_packed=is_packed)


def moe(kept: Storage) -> MoE:
    return MoE(H, F, E, 2, scale=1.5, limit=10.0, storage=kept, comm=LocalComm())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moe_tensors(*, is_quantised: bool) -> dict[str, Tensor]:
    """A small MoE as a checkpoint stores it. The plain form holds the values of the quantised one."""
    tensors = {"gate.weight": normal(E, H), "gate.bias": normal(E, seed=1), "gate.bias_vl": normal(E, seed=2)}
    seed = 3
    for name, shape in {"w1": (F, H), "w3": (F, H), "w2": (H, F)}.items():
        for path, quantise, dequantise in (
            (f"shared_experts.{name}", quant.quantize_fp8_tile, quant.dequantize_fp8_tile),
            *((f"experts.{e}.{name}", quant.quantize_mxfp4, quant.dequantize_mxfp4) for e in range(E)),
        ):
            seed += 1
            weight, scale = quantise(normal(*shape, seed=seed))
            if is_quantised:
                tensors |= {f"{path}.weight": weight, f"{path}.scale": scale}
            else:
                tensors[f"{path}.weight"] = dequantise(weight, scale, torch.float32)
    return tensors


def fill(module: nn.Module, tensors: dict[str, Tensor], order: Callable[[list[str]], list[str]] = list) -> None:
    sink = ModuleSink(module)
    for name in order(list(tensors)):
        sink.put(name, tensors[name])
    sink.finish()


def shuffled(names: list[str]) -> list[str]:
    return random.Random(7).sample(names, len(names))


def scales_first(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: (not name.endswith("scale"), name))


@pytest.mark.parametrize("order", [list, shuffled, scales_first, lambda names: names[::-1]])
@pytest.mark.parametrize("is_packed", [False, True])
def test_any_order_and_either_store_gives_the_same_layer(order: Callable[[list[str]], list[str]], is_packed: bool) -> None:
    plain, quantised = moe(storage(is_quantised=False)), moe(storage(is_packed=is_packed))
    fill(plain, moe_tensors(is_quantised=False))
    fill(quantised, moe_tensors(is_quantised=True), order)
    x_TH = normal(5, H, seed=3)
    assert torch.equal(plain(x_TH), quantised(x_TH))


@pytest.mark.parametrize("is_packed", [False, True])
def test_packed_weights_keep_the_stored_bytes(is_packed: bool) -> None:
    made, tensors = moe(storage(is_packed=is_packed)), moe_tensors(is_quantised=True)
    fill(made, tensors)
    assert (made.experts.w13.dtype == torch.int8) == is_packed
    if is_packed:
        assert torch.equal(made.experts.w13[1, :F], tensors["experts.1.w1.weight"])
        assert torch.equal(made.experts.w13[1, F:], tensors["experts.1.w3.weight"])
        assert torch.equal(made.experts.w2_scale[2], tensors["experts.2.w2.scale"])
        assert torch.equal(made.shared_experts.w2.scale, tensors["shared_experts.w2.scale"])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    "name", ["gate.bias_vl", "experts.1.w3.weight", "experts.0.w2.scale", "shared_experts.w1.weight", "shared_experts.w2.scale"]
)
def test_a_tensor_that_comes_twice_is_refused(name: str, is_packed: bool) -> None:
    made, tensors = moe(storage(is_packed=is_packed)), moe_tensors(is_quantised=True)
    fill(made, tensors)
    with pytest.raises(ConfigError, match="filled twice"):
        ModuleSink(made).put(name, tensors[name])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["shared_experts.w1.weight", "shared_experts.w2.scale"])
def test_a_half_that_comes_twice_before_the_other_is_refused(name: str, is_packed: bool) -> None:
    made, tensors = moe(storage(is_packed=is_packed)), moe_tensors(is_quantised=True)
    sink = ModuleSink(made)
    sink.put(name, tensors[name])
    with pytest.raises(ConfigError, match="filled twice"):
        sink.put(name, tensors[name])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", list(moe_tensors(is_quantised=True)))
def test_every_missing_tensor_is_named(name: str, is_packed: bool) -> None:
    tensors = moe_tensors(is_quantised=True)
    del tensors[name]
    module, _, kind = name.rpartition(".")
    with pytest.raises(ConfigError) as caught:
        fill(moe(storage(is_packed=is_packed)), tensors)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(module)
    assert kind in caught.value.problems[0]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gate.weight", torch.zeros(E, H + 1)),
        ("gate.bias", torch.zeros(1)),  # would broadcast
        ("shared_experts.w1.weight", torch.zeros(F, H // 2, dtype=torch.float8_e4m3fn)),
        ("experts.0.w1.weight", torch.zeros(1, H // 2, dtype=torch.int8)),  # would broadcast
        ("experts.2.w2.scale", torch.zeros(H, 2, dtype=torch.uint8)),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_wrong_shape_is_named(name: str, tensor: Tensor, is_packed: bool) -> None:
    tensors = moe_tensors(is_quantised=True) | {name: tensor}
    with pytest.raises(ConfigError, match="expected shape"):
        fill(moe(storage(is_packed=is_packed)), tensors)


def test_a_name_without_a_place_is_refused() -> None:
    sink = ModuleSink(moe(storage()))
    for name in ("gate.colour", "experts.7.w1.weight", "nowhere.weight", "gate"):
        with pytest.raises(ConfigError, match=name.split(".")[-1]):
            sink.put(name, torch.zeros(1))


def test_norm_weights_are_kept_in_float32() -> None:
    norm = RMSNorm(8, 1e-6, torch.device("cpu"))
    fill(norm, {"weight": normal(8).bfloat16()})
    assert norm.weight.dtype == torch.float32
    assert torch.equal(norm.weight, normal(8).bfloat16().float())


def test_a_linear_of_odd_size_has_partial_tiles() -> None:
    weight, scale = quant.quantize_fp8_tile(normal(40, 48))
    x_TK = normal(3, 48, seed=1)
    results = []
    for is_packed in (False, True):
        made = Linear(48, 40, storage(is_packed=is_packed))
        fill(made, {"weight": weight, "scale": scale})
        results.append(made(x_TK))
        assert torch.equal(made.dense_weight(torch.float32), quant.dequantize_fp8_tile(weight, scale, torch.float32))
    assert torch.equal(*results)


def test_engram_tables_are_taken_without_a_copy() -> None:
    made = Engram(H, 4, num_rows=50, slots=6, width=32, eps=1e-20, storage=storage())
    rows, scale = quant.quantize_fp8_row(normal(50, 32))
    wkv = quant.quantize_fp8_tile(normal(5 * H, 6 * 32))
    fill(
        made,
        {
            "embed.scale": scale,
            "wkv.weight": wkv[0],
            "embed.weight": rows,
            "q_weight": normal(4, H),
            "wkv.scale": wkv[1],
            "k_weight": normal(4, H),
        },
    )
    assert made.embed._tensors["weight"].data_ptr() == rows.data_ptr()
    with pytest.raises(ConfigError, match="filled twice"):
        ModuleSink(made).put("embed.weight", rows)


def test_a_short_engram_table_is_refused() -> None:
    made = Engram(H, 4, num_rows=50, slots=6, width=32, eps=1e-20, storage=storage())
    with pytest.raises(ConfigError, match=r"expected shape \(50, 32\), found \(49, 32\)"):
        ModuleSink(made).put("embed.weight", torch.zeros(49, 32, dtype=torch.float8_e4m3fn))
