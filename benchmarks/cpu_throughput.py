# SPDX-License-Identifier: Apache-2.0
"""How many tokens a second does the engine give on a CPU, against Hugging Face transformers on a model of equal size and depth?

Ours is DeepSeek-V4.1 under continuous batching; theirs is DeepSeek-V4 (transformers has no V4.1) generating the same prompts as one
padded static batch. Random weights, float32, greedy, end of sequence ignored. Both in one run and one process with the same number of
threads; each figure is the better of two rounds. Two kinds of load:

* `varied`, what a server sees: answers of 4 to 256 tokens, log-normal with a mean near 55. A static batch runs until its longest answer is
  done; only the tokens that were asked for count.
* `equal`, the kindest to a static batch: every answer has 64 tokens, so that nobody waits for anybody.

Win: at 64 concurrent requests at least 5 times the output tokens per second under the varied load.
Run: python -m benchmarks.cpu_throughput [--threads 2] [--concurrency 1 16 64 150] [--answers varied equal] [--csv out.csv]
(needs the `bench` extra)
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from whalefall import LLM, SamplingParams
from whalefall.testing.checkpoint import TINY_CONFIG, write_checkpoint

EQUAL_TOKENS = 64
LONGEST, SHORTEST = 256, 4
PROMPT_TOKENS = (32, 256)
SEED = 7


def our_config() -> dict[str, Any]:
    """The tiny test shape, made wider: 8 layers of every kind, 16 experts."""
    config = dict(TINY_CONFIG)
    config["text_config"] = TINY_CONFIG["text_config"] | {
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "sliding_window": 128,
        "index_topk": 64,
        "candidate_topk_blocks": 16,
        "max_position_embeddings": 4096,
    }
    return config


def their_model(vocab_size: int) -> Any:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(SEED)
    config = DeepseekV4Config(
        vocab_size=vocab_size,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=64,
        partial_rotary_factor=0.25,
        q_lora_rank=64,
        num_experts_per_tok=3,
        n_routed_experts=16,
        layer_types=["sliding_attention"] + ["compressed_sparse_attention", "heavily_compressed_attention"] * 3 + ["sliding_attention"],
        mlp_layer_types=["moe"] * 8,
        sliding_window=128,
        o_groups=4,
        o_lora_rank=32,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,
        max_position_embeddings=4096,
        pad_token_id=2,
    )
    return DeepseekV4ForCausalLM(config).eval()


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(SEED)
    return [[rng.randrange(3, min(250, vocab_size)) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(count)]


def answers(kind: str, count: int) -> list[int]:
    """Tokens asked for, per request."""
    if kind == "equal":
        return [EQUAL_TOKENS] * count
    rng = random.Random(SEED + 1)
    return [min(LONGEST, max(SHORTEST, round(rng.lognormvariate(3.6, 0.9)))) for _ in range(count)]


def run_ours(llm: LLM, ids: list[list[int]], lengths: list[int]) -> tuple[float, float]:
    """(seconds in all, mean seconds to the first token)."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in ids], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    return seconds, sum(o.metrics.time_to_first_token for o in outputs) / len(outputs)


def run_theirs(model: Any, ids: list[list[int]], lengths: list[int]) -> tuple[float, float]:
    width = max(map(len, ids))
    padded = torch.tensor([[2] * (width - len(p)) + p for p in ids])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2, "attention_mask": mask}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin = time.perf_counter()
        model.generate(padded, max_new_tokens=1, **options)
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        out = model.generate(padded, max_new_tokens=max(lengths), **options)
        seconds = time.perf_counter() - begin
    assert out.shape[1] == width + max(lengths)
    return seconds, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 150])
    parser.add_argument("--answers", nargs="+", choices=("varied", "equal"), default=["varied", "equal"])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--skip-theirs", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), our_config(), seed=SEED, quantised=False)
        llm = LLM(model=folder, dtype="float32", max_num_seqs=256, kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False)
        vocab = llm.model_config.vocab_size
        theirs = None if args.skip_theirs else their_model(vocab)
        sizes = {"whalefall": llm.config.weights_bytes // 4}
        if theirs is not None:
            sizes["transformers"] = sum(p.numel() for p in theirs.parameters())
        run_ours(llm, prompts(2, vocab), [EQUAL_TOKENS] * 2)
        for kind, count in itertools.product(args.answers, args.concurrency):
            ids, lengths = prompts(count, vocab), answers(kind, count)
            results = {"whalefall": min(run_ours(llm, ids, lengths) for _ in range(2))}
            if theirs is not None:
                results["transformers"] = min(run_theirs(theirs, ids, lengths) for _ in range(2))
            for engine, (seconds, ttft) in results.items():
                rows.append(
                    {
                        "commit": _git("rev-parse", "--short", "HEAD"),
                        "date": datetime.date.today().isoformat(),
                        "device": platform.machine() + f" x{args.threads} threads",
                        "load_average": round(os.getloadavg()[0], 1),
                        "torch": torch.__version__,
                        "engine": engine,
                        "parameters": sizes[engine],
                        "answers": kind,
                        "concurrency": count,
                        "output_tokens": sum(lengths),
                        "output_tokens_per_s": round(sum(lengths) / seconds, 1),
                        "mean_ttft_ms": round(ttft * 1e3, 1),
                        "times_transformers": round(results["transformers"][0] / seconds, 2) if theirs is not None else "",
                    }
                )
                print(rows[-1], flush=True)
        llm.shutdown()
    writer = csv.DictWriter(args.csv.open("w") if args.csv else sys.stdout, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
