# SPDX-License-Identifier: Apache-2.0
"""Trains the draft blocks of Krill on the frozen, quantised backbone, for the number of drafts that verification will accept.

First the backbone writes continuations of training prompts, greedily and at temperatures, and their features stay on the device
(rollout.py). Then every step drafts from a few thousand places in them; on a GPU the whole step, optimiser included, is one CUDA graph.
Usage: python -m training.train_draft --start whalefall/assets/krill --run training/.work/draft --seconds 480
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor

from training import model as plain
from training.checkpoint import load_official
from training.draft import confidence, draft, markov
from training.model import FUNCTIONS, Krill
from training.optimiser import Optimiser
from training.prepare import EOS_ID, load_tokens
from training.rollout import Bank, chat_prompts, roll_out, text_prompts
from training.train import Log, build

TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.6)
"""Of the rows, in turn."""
WARM_STEPS = 30
BALANCE = 0.001


class Slots(NamedTuple):
    """Per draft slot, [B, A, M]."""

    overlap: Tensor
    """Probability that the draft is accepted at temperature 1: sum over tokens of min(p, q)."""
    ce: Tensor
    """Cross entropy against the backbone's distribution."""
    top: Tensor
    """Minus the log-probability of the backbone's likeliest token."""
    agrees: Tensor
    """1.0 where draft and backbone have the same likeliest token."""


def slots(base: Tensor, extra: Tensor, target: Tensor) -> Slots:
    """From logits [B, A, M, V] of the draft without Markov term, of the Markov term, and of the backbone."""
    log_q = torch.log_softmax(base.float() + extra.float(), -1)
    log_p = torch.log_softmax(target.float(), -1)
    p, best = log_p.exp(), target.argmax(-1)
    top = -log_q.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    return Slots(torch.minimum(log_q.exp(), p).sum(-1), -(p * log_q).sum(-1), top, (log_q.argmax(-1) == best).float())


SLOTS: Callable[[Tensor, Tensor, Tensor], Slots] = slots


class Batch(NamedTuple):
    ids: Tensor
    """[B, T]"""
    features: Tensor
    """[B, T, taps * H]"""
    hidden: Tensor
    """[B, T, H]"""
    anchors: Tensor
    """[B, A]"""
    weight: Tensor
    """[B, A]: less where a prompt goes on"""
    greedy: Tensor
    """[B, 1] float: 1.0 where the row was written greedily"""


class Knobs(NamedTuple):
    """Scalars on the device that change while the step does not."""

    rate: Tensor
    imitation: Tensor
    """Weight of the cross entropies beside the expected number of accepted drafts."""


