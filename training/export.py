# SPDX-License-Identifier: Apache-2.0
"""Writes a trained Krill as an official checkpoint: config, tokenizer, and shards in FP8 tiles, MXFP4 experts, FP8 rows, BF16 and FP32.

Usage: python -m training.export --run training/.work/run --out whalefall/assets/krill
or, for the draft alone: python -m training.export --draft training/.work/draft
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.checkpoint import load_official, unstacked
from training.config import krill_config
from training.prepare import IMAGE_ID, NOISE_ID, SPECIAL_TOKENS
from training.train import build, load
from whalefall.kernels.quant import reference as q

LIMIT_BYTES = 16_000_000


def stored(name: str, fmt: str, value: Tensor) -> dict[str, Tensor]:
    """The tensors that hold one matrix in its storage format."""
    scale_name = name.removesuffix("weight") + "scale"
    if fmt in ("fp8", "fp4", "row"):
        quantise = {"fp8": q.quantize_fp8_tile, "fp4": q.quantize_mxfp4, "row": q.quantize_fp8_row}[fmt]
        codes, scale = quantise(value)
        return {name: codes, scale_name: scale.view(torch.float8_e8m0fnu)}
    return {name: value.to(torch.bfloat16 if fmt == "bf16" else torch.float32)}


def export(data_dir: Path, run_dir: Path, out: Path) -> int:
    """Bytes written."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("model-*.safetensors"):
        old.unlink()
    tokenizer = Tokenizer.from_file(str(data_dir / "tokenizer.json"))
    model = build(data_dir, "cpu", torch.float32)
    values, _, _ = load(run_dir)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name].view_as(p))
    tensors: dict[str, Tensor] = {}
    for name, fmt, value in unstacked(model):
        tensors |= {n: t.contiguous() for n, t in stored(name, fmt, value).items()}
    write_shards(tensors, out)
    _write_json(out / "config.json", krill_config(tokenizer), indent=2)
    _write_json(out / "tokenizer.json", _as_released(json.loads(tokenizer.to_str())))
    bos, eos, pad = SPECIAL_TOKENS[:3]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "thinking": False,
    }
    _write_json(out / "tokenizer_config.json", tokenizer_config, indent=2)
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    _write_json(out / "generation_config.json", generation, indent=2)
    return sum(path.stat().st_size for path in out.iterdir())


def export_draft(run_dir: Path, out: Path) -> int:
    """Replace the draft's shard by what train_draft.py saved; every other file keeps its bytes. Bytes of the folder."""
    model = load_official(out)
    values = load_file(run_dir / "draft.safetensors")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("mtp."):
                p.copy_(values[name].view_as(p))
    tensors: dict[str, Tensor] = {}
    for name, fmt, value in unstacked(model):
        if name.startswith("mtp."):
            tensors |= {n: t.contiguous() for n, t in stored(name, fmt, value).items()}
    path = out / "model-00002-of-00002.safetensors"
    with safe_open(str(path), "pt") as file:
        assert set(file.keys()) == set(tensors), "the shard holds other tensors"
    save_file(tensors, path, {"format": "pt"})
    path.chmod(0o644)
    return sum(path.stat().st_size for path in out.iterdir())


def write_shards(tensors: dict[str, Tensor], out: Path) -> None:
    """Two shards: the backbone, and the draft blocks (so that a better draft replaces 2 MB, not 16)."""
    shards = [{n: t for n, t in tensors.items() if n.startswith("mtp.") == is_draft} for is_draft in (False, True)]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, out / name, {"format": "pt"})
        (out / name).chmod(0o644)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(t.nbytes for t in tensors.values())
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _as_released(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """As in DeepSeek's own file, the markers of the chat format are added tokens but not "special": decoding keeps them."""
    for token in tokenizer["added_tokens"]:
        token["special"] = token["content"] in (*SPECIAL_TOKENS[:3], SPECIAL_TOKENS[IMAGE_ID], SPECIAL_TOKENS[NOISE_ID])
    return tokenizer


def _write_json(path: Path, value: object, indent: int | None = None) -> None:
    path.write_text(
        json.dumps(value, indent=indent, ensure_ascii=False, separators=None if indent else (",", ":")) + "\n", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("training/.work/data"))
    parser.add_argument("--run", type=Path, default=Path("training/.work/run"))
    parser.add_argument("--draft", type=Path, help="replace only the draft in --out, by the one trained in this run")
    parser.add_argument("--out", type=Path, default=Path("whalefall/assets/krill"))
    args = parser.parse_args()
    size = export_draft(args.draft, args.out) if args.draft else export(args.data, args.run, args.out)
    print(f"{args.out}: {size:,} bytes")
    assert size <= LIMIT_BYTES, f"at most {LIMIT_BYTES:,} bytes may be shipped"
    card = Path(__file__).parent / "MODEL_CARD.md"
    if card.exists():
        shutil.copy(card, args.out / "MODEL_CARD.md")


if __name__ == "__main__":
    main()
