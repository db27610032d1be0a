# SPDX-License-Identifier: Apache-2.0
"""From token ids to answers: the front's half of a request. LLM and AsyncLLM both feed it the engine's updates.

Unrolls n choices into engine requests, detokenises, watches for stop strings, trims what lies behind a match, joins the choices and counts.
A stop string ends a choice here, at once; the engine hears of it through an AbortRequests with reason STOP and may already have run on:
what it still sends for that choice is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whalefall.core.request import EngineRequest, FinishReason, RequestUpdate, TokenLogprobs
from whalefall.core.sampling import SamplingParams
from whalefall.engine.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput, position_logprobs
from whalefall.observe.metrics import EngineStats
from whalefall.observe.trace import RequestTrace
from whalefall.text.detokenizer import make_detokenizer
from whalefall.text.stop import StopMatcher
from whalefall.text.tokenizer import Tokenizer


class Choice:
    """One completion on its way to text."""

    def __init__(self, index: int, engine_id: str, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index = index
        self.engine_id = engine_id
        self.is_finished = False
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self.has_text = False
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._detokenizer = make_detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens) if sampling.detokenize else None
        self._matcher = StopMatcher(sampling.stop, include_in_text=sampling.include_stop_str_in_output)
        self._cumulative: float | None = None if sampling.logprobs is None else 0.0

    def take(self, update: RequestUpdate) -> CompletionOutput:
        """What the update adds. Tokens behind the one that completes a stop string are left out, with their log-probabilities."""
        assert not self.is_finished
        if len(update.new_token_ids) == 1 and update.finish_reason is None and update.logprobs is None:
            return self._take_one(update.new_token_ids[0])
        out = CompletionOutput(self.index)
        for i, token_id in enumerate(update.new_token_ids):
            self.num_tokens += 1
            ends_here = update.finish_reason is FinishReason.STOP and i + 1 == len(update.new_token_ids)
            out.token_ids.append(token_id)
            out.token_texts.append(self._text_of(token_id, ends_here=ends_here))
            if self._matcher.matched is not None:
                break
        if update.is_finished and self._matcher.matched is None:
            self._append(out, self._rest())
        self._add_logprobs(out, update.logprobs)
        out.text = "".join(out.token_texts)
        self.has_text |= bool(out.text)
        self._finish(out, update)
        return out

    def _take_one(self, token_id: int) -> CompletionOutput:
        """The usual update, for which the general way would take twice as long."""
        self.num_tokens += 1
        text = self._text_of(token_id, ends_here=False)
        out = CompletionOutput(self.index, text, [token_id], self._cumulative, None, None, None, [text])
        if text:
            self.has_text = True
        if self._matcher.matched is not None:
            self._finish_by_stop_string(out)
        return out

    def _text_of(self, token_id: int, *, ends_here: bool) -> str:
        if self._detokenizer is None or (ends_here and not self._sampling.include_stop_str_in_output):
            return ""  # the stop id itself is no part of the text
        return self._checked(self._detokenizer.push(token_id))

    def _checked(self, text: str) -> str:
        """Stop strings count only in text behind the first min_tokens tokens."""
        return text if self.num_tokens <= self._sampling.min_tokens else self._matcher.push(text)

    def _rest(self) -> str:
        """No more tokens: the half character and the possible beginning of a stop string that were held back."""
        if self._detokenizer is None:
            return ""
        text = self._checked(self._detokenizer.flush())
        return text if self._matcher.matched is not None else text + self._matcher.flush()

    def _append(self, out: CompletionOutput, text: str) -> None:
        if not text:
            return
        if out.token_texts:
            out.token_texts[-1] += text
        else:
            out.token_texts.append(text)  # an end without a token (abort): the rest stands alone

    def _add_logprobs(self, out: CompletionOutput, logprobs: Sequence[TokenLogprobs] | None) -> None:
        if logprobs is not None and self._cumulative is not None:
            kept = logprobs[: len(out.token_ids)]
            out.logprobs = [position_logprobs(position, self._tokenizer) for position in kept]
            self._cumulative += sum(position.logprob for position in kept)
        out.cumulative_logprob = self._cumulative

    def _finish(self, out: CompletionOutput, update: RequestUpdate) -> None:
        if self._matcher.matched is not None:
            self._finish_by_stop_string(out)
        elif update.finish_reason is not None:
            out.finish_reason, out.stop_reason = update.finish_reason, update.stop_token_id
            self.finish_reason, self.is_finished = out.finish_reason, True

    def _finish_by_stop_string(self, out: CompletionOutput) -> None:
        out.finish_reason, out.stop_reason = FinishReason.STOP, self._matcher.matched
        self.finish_reason, self.is_finished = FinishReason.STOP, True


@dataclass(slots=True)
class OpenRequest:
    """One user's request: n choices, the prompt's log-probabilities, the times."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[Choice]
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None
    """Grows chunk by chunk; None when not asked for, or delivered."""
    num_cached_tokens: int = 0
    has_begun: bool = False
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        for choice in self.choices:  # noqa: SIM110  # asked for every token, and a generator costs more
            if not choice.is_finished:
                return False
        return True

    @property
    def open_engine_ids(self) -> list[str]:
        return [choice.engine_id for choice in self.choices if not choice.is_finished]

    def empty_output(self) -> RequestOutput:
        """Everything but the choices."""
        is_finished = self.is_finished
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, None, [], is_finished, self.metrics, self.num_cached_tokens, self.error
        )

    def trace(self, model: str, now_s: float, headers: Mapping[str, str] | None) -> RequestTrace:
        """What a trace says of it, now that its reader is done."""
        times = self.metrics
        return RequestTrace(
            request_id=self.request_id,
            model=model,
            arrival_s=times.arrival_time,
            first_scheduled_s=times.first_scheduled_time,
            first_token_s=times.first_token_time,
            finished_s=now_s if times.finished_time is None else times.finished_time,
            prompt_tokens=len(self.prompt_token_ids),
            cached_tokens=self.num_cached_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            finish_reasons=tuple(choice.finish_reason or FinishReason.ABORT for choice in self.choices),
            error=self.error,
            headers=headers,
        )

    def take_prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """All of them once they are complete, and then never again."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) < len(self.prompt_token_ids):
            return None
        whole, self.prompt_logprobs = self.prompt_logprobs, None
        return whole


@dataclass(slots=True)
class Processed:
    """What a batch of updates came to."""

    deltas: list[tuple[OpenRequest, RequestOutput]] = field(default_factory=list)
    stopped_ids: list[str] = field(default_factory=list)
    """Engine requests that ended by a stop string and must be told so."""


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer, draw_seed: Callable[[], int]) -> None:
        """
        Args:
            draw_seed: a fresh 64-bit seed for a request that brings none.
        """
        self.stats = EngineStats()
        self._tokenizer = tokenizer
        self._draw_seed = draw_seed
        self._open: dict[str, tuple[OpenRequest, Choice]] = {}
        self._num_opened = 0

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        prompt: str | None,
        eos_token_ids: tuple[int, ...],
        arrival_s: float,
        cache_salt: str = "",
        use_prefix_cache: bool = True,
    ) -> tuple[OpenRequest, list[EngineRequest]]:
        """Register a request; what comes back second must be sent to the engine."""
        self._num_opened += 1
        self.stats.num_requests += 1
        seed = self._draw_seed() if sampling.seed is None else sampling.seed
        # The caller's id may repeat; the engine's never does.
        ids = [f"{request_id}/{self._num_opened}.{index}" for index in range(sampling.n)]
        params = [_choice_sampling(sampling, index, seed) for index in range(sampling.n)]
        choices = [Choice(index, engine_id, p, self._tokenizer) for index, (engine_id, p) in enumerate(zip(ids, params, strict=True))]
        metrics = RequestMetrics(arrival_s, token_times=[[] for _ in choices])
        prompt_ids = list(prompt_token_ids)
        opened = OpenRequest(request_id, prompt, prompt_ids, choices, metrics, None if sampling.prompt_logprobs is None else [None])
        self._open.update({choice.engine_id: (opened, choice) for choice in choices})
        requests = [
            EngineRequest(
                request_id=engine_id,
                prompt_token_ids=tuple(prompt_ids),
                sampling=p,
                eos_token_ids=eos_token_ids,
                arrival_s=arrival_s,
                cache_salt=cache_salt,
                use_prefix_cache=use_prefix_cache,
            )
            for engine_id, p in zip(ids, params, strict=True)
        ]
        return opened, requests

    def close(self, request: OpenRequest) -> list[str]:
        """The reader is gone: nothing more is delivered. The engine ids that still run."""
        left = request.open_engine_ids
        for choice in request.choices:
            self._open.pop(choice.engine_id, None)
            if not choice.is_finished:
                choice.is_finished = True
                self._count_end(FinishReason.ABORT)
        return left

    def process(self, updates: Iterable[RequestUpdate], now_s: float) -> Processed:
        done = Processed()
        for update in updates:
            found = self._open.get(update.request_id)
            if found is None:
                continue  # ended by a stop string, or its reader has left
            request, choice = found
            output = self._take(request, choice, update, now_s)
            if choice.is_finished:
                del self._open[update.request_id]
                if not update.is_finished:
                    done.stopped_ids.append(update.request_id)
            if output is not None:
                done.deltas.append((request, output))
        return done

    def _take(self, request: OpenRequest, choice: Choice, update: RequestUpdate, now_s: float) -> RequestOutput | None:
        self._note_prompt(request, choice, update)
        moved = choice.take(update)
        self._note_times(request, choice, len(moved.token_ids), update, now_s)
        if moved.finish_reason is not None:
            request.metrics.finished_time = now_s
            self._note_end(request, choice, moved, now_s)
        output = request.empty_output()
        if request.prompt_logprobs is not None:
            output.prompt_logprobs = request.take_prompt_logprobs()
        if moved.token_ids or moved.finish_reason is not None:
            output.outputs.append(moved)
        return output if output.outputs or output.prompt_logprobs is not None else None

    def _note_prompt(self, request: OpenRequest, choice: Choice, update: RequestUpdate) -> None:
        request.error = request.error or update.error
        if update.num_cached_tokens > request.num_cached_tokens:
            request.num_cached_tokens = update.num_cached_tokens
        if update.prompt_logprobs and choice.index == 0 and request.prompt_logprobs is not None:
            request.prompt_logprobs += [position_logprobs(position, self._tokenizer) for position in update.prompt_logprobs]
        if not request.has_begun and update.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
            request.has_begun = True
            self.stats.prompt_tokens += len(request.prompt_token_ids)
            self.stats.cached_prompt_tokens += request.num_cached_tokens
            self.stats.prompt_length.observe(len(request.prompt_token_ids))

    def _note_times(self, request: OpenRequest, choice: Choice, num_new: int, update: RequestUpdate, now_s: float) -> None:
        metrics, times = request.metrics, request.metrics.token_times[choice.index]
        timings = update.timings
        if timings is not None and timings.first_scheduled_s is not None and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = timings.first_scheduled_s
            self.stats.queue_s.observe(timings.first_scheduled_s - metrics.arrival_time)
        if not num_new:
            return
        at_s = now_s if timings is None or timings.last_token_s is None else timings.last_token_s
        if times:
            self.stats.itl_s.observe(at_s - times[-1])
        else:
            self.stats.ttft_s.observe(at_s - metrics.arrival_time)
        metrics.first_token_time = at_s if metrics.first_token_time is None else metrics.first_token_time
        metrics.last_token_time = at_s
        times += [at_s] * num_new
        self.stats.generation_tokens += num_new

    def _note_end(self, request: OpenRequest, choice: Choice, moved: CompletionOutput, now_s: float) -> None:
        assert moved.finish_reason is not None
        self._count_end(moved.finish_reason)
        self.stats.e2e_s.observe(now_s - request.metrics.arrival_time)
        self.stats.generation_length.observe(choice.num_tokens)
        self._note_stages(request.metrics, request.metrics.token_times[choice.index])
        if moved.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and not choice.has_text:
            self.stats.empty_answers += 1

    def _note_stages(self, metrics: RequestMetrics, times: list[float]) -> None:
        """How long a completion was computed, and how that was spent."""
        if not times or metrics.first_scheduled_time is None:
            return
        self.stats.prefill_s.observe(times[0] - metrics.first_scheduled_time)
        self.stats.decode_s.observe(times[-1] - times[0])
        self.stats.inference_s.observe(times[-1] - metrics.first_scheduled_time)
        if len(times) > 1:
            self.stats.tpot_s.observe((times[-1] - times[0]) / (len(times) - 1))

    def _count_end(self, reason: FinishReason) -> None:
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1


def _choice_sampling(sampling: SamplingParams, index: int, seed: int) -> SamplingParams:
    choice = sampling.for_choice(index, seed)
    # The prompt is scored once, by choice 0; a request that only scores (max_tokens 0) has nothing else to ask for.
    if index > 0 and sampling.max_tokens != 0:
        choice = replace(choice, prompt_logprobs=None)
    return choice
