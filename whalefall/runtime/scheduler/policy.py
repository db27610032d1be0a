# SPDX-License-Identifier: Apache-2.0
"""The rules of scheduling as small pure functions: who is refused, how far a request may grow, what a prefix hit is, which rows run,
who may enter, when an answer ends. `scheduler.py` applies them and owns all state.
"""

from __future__ import annotations

from whalefall.core.errors import BadSampling, PromptTooLong, RequestError
from whalefall.core.request import EngineRequest, FinishReason
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.kvcache.prefix_index import Node
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


def may_hit(state: RequestState, config: SchedulerConfig) -> bool:
    """Whether a request adopts what is known of its prompt. Prompt log-probabilities need every row."""
    is_wanted = state.request.use_prefix_cache and not state.sampling.skip_reading_prefix_cache
    return config.prefix_caching and is_wanted and state.sampling.prompt_logprobs is None


def find_hit(state: RequestState, config: SchedulerConfig, cache: CacheManager) -> list[Node]:
    """The published blocks that a request adopts at (re)admission; none for a miss.

    Bounded replay of a hit that is no longer than the replay would compute the whole of it again: a miss costs the same and is exact.
    """
    if not may_hit(state, config):
        return []
    assert state.chain is not None
    state.chain.extend(state.token_ids)  # a preempted request's answer is part of what it looks for
    hit = cache.match(state.chain, len(state.token_ids))
    if config.replay == "bounded" and len(hit) * cache.block_tokens <= config.replay_rows:
        return []
    return hit


def start_after_hit(num_adopted: int, config: SchedulerConfig) -> tuple[int, int]:
    """(first row, lowest position that windows may see) of a request that adopts this many tokens.

    Bounded: the rows before the end of the hit run again, and see nothing older, since windows are all they refill. Exact: the windows
    come from a snapshot taken there and are whole.
    """
    if num_adopted == 0 or config.replay == "exact":
        return num_adopted, 0
    return num_adopted - config.replay_rows, num_adopted - config.replay_rows


def decoder_start(state: RequestState, config: SchedulerConfig) -> int:
    """Position of the first decoder row, given the tokens known at (re)admission; stays until the next admission.

    Prompt log-probabilities need the logits of every row, so such a request is never trimmed. After a hit the tail of a short suffix
    would reach below the replayed rows; it begins with them, which still covers every window of a later row.
    """
    if config.replay == "exact" or config.decoder_window is None or state.sampling.prompt_logprobs is not None:
        return state.window_start
    return max(state.window_start, len(state.token_ids) - config.decoder_window)


def max_drafts(state: RequestState, config: SchedulerConfig, block_tokens: int) -> int:
    """Drafts that a decode row of this request may be followed by.

    The step gives up to one token more than drafts, and none may lie beyond the limit. Where snapshots are taken, the row right before a
    block border runs in a step of its own: the state that is kept there must be what that row leaves, whatever is refused.
    """
    if not config.num_drafts or not state.has_drafts or not state.sampling.use_drafts:
        return 0
    limit = min(config.num_drafts, state.max_total - state.num_expected - 1)
    if config.takes_snapshots:
        limit = min(limit, block_tokens - state.num_scheduled % block_tokens - 2)
    return max(0, limit)


def must_wait_for_commit(state: RequestState, num_drafts: int, config: SchedulerConfig, block_tokens: int) -> bool:
    """Whether a decode step cannot be planned before it is known how many drafts in flight were accepted: a snapshot is due in between."""
    if not (config.takes_snapshots and state.num_unsure):
        return False
    end = state.num_scheduled + 1 + num_drafts
    return (state.num_scheduled - state.num_unsure) // block_tokens != end // block_tokens


def is_above_watermark(num_wanted: int, num_running: int, cache: CacheManager) -> bool:
    """Whether taking `num_wanted` blocks leaves one free block for each request that runs already.

    Each of them may want its next block in the very next step; an entry that takes it would be preempted at once. With nothing running
    there is nobody to protect, and the newcomer may take the whole pool.
    """
    return cache.num_free_blocks - num_wanted >= num_running


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
