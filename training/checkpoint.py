# SPDX-License-Identifier: Apache-2.0
"""Between Krill's parameters and checkpoint names: experts stacked here, one tensor per matrix there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from training.model import Krill
from whalefall.kernels.quant import reference
from whalefall.models.deepseek_v41.engram_tables import compressed_vocab


def unstacked(model: Krill) -> Iterator[tuple[str, str, Tensor]]:
    """(checkpoint name, storage format, float32 values) of every tensor; formats fp8, fp4, row, bf16, fp32."""
    for name, parameter in model.named_parameters():
        value, fmt = parameter.detach().float().cpu(), getattr(parameter, "fmt", "bf16")
        if name.endswith("experts.w13"):
            for e, (w1, w3) in enumerate(zip(*value.chunk(2, 1), strict=True)):
                yield name.replace("w13", f"{e}.w1.weight"), fmt, w1
                yield name.replace("w13", f"{e}.w3.weight"), fmt, w3
        elif name.endswith("experts.w2"):
            for e, w2 in enumerate(value):
                yield name.replace("w2", f"{e}.w2.weight"), fmt, w2
        elif name.endswith("gate.bias"):
            yield name, "fp32", value
            yield name + "_vl", "fp32", value.clone()  # no images were seen: the text bias stands in
        else:
            yield name, "fp32" if ".hc_" in name or name.endswith("attn_sink") else fmt, value


def load_official(model_dir: Path) -> Krill:
    """A Krill in float32 with the values of an official checkpoint, quantised or not."""
    config = json.loads((model_dir / "config.json").read_text())
    vocab = compressed_vocab(model_dir / "tokenizer.json", config["text_config"]["vocab_size"])
    assert vocab.count == config["text_config"]["engram_compressed_vocab_size"]
    model = Krill(config, vocab.map_V)
    files = [safe_open(str(path), "pt") for path in sorted(model_dir.glob("model-*.safetensors"))]
    where = {name: file for file in files for name in list(file.keys())}
    used = set()

    def read(name: str) -> Tensor:
        value = where[name].get_tensor(name)
        used.add(name)
        scale_name = name.removesuffix(".weight") + ".scale"
        if scale_name not in where:
            return value.float()
        used.add(scale_name)
        scale = where[scale_name].get_tensor(scale_name).view(torch.uint8)
        if value.dtype == torch.int8:
            return reference.dequantize_mxfp4(value, scale, torch.float32)
        op = reference.dequantize_fp8_row if name.endswith("engram.embed.weight") else reference.dequantize_fp8_tile
        return op(value, scale, torch.float32)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.w13"):
                stem = name.removesuffix("w13")
                value = torch.stack(
                    [torch.cat((read(f"{stem}{e}.w1.weight"), read(f"{stem}{e}.w3.weight"))) for e in range(len(parameter))]
                )
            elif name.endswith("experts.w2"):
                value = torch.stack([read(f"{name.removesuffix('w2')}{e}.w2.weight") for e in range(len(parameter))])
            else:
                value = read(name)
                if name.endswith("gate.bias"):
                    read(name + "_vl")
            parameter.copy_(value.view_as(parameter))
    assert used == set(where), sorted(set(where) - used)[:5]
    return model.eval()
