# SPDX-License-Identifier: Apache-2.0
"""The sampler for one row, written as the documentation reads: plain loops, float64, no batching."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from whalefall.core.plan import NewRequest
from whalefall.core.sampling import SamplingParams
from whalefall.kernels import sampling as ops


def shaped(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos_ids: Sequence[int]
) -> list[float]:
    """Bias, penalties, bans."""
    out = list(logits)
    for token, bias in params.logit_bias.items():
        out[token] = -math.inf if bias <= -100 else out[token] + bias
    for token in {*prompt, *output}:
        out[token] = out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
    for token in set(output):
        out[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}:
            out[token] = -math.inf
    return out


def support(out: Sequence[float], params: SamplingParams) -> list[int]:
    """Ids that may be drawn, likeliest first."""
    order = sorted((i for i, x in enumerate(out) if x > -math.inf), key=lambda i: (-out[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    best = out[order[0]]
    weights = [math.exp((out[i] - best) / params.temperature) for i in order]
    total, reached, kept = sum(weights), 0.0, []
    for i, weight in zip(order, weights):
        if params.top_p < 1 and reached >= params.top_p * total:
            break
        kept.append(i)
        reached += weight
    return [i for i in kept if params.min_p == 0 or math.exp((out[i] - best) / params.temperature) >= params.min_p]


def choose(logits: Sequence[float], request: NewRequest, output: Sequence[int]) -> int:
    """The token that must come next."""
    params, prompt = request.sampling, request.token_ids[: request.num_prompt_tokens]
    out = shaped(logits, params, prompt, output, request.eos_token_ids)
    if params.is_greedy:
        return max(range(len(out)), key=lambda i: (out[i], -i))
    position = len(prompt) + len(output)
    seed = (params.seed or 0) % 2**64
    noise = ops.exponential_noise(torch.tensor([seed - 2**64 if seed >= 2**63 else seed]), torch.tensor([position]), 0, len(out))[
        0
    ].tolist()
    best = max(x for x in out)
    return max(support(out, params), key=lambda i: (out[i] - best) / params.temperature - math.log(noise[i]))
