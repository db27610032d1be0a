# SPDX-License-Identifier: Apache-2.0
"""What does speculation give on Krill, and does adaptive choose well?

Off, one to five of DSpark's drafts, and adaptive, under 1, 8, 64 and 150 requests at once: half of them questions in the chat format, half
the beginnings of pieces of this repository's documents, which Krill never saw; greedy, up to 48 new tokens. Fewer than 16 at once are
served group after group. Every way gives the same tokens, which is checked. The ways take turns, each figure is the best of so many rounds,
and adaptive has measured in rounds that do not count. First tokens do not count either: the time of the same prompts with one token each
is taken off, for reading prompts is the larger half of the work here and the same for all.
`--cpu-time` divides by the process's processor time instead of the clock's: for a machine that is not quiet.

Win: adaptive within 3 % of the best of the others at each load, or faster.
Run: python -m benchmarks.speculation [--threads 2] [--requests 1 8 64 150] [--rounds 3] [--temperature 0] [--csv out.csv]
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from whalefall import LLM, SamplingParams
from whalefall.engine.embedded import embedded_model_dir

WAYS = ("off", "fixed:1", "fixed:2", "fixed:3", "fixed:4", "fixed:5", "adaptive")
NEW_TOKENS = 48
TEXT_TOKENS = 96
QUESTION = "<｜begin▁of▁sentence｜><｜User｜>{}<｜Assistant｜></think>"
WORDS = (
    "whale", "krill", "ocean", "harbour", "anchor", "sail", "compass", "tide", "reef", "island", "captain", "voyage", "storm", "lantern",
    "rope", "deck", "oar", "current", "shore", "gull", "castle", "garden", "bridge", "engine", "letter", "mirror", "window", "forest",
    "river", "valley", "winter", "music", "silver", "copper", "wheat", "market",
)  # fmt: skip
QUESTIONS = ("What is a {}?", "Define {}.", "What is another word for {}?", "Use {} in a sentence.", "What kind of thing is a {}?")


def prompts(llm: LLM, count: int) -> list[dict[str, Any]]:
    """Questions and texts in turn; the same ones, whatever `count` is."""
    text = "\n".join(path.read_text() for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md")))
    tokens = llm.tokenizer.encode(text, add_bos=False, allow_special=False)
    step = max(1, (len(tokens) - TEXT_TOKENS) // 80)
    found = []
    for i in range(count):
        if i % 2 == 0:
            question = QUESTIONS[i // 2 % len(QUESTIONS)].format(WORDS[i // 2 * 7 % len(WORDS)])
            found.append({"prompt_token_ids": llm.tokenizer.encode(QUESTION.format(question), add_bos=False, allow_special=True)})
        else:
            start = i // 2 * step
            found.append({"prompt_token_ids": tokens[start : start + TEXT_TOKENS]})
    return found


def measure(
    llm: LLM, asked: list[dict[str, Any]], at_once: int, temperature: float, clock: Callable[[], float], new_tokens: int = NEW_TOKENS
) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds, and the tokens."""
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=new_tokens, detokenize=False) for i in range(len(asked))]
    outputs = []
    begin = clock()
    for first in range(0, len(asked), at_once):
        outputs += llm.generate(asked[first : first + at_once], params[first : first + at_once], use_tqdm=False)
    return clock() - begin, [tuple(output.outputs[0].token_ids) for output in outputs]


def accepted_by_place(llm: LLM) -> tuple[list[int], int]:
    drafts = llm.stats().engine.drafts
    return ([], 0) if drafts is None else (list(drafts.accepted_per_place), drafts.num_drafts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 150])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least-prompts", type=int, default=16, help="served one group of --requests after the other")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--acceptance", choices=("exact", "standard", "block"), default="exact")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # adaptive begins without knowledge
    config: dict[str, Any] = {
        "device": args.device,
        "max_num_seqs": max(args.requests),
        "max_model_len": 512,
        "block_size": 32,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 512 << 20,
        "draft_acceptance": args.acceptance,
    }
    engines = {way: LLM(str(embedded_model_dir()), draft=way, **config) for way in args.ways}
    rows = []
    for count in args.requests:
        asked = prompts(engines[args.ways[0]], max(count, args.least_prompts) // count * count)
        best, prompt_s = dict.fromkeys(args.ways, float("inf")), dict.fromkeys(args.ways, float("inf"))
        before, answers = {}, {}
        for turn in range(1 + args.rounds):
            for way, llm in engines.items():
                if turn == 0 and way == "adaptive":  # what it learns is kept on disk: a long run knows it from the start
                    for _ in range(4):
                        measure(llm, asked, count, args.temperature, clock)
                prompt_s[way] = min(prompt_s[way], measure(llm, asked, count, args.temperature, clock, new_tokens=1)[0])
                seconds, answers[way] = measure(llm, asked, count, args.temperature, clock)
                if turn == 0:
                    before[way] = accepted_by_place(llm)
                else:
                    best[way] = min(best[way], seconds)
        if args.acceptance == "exact" or args.temperature == 0:
            assert all(answer == answers[args.ways[0]] for answer in answers.values()), "drafts changed an answer"
        for way, llm in engines.items():
            num_tokens = sum(map(len, answers[way])) - len(asked)
            counts, times = accepted_by_place(llm)
            num_rounds = times - before[way][1]
            places = [(now - then) / max(1, num_rounds) for now, then in zip(counts, before[way][0], strict=True)]
            decode_s = {w: s - prompt_s[w] for w, s in best.items()}
            others = min((s for w, s in decode_s.items() if w != "adaptive"), default=decode_s[way])
            rows.append(
                {
                    "commit": _git("rev-parse", "--short", "HEAD"),
                    "date": datetime.date.today().isoformat(),
                    "device": torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} x{args.threads} threads",
                    "clock": "cpu" if args.cpu_time else "wall",
                    "load_average": round(os.getloadavg()[0], 1),
                    "requests": count,
                    "temperature": args.temperature,
                    "draft": way,
                    "output_tokens": num_tokens,
                    "tokens_per_s": round(num_tokens / decode_s[way], 1),
                    "ms_per_token_of_a_request": round(decode_s[way] * 1e3 * count / num_tokens, 3),
                    "times_off": round(decode_s.get("off", decode_s[way]) / decode_s[way], 3),
                    "of_best_other": round(others / decode_s[way], 3),
                    "accepted": round(sum(places), 2),
                    "accepted_by_place": " ".join(f"{place:.2f}" for place in places),
                }
            )
            print(rows[-1], flush=True)
    for llm in engines.values():
        llm.shutdown()
    writer = csv.DictWriter(args.csv.open("w") if args.csv else sys.stdout, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
