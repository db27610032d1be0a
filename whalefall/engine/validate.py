# SPDX-License-Identifier: Apache-2.0
"""What the front refuses before anything is queued: prompts and parameters that do not fit this model or this engine.

Ranges that hold for every model are checked by SamplingParams itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from whalefall.core.errors import BadSampling, PromptTooLong, RequestError
from whalefall.core.sampling import SamplingParams
from whalefall.core.structure import StructureKind
from whalefall.engine.resolve import ResolvedConfig


def check_prompt(prompt_token_ids: Sequence[int], config: ResolvedConfig) -> None:
    """
    Raises:
        RequestError: empty, or an id that is none of the model's.
        PromptTooLong: no room for one token of answer.
    """
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("prompt has no tokens, at least 1 is needed", param="prompt", code="empty_prompt")
    position = _first_bad(prompt_token_ids, config.vocab_size)
    if position is not None:
        raise RequestError(
            f"prompt token {position} is {prompt_token_ids[position]!r}, token ids are integers in [0, {config.vocab_size})",
            param="prompt",
            code="token_out_of_vocabulary",
        )
    if num_prompt + 1 > config.max_model_len:
        limit = f"limit {config.max_model_len:,} (max_model_len)"
        raise PromptTooLong(f"prompt has {num_prompt:,} tokens, {limit} with at least one for the answer", param="prompt")


def check_sampling(sampling: SamplingParams, config: ResolvedConfig, *, max_logprobs: int) -> None:
    """
    Args:
        max_logprobs: most alternatives per token; -1 allows all.
    Raises:
        BadSampling: more log-probabilities than allowed, or an id outside the vocabulary.
    """
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(sampling, name)
        if wanted is not None and max_logprobs != -1 and not 0 <= wanted <= max_logprobs:
            whole = "-1 (the whole vocabulary)" if wanted == -1 else str(wanted)
            raise BadSampling(f"{name} is {whole}, limit {max_logprobs} (max_logprobs)", param=name)
    for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
        for token_id in ids:
            if token_id >= config.vocab_size:
                raise BadSampling(f"{name} names token {token_id}, token ids are below {config.vocab_size}", param=name)
    spec = sampling.structured_outputs
    if spec is not None and spec.kind not in get_args(StructureKind):
        raise BadSampling(f"{spec.param}: kind must be one of {', '.join(get_args(StructureKind))}, got {spec.kind!r}", param=spec.param)


def _first_bad(token_ids: Sequence[int], vocab_size: int) -> int | None:
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return None  # the usual case, without a Python loop over a long prompt
    return next(i for i, t in enumerate(token_ids) if type(t) is not int or not 0 <= t < vocab_size)
