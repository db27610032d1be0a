# SPDX-License-Identifier: Apache-2.0
"""Live a recorded trace again: the same events through `rerun` give the same lines, byte for byte, or the scheduler has changed."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from whalefall.core.plan import RequestResult, StepPlan, StepResult
from whalefall.core.request import EngineRequest, FinishReason, TokenLogprobs
from whalefall.core.sampling import SamplingParams
from whalefall.core.structure import StructuredSpec
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.kvcache.tiers.ledger import LedgerConfig, TierLedger
from whalefall.runtime.kvcache.tiers.moves import MoveReport
from whalefall.runtime.scheduler.config import SchedulerConfig
from whalefall.runtime.scheduler.scheduler import Scheduler
from whalefall.runtime.scheduler.trace import TraceWriter


def rerun(lines: Iterable[str]) -> list[str]:
    """Send the recorded events through a new scheduler with the recorded configuration; the trace that it writes meanwhile."""
    again: list[str] = []
    plans: deque[StepPlan] = deque()
    events = (json.loads(line) for line in lines)
    start = next(events)
    assert start["event"] == "start", "a trace begins with its start line"
    cache = CacheManager(**start["cache"])
    tiers = None if start["tiers"] is None else TierLedger(cache, LedgerConfig(**start["tiers"]))
    scheduler = Scheduler(SchedulerConfig(**start["config"]), cache, tiers=tiers, trace=TraceWriter(again.append))
    for event in events:
        _apply(event, scheduler, plans)
    return again


def _apply(event: dict[str, Any], scheduler: Scheduler, plans: deque[StepPlan]) -> None:
    match event["event"]:
        case "add":
            scheduler.add(_request_of(event["request"]))
        case "abort":
            scheduler.abort(event["request_ids"], FinishReason(event["reason"]))
        case "fail_all":
            scheduler.fail_all(event["message"])
            plans.clear()
        case "reset_prefix_cache":
            scheduler.reset_prefix_cache()
        case "moved":
            scheduler.moved(MoveReport(*event["report"]))
        case "plan":
            plan = scheduler.plan(event["now_s"])
            if plan is not None:
                plans.append(plan)
        case "commit":
            results = tuple(_result_of(*gave) for gave in event["results"])
            scheduler.commit(plans.popleft(), StepResult(step_id=event["step_id"], results=results), event["now_s"])


def _request_of(fields: dict[str, Any]) -> EngineRequest:
    sampling = dict(fields["sampling"])
    sampling["logit_bias"] = {int(token_id): bias for token_id, bias in sampling["logit_bias"].items()}  # JSON keys are strings
    if sampling.get("structured_outputs") is not None:
        sampling["structured_outputs"] = StructuredSpec(**{**sampling["structured_outputs"], "parts": ()})
    ids = {name: tuple(fields[name]) for name in ("prompt_token_ids", "eos_token_ids")}
    return EngineRequest(**{**fields, **ids, "sampling": SamplingParams(**sampling)})


def _result_of(token_ids: list[int], num_prompt_logprobs: int, fault: str | None, is_cache_sound: bool) -> RequestResult:
    blank = TokenLogprobs(token_id=0, logprob=0.0, rank=1, top_ids=None, top_logprobs=np.zeros(0, dtype=np.float32))
    scores = (blank,) * num_prompt_logprobs or None
    return RequestResult(token_ids=tuple(token_ids), prompt_logprobs=scores, fault=fault, is_cache_sound=is_cache_sound)
