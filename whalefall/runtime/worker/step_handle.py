# SPDX-License-Identifier: Apache-2.0
"""A launched step: what is still on the device, and how it becomes the StepResult that the scheduler commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from whalefall.core.plan import RequestResult, RequestStep, StepPlan, StepResult
from whalefall.core.request import TokenLogprobs
from whalefall.runtime.sampling.logprobs import LogprobRows
from whalefall.runtime.sampling.sampler import Fault
from whalefall.runtime.spec.verify import Judged
from whalefall.runtime.worker.batch_builder import LogitRows
from whalefall.runtime.worker.health import HealthProbe
from whalefall.runtime.worker.readback import Readback

FAULT_TEXTS = {
    Fault.NON_FINITE: "non-finite logits",
    Fault.ALL_FORBIDDEN: "grammar, logit_bias, min_tokens and stop ids together forbid every token",
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """The sampling part of a step, S rows of R requests."""

    judged: Judged
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
        steps: Sequence[RequestStep],
        wanted: LogitRows,
        drawn: Drawn,
        scored: LogprobRows | None,
        clean_up: Callable[[int], None],
        health: HealthProbe,
    ) -> None:
        """steps: the plan's as they were really run."""
        self._plan = plan
        self._steps = steps
        self._wanted = wanted
        self._drawn = drawn
        self._scored = scored
        judged = drawn.judged
        self._judged = Readback((judged.ids_L, judged.num_new_R, judged.fault_R))
        self._logprobs = [None if rows is None else Readback(rows.tensors) for rows in (drawn.logprobs, scored)]
        self._clean_up = clean_up
        self._health = health

    def wait(self) -> StepResult:
        """Block until the step is done and give its result, one entry per request of the plan. Called once.

        What a faulted request leaves in its blocks and rings is made harmless here, before the scheduler can give them to another.
        """
        tokens, logprobs, faults = self._read_drawn()
        prompt_logprobs = self._read_scored(faults)
        first = dict(zip(self._wanted.first_row_R.tolist(), self._wanted.sample_request_S[self._wanted.first_row_R].tolist()))
        grammar_faults = {
            first[row]: f"the grammar cannot go on ({why})" for row, why in self._drawn.grammar_faults.items() if row in first
        }
        results = []
        for request, step in enumerate(self._steps):
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
                    num_drafts=step.num_drafts,
                    logprobs=logprobs.get(request),
                    prompt_logprobs=prompt_logprobs[request] if step.wants_prompt_logprobs else None,
                )
            )
        health = self._health.read(self._plan.step_id)  # after the ids: then its copy has arrived as well
        return StepResult(step_id=self._plan.step_id, results=tuple(results), health=health)

    def _read_drawn(self) -> tuple[list[tuple[int, ...]], dict[int, tuple[TokenLogprobs, ...]], dict[int, Fault]]:
        """Per request of the plan: its tokens, its log-probabilities if asked for, its fault if any."""
        drawn, wanted = self._drawn, self._wanted
        ids, num_new, fault_R = (tensor.tolist() for tensor in self._judged.wait())
        first = wanted.first_row_R.tolist()
        request_R = wanted.sample_request_S[wanted.first_row_R].tolist()
        tokens: list[tuple[int, ...]] = [()] * len(self._steps)
        for request, row, count in zip(request_R, first, num_new):
            tokens[request] = tuple(ids[row : row + count])
        faults: dict[int, Fault] = {r: Fault(f) for r, f in zip(request_R, fault_R) if f}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        if drawn.logprobs is not None:
            by_row = dict(zip(drawn.reporting.tolist(), self._tokens(drawn.logprobs, self._logprobs[0])))
            logprobs = {r: tuple(by_row[i] for i in range(row, row + n)) for r, row, n in zip(request_R, first, num_new) if row in by_row}
        return tokens, logprobs, faults

    @staticmethod
    def _tokens(rows: LogprobRows, copies: Readback | None) -> list[TokenLogprobs]:
        assert copies is not None, "log-probabilities without their copies"
        return rows.on_host(copies.wait()).tokens()

    def _read_scored(self, faults: dict[int, Fault]) -> list[tuple[TokenLogprobs, ...]]:
        """Per request: its scored prompt positions. Adds a fault where one of them is not a number."""
        scored = [] if self._scored is None else self._tokens(self._scored, self._logprobs[1])
        ends = np.cumsum(self._wanted.num_prompt_rows_B).tolist()
        parts = [tuple(scored[first:end]) for first, end in pairwise([0, *ends])]
        for request, part in enumerate(parts):
            if any(np.isnan(entry.logprob) for entry in part):
                faults.setdefault(request, Fault.NON_FINITE)
        return parts
