# SPDX-License-Identifier: Apache-2.0
"""The table of one GPU: decode steps, prefill, many requests at once and a cached prefix, on v41-cut with drawn weights.

Definitions, the same as for the stored peer figures: a decode step is an interval between two results in which every one of the B requests
got one token; time to first token runs from adding the request to the result with its first token; prompts are distinct random ids, greedy,
end of sequence ignored. Sections are independent and every figure is written as it comes.
Run: python -m benchmarks.device.hopper --out DIR [--only NAME ...] [--engine name=value ...]
"""

from __future__ import annotations

import argparse
import csv
import gc
import logging
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.v41_cut import write_model_dir
from whalefall import LLM, SamplingParams
from whalefall.bench.offline import engine_options, random_prompts, run_decode, run_throughput

FIELDS = ("engine", "what", "batch", "context", "value", "unit", "p10", "p90", "count", "note")


class Table:
    def __init__(self, file: Path, engine: str) -> None:
        self._file, self._engine, self.rows = file, engine, list[dict[str, Any]]()

    def add(self, what: str, value: float | None, unit: str, **more: Any) -> None:
        shown = None if value is None else round(value, 3)
        row: dict[str, Any] = {"engine": self._engine, "what": what, "value": shown, "unit": unit} | more
        self.rows.append(row)
        with self._file.open("a", newline="") as file:
            csv.DictWriter(file, FIELDS).writerow(row)
        print(",".join(str(row.get(f, "")) for f in FIELDS), flush=True)


def decode(llm: LLM, table: Table, context: int, batches: list[int], steps: int) -> None:
    for batch in batches:
        prompts = random_prompts(batch, context, llm.config.vocab_size, 1000 + batch)
        with HostTime(llm) as host:
            row = run_decode(llm, prompts, steps)
        made = row.step_ms
        table.add(
            "decode step", None if made is None else made.at(50.0), "ms", batch=batch, context=context,
            p10=None if made is None else round(made.at(10.0), 3), p90=None if made is None else round(made.at(90.0), 3),
            count=0 if made is None else made.count, note=host.text(),
        )  # fmt: skip


class HostTime:
    """Host milliseconds per step, of planning and launching together: what must stay below the device's step."""

    def __init__(self, llm: LLM) -> None:
        self._core, self._spent = llm.core, list[float]()

    def __enter__(self) -> HostTime:
        launch = self._core._launch

        def timed(plan: Any) -> Any:
            begin = time.perf_counter()
            made = launch(plan)
            self._spent.append(time.perf_counter() - begin)
            return made

        self._launch, self._core._launch = launch, timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._core._launch = self._launch  # type: ignore[method-assign]

    def text(self) -> str:
        spent = sorted(self._spent)
        return f"launch on the host {spent[len(spent) // 2] * 1e3:.2f} ms" if spent else ""


def prefill(llm: LLM, table: Table, length: int, times: int) -> None:
    values = []
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    for number in range(times + 1):
        ids = random_prompts(1, length, llm.config.vocab_size, 77 * length + number)[0]
        output = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
        assert output.metrics is not None and output.metrics.time_to_first_token is not None
        values.append(output.metrics.time_to_first_token * 1e3)
    warm = sorted(values[1:])
    best = warm[len(warm) // 2]
    table.add("prefill", best, "ms", batch=1, context=length, p10=round(warm[0], 2), p90=round(warm[-1], 2), count=times,
              note=f"first {values[0]:.1f} ms; {length / best * 1e3:,.0f} tok/s")  # fmt: skip


def mixed(llm: LLM, table: Table) -> None:
    for seed in (5, 6):
        made = run_throughput(llm, random_prompts(150, 2048, llm.config.vocab_size, seed), 256)
        assert made.ttft_ms is not None
        note = f"wall {made.duration_s:.2f} s; {made.output_tokens_per_s:,.0f} output tok/s; mean TTFT {made.ttft_ms.mean:,.0f} ms"
        table.add("150 x (2,048 in + 256 out)", made.total_tokens_per_s, "total tok/s", batch=150, context=2048, note=note)


def prefix(llm: LLM, table: Table) -> None:
    shared = random_prompts(1, 16_384, llm.config.vocab_size, 31)[0]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    values = []
    for number in range(8):
        ids = shared + random_prompts(1, 64, llm.config.vocab_size, 900 + number)[0]
        output = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
        assert output.metrics is not None and output.metrics.time_to_first_token is not None
        values.append((output.metrics.time_to_first_token * 1e3, output.num_cached_tokens))
    warm = sorted(value for value, _ in values[2:])
    table.add("16,384 cached + 64 new", warm[len(warm) // 2], "ms", batch=1, context=16_448, p10=round(warm[0], 2), p90=round(warm[-1], 2),
              count=len(warm), note=f"cold {values[0][0]:.1f} ms; cached tokens {values[-1][1]}")  # fmt: skip


def profile(llm: LLM, out: Path) -> None:
    """Where a decode step and a prefill spend the device's time: kernels by total time, in a file each."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    for name, batch, length, tokens in (
        ("decode1", 1, 64, 8),
        ("decode64", 64, 64, 8),
        ("decode256", 256, 16, 8),
        ("prefill8k", 1, 8192, 1),
    ):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": p} for p in random_prompts(batch, length, llm.config.vocab_size, 9 + batch + length)]
        with watch(activities=[ProfilerActivity.CUDA]) as seen:
            llm.generate(prompts, params, use_tqdm=False)
        (out / f"profile_{name}.txt").write_text(
            seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=60)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="graphs, one step ahead")
    parser.add_argument("--engine", nargs="*", default=[])
    parser.add_argument("--only", nargs="+", default=["decode1k", "prefill", "mixed", "prefix", "decode16k"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 150, 256])
    parser.add_argument("--long-batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "hopper.csv"
    if not file.exists():
        file.write_text(",".join(FIELDS) + "\n")
    table = Table(file, args.name)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s %(message)s")
    begin = time.perf_counter()
    options = {"max_model_len": 135_168, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.92}
    llm = LLM(
        model=write_model_dir(Path(tempfile.mkdtemp())), load_format="random", device="cuda", dtype="bfloat16",
        **(options | engine_options(args.engine)),
    )  # fmt: skip
    torch.cuda.synchronize()
    table.add("start", time.perf_counter() - begin, "s", note=f"{torch.cuda.memory_allocated() / 2**30:.2f} GiB allocated")
    sections: dict[str, Callable[[], None]] = {
        "decode1k": lambda: decode(llm, table, 1024, args.batches, args.steps),
        "prefill": lambda: [prefill(llm, table, n, 3 if n < 100_000 else 1) for n in args.lengths] and None,
        "mixed": lambda: mixed(llm, table),
        "prefix": lambda: prefix(llm, table),
        "profile": lambda: profile(llm, args.out),
        "decode16k": lambda: decode(llm, table, 16_384, args.long_batches, args.steps),
    }
    for name in args.only:
        begin = time.perf_counter()
        try:
            sections[name]()
        except Exception as error:
            traceback.print_exc(limit=12)
            table.add(name, None, "", note=f"FAILED {type(error).__name__}: {error}"[:300])
        print(f"# {name}: {time.perf_counter() - begin:.1f} s", flush=True)
    table.add("peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    llm.shutdown()
    gc.collect()


if __name__ == "__main__":
    main()
