# SPDX-License-Identifier: Apache-2.0
"""Supervisor: an EngineClient whose engine is a process of its own, started again when it dies.

    loading ──ready──► ready ──dies──► resting ──delay over──► loading ...        too many deaths in a row: given up, `fault` says why
       └──dies──► resting (at the first start: `wait_ready` raises)

When the engine dies every open request ends with reason "error" at once; requests that come before the next one is ready get Busy. The
process is started in the constructor, so that it imports its libraries while the caller imports its own.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, fields, replace
from typing import Any

from whalefall.core.errors import Busy, ConfigError, EngineDead
from whalefall.core.request import AbortRequests, EngineRequest, FinishReason, RequestUpdate, ResetPrefixCache
from whalefall.engine.child import Child, describe_exit
from whalefall.engine.client import Deliver, Message
from whalefall.engine.config import EngineConfig
from whalefall.engine.messages import Abort, Ended, FromEngine, LaunchSpec, Ready, Refused, Reset, Stop, Submit, Updates
from whalefall.engine.resolve import ResolvedConfig
from whalefall.observe.log import get_logger
from whalefall.observe.metrics import EngineGauges, TierStats

log = get_logger(__name__)
USUAL_FACTORY = "whalefall.engine.process:build"

_LAST_WORDS_S = 0.05
"""After the death of a process, for what it had sent to arrive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    max_restarts: int = 5
    """In a row, without `healthy_after_s` of work between them; then the engine stays dead. 0: never restart."""
    first_delay_s: float = 0.5
    """Before the first restart; doubles with each further one in a row."""
    max_delay_s: float = 30.0
    healthy_after_s: float = 60.0
    """An engine that was ready for this long has earned a fresh count."""
    silence_s: float = 60.0
    """A ready engine that gives no sign of life for this long is killed. A long step is no silence: a thread beside it speaks."""
    stop_timeout_s: float = 10.0
    """At shutdown the engine may take this long to leave; then it is killed."""


