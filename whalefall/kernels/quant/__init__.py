# SPDX-License-Identifier: Apache-2.0
"""Number formats: FP8 tiles, FP8 rows, MXFP4, NVFP4. On a GPU: triton for what a step uses, else the reference."""

from whalefall.kernels.quant.reference import (
    dequantize_fp8_row,
    dequantize_fp8_tile,
    dequantize_mxfp4,
    fakequant_mxfp4,
    fakequant_mxfp8,
    fakequant_nvfp4,
    quantize_fp8_row,
    quantize_fp8_tile,
    quantize_mxfp4,
)
from whalefall.kernels.triton_env import has_triton

if has_triton():
    from whalefall.kernels.quant import triton as _triton  # noqa: F401  registers its twins

__all__ = [
    "dequantize_fp8_row",
    "dequantize_fp8_tile",
    "dequantize_mxfp4",
    "fakequant_mxfp4",
    "fakequant_mxfp8",
    "fakequant_nvfp4",
    "quantize_fp8_row",
    "quantize_fp8_tile",
    "quantize_mxfp4",
]
