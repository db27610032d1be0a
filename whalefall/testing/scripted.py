# SPDX-License-Identifier: Apache-2.0
"""ScriptedLLM: an engine without a model, for tests of everything in front of it. It says the given pieces, k of them in one step.

Detokenising, stop strings, log-probabilities and outputs are the real ones (`engine.assembly`); only the tokens are written down.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from whalefall.core.errors import PromptTooLong
from whalefall.core.request import EngineRequest, FinishReason, RequestUpdate, TokenLogprobs
from whalefall.core.sampling import SamplingParams
from whalefall.engine.assembly import OpenRequest, OutputProcessor
from whalefall.engine.outputs import RequestOutput
from whalefall.observe.metrics import EngineStats
from whalefall.runtime.sampling.grammar import GrammarCompiler, GrammarStore
from whalefall.text.tokenizer import BYTE_OF_LETTER, Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIALS = (BOS, EOS, "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>")


def piece_tokenizer(pieces: Sequence[str | bytes]) -> Tokenizer:
    """A byte-level tokenizer with the markers of V4.1 and one extra token for each piece. Text is encoded byte by byte."""
    vocab = dict(BYTE_OF_LETTER)
    for piece in pieces:
        vocab.setdefault(_spelling(piece), len(vocab))
    added = [
        {
            "id": len(vocab) + i,
            "content": text,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, text in enumerate(SPECIALS)
    ]
    definition = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    return Tokenizer(json.dumps(definition), {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True})


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What every answer will be."""

    pieces: tuple[str | bytes, ...] = ()
    """Text of one token each; a marker (SPECIALS) means that control token. End of sequence follows the last piece by itself."""
    pieces_per_step: int = 1
    step_s: float = 0.0
    """Pause before each step."""
    fails_at: int | None = None
    """The step that ends with a fault of the engine."""
    rival_logprob: float = -3.0
    """Of the alternatives; -inf as under top_k 1."""


class ScriptedLLM:
    """Stands in for `AsyncLLM`. `open_requests` shows what is running; a request that was closed early is in `aborted`."""

    model_name = "scripted"

    def __init__(self, script: Script, *, max_model_len: int = 4096, chat_format: str = "deepseek_v41") -> None:
        self.script = script
        self.tokenizer = piece_tokenizer([piece for piece in script.pieces if piece not in SPECIALS])
        self.config = SimpleNamespace(max_model_len=max_model_len, max_logprobs=20, vocab_size=self.tokenizer.vocab_size)
        self.definition = SimpleNamespace(chat_format=chat_format)
        self.is_ready = True
        self.is_alive = True
        self.retry_after_s = 3.0
        self.gate = asyncio.Event()
        """Steps wait until it is set; it is, unless a test clears it."""
        self.gate.set()
        self.open_requests: set[str] = set()
        self.aborted: list[str] = []
        self.seen: list[tuple[list[int], SamplingParams]] = []
        """Prompts and parameters of all requests, in order."""
        self.cache_use: list[tuple[str, bool]] = []
        """cache_salt and use_prefix_cache of all requests."""
        self.num_resets = 0
        self._abort_asked: dict[tuple[str, int | None], FinishReason] = {}
        self._processor = OutputProcessor(self.tokenizer, lambda: 0)
        self._token_ids = [self._token_id(piece) for piece in script.pieces]
        self._grammars = GrammarStore(self._make_compiler)

    def validate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        if len(prompt_token_ids) + 1 > self.config.max_model_len:
            raise PromptTooLong(
                f"prompt has {len(prompt_token_ids)} tokens, limit {self.config.max_model_len} (max_model_len)", param="prompt"
            )

    async def prepare(self, sampling: SamplingParams) -> None:
        """The rule for the answer must be a good one, though no script is held to it."""
        if sampling.structured_outputs is not None:
            await self._grammars.check_async(sampling.structured_outputs)

    def _make_compiler(self) -> GrammarCompiler:
        from whalefall.runtime.sampling.llguidance_grammar import LLGuidanceCompiler

        return LLGuidanceCompiler(self.tokenizer, self.config.vocab_size, (self._token_id(EOS),))

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
        self.cache_use.append((cache_salt, use_prefix_cache))
        self.seen.append((list(prompt_token_ids), sampling))
        opened, requests = self._processor.open(
            request_id, prompt_token_ids, sampling, prompt=prompt, eos_token_ids=(self._token_id(EOS),), arrival_s=0.0
        )
        self.open_requests.add(request_id)
        try:
            async for output in self._steps(opened, requests, request_id):
                yield output
        finally:
            self.open_requests.discard(request_id)
            if self._processor.close(opened):
                self.aborted.append(request_id)

    async def abort(self, request_id: str, *, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        self._abort_asked[request_id, choice] = reason

    async def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    async def shutdown(self) -> None:
        self.is_alive = False

    def stats(self) -> EngineStats:
        self._processor.stats.engine.num_running = len(self.open_requests)
        return self._processor.stats

    async def _steps(self, opened: OpenRequest, requests: list[EngineRequest], request_id: str) -> AsyncGenerator[RequestOutput, None]:
        step = 0
        while not opened.is_finished:
            await asyncio.sleep(self.script.step_s)
            await self.gate.wait()
            for choice, request in enumerate(requests):  # choices take turns, as in a batch
                asked = self._abort_asked.get((request_id, choice)) or self._abort_asked.get((request_id, None))
                update = self._update(request, step, asked)
                for _, output in self._processor.process([update], now_s=0.0).deltas:
                    yield output
            step += 1

    def _update(self, request: EngineRequest, step: int, asked: FinishReason | None) -> RequestUpdate:
        if asked is not None:
            return RequestUpdate(request_id=request.request_id, finish_reason=asked)
        if step == self.script.fails_at:
            return RequestUpdate(request_id=request.request_id, finish_reason=FinishReason.ERROR, error="scripted fault")
        limit = request.sampling.max_tokens if request.sampling.max_tokens is not None else self.config.max_model_len
        whole = [*self._token_ids, self._token_id(EOS)][:limit]
        start = step * self.script.pieces_per_step
        ids = whole[start : start + self.script.pieces_per_step]
        is_end = start + len(ids) >= len(whole)
        reason = FinishReason.STOP if len(whole) == len(self._token_ids) + 1 else FinishReason.LENGTH
        wants = request.sampling.prompt_logprobs if step == 0 else None
        return RequestUpdate(
            request_id=request.request_id,
            new_token_ids=tuple(ids),
            logprobs=None if request.sampling.logprobs is None else tuple(self._score(i, request.sampling.logprobs) for i in ids),
            prompt_logprobs=None if wants is None else tuple(self._score(i, wants) for i in request.prompt_token_ids[1:]),
            finish_reason=reason if is_end else None,
        )

    def _score(self, token_id: int, count: int) -> TokenLogprobs:
        rivals = [token_id, *(i for i in range(count) if i != token_id)][:count]
        values = [-0.5, *[self.script.rival_logprob] * count][:count]
        return TokenLogprobs(
            token_id=token_id, logprob=-0.5, rank=1, top_ids=np.array(rivals, np.int32), top_logprobs=np.array(values, np.float32)
        )

    def _token_id(self, piece: str | bytes) -> int:
        found = self.tokenizer.token_to_id(str(piece) if piece in SPECIALS else _spelling(piece))
        assert found is not None
        return found


def _spelling(piece: str | bytes) -> str:
    """How a byte-level vocabulary writes these bytes."""
    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    return "".join(letters[byte] for byte in (piece.encode() if isinstance(piece, str) else piece))
