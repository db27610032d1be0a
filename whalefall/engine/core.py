# SPDX-License-Identifier: Apache-2.0
"""EngineCore: the loop. Messages in, one plan and one commit per turn, updates out. No text, no sockets, no model by name.

          send()                    plan                  launch
front ──────────────► Inbox ──► Scheduler ──► StepPlan ──► Worker
  ▲                                 ▲                        │ wait
  └───── list[RequestUpdate] ───────┴─────── StepResult ─────┘

A thread runs `run` for the server; LLM calls `turn` itself. Both see the same messages, so that a process border only adds sockets.
One step ahead, plan N+1 is launched before the result of N is read; serial, each plan is committed in its own turn. Same tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from whalefall.core.errors import EngineDead, RequestError
from whalefall.core.plan import StepPlan, StepResult
from whalefall.core.request import AbortRequests, EngineRequest, FinishReason, RequestUpdate, ResetPrefixCache
from whalefall.core.seams import Clock
from whalefall.engine.grammar_gate import GrammarGate
from whalefall.engine.tier_pump import TierPump
from whalefall.observe.log import get_logger
from whalefall.observe.metrics import DraftStats, EngineGauges, ThroughputReport
from whalefall.runtime.kvcache.events import CacheEvent
from whalefall.runtime.sampling.grammar import GrammarStore
from whalefall.runtime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # naming the mover must not cost the seconds that importing torch takes
    from whalefall.runtime.kvcache.tiers.mover import Mover

Message: TypeAlias = EngineRequest | AbortRequests | ResetPrefixCache
log = get_logger(__name__)
GRAMMAR_WAIT_S = 0.005
"""An idle loop looks this often for messages while grammars compile."""


class StepHandle(Protocol):
    def wait(self) -> StepResult: ...


class Launcher(Protocol):
    """The worker, as the loop sees it."""

    def launch(self, plan: StepPlan) -> StepHandle: ...


class EventSink(Protocol):
    """Who hears of cache events; kv_events.KvEventPublisher is one."""

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Copies what it keeps; never blocks."""
        ...

    def close(self) -> None: ...


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        worker: Launcher,
        *,
        clock: Clock,
        is_one_step_ahead: bool,
        stats_interval_s: float = 0.0,
        grammars: GrammarStore | None = None,
        mover: Mover | None = None,
        kv_events: EventSink | None = None,
    ) -> None:
        """
        Args:
            mover: for a scheduler with tiers; closed when the loop ends.
            kv_events: hears of every block that becomes findable or is forgotten; closed when the loop ends.
            grammars: the worker's; None: structured requests are refused.
        """
        self.scheduler = scheduler
        self.grammars = grammars
        self.fault: str | None = None
        """Why the loop has ended by itself; None while all is well."""
        self.gauges = EngineGauges()
        """Of the last turn; replaced as a whole, so another thread may read it."""
        self._worker = worker
        self._clock = clock
        self._is_one_step_ahead = is_one_step_ahead
        self._inbox = Inbox()
        self._gate = GrammarGate(grammars)
        self._tiers = TierPump(scheduler, mover, self._inbox.poke)
        self._kv_events = kv_events
        if kv_events is not None:
            scheduler.cache.events = []
        self._pending: _Launched | None = None
        self._open: set[str] = set()
        self._num_steps = self._num_rows = self._num_drawn = self._num_mismatches = 0
        most = scheduler.config.num_drafts
        self._drafts = DraftStats(accepted_per_place=[0] * most) if most else None
        self._report = ThroughputReport(stats_interval_s) if stats_interval_s > 0 else None
        self._publish()

    def send(self, message: Message) -> None:
        """From any thread.

        Raises:
            EngineDead: the loop has ended.
        """
        self._inbox.put(message)

    @property
    def has_work(self) -> bool:
        return bool(self._inbox) or bool(self._gate) or self._pending is not None or self.scheduler.has_work

    def turn(self) -> list[RequestUpdate]:
        """One turn of the loop. A fault ends every request with reason "error" and the loop with them."""
        updates: list[RequestUpdate] = []
        try:
            self._deliver(self._inbox.take(), updates)
            updates += self._step()
        except Exception as error:
            log.exception("the step loop has failed")
            self._forget_ended(updates)
            updates += self._fail(f"{type(error).__name__}: {error}")
        self._forget_ended(updates)
        self._num_drawn += sum(len(u.new_token_ids) for u in updates)
        self._publish()
        self._tell_kv_events()
        return updates

    def run(self, deliver: Callable[[list[RequestUpdate]], None]) -> None:
        """Turn until `stop` or a fault; sleep while there is nothing to do. `deliver` gets every turn's updates, if any."""
        while not self._inbox.is_closed:
            if not self.has_work:
                self._rest()
            elif updates := self.turn():
                deliver(updates)
        if updates := self._end_open():
            deliver(updates)
        self._tiers.close(drain=self.fault is None)
        if self._kv_events is not None:
            self._kv_events.close()

    def stop(self) -> None:
        """From any thread: end the loop. What is open ends with reason "abort"."""
        self._inbox.close("the engine was shut down")

    def _deliver(self, messages: Sequence[Message], updates: list[RequestUpdate]) -> None:
        for message in messages:
            if isinstance(message, AbortRequests):
                updates += self._abort(message.request_ids, message.reason)
                continue
            if isinstance(message, ResetPrefixCache):
                self.scheduler.reset_prefix_cache()
                log.info("prefix cache: reset")
                continue
            self._open.add(message.request_id)
            self._admit(message, None, updates, is_new=True)
        for request, error in self._gate.take_ready(self._clock.now_s()) if self._gate else ():
            self._admit(request, error, updates)

    def _admit(self, request: EngineRequest, error: RequestError | None, updates: list[RequestUpdate], *, is_new: bool = False) -> None:
        """To the scheduler; a new one with a grammar waits at the gate first."""
        try:
            if error is not None:
                raise error
            if is_new and request.sampling.structured_outputs is not None:
                self._gate.put(request, self._clock.now_s())
            else:
                self.scheduler.add(request)
        except RequestError as refusal:
            updates.append(RequestUpdate(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=refusal.message))

    def _abort(self, request_ids: Sequence[str], reason: FinishReason) -> list[RequestUpdate]:
        held = [RequestUpdate(request_id=name, finish_reason=reason) for name in self._gate.drop(request_ids)] if self._gate else []
        return held + self.scheduler.abort(request_ids, reason)

    def _step(self) -> list[RequestUpdate]:
        self._tiers.take_reports()
        plan = self.scheduler.plan(self._clock.now_s())  # integers only; may be one step ahead of commit
        launched = None if plan is None else self._launch(plan)  # returns at once
        self._tiers.submit_moves()
        due, self._pending = (self._pending, launched) if self._is_one_step_ahead else (launched, None)
        if due is not None:
            result = due.handle.wait()
            self._note_drafts(result)
            self._num_mismatches = result.health.get("ring_tag_mismatch", 0)
            updates = self.scheduler.commit(due.plan, result, self._clock.now_s())
            self._tiers.submit_moves()
            return updates
        if launched is None and self.scheduler.has_work:
            if self.scheduler.waits_for_moves:
                self._inbox.wait(GRAMMAR_WAIT_S if self._gate else self._tiers.max_wait_s(self._clock.now_s()))
                return []
            raise RuntimeError("requests wait, nothing runs, and no step can be planned")  # better an error than a silent standstill
        if launched is None and self._gate:
            self._gate.rest(GRAMMAR_WAIT_S)
        return []

    def _note_drafts(self, result: StepResult) -> None:
        if self._drafts is not None:
            for gave in result.results:
                if gave.num_drafts and gave.fault is None:
                    self._drafts.note(gave.num_drafts, len(gave.token_ids) - 1)
                elif gave.token_ids:
                    self._drafts.num_undrafted += 1

    def _launch(self, plan: StepPlan) -> _Launched:
        self._num_steps += 1
        self._num_rows += plan.num_tokens
        return _Launched(plan, self._worker.launch(plan))

    def _fail(self, fault: str) -> list[RequestUpdate]:
        self.fault = fault
        left = self._inbox.close(f"the step loop has ended with {fault}")
        self._settle()
        updates: list[RequestUpdate] = []
        try:
            updates += self.scheduler.fail_all(fault)
        except Exception:
            log.exception("the scheduler cannot say what was running")
        # The scheduler may be what broke: every request that has not ended ends here.
        told = {u.request_id for u in updates}
        lost = [*self._open, *(m.request_id for m in left if isinstance(m, EngineRequest))]
        untold = [request_id for request_id in lost if request_id not in told]
        return updates + [RequestUpdate(request_id=name, finish_reason=FinishReason.ERROR, error=fault) for name in untold]

    def _end_open(self) -> list[RequestUpdate]:
        """After `stop`: end what is open, the messages nobody has read among them, and let the launched step run out."""
        updates: list[RequestUpdate] = []
        if self.fault is None:
            self._deliver(self._inbox.take(), updates)
            updates += self._abort(tuple(self._open), FinishReason.ABORT)
            while self._pending is not None:
                updates += self.turn()
        return updates

    def _settle(self) -> None:
        """Wait for the launched step, so that nothing still writes to what is freed; its result no longer matters."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.handle.wait()
            except Exception:
                log.exception("the launched step has failed too")

    def _forget_ended(self, updates: Sequence[RequestUpdate]) -> None:
        self._open.difference_update(u.request_id for u in updates if u.is_finished)

    def _rest(self) -> None:
        if self._report is not None:
            self._report.rest()
        self._inbox.wait()

    def _tell_kv_events(self) -> None:
        events = self.scheduler.cache.events
        if self._kv_events is not None and events:
            self._kv_events.publish(events)
            events.clear()

    def _publish(self) -> None:
        cache, scheduler = self.scheduler.cache, self.scheduler
        self.gauges = EngineGauges(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            blocks_used=cache.num_usable_blocks - cache.num_free_blocks,
            blocks_total=cache.num_usable_blocks,
            slots_used=cache.num_slots - cache.num_free_slots,
            slots_total=cache.num_slots,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            batched_tokens=self._num_rows,
            blocks_cached=cache.num_cached_blocks,
            prefix_adopted_tokens=cache.counters.hit_tokens + cache.counters.readmitted_hit_tokens,
            prefix_replayed_tokens=cache.counters.replayed_tokens,
            prefix_readmitted_tokens=cache.counters.readmitted_hit_tokens,
            prefix_stored_blocks=cache.counters.stored_blocks,
            prefix_evicted_blocks=cache.counters.evicted_blocks,
            prefix_evicted_tokens=cache.counters.evicted_blocks * cache.block_tokens,
            ring_tag_mismatches=self._num_mismatches,
            drafts=None if self._drafts is None else self._drafts.copy(),
            tiers=self._tiers.stats(),
        )
        if self._report is not None:
            now_s = self._clock.now_s()
            line = self._report.line(now_s, self.gauges, num_rows=self._num_rows, num_drawn=self._num_drawn)
            if line is not None:
                log.info(line)


class _Launched(NamedTuple):
    plan: StepPlan
    handle: StepHandle


class Inbox:
    """Messages from any thread to the loop, in order."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._closed_because: str | None = None
        self._is_poked = False
        self._changed = threading.Condition()

    def __bool__(self) -> bool:
        return bool(self._messages) or self._is_poked

    @property
    def is_closed(self) -> bool:
        return self._closed_because is not None

    def put(self, message: Message) -> None:
        with self._changed:
            if self._closed_because is not None:
                raise EngineDead(self._closed_because)
            self._messages.append(message)
            self._changed.notify()

    def take(self) -> list[Message]:
        """All messages there are, without waiting."""
        with self._changed:
            messages, self._messages = self._messages, []
            self._is_poked = False
            return messages

    def poke(self) -> None:
        """From any thread: something else than a message wants a turn of the loop."""
        with self._changed:
            self._is_poked = True
            self._changed.notify()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until there is a message or a poke, the inbox is closed, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self) or self.is_closed, timeout_s)

    def close(self, reason: str) -> list[Message]:
        """Refuse all further messages; those that nobody has taken."""
        with self._changed:
            self._closed_because = self._closed_because or reason
            self._changed.notify()
            return self._messages
