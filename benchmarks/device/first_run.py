# SPDX-License-Identifier: Apache-2.0
"""First light on a GPU: does the engine run, are its numbers right, what do load and decode cost, and where does a decode step go?

Sections are independent: one that fails prints its traceback and the next one runs. Results are written as they come.
Run: python -m benchmarks.device.first_run --out DIR [--goldens DIR/v41-k-quant] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.v41_cut import expected_experts, write_model_dir
from whalefall import LLM, SamplingParams
from whalefall.bench.offline import random_prompts, run_decode

KRILL = Path("whalefall/assets/krill")


def machine(_: argparse.Namespace) -> dict[str, Any]:
    import triton

    free, total = torch.cuda.mem_get_info()
    return {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name(), "free": free, "total": total}


def krill(_: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens on the GPU against the CPU's, both float32."""
    prompts = [{"prompt_token_ids": p} for p in random_prompts(6, 90, 4000, 3)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    answers = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        llm = LLM(model=KRILL, device=device, dtype=dtype, kv_cache_memory_bytes=1 << 28, max_num_seqs=16, max_model_len=2048)
        answers[device, dtype] = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        llm.shutdown()
    truth = answers["cpu", "float32"]
    same = {dtype: sum(a == b for a, b in zip(answers["cuda", dtype], truth)) for dtype in ("float32", "bfloat16")}
    return {"prompts": len(prompts), "equal_float32": same["float32"], "equal_bfloat16": same["bfloat16"]}


def goldens(args: argparse.Namespace) -> dict[str, Any]:
    """Every row of every prompt: relative L2 error of the centred log probabilities, and agreement of the best token."""
    expected = load_file(args.goldens / "expected.safetensors")
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        llm = LLM(
            model=args.goldens, device="cuda", dtype=dtype, replay="exact", kv_cache_dtype="unrounded", max_logprobs=-1,
            kv_cache_memory_bytes=1 << 28, max_num_seqs=8, enable_prefix_caching=False,
        )  # fmt: skip
        errors, agree, worst = [], [], 0.0
        for n in (1, 2, 3, 7, 16, 33, 70, 130, 300):
            ids, logits_TV = expected[f"prompt.{n}.input_ids"].tolist(), expected[f"prompt.{n}.logits"]
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, logprobs=-1, ignore_eos=True, detokenize=False)
            output = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
            assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
            rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
            got_TV = torch.tensor([[row[v].logprob for v in range(logits_TV.shape[1])] for row in rows if row is not None])
            a_TV, b_TV = got_TV - got_TV.mean(-1, keepdim=True), logits_TV - logits_TV.mean(-1, keepdim=True)
            errors.append((a_TV - b_TV).norm(dim=-1) / b_TV.norm(dim=-1))
            worst = max(worst, float((got_TV - logits_TV.log_softmax(-1)).abs().max()))
            agree.append(a_TV.argmax(-1) == b_TV.argmax(-1))
        error = torch.cat(errors)
        found[dtype] = {
            "median_rel_l2": float(error.median()),
            "p90_rel_l2": float(error.quantile(0.9)),
            "argmax": float(torch.cat(agree).float().mean()),
            "worst_logprob": worst,
        }
        llm.shutdown()
    return found


def load_cut(args: argparse.Namespace) -> dict[str, Any]:
    """v41-cut with drawn weights: how long, how much, how the routing spreads, and a decode step run eagerly."""
    folder = write_model_dir(Path(tempfile.mkdtemp()))
    begin = time.perf_counter()
    llm = LLM(
        model=folder, load_format="random", device="cuda", dtype="bfloat16", max_model_len=20_480, max_num_seqs=64,
        kv_cache_memory_bytes=6 << 30, enable_prefix_caching=False,
    )  # fmt: skip
    torch.cuda.synchronize()
    result: dict[str, Any] = {"load_s": time.perf_counter() - begin, "allocated_gib": torch.cuda.memory_allocated() / 2**30}
    report(args, "load_cut", result)
    result["spread"] = routing_spread(llm)
    report(args, "load_cut", result)
    for batch in args.batches:
        prompts = random_prompts(batch, 1024, llm.config.vocab_size, batch)
        begin = time.perf_counter()
        row = run_decode(llm, prompts, 12)
        steps = None if row.step_ms is None else {f"p{p:g}": row.step_ms.at(p) for p in (10.0, 50.0, 90.0)}
        result[f"B{batch}"] = {"step_ms": steps, "wall_s": time.perf_counter() - begin}
        report(args, "load_cut", result)
    profile(llm, args)
    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    llm.shutdown()
    return result


def routing_spread(llm: LLM) -> dict[str, Any]:
    """Distinct experts per layer in a step of 64 tokens, in the mean over layers; uniform routing would give `expected`."""
    from whalefall.layers.moe import Gate

    counts: list[int] = []
    plain = Gate.forward

    def counted(self: Gate, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        expert_TA, weight_TA = plain(self, x_TH)
        if x_TH.shape[0] == 64:
            counts.append(int(expert_TA.unique().numel()))
        return expert_TA, weight_TA

    Gate.forward = counted  # type: ignore[method-assign]
    try:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": p} for p in random_prompts(64, 40, llm.config.vocab_size, 1)]
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        Gate.forward = plain  # type: ignore[method-assign]
    return {"rows": 64, "mean_experts": sum(counts) / max(1, len(counts)), "expected": expected_experts(64), "layers_seen": len(counts)}


def profile(llm: LLM, args: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    for batch in (1, 64):
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": p} for p in random_prompts(batch, 64, llm.config.vocab_size, 9)]
        with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
            llm.generate(prompts, params, use_tqdm=False)
        for key in ("self_cuda_time_total", "self_cpu_time_total"):
            table = watched.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=70)
            (args.out / f"profile_B{batch}_{key}.txt").write_text(table)


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """The device script of the kernel families."""
    import runpy
    import sys

    done = {}
    for name in ("benchmarks.kernels.gpu_k1",):
        sys.argv = [name, "--out", str(args.out / f"{name.rpartition('.')[2]}.csv")]
        try:
            runpy.run_module(name, run_name="__main__")
            done[name] = "ran"
        except BaseException as error:
            traceback.print_exc()
            done[name] = f"{type(error).__name__}: {error}"[:300]
    return done


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "machine": machine, "krill": krill, "goldens": goldens, "load_cut": load_cut, "kernels": kernels,
}  # fmt: skip
RESULTS: dict[str, Any] = {}


def report(args: argparse.Namespace, name: str, result: Any) -> None:
    RESULTS[name] = result
    (args.out / "first_run.json").write_text(json.dumps(RESULTS, indent=1, default=str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--goldens", type=Path)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        begin = time.perf_counter()
        try:
            report(args, name, SECTIONS[name](args))
        except BaseException as error:
            traceback.print_exc()
            report(args, name, RESULTS.get(name, {}) | {"error": f"{type(error).__name__}: {error}"[:600]})
        gc.collect()
        torch.cuda.empty_cache()
        print(f"== {name}: {time.perf_counter() - begin:.1f} s\n{json.dumps(RESULTS[name], default=str)}", flush=True)


if __name__ == "__main__":
    main()
