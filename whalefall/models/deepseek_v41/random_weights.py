# SPDX-License-Identifier: Apache-2.0
"""draw: a random V4.1 tensor of realistic scale in the released format, so that routing spreads and activations stay in range.

Norm gains are 1; FP8 values are normal with scale 2**-6, FP4 codes uniform over all 16 with scale 2**-8; plain matrices are normal with
the inverse root of their inputs; the router's bias is small (0.02), so that scores and not the bias choose the experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.kernels.quant.reference import E4M3_MAX
from whalefall.weights.spec import TensorSpec

FP8_SCALE_CODE = 121
FP4_SCALE_CODE = 119
_GAINS = ("norm.weight", ".q_weight", ".k_weight")
_DEVIATIONS = {"gate.bias": 0.02, "gate.bias_vl": 0.02, "_base": 0.5, "attn_sink": 0.5, "embed.weight": 1.0}
"""By ending of the name, where it is not the inverse root of the row length."""


def draw(name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """The tensor as a checkpoint would store it, on the generator's device."""
    device, kind = generator.device, spec.dtypes[0]
    if kind == "F8_E8M0":
        code = FP4_SCALE_CODE if ".experts." in name else FP8_SCALE_CODE
        return torch.full(spec.shape, code, dtype=torch.uint8, device=device)
    if kind in ("I8", "U8"):
        return torch.randint(-128, 128, spec.shape, dtype=torch.int8, device=device, generator=generator)
    if kind == "F8_E4M3":
        normal = torch.randn(spec.shape, device=device, generator=generator)
        return normal.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    dtype = torch.float32 if kind == "F32" else torch.bfloat16
    if name.endswith(_GAINS):
        return torch.ones(spec.shape, dtype=dtype, device=device)
    if name.endswith("_scale"):
        return torch.full(spec.shape, 0.5, dtype=dtype, device=device)
    deviation = next((d for ending, d in _DEVIATIONS.items() if name.endswith(ending)), spec.shape[-1] ** -0.5)
    return (torch.randn(spec.shape, device=device, generator=generator) * deviation).to(dtype)