class Supervisor:
    def __init__(
        self, config: EngineConfig, policy: RestartPolicy | None = None, *, factory: str = USUAL_FACTORY, log_format: str = "text"
    ) -> None:
        """Starts the engine process. Call from a thread that lives as long as the engine, and `start` soon."""
        self.phases: list[tuple[str, float]] = []
        """Of the engine's last start."""
        self.num_restarts = 0
        self._config = config
        self._policy = policy or RestartPolicy()
        self._factory = factory
        self._log_format = log_format
        self._fault: str | None = None
        self._resolved: ResolvedConfig | None = None
        self._deliver: Deliver | None = None
        self._open: set[str] = set()
        self._gauges = EngineGauges()
        self._before = EngineGauges()
        """Counts of the processes before this one."""
        self._deaths_in_a_row = 0
        self._start_s = 5.0
        """How long the last start took."""
        self._ready_at_s: float | None = None
        self._due_s = 0.0
        """While resting: when the next process starts."""
        self._is_stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._first: asyncio.Future[ResolvedConfig] | None = None
        self._last_words: str | None = None
        self._child: Child | None = self._spawn()

    # What the front asks

    @property
    def fault(self) -> str | None:
        return self._fault

    @property
    def is_ready(self) -> bool:
        return self._ready_at_s is not None and self._fault is None and not self._is_stopping

    @property
    def gauges(self) -> EngineGauges:
        return _with_counts(self._gauges, self._before)

    @property
    def pid(self) -> int | None:
        """Of the engine process; None while there is none."""
        return self._child.pid if self._child is not None else None

    @property
    def retry_after_s(self) -> float:
        if self._child is None:
            return max(0.0, self._due_s - time.monotonic()) + self._start_s
        return max(1.0, self._start_s - (time.monotonic() - self._child.started_s))

    def check(self) -> None:
        if self._fault is not None:
            raise EngineDead(self._fault)
        if not self.is_ready:
            reason = "the engine is being started again" if self._resolved is not None else "the model is still loading"
            raise Busy(reason, retry_after_s=self.retry_after_s)

    def send(self, message: Message) -> None:
        self.check()
        assert self._child is not None
        if isinstance(message, AbortRequests):
            self._child.send(Abort(message))
        elif isinstance(message, ResetPrefixCache):
            self._child.send(Reset())
        else:
            assert isinstance(message, EngineRequest)
            self._open.add(message.request_id)
            self._child.send(Submit(message))

    # Its life

    def attach(self) -> None:
        """Once, from the event loop in which everything else will be called."""
        if self._first is None:
            loop = asyncio.get_running_loop()
            self._first = loop.create_future()
            self._watch = loop.call_later(1.0, self._check_silence)
            if self._child is not None:
                self._child.attach(loop, self._on_message, self._on_exit)

    def start(self, deliver: Deliver) -> None:
        self.attach()
        self._deliver = deliver

    async def wait_ready(self) -> ResolvedConfig:
        """Until the engine is ready for the first time.

        Raises:
            ConfigError: it refuses this model or these options.
            EngineDead: the process ended while it was loading.
        """
        self.attach()
        assert self._first is not None
        return await asyncio.shield(self._first)

    async def shutdown(self) -> None:
        self._is_stopping = True
        self._fault = self._fault or "the engine was shut down"
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        child = self._child
        if child is None:
            return
        self.attach()
        if self._ready_at_s is None:
            child.kill()  # nothing is open yet, and loading does not listen
        else:
            child.send(Stop())
        try:
            await asyncio.wait_for(child.wait(), self._policy.stop_timeout_s)
        except TimeoutError:
            log.warning("the engine process does not leave: it is killed")
            child.kill()
            await child.wait()
        await asyncio.sleep(0)
        self._bury(child)
        self._end_open("the engine was shut down", FinishReason.ABORT)

    def kill(self) -> None:
        """At once, without an event loop: for a program that never got to its loop."""
        self._is_stopping = True
        if self._child is not None:
            self._child.kill()
            self._child.close()

    def _spawn(self) -> Child:
        return Child(
            LaunchSpec(
                factory=self._factory,
                options=_plain_options(_pinned(self._config, self._resolved)),
                log_format=self._log_format,
            )
        )

    def _respawn(self) -> None:
        self._timer = None
        self.num_restarts += 1
        try:
            self._child = self._spawn()
        except OSError as error:
            log.error("the engine process cannot be started: %s", error)
            self._rest(f"the engine process cannot be started: {error}")
            return
        self._child.attach(asyncio.get_running_loop(), self._on_message, self._on_exit)

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Updates):
            self._gauges = message.gauges
            if message.updates:
                self._hand_over(message.updates)
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Refused):
            self._last_words = "\n".join(message.problems)
            if self._first is not None and not self._first.done():
                self._fault = self._last_words
                self._first.set_exception(ConfigError(message.problems))
        elif isinstance(message, Ended):
            self._last_words = self._last_words or message.fault

    def _on_ready(self, message: Ready) -> None:
        assert self._child is not None and self._first is not None
        self._ready_at_s = time.monotonic()
        self._start_s = self._ready_at_s - self._child.started_s
        self._resolved, self.phases = message.config, message.phases
        if not self._first.done():
            self._first.set_result(message.config)
        else:
            log.warning("the engine is ready again after %.1f s (process %d)", self._start_s, self._child.pid)

    def _on_exit(self, child: Child) -> None:
        """The process is gone. Not ready from this moment; what it still said is on its way."""
        was_ready_s = time.monotonic() - self._ready_at_s if self._ready_at_s is not None else 0.0
        self._ready_at_s = None
        if self._is_stopping:
            return
        if was_ready_s >= self._policy.healthy_after_s:
            self._deaths_in_a_row = 0
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._on_death, child)

    def _on_death(self, child: Child) -> None:
        if self._is_stopping:
            return
        child.drain()
        how = f"the engine process ended ({describe_exit(child.exit_code)})"
        reason = f"{how}: {self._last_words}" if self._last_words else how
        log.error("%s; %d requests were open", reason, len(self._open))
        self._last_words = None
        self._bury(child)
        self._end_open(reason, FinishReason.ERROR)
        if self._first is not None and not self._first.done():
            self._fault = f"{reason} while it was loading"
            self._first.set_exception(EngineDead(self._fault))
        if self._resolved is not None:
            self._rest(reason)

    def _rest(self, reason: str) -> None:
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > self._policy.max_restarts:
            self._fault = f"{reason}; given up after {self._policy.max_restarts} restarts in a row"
            log.critical("%s", self._fault)
            return
        delay_s = min(self._policy.max_delay_s, self._policy.first_delay_s * 2 ** (self._deaths_in_a_row - 1))
        log.warning("restart %d of at most %d in a row begins in %.1f s", self._deaths_in_a_row, self._policy.max_restarts, delay_s)
        self._due_s = time.monotonic() + delay_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._respawn)

    def _check_silence(self) -> None:
        child = self._child
        if child is not None and self._ready_at_s is not None:
            child.drain()  # a busy event loop may not have read yet what is there
            silent_s = time.monotonic() - max(child.heard_s, self._ready_at_s or 0.0)
            if silent_s > self._policy.silence_s:
                self._last_words = f"killed after {silent_s:.0f} s without a sign of life"
                child.kill()
        self._watch = asyncio.get_running_loop().call_later(1.0, self._check_silence)

    def _bury(self, child: Child) -> None:
        child.drain()
        child.close()
        self._child = None
        self._before = self.gauges
        # What the dead process held is free; counting goes on from where it was.
        self._gauges = EngineGauges(blocks_total=self._gauges.blocks_total, slots_total=self._gauges.slots_total)

    def _end_open(self, reason: str, how: FinishReason) -> None:
        error = reason if how is FinishReason.ERROR else None
        self._hand_over([RequestUpdate(request_id=name, finish_reason=how, error=error) for name in sorted(self._open)])

    def _hand_over(self, updates: list[RequestUpdate]) -> None:
        self._open.difference_update(u.request_id for u in updates if u.finish_reason is not None)
        if updates and self._deliver is not None:
            self._deliver(updates)


