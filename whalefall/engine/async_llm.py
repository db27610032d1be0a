# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM: the engine for an event loop. Steps run in a thread or in a process of their own; text is made here, in the loop's thread.

`generate` streams deltas. What the reader does not take in time is joined to one delta per request, so a slow reader costs no more than
its own answer. Closing the iterator, or cancelling the task that reads it, aborts the request in the engine and frees everything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Self

from whalefall.core.errors import Busy, EngineDead
from whalefall.core.request import AbortRequests, FinishReason, RequestUpdate, ResetPrefixCache
from whalefall.core.sampling import SamplingParams
from whalefall.core.seams import Clock, MonotonicClock
from whalefall.engine.assembly import OpenRequest, OutputProcessor
from whalefall.engine.client import EngineClient, ThreadEngine
from whalefall.engine.config import EngineConfig
from whalefall.engine.opened import OpenModel
from whalefall.engine.outputs import RequestOutput
from whalefall.engine.seeds import seed_source
from whalefall.engine.validate import check_prompt, check_sampling
from whalefall.observe.log import RequestLog, get_logger
from whalefall.observe.metrics import EngineStats
from whalefall.observe.trace import Tracer, incoming_headers

if TYPE_CHECKING:
    from whalefall.engine.wiring import Progress

log = get_logger(__name__)