def draft_loss(model: Krill, batch: Batch, imitation: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The loss, what the log shows ([B, A, 4]: accepted at temperature 1, greedy, slot overlap, confidence loss), and expert loads.

    Accepted drafts are expected to number sum_i prod_{j <= i} overlap_j, which is differentiated as it stands. The cross entropies give
    direction where the overlap is flat; they too count for less in slots that are seldom reached. Nothing counts after the end of a turn.
    """
    size = model.c.dspark_block_size
    p = model.make_pass()
    drafts = draft(model, batch.ids, batch.features, batch.anchors, p)
    places = batch.anchors.unsqueeze(-1) + 1 + torch.arange(size, device=batch.ids.device)
    flat = places.flatten(1)
    previous = batch.ids.gather(1, flat).view_as(places)
    e, extra = markov(model, previous)
    with torch.no_grad():
        hidden = batch.hidden.gather(1, flat.unsqueeze(-1).expand(-1, -1, batch.hidden.shape[-1])).unflatten(1, places.shape[1:])
        target = model.logits(hidden)
    out = SLOTS(drafts.base, extra, target)
    goes_on = ((previous == EOS_ID).cumsum(-1) == 0).float()
    alive = torch.cumprod(out.overlap * goes_on, -1)
    reached = torch.cat((torch.ones_like(alive[..., :1]), alive[..., :-1]), -1).detach() * goes_on
    slot_weight = (0.2 * goes_on + 0.8 * reached) * 0.9 ** torch.arange(size, device=alive.device)
    top_weight = 0.3 + 0.7 * batch.greedy
    told = F.binary_cross_entropy_with_logits(confidence(model, drafts.hidden, e), out.overlap.detach(), reduction="none")
    imitate = (slot_weight * (out.ce + top_weight.unsqueeze(-1) * out.top)).sum(-1)
    told_mean = (told * (0.1 * goes_on + reached)).sum(-1)
    loss = ((imitation * imitate - alive.sum(-1) + 0.1 * told_mean) * batch.weight).sum() / batch.weight.sum()
    agreed = torch.cumprod(out.agrees * goes_on, -1).sum(-1)
    return loss, torch.stack((alive.sum(-1), agreed, out.overlap.mean(-1), told_mean), -1).detach(), p.loads


class Step:
    """One update on fixed buffers, so that a CUDA graph can replay it."""

    def __init__(self, model: Krill, optimiser: Optimiser, batch: Batch) -> None:
        self.model, self.optimiser = model, optimiser
        self.batch = Batch(*(value.clone() for value in batch))
        device = batch.ids.device
        self.knobs = Knobs(torch.zeros((), device=device), torch.zeros((), device=device))
        self.shown = torch.zeros(*batch.anchors.shape, 4, device=device)
        self.graph: Any = None
        self.stream = torch.cuda.Stream() if batch.ids.is_cuda else None

    def eager(self) -> None:
        loss, shown, loads = draft_loss(self.model, self.batch, self.knobs.imitation)
        loss.backward()
        self.optimiser.step(self.knobs.rate)
        self.shown.copy_(shown)
        with torch.no_grad():  # balance: experts that got more than their share are chosen a little less
            for block, load_E in zip(self.model.mtp, loads, strict=True):
                bias = block.ffn.gate.bias
                bias.add_(BALANCE * self.knobs.rate * torch.sign(load_E.mean() - load_E))
                bias.sub_(bias.mean())

    def capture(self) -> None:
        """After some eager steps on the same stream: record one."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.eager()
        self.graph = graph

    def run(self, batch: Batch, rate: float, imitation: float) -> None:
        for buffer, value in zip(self.batch, batch, strict=True):
            buffer.copy_(value)
        self.knobs.rate.fill_(rate)
        self.knobs.imitation.fill_(imitation)
        if self.graph is not None:
            self.graph.replay()
        elif self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.eager()
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            self.eager()


def draw(bank: Bank, num_rows: int, num_anchors: int, generator: torch.Generator) -> tuple[Batch, Tensor]:
    """Random rows and in each random places, six of seven where the model wrote what follows. Also the rows' numbers."""
    rows = torch.randint(0, len(bank.ids), (num_rows,), generator=generator, device=bank.ids.device)
    last = bank.ids.shape[1] - 8
    own = bank.written[rows, 2 : last + 2].float()
    luck = torch.rand(own.shape, generator=generator, device=own.device).clamp_min(1e-20).log() / (0.15 + 0.85 * own)
    anchors = luck.topk(num_anchors, -1, sorted=False).indices
    batch = Batch(
        bank.ids[rows].long(),
        bank.features[rows],
        bank.hidden[rows],
        anchors,
        0.3 + 0.7 * own.gather(1, anchors),
        (bank.temperature[rows] == 0).float().unsqueeze(-1),
    )
    return batch, rows


def fill(args: argparse.Namespace, model: Krill, log: Log) -> Bank:
    """Continuations, half of chat turns and half of text, by as many passes as the time allows."""
    generator = torch.Generator(device=args.device).manual_seed(args.seed)
    chat = chat_prompts(load_tokens(args.data / "chat.xz"), 96, args.device)
    text = text_prompts(load_tokens(args.data / "text.xz"), 150_000, 24, 224, np.random.default_rng(args.seed), args.device)
    bank = Bank.empty(args.bank, args.length, model)
    bank.temperature.copy_(torch.tensor(TEMPERATURES, device=args.device).repeat(args.bank // len(TEMPERATURES) + 1)[: args.bank])
    done, half = 0, args.together // 2
    while done < args.bank and (not done or time.monotonic() - args.begun < args.fill_seconds):
        for prompts in (chat, text):
            roll_out(model, prompts, bank.rows(done, done + half), 96, generator)
            done += half
        log.write(rows=done, written=bank.written[:done].float().mean().item())
    return bank.rows(0, done)


def train(args: argparse.Namespace, model: Krill) -> None:
    log = Log(args.run / "draft-log.jsonl")
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("mtp.") and not name.endswith("gate.bias"))
    optimiser = Optimiser(((n, p) for n, p in model.named_parameters() if n.startswith("mtp.")), quantise=True)
    resume(args.run, model, optimiser)
    bank = fill(args, model, log)
    generator = torch.Generator(device=args.device).manual_seed(args.seed + 1)
    batch, rows = draw(bank, args.rows, args.anchors, generator)
    step = Step(model, optimiser, batch)
    if args.device == "cuda" and not _try(partial(compiled_step, step, batch), "compiled functions"):
        slow_down()
    log.write(ready=True)
    count, since, saved = 0, time.monotonic(), time.monotonic()
    fresh = time.monotonic() - args.begun
    while True:
        elapsed = time.monotonic() - args.begun
        done = max((elapsed - fresh) / max(1.0, args.seconds - fresh), count / args.steps)
        if done >= 1:
            break
        if count == WARM_STEPS and args.device == "cuda" and not args.eager:
            _try(step.capture, "CUDA graph")
        rate = args.rate * min(1.0, (count + 1) / WARM_STEPS) * max(0.005, min(1.0, (1 - done) / 0.75))
        step.run(batch, rate, args.imitation * max(0.2, 1 - 2 * done))
        count += 1
        if time.monotonic() - since > args.every or count in (1, WARM_STEPS):
            _report(log, step, bank, rows, count, rate)
            since = time.monotonic()
        if time.monotonic() - saved > 60:
            save(args.run, model, optimiser)
            saved = time.monotonic()
        batch, rows = draw(bank, args.rows, args.anchors, generator)
    _report(log, step, bank, rows, count, 0.0)
    save(args.run, model, optimiser)
    print(f"draft: {count} steps", flush=True)


def _report(log: Log, step: Step, bank: Bank, rows: Tensor, count: int, rate: float) -> None:
    """Accepted of 5 on this step's anchors, by who wrote the row (rows of a pass: chat first, then text)."""
    greedy = bank.temperature[rows] == 0
    sampled = bank.temperature[rows] == 1
    shown = step.shown.mean(1)
    values = {
        "greedy": shown[greedy, 1].mean().item(),
        "sampled": shown[sampled, 0].mean().item(),
        "overlap": shown[:, 2].mean().item(),
        "conf": shown[:, 3].mean().item(),
    }
    log.write(step=count, rate=rate, **values, graph=step.graph is not None)


def _try(what: Callable[[], object], name: str) -> bool:
    """Speed is worth trying; without it the run goes on, slower, and says so."""
    try:
        what()
        return True
    except Exception:  # whatever a compiler or driver raises; the first of a chain says why
        print(f"{name} not used: {traceback.format_exc()[:4000]}", flush=True)
        return False


def save(run_dir: Path, model: Krill, optimiser: Optimiser) -> None:
    values = {n: p.detach().float() for n, p in model.named_parameters() if n.startswith("mtp.")} | optimiser.masters()
    if not all(bool(v.isfinite().all()) for v in values.values()):
        raise FloatingPointError("a draft weight is not a number; the last saved ones are kept")
    save_file({n: v.float().contiguous().cpu() for n, v in values.items()}, run_dir / "draft.safetensors")
    torch.save(optimiser.moments(), run_dir / "draft-moments.pt")


def resume(run_dir: Path, model: Krill, optimiser: Optimiser) -> None:
    if not (run_dir / "draft.safetensors").exists():
        return
    values = load_file(run_dir / "draft.safetensors")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in values:
                p.copy_(values[name].view_as(p))
    optimiser.load_masters(values)
    if (run_dir / "draft-moments.pt").exists():
        optimiser.load_moments(torch.load(run_dir / "draft-moments.pt"))


def speed_up() -> None:
    """Compile what the draft blocks call, and the loss."""
    from training import gpu

    global SLOTS
    gpu.speed_up()
    SLOTS = torch.compile(slots, dynamic=False)


def compiled_step(step: Step, batch: Batch) -> None:
    speed_up()
    step.run(batch, 0.0, 1.0)


def slow_down() -> None:
    global SLOTS
    SLOTS = slots
    for name in ("rms", "rope", "open_sublayer", "close_sublayer", "moe", "engram_inject", "sink_and_unrotate"):
        setattr(FUNCTIONS, name, getattr(plain, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("training/.work/data"))
    parser.add_argument("--run", type=Path, default=Path("training/.work/draft"))
    parser.add_argument("--start", type=Path, default=Path("whalefall/assets/krill"), help="the checkpoint whose draft is trained")
    parser.add_argument("--seconds", type=float, default=480, help="end after so long, the rate falling to zero until then")
    parser.add_argument("--steps", type=int, default=1_000_000, help="or after so many steps")
    parser.add_argument("--fill-seconds", type=float, default=90, help="begin no further pass of continuations after so long")
    parser.add_argument("--bank", type=int, default=49_152, help="rows of continuations to keep (2 KB a token on the device)")
    parser.add_argument("--together", type=int, default=24_576, help="rows written in one pass")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=64, help="rows of a step")
    parser.add_argument("--anchors", type=int, default=96, help="places in each row to draft from")
    parser.add_argument("--rate", type=float, default=0.6)
    parser.add_argument("--imitation", type=float, default=0.3)
    parser.add_argument("--every", type=float, default=5, help="seconds between lines of the log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.begun = time.monotonic()
    args.run.mkdir(parents=True, exist_ok=True)
    model = build(args.data, args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    model.load_state_dict(load_official(args.start).state_dict(), strict=False)
    if args.device == "cuda":
        from training.sinkhorn import sinkhorn_triton

        FUNCTIONS.sinkhorn = sinkhorn_triton
    train(args, model)


if __name__ == "__main__":
    main()
