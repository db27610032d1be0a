# SPDX-License-Identifier: Apache-2.0
"""Trains the backbone of Krill; train_draft.py then trains the draft blocks. Resumable; see README.md for the commands.

A run directory holds `weights-*.safetensors` (float32 masters and the step), `moments.pt` (optional: without it the optimiser warms up
again) and `log.jsonl`. Every piece resumes what it finds there.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.config import krill_config
from training.data import Mixture
from training.model import Krill, dense_core
from training.optimiser import Optimiser
from whalefall.models.deepseek_v41.engram_tables import compressed_vocab

SHARD_BYTES = 15 * 2**20


@dataclass
class Plan:
    """What step of how many does what. Shares are of `total` steps."""

    total: int
    short: int = 1024
    long: int = 4096
    tokens: int = 65536
    long_from: float = 0.88
    """From here on: sequences of 4,096 tokens with the sparse selection in force."""
    quantise_from: float = 0.6
    decay_from: float = 0.45
    index_from: float = 0.3
    chat: tuple[tuple[float, float], ...] = ((0.0, 0.05), (0.3, 0.15), (0.6, 0.3))

    def rate(self, step: int, warm: int) -> float:
        at = step / self.total
        decay = 1.0 if at < self.decay_from else max(0.01, (1 - at) / (1 - self.decay_from))
        return min(1.0, (warm + 1) / 60) * decay

    def chat_share(self, step: int) -> float:
        return [share for start, share in self.chat if step / self.total >= start][-1]


def build(data_dir: Path, device: str, dtype: torch.dtype) -> Krill:
    tokenizer = Tokenizer.from_file(str(data_dir / "tokenizer.json"))
    config = krill_config(tokenizer)
    torch.manual_seed(0)
    model = Krill(config, compressed_vocab(tokenizer, config["text_config"]["vocab_size"]).map_V)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("wo_b.weight", "experts.w2", "shared_experts.w2.weight")):
                p.mul_(0.3)  # quiet sublayers at the start
            elif name == "head.weight":
                p.mul_(0.5)
            if hasattr(p, "fmt"):
                p.data = p.data.to(dtype)
    return model.to(device)


def lm_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def save(run_dir: Path, model: Krill, optimiser: Optimiser, step: int, stage: str) -> None:
    """Weights in shards that fit a narrow way out; the moments beside them, for the next piece on the same machine."""
    run_dir.mkdir(parents=True, exist_ok=True)
    values = {name: p.detach().float() for name, p in model.named_parameters()} | optimiser.masters()
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, value in values.items():
        if used + value.numel() * 4 > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = value.float().contiguous().cpu()
        used += value.numel() * 4
    for i, shard in enumerate(shards):
        save_file(shard, run_dir / f"weights-{i}.safetensors", {"step": str(step), "stage": stage})
    torch.save({"stage": stage, "moments": optimiser.moments()}, run_dir / "moments.pt")


def load(run_dir: Path) -> tuple[dict[str, Tensor], int, str]:
    values, step, stage = {}, 0, "backbone"
    for path in sorted(run_dir.glob("weights-*.safetensors")):
        with safe_open(str(path), "pt") as file:
            step, stage = int(file.metadata()["step"]), file.metadata()["stage"]
            values |= {name: file.get_tensor(name) for name in list(file.keys())}
    return values, step, stage


def resume(run_dir: Path, model: Krill, optimiser: Optimiser, stage: str) -> int:
    """Load what there is; the step to go on with (0 for a stage not begun)."""
    values, step, saved_stage = load(run_dir)
    if not values:
        return 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name].view_as(p))
    optimiser.load_masters(values)
    moments = run_dir / "moments.pt"
    kept = torch.load(moments)["moments"] if saved_stage == stage and moments.exists() else []
    if kept:
        optimiser.load_moments(kept)
    return step if saved_stage == stage else 0


class Log:
    def __init__(self, path: Path) -> None:
        self.file = path.open("a")
        self.begun = time.monotonic()

    def write(self, **values: Any) -> None:
        line = json.dumps(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()} | {"s": round(time.monotonic() - self.begun, 1)}
        )
        self.file.write(line + "\n")
        self.file.flush()
        print(line, flush=True)


def train_backbone(args: argparse.Namespace, model: Krill, mixture: Mixture) -> None:
    plan = Plan(total=args.steps, tokens=args.tokens, short=args.short, long=args.long)
    for p in model.mtp.parameters():
        p.requires_grad_(False)
    optimiser = Optimiser(model.named_parameters())
    first = step = resume(args.run, model, optimiser, "backbone")
    core, loss_of = args.core, args.lm_loss
    log = Log(args.run / "log.jsonl")
    biases = [block.ffn.gate.bias for block in model.layers]
    tokens_seen, since = 0, time.monotonic()
    while step < args.steps and time.monotonic() - args.begun < args.seconds:
        at = step / args.steps
        if (at >= plan.quantise_from) != optimiser.quantise:
            optimiser.set_quantise(at >= plan.quantise_from)
        is_long = at >= plan.long_from
        length = plan.long if is_long else plan.short
        ids = mixture.batch(step, plan.tokens // length, length, plan.chat_share(step))
        rows = None
        if at >= plan.index_from and step % (2 if is_long else 4) == 0:
            rows = torch.randint(32, length, (64 if is_long else 32,), generator=torch.Generator().manual_seed(step)).to(ids.device)
        p = model.make_pass(core=core, select=is_long, distill_rows=rows, round_cache=at >= plan.quantise_from)
        hidden = model(ids[:, :-1], p)
        loss = loss_of(hidden, model.head.weight, ids[:, 1:])
        index_loss = p.index_loss() if rows is not None else torch.zeros((), device=ids.device)
        (loss + 0.1 * index_loss).backward()
        optimiser.step(plan.rate(step, step - first if first else step))
        with torch.no_grad():  # balance: experts that got more than their share are chosen a little less
            for bias, load_E in zip(biases, p.loads, strict=False):
                bias.add_(0.002 * torch.sign(load_E.mean() - load_E)).sub_(bias.mean())
        step += 1
        tokens_seen += ids.shape[0] * length
        if step % args.every == 0 or step == first + 1:
            load_E = torch.stack(p.loads)
            value = loss.item()
            log.write(
                step=step,
                loss=value,
                index=index_loss.item(),
                tokens_s=tokens_seen / (time.monotonic() - since),
                imbalance=(load_E.amax(1) / load_E.mean(1)).max().item(),
            )
            assert value == value, "the loss is not a number"
            tokens_seen, since = 0, time.monotonic()
        if step % 1500 == 0:
            save(args.run, model, optimiser, step, "backbone")
    save(args.run, model, optimiser, step, "backbone")
    print(
        f"backbone: step {step} of {args.steps}, {torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0:.1f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("training/.work/data"))
    parser.add_argument("--run", type=Path, default=Path("training/.work/run"))
    parser.add_argument("--steps", type=int, required=True, help="length of the whole stage")
    parser.add_argument("--seconds", type=float, default=1e9, help="end this piece after so long")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of one step")
    parser.add_argument("--short", type=int, default=1024, help="sequence length of most steps")
    parser.add_argument("--long", type=int, default=4096, help="sequence length of the last steps, with the sparse selection in force")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.begun = time.monotonic()
    args.run.mkdir(parents=True, exist_ok=True)
    args.core, args.lm_loss = dense_core, lm_loss
    if args.device == "cuda":
        from training import gpu

        gpu.speed_up()
        args.core, args.lm_loss = gpu.flex_core, torch.compile(lm_loss, dynamic=False)
    model = build(args.data, args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    mixture = Mixture(args.data, args.device)
    train_backbone(args, model, mixture)


if __name__ == "__main__":
    main()
