# SPDX-License-Identifier: Apache-2.0
"""Number formats: FP8 tiles, FP8 rows, MXFP4, NVFP4."""

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
