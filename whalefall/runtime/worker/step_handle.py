# SPDX-License-Identifier: Apache-2.0
"""A launched step: what is still on the device, and how it becomes the StepResult that the scheduler commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from whalefall.core.plan import RequestResult, StepPlan, StepResult
from whalefall.core.request import TokenLogprobs
from whalefall.runtime.sampling.logprobs import LogprobRows
from whalefall.runtime.sampling.sampler import Fault, Sampled
from whalefall.runtime.worker.batch_builder import LogitRows
from whalefall.runtime.worker.health import HealthProbe

FAULT_TEXTS = {
    Fault.NON_FINITE: "non-finite logits",
    Fault.ALL_FORBIDDEN: "grammar, logit_bias, min_tokens and stop ids together forbid every token",
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """The sampling part of a step, S rows."""

    sampled: Sampled
    reporting: npt.NDArray[np.int64]
    """Which of the S rows want log-probabilities."""
    logprobs: LogprobRows | None
    """Of the reporting rows."""
    grammar_faults: Mapping[int, str] = field(default_factory=dict)
    """Row -> why its grammar allows nothing."""


class StepHandle:
    """Holds what a step needs until its result is read."""

    def __init__(
        self,
        plan: StepPlan,
        wanted: LogitRows,
        drawn: Drawn,
        scored: LogprobRows | None,
        clean_up: Callable[[int], None],
        health: HealthProbe,
    ) -> None:
        self._plan = plan
        self._wanted = wanted
        self._drawn = drawn
        self._scored = scored
        self._clean_up = clean_up
        self._health = health

    def wait(self) -> StepResult:
        """Block until the step is done and give its result, one entry per request of the plan. Called once.

        What a faulted request leaves in its blocks and rings is made harmless here, before the scheduler can give them to another.
        """
        tokens, logprobs, faults = self._read_drawn()
        prompt_logprobs = self._read_scored(faults)
        request_S = self._wanted.sample_request_S
        grammar_faults = {int(request_S[row]): f"the grammar cannot go on ({why})" for row, why in self._drawn.grammar_faults.items()}
        results = []
        for request, step in enumerate(self._plan.steps):
            fault = faults.get(request)
            if fault is not None:
                self._clean_up(step.slot)
                last = step.start + step.num_tokens - 1
                where = f"in step {self._plan.step_id}, rows {step.start} to {last}"
                text = grammar_faults.get(request, FAULT_TEXTS[fault]) if fault is Fault.ALL_FORBIDDEN else FAULT_TEXTS[fault]
                results.append(RequestResult(fault=f"{text} {where}", is_cache_sound=fault is Fault.ALL_FORBIDDEN))
                continue
            results.append(
                RequestResult(
                    token_ids=tokens[request],
                    logprobs=logprobs.get(request),
                    prompt_logprobs=prompt_logprobs[request] if step.wants_prompt_logprobs else None,
                )
            )
        health = self._health.read(self._plan.step_id)  # after the ids: then its copy has arrived as well
        return StepResult(step_id=self._plan.step_id, results=tuple(results), health=health)

    def _read_drawn(self) -> tuple[list[tuple[int, ...]], dict[int, tuple[TokenLogprobs, ...]], dict[int, Fault]]:
        """Per request of the plan: its tokens, its log-probabilities if asked for, its fault if any."""
        request_S = self._wanted.sample_request_S.tolist()
        tokens: list[tuple[int, ...]] = [()] * len(self._plan.steps)
        for request, token_id in zip(request_S, self._drawn.sampled.ids_L.tolist()):
            tokens[request] = (token_id,)
        faults: dict[int, Fault] = {r: Fault(f) for r, f in zip(request_S, self._drawn.sampled.fault_L.tolist()) if f}
        reports = [] if self._drawn.logprobs is None else self._drawn.logprobs.tokens()
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {
            request_S[row]: (report,) for row, report in zip(self._drawn.reporting.tolist(), reports)
        }
        return tokens, logprobs, faults

    def _read_scored(self, faults: dict[int, Fault]) -> list[tuple[TokenLogprobs, ...]]:
        """Per request: its scored prompt positions. Adds a fault where one of them is not a number."""
        scored = [] if self._scored is None else self._scored.tokens()
        ends = np.cumsum(self._wanted.num_prompt_rows_B).tolist()
        parts = [tuple(scored[first:end]) for first, end in pairwise([0, *ends])]
        for request, part in enumerate(parts):
            if any(np.isnan(entry.logprob) for entry in part):
                faults.setdefault(request, Fault.NON_FINITE)
        return parts
