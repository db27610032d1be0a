# SPDX-License-Identifier: Apache-2.0
"""The rules of scheduling as small pure functions: who is refused, how far a request may grow, which rows the decoder runs, who may
enter, when an answer ends. `scheduler.py` applies them and owns all state.
"""

from __future__ import annotations

from whalefall.core.errors import BadSampling, PromptTooLong, RequestError
from whalefall.core.request import EngineRequest, FinishReason
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler.config import SchedulerConfig
from whalefall.runtime.scheduler.state import RequestState


def check_request(request: EngineRequest, config: SchedulerConfig, cache: CacheManager) -> None:
    """Refuse what could never run.

    Raises:
        PromptTooLong: no room for one token of answer within max_model_len.
        RequestError: an empty prompt, or a prompt that the whole cache could not hold.
        BadSampling: n was not unrolled.
    """
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("prompt has no tokens, at least 1 is needed", param="prompt", code="empty_prompt")
    if num_prompt + 1 > config.max_model_len:
        limit = f"limit {config.max_model_len:,} (max_model_len)"
        raise PromptTooLong(f"prompt has {num_prompt:,} tokens, {limit} with at least one for the answer", param="prompt")
    if num_prompt > cache.capacity_tokens:
        room = f"the KV cache holds {cache.capacity_tokens:,} ({cache.num_usable_blocks:,} blocks of {cache.block_tokens:,})"
        message = f"prompt has {num_prompt:,} tokens, {room}: shorten it or give the cache more memory"
        raise RequestError(message, param="prompt", code="kv_cache_too_small")
    if request.sampling.n != 1:
        raise BadSampling(f"n is {request.sampling.n}: the scheduler takes one request per choice", param="n")


def max_total_tokens(request: EngineRequest, config: SchedulerConfig, cache: CacheManager) -> int:
    """Prompt and answer together: max_tokens, clipped to the context limit and to what the cache could hold alone.

    The last token of an answer is never a row, so it needs no place in the cache.
    """
    limit = min(config.max_model_len, cache.capacity_tokens + 1)
    max_tokens = request.sampling.max_tokens
    return limit if max_tokens is None else min(limit, len(request.prompt_token_ids) + max_tokens)


def decoder_start(state: RequestState, config: SchedulerConfig) -> int:
    """Position of the first decoder row, given the tokens known at (re)admission; stays until the next admission.

    Prompt log-probabilities need the logits of every row, so such a request is never trimmed.
    """
    if config.replay == "exact" or config.decoder_window is None or state.sampling.prompt_logprobs is not None:
        return 0
    return max(0, len(state.token_ids) - config.decoder_window)


def is_above_watermark(num_tokens: int, num_running: int, cache: CacheManager) -> bool:
    """Whether admitting `num_tokens` leaves one free block for each request that runs already.

    Each of them may want its next block in the very next step; an entry that takes it would be preempted at once. With nothing running
    there is nobody to protect, and the newcomer may take the whole pool.
    """
    return cache.num_free_blocks - cache.blocks_for(num_tokens) >= num_running


def end_of(state: RequestState, token_id: int) -> tuple[FinishReason | None, int | None]:
    """Whether the answer ends with `token_id`, just appended; and the stop id when that was the reason and not end-of-sequence.

    An id that ends the answer and fills the limit at once counts as STOP. Before min_tokens no id ends anything: the sampler masks them,
    and this does not rely on it.
    """
    if state.num_outputs > state.sampling.min_tokens:
        if token_id in state.eos_ids:
            return FinishReason.STOP, None
        if token_id in state.stop_ids:
            return FinishReason.STOP, token_id
    if len(state.token_ids) >= state.max_total:
        return FinishReason.LENGTH, None
    return None, None
