# SPDX-License-Identifier: Apache-2.0
"""Claims about decode graphs: a step through the graphs' buffers, filled up with rows of nobody, gives what the step itself gives.

On a CPU a graph is stood in for by the forward that would have been captured: what is shown is the padding, the buffers and the choice of
the graph. On a GPU the graphs themselves are held to the eager run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from whalefall import LLM, SamplingParams
from whalefall.core.batch import CacheTensors
from whalefall.engine.embedded import embedded_model_dir
from whalefall.runtime.worker.graphs import GraphRunner, _Captured
from whalefall.testing.checkpoint import QUANTIZATION_CONFIG, TINY_CONFIG
from whalefall.testing.v41_tokenizer import write_v41_tokenizer

PROMPT_LENGTHS = (3, 40, 131, 7, 260, 90, 18)


class _Replay:
    """Runs the forward that a graph would have recorded, over the same buffers."""

    def __init__(self, runner: GraphRunner, rows: int, context: int) -> None:
        self.runner, self.batch = runner, runner._buffers.batch(rows, context, runner._cache.block_tokens)
        self.logits_LV = torch.empty(0)

    def replay(self) -> None:
        self.logits_LV.copy_(self.runner._model.forward(self.batch, self.runner._cache))


class PaddedRunner(GraphRunner):
    def _check(self) -> None:
        """There is no device to wait for."""

    def _capture(self, rows: int, context: int) -> _Captured:
        made = _Replay(self, rows, context)
        self._buffers.clear(rows)
        made.logits_LV = self._model.forward(made.batch, self._cache)
        return _Captured(made, made.logits_LV)  # type: ignore[arg-type]


def answers(**options: Any) -> tuple[list[tuple[int, ...]], LLM]:
    options = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 26} | options
    llm = LLM(**({"model": embedded_model_dir()} | options))
    return generate(llm), llm


@pytest.fixture
def gpu_model(tmp_path: Path) -> dict[str, Any]:
    """Options of a small model with layer sizes that every kernel of a GPU takes."""
    text = TINY_CONFIG["text_config"] | {"hidden_size": 512, "moe_intermediate_size": 512}
    config = TINY_CONFIG | {"text_config": text, "quantization_config": QUANTIZATION_CONFIG}
    write_v41_tokenizer(tmp_path, text["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    return {"model": tmp_path, "load_format": "random", "device": "cuda", "dtype": "bfloat16"}


def generate(llm: LLM) -> list[tuple[int, ...]]:
    size = llm.config.vocab_size - 60
    prompts = [{"prompt_token_ids": [(17 * i + 5 * n) % size + 50 for i in range(n)]} for n in PROMPT_LENGTHS]
    params = [SamplingParams(temperature=0, max_tokens=6 + 3 * i, ignore_eos=True) for i in range(len(prompts))]
    return [tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def test_filled_up_steps_give_the_tokens_of_plain_ones() -> None:
    wanted, llm = answers(device="cpu")
    worker = llm.core._worker
    cache: CacheTensors = worker.cache
    runner = PaddedRunner(
        worker._runner._model, cache, worker.config.vocab_size, max_rows=8, max_context=1024, spare_slot=7, history_tokens=3
    )
    worker._runner = runner
    assert runner.capture() == 4  # 1, 2, 4 and 8 rows
    assert generate(llm) == wanted
    assert runner.num_replays > 15, "decode steps did not take the graphs"
    assert llm.core.gauges.ring_tag_mismatches == 0
    llm.shutdown()


@pytest.mark.gpu
def test_graphs_give_the_tokens_of_the_eager_run(gpu_model: dict[str, Any]) -> None:
    eager, first = answers(**gpu_model, enforce_eager=True)
    first.shutdown()
    captured, second = answers(**gpu_model)
    runner = second.core._worker._runner
    assert isinstance(runner, GraphRunner) and runner.num_replays > 15
    second.shutdown()
    same = sum(a == b for a, b in zip(eager, captured))
    assert same >= len(eager) - 1, f"{same} of {len(eager)} answers are equal: more than one rounding apart"


@pytest.mark.gpu
def test_a_step_of_decode_does_not_wait_for_the_device(gpu_model: dict[str, Any]) -> None:
    llm = LLM(**gpu_model, max_model_len=1024, max_num_seqs=4, kv_cache_memory_bytes=1 << 26)
    worker, launch = llm.core._worker, llm.core._worker.launch
    plans: list[int] = []

    def watched(plan: Any) -> Any:
        is_decode = not plan.new_requests and all(step.num_tokens == 1 for step in plan.steps)
        torch.cuda.set_sync_debug_mode("error" if is_decode else "default")
        try:
            plans.append(is_decode)
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    worker.launch = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [300 + i, 301, 302]} for i in range(3)], params, use_tqdm=False)
    assert sum(plans) > 10
    llm.shutdown()
