# SPDX-License-Identifier: Apache-2.0
"""Door: what all routes share. The engine (absent while it loads), the chat codec, the names served, the state of draining.

`Engine` is the part of `engine.AsyncLLM` that the door uses; `testing.ScriptedLLM` is another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from whalefall.core.errors import Busy, EngineDead, PromptTooLong, UnknownModel
from whalefall.core.request import FinishReason
from whalefall.core.sampling import SamplingParams
from whalefall.server.admission import Gatekeeper
from whalefall.server.config import ServerConfig
from whalefall.text.chat import ChatCodec, codec_for

T = TypeVar("T")

_ENCODE_INLINE_CHARS = 20_000
"""A longer text is encoded beside the event loop, so that the others' streams go on."""
_MAX_TOKEN_BYTES = 256
"""No vocabulary has longer tokens; bounds from below how many tokens a text has."""


class Engine(Protocol):
    model_name: str
    config: Any
    tokenizer: Any
    definition: Any

    @property
    def is_ready(self) -> bool: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def retry_after_s(self) -> float: ...
    def validate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None: ...
    async def prepare(self, sampling: SamplingParams) -> None: ...
    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        *,
        prompt: str | None = None,
        cache_salt: str = "",
        use_prefix_cache: bool = True,
    ) -> AsyncGenerator[Any, None]: ...
    async def reset_prefix_cache(self) -> None: ...
    async def abort(self, request_id: str, *, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None: ...
    def stats(self) -> Any: ...
    async def shutdown(self) -> None: ...


class Door:
    def __init__(self, config: ServerConfig, engine: Engine | None = None) -> None:
        self.config = config
        self.started_s = int(time.time())
        self.is_draining = False
        self.is_paused = False
        self.active: set[str] = set()
        """Ids of the engine requests of answers under way."""
        self.gate = Gatekeeper(config, time.monotonic)
        self._engine: Engine | None = None
        self._codec: ChatCodec | None = None
        if engine is not None:
            self.open(engine)

    @property
    def model_name(self) -> str:
        return self.config.served_model_names[0]

    @property
    def is_ready(self) -> bool:
        return self._engine is not None and self._engine.is_ready and self._engine.is_alive and not (self.is_draining or self.is_paused)

    @property
    def is_alive(self) -> bool:
        """Loading counts as alive, and so does an engine that is being restarted; one that stays dead does not."""
        return self._engine is None or self._engine.is_alive

    @property
    def engine_if_loaded(self) -> Engine | None:
        return self._engine

    def open(self, engine: Engine) -> None:
        """The engine has loaded: from now on requests get through."""
        self._engine = engine
        self._codec = codec_for(engine.definition.chat_format, engine.tokenizer)

    def admit(self) -> Engine:
        """The engine, if a new request may go to it now."""
        if self.is_draining:
            raise Busy("the server is shutting down", retry_after_s=self.config.drain_timeout_s)
        if self.is_paused:
            raise Busy("the server is paused", retry_after_s=self.gate.backlog.wait_s)
        if self._engine is None:
            raise Busy("the model is still loading", retry_after_s=1.0)
        if not self._engine.is_alive:
            raise EngineDead("the engine has stopped")
        if not self._engine.is_ready:
            raise Busy("the engine has stopped and is being started again", retry_after_s=self._engine.retry_after_s)
        admitted: Engine = self.gate.admit(self._engine)
        return admitted

    @property
    def codec(self) -> ChatCodec:
        assert self._codec is not None, "ask admit() first"
        return self._codec

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.config.served_model_names:
            known = ", ".join(self.config.served_model_names)
            raise UnknownModel(f"model {name!r} is not served here; there is: {known}", param="model")

    async def encode(self, work: Callable[[], T], num_bytes: int, param: str) -> T:
        """Run an encoding; a text too long for any tokenizer to fit is refused before the work, a long one is encoded in a thread."""
        limit = int(self.admit().config.max_model_len)
        fewest = num_bytes // _MAX_TOKEN_BYTES
        if fewest >= limit:
            raise PromptTooLong(f"prompt has at least {fewest:,} tokens, limit {limit:,} (max_model_len)", param=param)
        return work() if num_bytes < _ENCODE_INLINE_CHARS else await asyncio.to_thread(work)

    async def abort(self, request_id: str) -> None:
        if self._engine is not None:
            await self._engine.abort(request_id)

    async def abort_all(self) -> None:
        """End every answer under way with reason "abort"."""
        if self._engine is not None:
            for request_id in list(self.active):
                await self._engine.abort(request_id)
