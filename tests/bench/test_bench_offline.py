# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whalefall.bench.command import app
from whalefall.bench.offline import decode_steps, engine_options, random_prompts, run_decode, run_latency, run_throughput
from whalefall.core.errors import ConfigError
from whalefall.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from whalefall.testing.toy_checkpoint import write_toy_checkpoint


class SteppingEngine:
    """Prefills one prompt a second, then gives every request one token each half second."""

    def __init__(self) -> None:
        self.now = 50.0
        self.asked: list = []

    def generate(self, prompts, sampling_params, *, use_tqdm):
        self.asked.append(sampling_params)
        start, count, tokens = self.now, len(prompts), sampling_params.max_tokens
        outputs = []
        for i, prompt in enumerate(prompts):
            times = [start + i + 1 + 0.5 * n for n in range(tokens)]
            metrics = RequestMetrics(start, first_token_time=times[0], last_token_time=times[-1], token_times=[times])
            output = RequestOutput("x", None, prompt["prompt_token_ids"], metrics=metrics)
            output.outputs = [CompletionOutput(0, token_ids=[0] * tokens)]
            outputs.append(output)
        self.now = start + count + 0.5 * tokens
        return outputs


def test_only_intervals_between_whole_steps_count() -> None:
    early, late = [1.0, 2.0, 3.0, 4.0, 7.0], [2.0, 3.0, 4.5, 7.0, 8.0]
    # Whole steps lie at 2, 3 and 7; 4 and 4.5 served one request only, 8 too.
    assert decode_steps([early, late]) == [1.0]


def test_step_that_gives_one_request_two_tokens_is_no_plain_step() -> None:
    assert decode_steps([[1.0, 2.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]) == [1.0]


def test_decode_row_holds_the_step_time_after_the_ramp() -> None:
    row = run_decode(SteppingEngine(), [[1] * 7, [2] * 7], num_steps=20)
    assert (row.batch, row.context) == (2, 7)
    assert row.step_ms is not None
    assert row.step_ms.at(50) == pytest.approx(500)
    assert row.output_tokens_per_s == pytest.approx(4)


def test_throughput_runs_from_the_first_arrival_to_the_last_token() -> None:
    engine = SteppingEngine()
    made = run_throughput(engine, [[1] * 10, [2] * 10], output_len=5)
    assert (made.prompt_tokens, made.output_tokens, made.duration_s) == (20, 10, pytest.approx(2 + 0.5 * 4))
    assert made.total_tokens_per_s == pytest.approx(30 / 4)
    assert made.ttft_ms is not None
    assert (made.ttft_ms.min, made.ttft_ms.max) == (pytest.approx(1_000), pytest.approx(2_000))
    assert (engine.asked[0].ignore_eos, engine.asked[0].temperature) == (True, 0.0)


def test_latency_leaves_warm_up_rounds_out() -> None:
    made = run_latency(SteppingEngine(), [[[1]], [[1], [1], [1]], [[1]]], output_len=3, num_warmup=1)
    assert made is not None
    assert (made.count, made.min, made.max) == (2, pytest.approx(2_000), pytest.approx(4_000))


def test_prompts_are_the_seeds_and_avoid_low_ids() -> None:
    assert random_prompts(3, 4, 1_000, 7) == random_prompts(3, 4, 1_000, 7) != random_prompts(3, 4, 1_000, 8)
    assert min(min(p) for p in random_prompts(50, 50, 1_000, 0)) >= 100
    assert all(32 <= i < 64 for p in random_prompts(5, 50, 64, 0) for i in p)


def test_engine_options_are_read_by_their_fields() -> None:
    assert engine_options(["dtype=float32", "max-num-seqs=8", "async_scheduling=true", "gpu_memory_utilization=0.5", "seed=none"]) == {
        "dtype": "float32",
        "max_num_seqs": 8,
        "async_scheduling": True,
        "gpu_memory_utilization": 0.5,
        "seed": None,
    }
    for item, words in (("dtype", "name=value"), ("max_num_seqs=many", "an integer"), ("async_scheduling=1", "true or false")):
        with pytest.raises(ConfigError, match=words):
            engine_options([item])


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy") / "model")


def test_offline_commands_run_the_real_engine(toy: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    made = run(app, ["throughput", str(toy), "--num-prompts", "3", "--input-len", "9", "--output-len", "4", "--json"])
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["output_tokens"] == 12
    made = run(
        app, ["latency", str(toy), "--batch-size", "2", "--input-len", "5", "--output-len", "3", "--num-rounds", "2", "--num-warmup", "1"]
    )
    assert made.exit_code == 0, made.output
    assert "2 rounds of 2 x (5 in + 3 out)" in made.stdout
    out = tmp_path / "rows.csv"
    args = ["decode", str(toy), "--batch", "1", "--batch", "3", "--context", "20", "--num-steps", "6", "--out", str(out)]
    for _ in range(2):
        made = run(app, args)
        assert made.exit_code == 0, made.output
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(row["batch"], row["context"], row["num_steps"]) for row in rows] == [("1", "20", "6"), ("3", "20", "6")] * 2


def test_offline_benches_import_with_the_engines_own_packages_alone() -> None:
    """A bare GPU machine has torch, numpy, safetensors and tokenizers, typer and rich, and nothing of the server."""
    absent = ["deepseek_recipe", "llguidance", "fastapi", "uvicorn", "uvloop", "httptools", "orjson", "msgspec", "zmq", "pydantic"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); from whalefall import LLM; import whalefall.bench.command"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
