# SPDX-License-Identifier: Apache-2.0
"""A scheduler's life as lines of JSON: every event that reaches it is one line, plans included.

So the trace of a server in trouble can be lived again on a desk (rerun.py). Log-probabilities are left out except for their count: no plan
depends on them. Prompts are in it: a trace is as confidential as what users typed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from whalefall.core.plan import StepPlan, StepResult
from whalefall.core.request import EngineRequest, FinishReason
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.kvcache.tiers.ledger import TierLedger
from whalefall.runtime.kvcache.tiers.moves import MoveReport
from whalefall.runtime.scheduler.config import SchedulerConfig


class TraceWriter:
    """Gives each event as a line (without line end) to `sink`: a list's append, or a function that writes to a file."""

    def __init__(self, sink: Callable[[str], object]) -> None:
        self._sink = sink

    def start(self, config: SchedulerConfig, cache: CacheManager, tiers: TierLedger | None) -> None:
        sizes = {"num_blocks": cache.num_blocks, "block_tokens": cache.block_tokens, "num_slots": cache.num_slots}
        self._write("start", config=asdict(config), cache=sizes, tiers=None if tiers is None else asdict(tiers.config))

    def add(self, request: EngineRequest) -> None:
        self._write("add", request=asdict(request))

    def abort(self, request_ids: tuple[str, ...], reason: FinishReason) -> None:
        self._write("abort", request_ids=request_ids, reason=reason)

    def fail_all(self, message: str) -> None:
        self._write("fail_all", message=message)

    def reset_prefix_cache(self) -> None:
        self._write("reset_prefix_cache")

    def moved(self, report: MoveReport) -> None:
        self._write("moved", report=report)

    def plan(self, plan: StepPlan | None, now_s: float) -> None:
        if plan is None:
            self._write("plan", now_s=now_s, step_id=None)
            return
        new_requests = [[new.request_id, new.slot, new.token_ids, new.start, new.restore_block] for new in plan.new_requests]
        self._write("plan", now_s=now_s, step_id=plan.step_id, new_requests=new_requests, steps=plan.steps)

    def commit(self, result: StepResult, now_s: float) -> None:
        results = [[gave.token_ids, len(gave.prompt_logprobs or ()), gave.fault, gave.is_cache_sound] for gave in result.results]
        self._write("commit", now_s=now_s, step_id=result.step_id, results=results)

    def _write(self, event: str, **fields: Any) -> None:
        self._sink(json.dumps({"event": event, **fields}, separators=(",", ":")))
