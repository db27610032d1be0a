# SPDX-License-Identifier: Apache-2.0
"""Prints the numbers of RESULTS.md: bits per byte (fp32, quantised, selection off, bounded replay), draft acceptance, calibration.

Usage: python -m training.evaluate [--run training/.work/run] [--device cuda] [--limit 340000] [--out results.json]
The exported checkpoint is read back through the official formats; `--run` adds the unquantised masters.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor

from training.chat import END_THINK
from training.checkpoint import load_official
from training.draft import confidence, draft, markov
from training.model import Krill
from training.prepare import EOS_ID, SPECIAL_TOKENS, load_tokens
from training.train import build, load


@torch.no_grad()
def nats(model: Krill, windows: Tensor, rows: int, first: int = 0, **options: Any) -> float:
    """Summed negative log-likelihood of windows [W, L + 1], positions from `first` on."""
    total = 0.0
    for at in range(0, len(windows), rows):
        ids = windows[at : at + rows]
        hidden = model(ids[:, :-1], model.make_pass(**options))[:, first:]
        for part, target in zip(hidden.split(512, 1), ids[:, first + 1 :].split(512, 1), strict=True):
            total += F.cross_entropy(model.logits(part).flatten(0, 1), target.flatten(), reduction="sum").item()
    return total


def windows_of(tokens: Tensor, length: int) -> Tensor:
    """Windows that overlap by one token, so that each token is predicted once."""
    return tokens[: (len(tokens) - 1) // length * length + 1].unfold(0, length + 1, length)


class Text:
    def __init__(self, path: Path, tokenizer: Tokenizer, limit: int, device: str) -> None:
        self.tokens = torch.from_numpy(load_tokens(path)[:limit].astype("int64")).to(device)
        widths = torch.tensor(
            [
                len(piece.encode()) if "\ufffd" not in piece else 1
                for piece in tokenizer.decode_batch([[i] for i in range(tokenizer.get_vocab_size())], skip_special_tokens=True)
            ]
        )
        widths[: len(SPECIAL_TOKENS)] = 0  # markers are predicted, but are no text
        self.widths = widths.to(device)

    def bits_per_byte(self, model: Krill, length: int, rows: int, first: int = 0, **options: Any) -> float:
        windows = windows_of(self.tokens, length)
        num_bytes = self.widths[windows[:, first + 1 :]].sum().item()
        return nats(model, windows, rows, first, **options) / math.log(2) / num_bytes


@torch.no_grad()
def speculate(model: Krill, prompts: list[list[int]], new_tokens: int, greedy: bool, generator: torch.Generator) -> dict[str, Any]:
    """Play speculative decoding exactly as the engine does (design note §4.3, §4.4) on dense forwards; the rounds' counts."""
    device = model.embed.weight.device
    size = model.c.dspark_block_size
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    goal = lengths + new_tokens
    ids = torch.zeros(len(prompts), int(goal.max()) + 2 * size + 4, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    alone = torch.arange(len(prompts), device=device)

    def pick(logits: Tensor) -> tuple[Tensor, Tensor]:
        probs = torch.softmax(logits, -1)
        if greedy:
            return logits.argmax(-1), probs
        return torch.multinomial(probs.cpu(), 1, generator=generator).squeeze(-1).to(device), probs

    p = model.make_pass()
    hidden = model(ids, p)
    token, _ = pick(model.logits(hidden[alone, lengths - 1]))
    ids[alone, lengths] = token
    lengths = lengths + 1
    accepted_counts: list[list[int]] = [[] for _ in prompts]
    calibration: list[tuple[float, float, int]] = []
    while True:
        going = (lengths < goal) & ~_ended(ids, lengths, prompts)
        if not going.any():
            break
        drafts = draft(model, ids, torch.cat(p.taps, -1), (lengths - 2).unsqueeze(-1), p)
        previous, q, conf = ids[alone, lengths - 1], [], []
        for i in range(size):
            e, extra = markov(model, previous)
            conf.append(torch.sigmoid(confidence(model, drafts.hidden[:, 0, i], e)))
            previous, probs = pick(drafts.base[:, 0, i] + extra)
            q.append(probs)
            ids[alone, lengths + i] = previous
        p = model.make_pass()
        hidden = model(ids, p)
        alive = going.clone()
        count = torch.zeros_like(lengths)
        replacement = torch.zeros_like(lengths)
        for i in range(size + 1):
            logits = model.logits(hidden[alone, lengths - 1 + i])
            choice, target = pick(logits)
            if i < size:
                drafted = ids[alone, lengths + i]
                if greedy:
                    ok = drafted == choice
                else:
                    ratio = target[alone, drafted] / q[i][alone, drafted]
                    ok = torch.rand(len(prompts), generator=generator).to(device) < ratio
                    rest = (target - q[i]).clamp_min(0) + 1e-12
                    choice = torch.multinomial(rest.cpu(), 1, generator=generator).squeeze(-1).to(device)
                for c, a, on in zip(conf[i].tolist(), ok.tolist(), alive.tolist(), strict=True):
                    if on:
                        calibration.append((c, float(a), i))
            else:
                ok = torch.zeros_like(alive)
            stops = alive & ~ok
            replacement = torch.where(stops, choice, replacement)
            alive = alive & ok
            count += alive
        for row, accepted, on in zip(accepted_counts, count.tolist(), going.tolist(), strict=True):
            if on:
                row.append(accepted)
        ids[alone[going], (lengths + count)[going]] = replacement[going]
        lengths = torch.where(going, lengths + count + 1, lengths)
    return {**_summary(accepted_counts, size), "counts": accepted_counts, "calibration": calibration, "ids": ids, "lengths": lengths}


def _ended(ids: Tensor, lengths: Tensor, prompts: list[list[int]]) -> Tensor:
    place = torch.arange(ids.shape[1], device=ids.device)
    starts = torch.tensor([len(p) for p in prompts], device=ids.device)
    return ((ids == EOS_ID) & (place >= starts.unsqueeze(-1)) & (place < lengths.unsqueeze(-1))).any(-1)


def _calibrate(pairs: list[tuple[float, float, int]]) -> dict[str, Any]:
    """Ten bins of predicted confidence: (mean confidence, share accepted, count), and the expected calibration error."""
    bins = [[pair for pair in pairs if min(9, int(pair[0] * 10)) == b] for b in range(10)]
    rows = [(sum(c for c, _, _ in b) / len(b), sum(a for _, a, _ in b) / len(b), len(b)) if b else (0.0, 0.0, 0) for b in bins]
    error = sum(abs(c - a) * n for c, a, n in rows) / max(1, len(pairs))
    slots = [[a for _, a, i in pairs if i == slot] for slot in range(5)]
    return {
        "bins": [[round(c, 3), round(a, 3), n] for c, a, n in rows],
        "ece": error,
        "accepted_by_slot": [round(sum(s) / max(1, len(s)), 3) for s in slots],
    }


def held_out_prompts(tokens: Tensor, chats: list[str], tokenizer: Tokenizer, count: int, length: int = 256) -> dict[str, list[list[int]]]:
    """As many beginnings of held-out text windows as held-out questions."""
    starts = torch.linspace(0, len(tokens) - length - 1, count // 2).long()
    texts = [tokens[s : s + length].tolist() for s in starts]
    questions = [chat[: chat.index(END_THINK) + len(END_THINK)] for chat in chats if "<think>" not in chat][: count // 2]
    return {"text": texts, "chat": [tokenizer.encode(q, add_special_tokens=False).ids for q in questions]}


def _summary(rounds: list[list[int]], size: int) -> dict[str, Any]:
    """Means over rounds, and, because short answers have few rounds, over prompts."""
    flat = [count for row in rounds for count in row]
    mean = sum(flat) / len(flat)
    by_prompt = [sum(row) / len(row) for row in rounds if row]
    return {
        "accepted_of_5": mean,
        "tokens_per_round": mean + 1,
        "accepted_of_5, mean over prompts": sum(by_prompt) / len(by_prompt),
        "reached_by_slot": [round(sum(count > slot for count in flat) / len(flat), 3) for slot in range(size)],
        "rounds": len(flat),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("whalefall/assets/krill"))
    parser.add_argument("--run", type=Path, help="also evaluate these float32 masters")
    parser.add_argument("--data", type=Path, default=Path("training/.work/data"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=20000, help="held-out tokens to score")
    parser.add_argument("--prompts", type=int, default=12, help="prompts for the draft's acceptance")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1, help="windows of 4,096 tokens at a time")
    parser.add_argument("--only", nargs="*", default=["bits", "draft"], choices=["bits", "draft"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = load_official(args.model).to(args.device)
    chats = json.loads((args.data / "chat-held-out.json").read_text())
    text = Text(args.data / "text-held-out.xz", tokenizer, args.limit, args.device)
    chat_text = Text(args.data / "chat-held-out.xz", tokenizer, args.limit // 2, args.device)
    results: dict[str, Any] = {}

    def report(name: str, value: Any) -> None:
        results[name] = value
        print(f"[{time.monotonic() - begun:6.1f} s] {name}: {json.dumps(value, ensure_ascii=False)}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False))

    begun = time.monotonic()
    if "bits" in args.only:
        report("bits_per_byte quantised", text.bits_per_byte(model, 4096, args.rows))
        report("bits_per_byte quantised, index top-k off", text.bits_per_byte(model, 4096, args.rows, select=False))
        report("bits_per_byte quantised, rounded caches", text.bits_per_byte(model, 4096, args.rows, round_cache=True))
        report("bits_per_byte quantised, last quarter of 1,024 tokens, exact", text.bits_per_byte(model, 1024, 8 * args.rows, 768))
        report(
            "bits_per_byte quantised, last quarter of 1,024 tokens, bounded replay",
            text.bits_per_byte(model, 1024, 8 * args.rows, 768, bounded_from=768 - 128),
        )
        report("bits_per_byte quantised, chat", chat_text.bits_per_byte(model, 1024, 8 * args.rows))
        if args.run:
            masters = build(args.data, "cpu", torch.float32)
            values, _, _ = load(args.run)
            with torch.no_grad():
                for name, parameter in masters.named_parameters():
                    parameter.copy_(values[name].view_as(parameter))
            report("bits_per_byte fp32", text.bits_per_byte(masters.to(args.device), 4096, args.rows))
    if "draft" in args.only:
        kinds = held_out_prompts(text.tokens, chats, tokenizer, args.prompts, args.prompt_tokens)
        for greedy in (True, False):
            name = "speculation, greedy" if greedy else "speculation, temperature 1"
            outcomes = {k: speculate(model, v, args.new_tokens, greedy, torch.Generator().manual_seed(1)) for k, v in kinds.items()}
            for kind, outcome in outcomes.items():
                report(f"{name}, {kind}", _summary(outcome["counts"], model.c.dspark_block_size))
            counts = [row for outcome in outcomes.values() for row in outcome["counts"]]
            calibration = _calibrate([pair for outcome in outcomes.values() for pair in outcome["calibration"]])
            report(name, _summary(counts, model.c.dspark_block_size) | {"calibration": calibration})


if __name__ == "__main__":
    main()