class AsyncLLM:
    def __init__(self, opened: OpenModel, client: EngineClient, *, clock: Clock | None = None, tracer: Tracer | None = None) -> None:
        """Around an engine that is loaded. Use `from_config` to load one in this process."""
        self.model_name = opened.config.model_name
        self.config = opened.config
        self.tokenizer = opened.tokenizer
        self.definition = opened.definition
        self.model_config = opened.model_config
        self._eos_token_ids = opened.eos_token_ids
        self._client = client
        self._clock = clock or MonotonicClock()
        self._tracer = tracer
        # An engine in this process has compiled what it needs itself; one elsewhere does so again, and its front refuses what is wrong.
        own = client.core.grammars if isinstance(client, ThreadEngine) else None
        self._grammars = own or opened.grammar_store()
        self._processor = OutputProcessor(self.tokenizer, seed_source(self.config.seed))
        self._mailboxes: dict[int, _Mailbox] = {}
        """By identity of the open request."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: Progress | None = None) -> Self:
        """Load an engine into this process; blocks, so a server calls it in a thread.

        Raises:
            ConfigError: every problem found.
        """
        from whalefall.engine.wiring import load_engine, open_model  # brings torch, which the API process does without

        clock = MonotonicClock()
        opened = open_model(config)
        return cls(opened, ThreadEngine(load_engine(opened, progress=progress, clock=clock)), clock=clock)

    @property
    def is_alive(self) -> bool:
        """Requests run now, or will again when the engine has been restarted."""
        return self._client.fault is None

    @property
    def is_ready(self) -> bool:
        return self._client.is_ready

    @property
    def retry_after_s(self) -> float:
        """While alive and not ready: a guess of how long that lasts."""
        return self._client.retry_after_s

    def validate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """
        Raises:
            RequestError: the request cannot run here; nothing is queued.
        """
        check_prompt(prompt_token_ids, self.config)
        check_sampling(sampling, self.config, max_logprobs=self.config.max_logprobs)

    async def prepare(self, sampling: SamplingParams) -> None:
        """Compile what the answer must look like, in a thread. `generate` does so too; a server asks before it has answered anything.

        Raises:
            RequestError: the schema or grammar is wrong, not supported or too slow.
        """
        if sampling.structured_outputs is not None:
            await self._grammars.check_async(sampling.structured_outputs)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        *,
        prompt: str | None = None,
        cache_salt: str = "",
        use_prefix_cache: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream deltas until all n choices have ended. A failing engine ends them with reason "error".

        Args:
            cache_salt: prefix hits only among requests of equal salt.
            use_prefix_cache: False computes every row of the prompt.
        Raises:
            RequestError: as `validate`, before anything is queued.
            EngineDead: the engine had ended before.
            Busy: it is being restarted.
        """
        self.validate(prompt_token_ids, sampling)
        await self.prepare(sampling)
        request, mailbox = self._open(prompt_token_ids, sampling, request_id, prompt, cache_salt, use_prefix_cache)
        try:
            while True:
                delta = await mailbox.get()
                yield delta
                if delta.finished:
                    return
        finally:
            self._close(request)

    async def abort(self, request_id: str, *, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End the open requests of this id, or one choice of them; their streams get the final deltas. Unknown ids are ignored.

        Args:
            reason: STOP when the reader has seen all it wants: an ordinary end.
        """
        for mailbox in self._mailboxes.values():
            if mailbox.request.request_id == request_id:
                chosen = [c.engine_id for c in mailbox.request.choices if not c.is_finished and choice in (None, c.index)]
                self._send_abort(chosen, reason)

    async def reset_prefix_cache(self) -> None:
        """Forget what was computed for earlier prompts; running requests go on undisturbed.

        Raises:
            EngineDead, Busy: there is no engine now.
        """
        self._client.check()
        self._start()
        self._client.send(ResetPrefixCache())

    def stats(self) -> EngineStats:
        self._processor.stats.engine = self._client.gauges
        self._processor.stats.num_restarts = self._client.num_restarts
        return self._processor.stats

    async def shutdown(self) -> None:
        """End everything that runs with reason "abort", then the loop."""
        await self._client.shutdown()

    def _open(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        prompt: str | None,
        cache_salt: str,
        use_prefix_cache: bool,
    ) -> tuple[OpenRequest, _Mailbox]:
        self._client.check()
        self._start()
        request, messages = self._processor.open(
            request_id,
            prompt_token_ids,
            sampling,
            prompt=prompt,
            eos_token_ids=self._eos_token_ids,
            arrival_s=self._clock.now_s(),
            cache_salt=cache_salt,
            use_prefix_cache=use_prefix_cache,
        )
        mailbox = self._mailboxes[id(request)] = _Mailbox(request)
        try:
            for message in messages:
                self._client.send(message)
        except (EngineDead, Busy):
            self._close(request)
            raise
        return request, mailbox

    def _close(self, request: OpenRequest) -> None:
        """The reader is done with it, or has left."""
        self._mailboxes.pop(id(request), None)
        left = self._processor.close(request)
        if left:
            RequestLog(log, request.request_id).info("closed by its reader after %d tokens", sum(c.num_tokens for c in request.choices))
            self._send_abort(left, FinishReason.ABORT)
        if self._tracer is not None:
            self._tracer(request.trace(self.model_name, self._clock.now_s(), incoming_headers.get()))

    def _send_abort(self, engine_ids: Sequence[str], reason: FinishReason) -> None:
        if engine_ids:
            with contextlib.suppress(EngineDead, Busy):  # a dead engine has ended every request itself
                self._client.send(AbortRequests(request_ids=tuple(engine_ids), reason=reason))

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            assert not self._mailboxes, "one engine serves one event loop at a time"
            self._loop = loop
            self._client.start(self._deliver)

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        done = self._processor.process(updates, self._clock.now_s())
        self._send_abort(done.stopped_ids, FinishReason.STOP)
        for request, delta in done.deltas:
            if delta.error is not None and delta.finished:
                RequestLog(log, request.request_id).warning("ended with an error: %s", delta.error)
            mailbox = self._mailboxes.get(id(request))
            if mailbox is not None:
                mailbox.put(delta)


class _Mailbox:
    """Between the processor and one reader: holds at most one delta, to which later ones are joined."""

    def __init__(self, request: OpenRequest) -> None:
        self.request = request
        self._delta: RequestOutput | None = None
        self._reader: asyncio.Future[None] | None = None
        """Waits for the next delta."""

    def put(self, delta: RequestOutput) -> None:
        if self._delta is None:
            self._delta = delta
        else:
            self._delta.add(delta)
        # A bare future: this happens once per token and stream, and an Event would cost as much again.
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> RequestOutput:
        while self._delta is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        delta, self._delta = self._delta, None
        return delta
