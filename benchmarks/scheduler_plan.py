# SPDX-License-Identifier: Apache-2.0
"""How long does the scheduler take to plan 256 decoding requests, and to commit what they gave?

Win: plan <= 1 ms in the median (commit beside it, no target of its own). One step ahead, 1,000-token prompts, 64-token blocks, so that four
requests in 256 want a new block in a step; the worker's answer is prepared outside the clock.
Run: python -m benchmarks.scheduler_plan [--requests 256] [--steps 400]
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import subprocess
import time

from whalefall.core.plan import RequestResult, StepPlan, StepResult
from whalefall.core.request import EngineRequest
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler import Scheduler, SchedulerConfig

NUM_WARM_STEPS = 50
COLUMNS = "commit,date,device,python,num_requests,num_steps,plan_median_ms,plan_p10_ms,plan_p90_ms,commit_median_ms,plan_us_per_request"


def decoding_scheduler(num_requests: int, num_steps: int) -> Scheduler:
    config = SchedulerConfig(max_model_len=4_096, max_num_seqs=num_requests, max_num_batched_tokens=8_192, decoder_window=128)
    scheduler = Scheduler(config, CacheManager(num_requests * 64 + 1, 64, num_requests))
    for i in range(num_requests):
        sampling = SamplingParams(max_tokens=num_steps + 500, seed=i)
        # Lengths differ, or all would want their next block in the same step.
        prompt = tuple(range(5, 1_005 + i % 64))
        scheduler.add(EngineRequest(request_id=f"request-{i}", prompt_token_ids=prompt, sampling=sampling, eos_token_ids=(1,)))
    is_decoding = False
    while not is_decoding:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.commit(plan, answer(plan), 0.0)
        is_decoding = plan.num_tokens == len(plan.steps) == num_requests
    return scheduler


def answer(plan: StepPlan) -> StepResult:
    results = tuple(RequestResult(token_ids=(7,) if step.samples else ()) for step in plan.steps)
    return StepResult(step_id=plan.step_id, results=results)


def measure(scheduler: Scheduler, num_steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds per plan and per commit, one step ahead."""
    plan_ms, commit_ms = [], []
    pending = scheduler.plan(0.0)
    for step in range(NUM_WARM_STEPS + num_steps):
        assert pending is not None
        given = answer(pending)
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        scheduler.commit(pending, given, 0.0)
        committed = time.perf_counter()
        pending = plan
        if step >= NUM_WARM_STEPS:
            plan_ms.append((planned - start) * 1e3)
            commit_ms.append((committed - planned) * 1e3)
    return plan_ms, commit_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    plan_ms, commit_ms = measure(decoding_scheduler(args.requests, args.steps), args.steps)
    deciles = statistics.quantiles(plan_ms, n=10)
    median = statistics.median(plan_ms)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    print(COLUMNS)
    print(
        f"{commit},{datetime.date.today()},{platform.machine()} cpu,{platform.python_version()},{args.requests},{args.steps},"
        f"{median:.3f},{deciles[0]:.3f},{deciles[-1]:.3f},{statistics.median(commit_ms):.3f},{median * 1e3 / args.requests:.2f}"
    )


if __name__ == "__main__":
    main()
