# SPDX-License-Identifier: Apache-2.0
"""The engine in this process, without a server: throughput, latency, and the time of a decode step at a batch and a context.

A *decode step* is an interval between two results in which every one of the B requests got one token, and nothing else ran; times are the
engine's own, taken when a step's result is read. Prompts are random ids, greedy, end of sequence ignored.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from whalefall.bench.metrics import Spread, spread
from whalefall.core.errors import ConfigError
from whalefall.core.sampling import SamplingParams
from whalefall.engine.config import EngineConfig, describe_options
from whalefall.engine.outputs import RequestMetrics, RequestOutput

STEP_PERCENTILES = (10.0, 50.0, 90.0)


class Engine(Protocol):
    """What is measured: `whalefall.LLM`, or a stand-in."""

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[RequestOutput]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    requests: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float
    """From the first arrival to the last end, on the engine's clock."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRow:
    batch: int
    context: int
    """Tokens of the prompt; the steps measured follow it."""
    step_ms: Spread | None
    """None when no interval qualified."""
    output_tokens_per_s: float | None
    """Batch over the mean step."""


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Ids from the upper part of the vocabulary where there is one, so that no control token is among them."""
    rng, low = random.Random(seed), min(100, vocab_size // 2)
    return [[rng.randrange(low, vocab_size) for _ in range(length)] for _ in range(count)]


def run_throughput(engine: Engine, prompts: Sequence[Sequence[int]], output_len: int) -> Throughput:
    outputs = _generate(engine, prompts, output_len)
    duration = max(_end(o) for o in outputs) - min(_metrics(o).arrival_time for o in outputs)
    prompt_tokens, output_tokens = sum(len(p) for p in prompts), sum(len(o.outputs[0].token_ids) for o in outputs)
    firsts = [t * 1e3 for o in outputs if (t := _metrics(o).time_to_first_token) is not None]
    return Throughput(
        requests=len(outputs),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        duration_s=duration,
        requests_per_s=len(outputs) / duration,
        output_tokens_per_s=output_tokens / duration,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration,
        ttft_ms=spread(firsts),
    )


def run_latency(engine: Engine, batches: Sequence[Sequence[Sequence[int]]], output_len: int, num_warmup: int) -> Spread | None:
    """Milliseconds from the arrival of a batch to its last token, one value per batch after the warm-up ones."""
    values = []
    for number, prompts in enumerate(batches):
        outputs = _generate(engine, prompts, output_len)
        if number >= num_warmup:
            values.append((max(_end(o) for o in outputs) - min(_metrics(o).arrival_time for o in outputs)) * 1e3)
    return spread(values)


def run_decode(engine: Engine, prompts: Sequence[Sequence[int]], num_steps: int, num_warmup: int = 2) -> DecodeRow:
    """One batch of prompts of equal length; the first steps after the whole batch has begun are left out."""
    outputs = _generate(engine, prompts, num_steps + num_warmup + 1)
    steps = decode_steps([_metrics(o).token_times[0] for o in outputs])[num_warmup:]
    made = spread([s * 1e3 for s in steps], STEP_PERCENTILES)
    rate = None if made is None or made.mean == 0 else len(prompts) / made.mean * 1e3
    return DecodeRow(batch=len(prompts), context=len(prompts[0]), step_ms=made, output_tokens_per_s=rate)


def decode_steps(times: Sequence[Sequence[float]]) -> list[float]:
    """Seconds between consecutive results of which each carried exactly one token for every request.

    Args:
        times: per request, the time of each of its tokens; tokens of one step have one time.
    """
    counts: dict[float, list[int]] = {}
    for who, own in enumerate(times):
        for at in own:
            counts.setdefault(at, [0] * len(times))[who] += 1
    ordered = sorted(counts.items())
    whole = [(at, all(n == 1 for n in got)) for at, got in ordered]
    return [at - before for (before, was), (at, now) in pairwise(whole) if was and now]


def engine_options(items: Sequence[str]) -> dict[str, Any]:
    """ "dtype=float32", "max-num-seqs=8" -> options of EngineConfig.

    Raises:
        ConfigError: an item without "=", or a value of the wrong kind; unknown names are the engine's to refuse.
    """
    kinds = {option.name: option.kind for option in describe_options(EngineConfig)}
    options: dict[str, Any] = {}
    for item in items:
        name, mark, text = item.partition("=")
        name = name.replace("-", "_")
        if not mark:
            raise ConfigError(f"engine option {item!r} must be name=value, e.g. dtype=float32")
        options[name] = _value(name, text, kinds.get(name, str))
    return options


def as_row(facts: Mapping[str, Any], row: DecodeRow) -> dict[str, Any]:
    """A CSV row: who ran where, the shape, the figures."""
    s = row.step_ms
    figures = {f"p{p:g}_ms": None if s is None else round(s.at(p), 4) for p in STEP_PERCENTILES}
    speed = None if row.output_tokens_per_s is None else round(row.output_tokens_per_s, 2)
    return {**facts, "batch": row.batch, "context": row.context, "num_steps": s.count if s else 0, **figures, "output_tokens_per_s": speed}


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], output_len: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    return engine.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)


def _metrics(output: RequestOutput) -> RequestMetrics:
    assert output.metrics is not None, "an answer without its times"
    return output.metrics


def _end(output: RequestOutput) -> float:
    end = _metrics(output).last_token_time
    assert end is not None, "a request that ended without a token"
    return end


def _value(name: str, text: str, kind: type) -> Any:
    if text.lower() in ("none", "null"):
        return None
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"engine option {name} is {text!r}, must be true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"engine option {name} is {text!r}, must be {'an integer' if kind is int else 'a number'}") from None
