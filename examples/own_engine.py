# SPDX-License-Identifier: Apache-2.0
"""An engine of one's own: scheduler + cache + worker + toy model, no server, no threads.

Run: python examples/own_engine.py

Five requests share one step budget that is smaller than their prompts, and a pool of blocks too small for all of them: prompts are read
in chunks beside answers that are being written, and somebody is preempted and comes back. The last request is the first one again, alone,
and gets the same tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch

from whalefall.core.plan import StepPlan
from whalefall.core.request import EngineRequest
from whalefall.core.sampling import SamplingParams
from whalefall.core.seams import LocalComm
from whalefall.models.definition import BuildContext
from whalefall.models.toy import DEFINITION
from whalefall.models.toy.config import ToyConfig
from whalefall.models.toy.weights import random_weights
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler.config import SchedulerConfig
from whalefall.runtime.scheduler.scheduler import Scheduler
from whalefall.runtime.worker.step_handle import StepHandle
from whalefall.runtime.worker.worker import Worker, WorkerConfig

BLOCK_TOKENS, NUM_BLOCKS, NUM_SLOTS, MAX_MODEL_LEN = 16, 13, 4, 128


def build_worker() -> Worker:
    """A model, what it wants to keep, and the worker that runs it."""
    config = ToyConfig()
    device = torch.device("cpu")
    context = BuildContext(
        dtype=torch.float32, device=device, weights="dense", kv_cache_dtype="unrounded", comm=LocalComm(), model_dir=Path()
    )
    built = DEFINITION.build(config, context)
    for name, tensor in random_weights(config, seed=0).items():
        built.sink.put(name, tensor)  # a checkpoint's tensors take the same way
    built.sink.finish()
    spec = DEFINITION.cache_spec(config, context, BLOCK_TOKENS)
    worker_config = WorkerConfig(
        num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS, max_model_len=MAX_MODEL_LEN, vocab_size=config.vocab_size, device=device
    )
    return Worker(built.model, spec, worker_config)


def run(scheduler: Scheduler, worker: Worker) -> dict[str, list[int]]:
    """The step loop, one step ahead: the next plan is launched before the last result is read."""
    answers: dict[str, list[int]] = {}
    pending: tuple[StepPlan, StepHandle] | None = None
    while scheduler.has_work:
        plan = scheduler.plan(now_s=0.0)
        launched = (plan, worker.launch(plan)) if plan is not None else None
        if pending is not None:
            for update in scheduler.commit(pending[0], pending[1].wait(), now_s=0.0):
                answers.setdefault(update.request_id, []).extend(update.new_token_ids)
        pending = launched
    return answers


def main() -> None:
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=NUM_SLOTS, max_num_batched_tokens=24)
    scheduler = Scheduler(config, CacheManager(NUM_BLOCKS, BLOCK_TOKENS, NUM_SLOTS))
    worker = build_worker()
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24)
    prompts = [tuple(range(10 * i, 10 * i + 40 + 3 * i)) for i in range(1, 6)]
    for i, prompt in enumerate(prompts):
        scheduler.add(EngineRequest(request_id=f"crowd-{i}", prompt_token_ids=prompt, sampling=sampling))
    answers = run(scheduler, worker)
    scheduler.add(EngineRequest(request_id="alone", prompt_token_ids=prompts[0], sampling=sampling))
    answers |= run(scheduler, worker)
    for name in sorted(answers):
        print(name, *answers[name])
    print(f"preemptions: {scheduler.num_preemptions}")
    print(f"same tokens alone and in a crowd: {answers['alone'] == answers['crowd-0']}")


if __name__ == "__main__":
    main()
