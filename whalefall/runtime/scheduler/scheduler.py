# SPDX-License-Identifier: Apache-2.0
"""The scheduler: events in (add, abort, plan, commit), plans and updates out. No torch, no clock, no randomness: the same events give the
same plans. The caller is the engine loop; the callees are the cache bookkeeping and the rules in policy.py.

One step ahead. `plan` may be called once more before the previous plan is committed. It then counts on the token in flight: the decode row
of that token is planned by position, its id never leaves the device. What may go wrong with that is settled at commit:

* The token ended its request (end-of-sequence, a fault, an abort in between). The next step is launched already; what it gives for this
  request is discarded, and slot and blocks become free only when that step is done. Ends that can be counted (max_tokens, context limit)
  are never planned past.
* The request was preempted meanwhile. Its token in flight still counts: it is appended at commit, while the request waits, and is among the
  known ids when the request returns. Nothing is drawn twice. Its blocks too become free only when its last launched step is done; until
  then the request that needed them sits out.
* Drafts of the step in flight were refused. Plans count on every one of them (`num_scheduled`, `num_expected` are upper bounds by at most
  `num_unsure`); the worker moves the rows of the next step back by as many as were refused, and commit lowers the counts. Only the cut is
  conservative: a request whose upper bound has reached its limit waits until it is known how far it really came.

Prompt log-probabilities after a preemption: rows run again, but `next_prompt_logprob` remembers how far delivery went. A step that covers
only delivered positions does not ask for them; of a step across the border, commit drops the delivered prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from whalefall.core.errors import RequestError
from whalefall.core.plan import NewRequest, RequestResult, RequestStep, StepPlan, StepResult
from whalefall.core.request import EngineRequest, FinishReason, RequestUpdate, TokenLogprobs
from whalefall.runtime.kvcache.manager import CacheManager, Reservation
from whalefall.runtime.kvcache.tiers.ledger import TierLedger
from whalefall.runtime.kvcache.tiers.moves import Move, MoveReport
from whalefall.runtime.scheduler import policy
from whalefall.runtime.scheduler.config import SchedulerConfig
from whalefall.runtime.scheduler.queues import RequestQueue
from whalefall.runtime.scheduler.state import Phase, RequestState
from whalefall.runtime.scheduler.trace import TraceWriter

MAX_IN_FLIGHT = 2
"""Plans made and not committed."""
PREFETCH_AHEAD = 16
"""So many of those who wait have their blocks brought into the host's memory before it is their turn."""


