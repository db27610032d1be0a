# SPDX-License-Identifier: Apache-2.0
"""A whole engine in miniature: a scheduler, a FakeWorker and a FakeClock, turned by hand, with the invariants asserted at every turn.

For tests of scheduling, and for whoever changes a rule of it: `add`, `abort` and `turn` in any order; `finish` turns until all have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from whalefall.core.plan import StepPlan, StepResult
from whalefall.core.request import EngineRequest, FinishReason, RequestUpdate, TokenLogprobs
from whalefall.runtime.scheduler.policy import max_total_tokens
from whalefall.runtime.scheduler.scheduler import Scheduler
from whalefall.testing.fake_mover import FakeMover
from whalefall.testing.fakes import FakeClock, FakeStepHandle, FakeWorker

PATIENCE_WITH_MOVES = 20
"""With tiers, a turn may pass in waiting for a move: a request waits so much longer at most."""


@dataclass
class Outcome:
    """What a request got so far."""

    request: EngineRequest
    max_total: int
    deadline_turn: int
    """It must have ended by then, see `Simulation.add`."""
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_admissions: int = 0
    last: RequestUpdate | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.last.finish_reason if self.last else None


class Simulation:
    def __init__(self, scheduler: Scheduler, worker: FakeWorker, *, one_step_ahead: bool, mover: FakeMover | None = None) -> None:
        """mover: for a scheduler with tiers."""
        self.scheduler = scheduler
        self.worker = worker
        self.mover = mover
        self.clock = FakeClock()
        self.one_step_ahead = one_step_ahead
        self.outcomes: dict[str, Outcome] = {}
        self.plans: list[StepPlan] = []
        self.num_turns = 0
        self.num_drafts = 0
        """Verified so far; of them accepted:"""
        self.num_accepted = 0
        self._live: dict[str, Outcome] = {}
        self._has_launched = False
        self._pending: list[tuple[StepPlan, FakeStepHandle]] = []
        self._rows: dict[str, tuple[int, int, int]] = {}  # request id -> (next row, window_start, decoder_start)

    def add(self, request: EngineRequest) -> None:
        """Queue a request and note its deadline.

        The oldest request is never preempted and gets at least one row in every second turn (one ahead, it may wait for its own token
        or for a block that retires). So a request ends before everybody who is ahead of it, and it itself, could have run one by one.
        """
        self.scheduler.add(request)
        max_total = max_total_tokens(request, self.scheduler.config, self.scheduler.cache)
        ahead = sum(other.max_total + 1 for other in self._live.values())
        num_turns = 2 * (ahead + max_total + 1)
        if self.mover is not None:
            num_turns *= PATIENCE_WITH_MOVES
        outcome = Outcome(request, max_total, self.num_turns + num_turns)
        self.outcomes[request.request_id] = self._live[request.request_id] = outcome

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        self._take(self.scheduler.abort(request_ids, reason))

    def turn(self) -> None:
        """One turn of the engine loop."""
        self.launch()
        self.collect()

    def launch(self) -> None:
        """The first half of a turn: plan and launch."""
        self.num_turns += 1
        self.clock.advance(0.01)
        self._take_reports()
        plan = self.scheduler.plan(self.clock.now_s())
        self._submit_moves()
        self._has_launched = plan is not None
        if plan is not None:
            self._check_plan(plan)
            self.plans.append(plan)
            self._pending.append((plan, self.worker.launch(plan)))
        else:
            may_go_on = self._pending or self.scheduler.waits_for_moves
            assert may_go_on or not self.scheduler.has_work, "stuck: work, nothing in flight and no plan"

    def collect(self) -> None:
        """The second half: commit what is due."""
        num_kept = 1 if self.one_step_ahead and self._has_launched else 0
        while len(self._pending) > num_kept:
            plan, handle = self._pending.pop(0)
            result = handle.wait()
            self._note_refused(plan, result)
            self._take(self.scheduler.commit(plan, result, self.clock.now_s()))
        self._submit_moves()
        self.scheduler.cache.check()
        if self.scheduler.tiers is not None:
            self.scheduler.tiers.check()
        late = [name for name, outcome in self._live.items() if outcome.deadline_turn < self.num_turns]
        assert not late, f"starved: {late}"

    def finish(self) -> None:
        """Turn until nothing is left, and see that nothing was kept."""
        while self.scheduler.has_work or self.scheduler.waits_for_moves:
            self.turn()
        assert self.mover is None or self.mover.is_idle, "a move that nobody waits for"
        assert not self._live, f"never ended: {sorted(self._live)}"
        assert self.scheduler.cache.is_pristine, "blocks or slots leaked"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def _take_reports(self) -> None:
        for report in [] if self.mover is None else self.mover.reports():
            self.scheduler.moved(report)

    def _submit_moves(self) -> None:
        moves = self.scheduler.take_moves()
        if self.mover is not None:
            self.mover.submit(moves)

    def _take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            assert update.request_id in self._live, f"{update.request_id}: an update after the end"
            outcome = self._live[update.request_id]
            outcome.token_ids.extend(update.new_token_ids)
            outcome.prompt_logprobs.extend(update.prompt_logprobs or ())
            outcome.last = update
            if update.is_finished:
                del self._live[update.request_id]
                self._rows.pop(update.request_id, None)

    def _note_refused(self, plan: StepPlan, result: StepResult) -> None:
        """The next plan begins earlier by what this step's drafts did not give; unless the request has left, or was preempted since."""
        for step, gave in zip(plan.steps, result.results, strict=True):
            rows = self._rows.get(step.request_id)
            if step.num_drafts and rows is not None and not gave.fault:
                self.num_drafts += gave.num_drafts
                self.num_accepted += len(gave.token_ids) - 1
                self._rows[step.request_id] = (rows[0] - step.num_drafts - 1 + len(gave.token_ids), *rows[1:])

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        names = [step.request_id for step in plan.steps]
        assert len(set(names)) == len(names), "a request stands twice in a plan"
        assert 0 < plan.num_tokens <= config.max_num_batched_tokens
        assert self.scheduler.num_running <= config.max_num_seqs
        for new in plan.new_requests:
            outcome = self._live[new.request_id]
            outcome.num_admissions += 1
            assert list(new.token_ids) == [*outcome.request.prompt_token_ids, *outcome.token_ids], f"{new.request_id}: tokens lost"
            window_start = new.start if config.replay == "bounded" else 0
            self._rows[new.request_id] = (new.start, window_start, self._decoder_start(outcome.request, len(new.token_ids), window_start))
        for step in plan.steps:
            next_row, window_start, decoder_start = self._rows[step.request_id]
            end, max_total = step.start + step.num_tokens, self._live[step.request_id].max_total
            assert step.num_tokens > 0 and step.start == next_row, f"{step.request_id}: rows {step.start} follow {next_row}"
            assert (step.window_start, step.decoder_start) == (window_start, decoder_start)
            assert end <= max_total and not (step.samples and end == max_total), f"{step.request_id}: planned past its end"
            assert step.num_drafts <= config.num_drafts and (step.samples or not step.num_drafts)
            self._rows[step.request_id] = (end, window_start, decoder_start)

    def _decoder_start(self, request: EngineRequest, num_known: int, window_start: int) -> int:
        config = self.scheduler.config
        runs_all_rows = config.replay == "exact" or config.decoder_window is None or request.sampling.prompt_logprobs is not None
        return window_start if runs_all_rows else max(window_start, num_known - (config.decoder_window or 0))