_OF_THE_MOMENT = frozenset(
    {"num_running", "num_waiting", "blocks_used", "blocks_total", "blocks_cached", "slots_used", "slots_total"}
    | {"host_blocks_used", "host_blocks_total", "has_disk", "disk_blocks_used", "disk_blocks_total", "is_disk_off"}
)
"""Figures that say how things are now; all others count, and those of the processes before this one are added to them."""


def _with_counts(now: EngineGauges, before: EngineGauges) -> EngineGauges:
    """Counters must never fall, also when the process that counted is gone."""
    tiers = now.tiers if now.tiers is not None or before.tiers is None else TierStats()
    if tiers is not None and before.tiers is not None:
        tiers = replace(tiers, **_sums(tiers, before.tiers))
    drafts = now.drafts or before.drafts
    if now.drafts is not None and before.drafts is not None:
        drafts = now.drafts.plus(before.drafts)
    return replace(now, **_sums(now, before), tiers=tiers, drafts=drafts)


def _sums(now: Any, before: Any) -> dict[str, Any]:
    names = [field.name for field in fields(now) if field.name not in _OF_THE_MOMENT and field.name not in ("tiers", "drafts")]
    return {name: getattr(now, name) + getattr(before, name) for name in names}


def _pinned(config: EngineConfig, resolved: ResolvedConfig | None) -> EngineConfig:
    """A restarted engine must be the engine that clients know, whatever memory is free by then."""
    if resolved is None:
        return config
    names = ("device", "dtype", "weights", "kv_cache_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "async_scheduling")
    return replace(config, **{name: getattr(resolved, name) for name in names})


def _plain_options(config: EngineConfig) -> dict[str, Any]:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value if value is None or isinstance(value, bool | int | float) else str(value) for name, value in values.items()}