class Scheduler:
    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, *, tiers: TierLedger | None = None, trace: TraceWriter | None = None
    ) -> None:
        """tiers: the account of the tiers below the device's blocks, made over the same cache; None when there are none."""
        self.config = config
        self.cache = cache
        self.tiers = tiers
        self.num_preemptions = 0
        self._trace = trace
        self._live: dict[str, RequestState] = {}
        self._running = RequestQueue()
        self._waiting = RequestQueue()
        self._in_flight: deque[_Launched] = deque()
        self._next_step_id = 0
        self._done_step_id = -1
        self._committed_s = 0.0
        if trace is not None:
            trace.start(config, cache, tiers)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans made and not committed."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether a request is alive or a plan waits for its commit."""
        return bool(self._live) or bool(self._in_flight)

    def add(self, request: EngineRequest) -> None:
        """Queue a request behind all others.

        Raises:
            RequestError: it could never run (policy.check_request), or its id is in use.
        """
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id", code="duplicate_request_id")
        policy.check_request(request, self.config, self.cache)
        if self._trace is not None:
            self._trace.add(request)
        state = RequestState.of(request, policy.max_total_tokens(request, self.config, self.cache))
        if self.config.prefix_caching:
            state.chain = self.cache.chain(request.prompt_token_ids, salt=request.cache_salt)
        self._live[state.request_id] = state
        self._waiting.push_newest(state)

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[RequestUpdate]:
        """End these requests now; unknown and ended ones are ignored. One final update each."""
        request_ids = tuple(request_ids)
        if self._trace is not None:
            self._trace.abort(request_ids, reason)
        states = [self._live[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._live]
        return [self._end(state, reason) for state in states]

    def fail_all(self, message: str) -> list[RequestUpdate]:
        """End every request with ERROR and forget the launched steps. The caller vouches that none of them still runs on the device."""
        if self._trace is not None:
            self._trace.fail_all(message)
        self._in_flight.clear()
        self._done_step_id = self._next_step_id - 1
        self.cache.step_done(self._done_step_id)
        return [self._end(state, FinishReason.ERROR, error=message) for state in list(self._live.values())]

    def reset_prefix_cache(self) -> None:
        """Forget what was computed for earlier requests; running ones go on undisturbed."""
        if self._trace is not None:
            self._trace.reset_prefix_cache()
        self.cache.reset()

    def take_moves(self) -> list[Move]:
        """What shall be copied between tiers, to be begun now. Ask after each plan and each commit."""
        return [] if self.tiers is None else self.tiers.take_moves()

    def moved(self, report: MoveReport) -> None:
        """A move has ended. Every move that was taken is reported once."""
        assert self.tiers is not None, "a move is reported, but there are no tiers"
        if self._trace is not None:
            self._trace.moved(report)
        self.tiers.report(report)

    @property
    def waits_for_moves(self) -> bool:
        """Whether a report may let a request go on that cannot now."""
        return self.tiers is not None and self.tiers.has_moves

    @property
    def next_deadline_s(self) -> float | None:
        """When to plan again if no report comes before: somebody will have waited long enough."""
        waiting = [s.prefetch for s in self._waiting.first(PREFETCH_AHEAD) if s.prefetch is not None]
        return None if self.tiers is None else self.tiers.next_deadline_s(waiting)

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None: nothing can run before the plan in flight is committed, or a move reported, or there is no work."""
        assert len(self._in_flight) < MAX_IN_FLIGHT, "plan called again before the commit of the last plan but one"
        making = _Making(self._next_step_id, self.config.max_num_batched_tokens)
        self._plan_running(making)
        self._prefetch(now_s)
        self._admit(making, now_s)
        plan = None
        if making.steps:
            plan = StepPlan(making.step_id, tuple(making.new_requests), tuple(making.steps))
            self._in_flight.append(_Launched(plan, making.states, now_s))
            self._next_step_id += 1
        if self._trace is not None:
            self._trace.plan(plan, now_s)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[RequestUpdate]:
        """Take in what the oldest plan in flight gave. An update for each request that got something or ended."""
        if plan.step_id <= self._done_step_id:
            return []  # forgotten by fail_all
        assert self._in_flight and self._in_flight[0].plan.step_id == plan.step_id == result.step_id, "plans are committed in order"
        assert len(result.results) == len(plan.steps), f"step {plan.step_id}: {len(result.results)} results, {len(plan.steps)} requests"
        if self._trace is not None:
            self._trace.commit(result, now_s)
        launched = self._in_flight.popleft()
        self._done_step_id = plan.step_id
        self.cache.step_done(plan.step_id)
        if self.tiers is not None:
            self.tiers.cost.note_step(plan.num_tokens, now_s - max(launched.planned_s, self._committed_s))
            self._committed_s = now_s
        updates = []
        # States by identity, not by id: an id may have ended and come back while the step was under way.
        for step, state, gave in zip(launched.plan.steps, launched.states, result.results, strict=True):
            if state.phase is not Phase.ENDED:
                update = self._commit_request(state, step, gave, now_s)
                if update is not None:
                    updates.append(update)
        return updates

    # Planning: rows for those who run, oldest first, decodes before longer stretches; then entry for those who wait.

    def _plan_running(self, making: _Making) -> None:
        stretches = []
        running = self._running.snapshot()
        making.spare = max(0, making.budget - len(running))
        for state in running:
            if making.budget == 0:
                return
            if state.phase is not Phase.RUNNING:
                continue  # an older one took its blocks in this very plan
            num_rows = min(state.num_expected, state.max_rows) - state.num_scheduled
            if num_rows > 1:
                stretches.append((state, num_rows))
            elif num_rows == 1:
                self._plan_decode(making, state)
        for state, num_rows in stretches:
            if making.budget == 0:
                return
            self._append_step(making, state, num_rows, ())  # blocks were reserved at entry

    def _plan_decode(self, making: _Making, state: RequestState) -> None:
        """One row, and drafts behind it as far as limits, budget and blocks allow. Nobody is preempted for drafts."""
        num_drafts = min(policy.max_drafts(state, self.config, self.cache.block_tokens), making.spare)
        if policy.must_wait_for_commit(state, num_drafts, self.config, self.cache.block_tokens):
            return
        reservation = state.reservation
        assert reservation is not None
        num_rows = state.num_scheduled + 1
        new_ids = self._grow(state, reservation) if state.num_scheduled >= reservation.num_tokens else ()
        if new_ids is None:
            return
        if num_drafts and num_rows + num_drafts > reservation.num_tokens:
            more_ids = self.cache.extend(reservation, num_rows + num_drafts)
            new_ids += more_ids or ()
            num_drafts = min(num_drafts, reservation.num_tokens - num_rows)
        making.spare -= num_drafts
        self._append_step(making, state, 1, new_ids, num_drafts)

    def _grow(self, state: RequestState, reservation: Reservation) -> tuple[int, ...] | None:
        """Blocks for the next row of `state`; None when it has to sit out, or was itself the newest and gave way.

        Rows are given to the oldest first, so a victim never has rows in this plan yet. It goes to the front of the queue and cannot come
        back within the plan: of the blocks it held, or that retire now, at least one is spoken for.
        """
        while True:
            new_ids = self.cache.extend(reservation, state.num_scheduled + 1)
            if new_ids is not None:
                return new_ids
            if self.cache.num_returning_blocks:
                return None  # they are free after the next commit, or the next report: no need to preempt anybody yet
            victim = self._running.newest
            self._preempt(victim)
            if victim is state:
                return None

    def _prefetch(self, now_s: float) -> None:
        """Bring what lower tiers know of the next prompts closer, before it is their turn."""
        if self.tiers is not None:
            for state in self._waiting.first(PREFETCH_AHEAD):
                self._has_arrived(state, now_s, may_load=False)

    def _has_arrived(self, state: RequestState, now_s: float, *, may_load: bool) -> bool:
        """Whether nothing (more) is to be waited for from lower tiers before this request enters."""
        if self.tiers is None or not policy.may_hit(state, self.config):
            return True
        if state.prefetch is None:
            assert state.chain is not None
            state.chain.extend(state.token_ids)
            num_blocks = (len(state.token_ids) - 1) // self.cache.block_tokens  # a hit leaves at least one token to compute
            state.prefetch = self.tiers.begin(state.chain.keys[:num_blocks], state.token_ids, state.chain.salt)
        return self.tiers.advance(state.prefetch, now_s, may_load=may_load)

    def _admit(self, making: _Making, now_s: float) -> None:
        """Strictly first come, first served: a small request never overtakes a large one that waits for room, or for its blocks."""
        while making.budget and self._waiting and len(self._running) < self.config.max_num_seqs:
            state = self._waiting.oldest
            if self._is_in_flight(state):
                return  # preempted in this very plan: it comes back when its token in flight is known
            num_known = len(state.token_ids)
            hit = policy.find_hit(state, self.config, self.cache)
            num_wanted = self.cache.num_wanted(num_known, hit)
            if self._running and not policy.is_above_watermark(num_wanted, len(self._running), self.cache):
                return
            if not self.cache.has_room(num_wanted) or not self._has_arrived(state, now_s, may_load=True):
                return
            reservation = self.cache.reserve(num_known, hit)
            assert reservation is not None
            self._waiting.remove(state)
            self._running.push_newest(state)
            state.phase = Phase.RUNNING
            state.prefetch = None
            state.reservation = reservation
            self._begin(state, len(hit) * self.cache.block_tokens)
            if state.first_scheduled_s is None:
                state.first_scheduled_s = now_s
            restored = hit[-1].block_id if hit and self.config.takes_snapshots else 0
            making.new_requests.append(_as_new_request(state, reservation.slot, restored))
            self._append_step(making, state, num_known - state.num_scheduled, tuple(reservation.block_ids))

    def _begin(self, state: RequestState, num_adopted: int) -> None:
        """Where the rows of a request begin, and what its windows see; counted as the first look or as a return."""
        state.write_start = num_adopted
        state.num_scheduled, state.window_start = policy.start_after_hit(num_adopted, self.config)
        state.decoder_start = policy.decoder_start(state, self.config)
        if not self.config.prefix_caching:
            return
        counters = self.cache.counters
        counters.replayed_tokens += num_adopted - state.num_scheduled
        if state.first_scheduled_s is None:
            state.num_cached_tokens = num_adopted
            counters.query_tokens += state.num_prompt
            counters.hit_tokens += num_adopted
        else:
            counters.readmitted_hit_tokens += num_adopted

    def _append_step(self, making: _Making, state: RequestState, num_wanted: int, new_ids: tuple[int, ...], num_drafts: int = 0) -> None:
        """The next rows of `state`: those it wants, as far as the budget and, where snapshots are taken, the next block border allow; then
        its drafts."""
        start = state.num_scheduled
        num_rows = min(num_wanted, making.budget)
        if self.config.takes_snapshots:
            num_rows = min(num_rows, self.cache.block_tokens - start % self.cache.block_tokens)
        end = start + num_rows
        samples = end == state.num_expected and end < state.max_total
        wants_prompt = False
        if start < state.num_prompt and state.sampling.prompt_logprobs is not None:
            wants_prompt = min(end, state.num_prompt - 1) >= state.next_prompt_logprob
        assert state.reservation is not None and (samples or not num_drafts)
        block_ids, block_tokens = state.reservation.block_ids, self.cache.block_tokens
        making.steps.append(
            RequestStep(
                state.request_id,
                state.reservation.slot,
                start,
                num_rows + num_drafts,
                new_ids,
                state.window_start,
                state.decoder_start,
                samples,
                wants_prompt,
                state.write_start,
                block_ids[end // block_tokens - 1] if self.config.takes_snapshots and end % block_tokens == 0 else 0,
                num_drafts,
                state.num_unsure,
            )
        )
        making.states.append(state)
        making.budget -= num_rows + num_drafts
        state.num_scheduled = end + num_drafts
        state.last_step_id = making.step_id
        if samples:
            state.num_expected = end + 1 + num_drafts
            state.num_unsure += num_drafts
            state.has_drafts = True

    # Changes of phase.

    def _preempt(self, state: RequestState) -> None:
        """Take blocks and slot back and send the request to the front of those who wait; its tokens, known or in flight, stay."""
        self.num_preemptions += 1
        self._running.remove(state)
        self._waiting.push_oldest(state)
        self._give_back(state)
        state.phase = Phase.WAITING
        state.num_scheduled = 0
        state.has_drafts = False

    def _end(
        self,
        state: RequestState,
        reason: FinishReason,
        *,
        error: str | None = None,
        stop_token_id: int | None = None,
        new_token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> RequestUpdate:
        """The one way out. Whatever a launched step still gives for the request is discarded."""
        (self._running if state.phase is Phase.RUNNING else self._waiting).remove(state)
        del self._live[state.request_id]
        if state.reservation is not None:
            self._give_back(state)
        state.phase = Phase.ENDED
        return RequestUpdate(
            request_id=state.request_id,
            new_token_ids=new_token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            error=error,
            num_cached_tokens=state.num_cached_tokens,
            timings=state.timings(with_tokens=True),
        )

    def _give_back(self, state: RequestState) -> None:
        assert state.reservation is not None
        self.cache.release(state.reservation, state.last_step_id if self._is_in_flight(state) else None)
        state.reservation = None

    def _is_in_flight(self, state: RequestState) -> bool:
        return state.last_step_id > self._done_step_id

    # Commit.

    def _commit_request(self, state: RequestState, step: RequestStep, gave: RequestResult, now_s: float) -> RequestUpdate | None:
        if gave.fault is not None:
            if state.chain is not None and not gave.is_cache_sound:
                self.cache.forget(state.chain)
            return self._end(state, FinishReason.ERROR, error=gave.fault)
        prompt_logprobs = _undelivered(state, step, gave) if step.wants_prompt_logprobs else None
        reason: FinishReason | None = None
        stop_token_id = None
        num_new = 0
        if step.samples:
            num_new, reason, stop_token_id = _append_tokens(state, step, gave, now_s)
        if state.chain is not None and state.reservation is not None:
            # Of a step that draws, the rows of all tokens but the last are done and final; whatever ran behind them was refused.
            num_final = len(state.token_ids) - 1 if step.samples else step.start + step.num_tokens
            self.cache.publish(state.reservation, state.chain, state.token_ids, num_final)
        if not step.samples:
            if step.start + step.num_tokens == state.max_total:
                reason = FinishReason.LENGTH  # max_tokens is 0: the prompt is scored
            elif prompt_logprobs is None:
                return None
        token_ids, logprobs = gave.token_ids, gave.logprobs
        if num_new < len(token_ids):  # the answer ends before the last accepted draft
            token_ids, logprobs = token_ids[:num_new], None if logprobs is None else logprobs[:num_new]
        if reason is not None:
            return self._end(
                state,
                reason,
                stop_token_id=stop_token_id,
                new_token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        return RequestUpdate(
            request_id=state.request_id,
            new_token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=state.num_cached_tokens,
            timings=state.timings(with_tokens=False),
        )


class _Launched(NamedTuple):
    plan: StepPlan
    states: list[RequestState]
    """Aligned with plan.steps."""
    planned_s: float


class _Making:
    """A plan while it is being made."""

    __slots__ = ("budget", "new_requests", "spare", "states", "step_id", "steps")

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.spare = 0
        """What drafts may take of the budget: a row of everybody who runs comes first."""
        self.new_requests: list[NewRequest] = []
        self.steps: list[RequestStep] = []
        self.states: list[RequestState] = []


def _as_new_request(state: RequestState, slot: int, restore_block: int) -> NewRequest:
    return NewRequest(
        request_id=state.request_id,
        slot=slot,
        token_ids=tuple(state.token_ids),
        num_prompt_tokens=state.num_prompt,
        sampling=state.sampling,
        eos_token_ids=state.request.eos_token_ids,
        start=state.num_scheduled,
        restore_block=restore_block,
    )


def _append_tokens(
    state: RequestState, step: RequestStep, gave: RequestResult, now_s: float
) -> tuple[int, FinishReason | None, int | None]:
    """Take in the tokens that a step drew, up to the one that ends the answer: how many, and whether and how it ends."""
    assert 1 <= len(gave.token_ids) <= 1 + step.num_drafts, f"{state.request_id}: {len(gave.token_ids)} tokens, {step.num_drafts} drafts"
    num_refused = 1 + step.num_drafts - len(gave.token_ids)
    state.num_unsure -= step.num_drafts
    state.num_expected -= num_refused
    if state.phase is Phase.RUNNING:  # else it was preempted, and starts anew
        state.num_scheduled -= num_refused
    for count, token_id in enumerate(gave.token_ids, 1):
        state.token_ids.append(token_id)
        state.token_s.append(now_s)
        reason, stop_token_id = policy.end_of(state, token_id)
        if reason is not None:
            return count, reason, stop_token_id
    return len(gave.token_ids), None, None


def _undelivered(state: RequestState, step: RequestStep, gave: RequestResult) -> tuple[TokenLogprobs, ...]:
    """The prompt log-probabilities of a step less those that were delivered before a preemption."""
    first = step.start + 1
    end = min(step.start + step.num_tokens, state.num_prompt - 1) + 1
    scores = gave.prompt_logprobs or ()
    assert len(scores) == end - first, f"{state.request_id}: {len(scores)} prompt logprobs for positions [{first}, {end})"
    fresh = scores[max(0, state.next_prompt_logprob - first) :]
    state.next_prompt_logprob = max(state.next_prompt_logprob, end)
    return fresh
