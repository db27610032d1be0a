# SPDX-License-Identifier: Apache-2.0
"""What each optimisation is worth: the engine in this process, with one of them switched off at a time.

A *switch* is an engine option, or the choice of kernels, that one row turns off. After loading, a row reads the engine's resolved config
and the kernel registry to see that what should be off is off; a row that cannot run says why. What this build does not have, or this device
does not use, is named and not measured. Who adds an optimisation adds its switch here.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from whalefall.bench.agent import AgentShape, make_sessions, run_agents
from whalefall.bench.load import run_load
from whalefall.bench.metrics import summarise
from whalefall.bench.mixes import FIRST_TOKEN_ID, Lengths, PromptMaker
from whalefall.bench.openai import Ask
from whalefall.bench.records import Arrival, Record
from whalefall.core.errors import ConfigError, WhalefallError, not_among
from whalefall.core.sampling import SamplingParams
from whalefall.core.seams import MonotonicClock
from whalefall.engine.async_llm import AsyncLLM
from whalefall.engine.config import EngineConfig
from whalefall.engine.outputs import RequestOutput
from whalefall.engine.resolve import ResolvedConfig
from whalefall.kernels.registry import reference_only, twins_on

FULL, BASELINE = "everything on", "baseline"
REFERENCE_KERNELS = "kernels"
"""Stands beside the engine options in a row's choices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    name: str
    off: Mapping[str, Any]
    """Engine options that turn it off; {"kernels": "reference"} is the registry's."""
    is_on: Callable[[ResolvedConfig], bool]
    option: str = ""
    """Whose reason to quote when it is off by default here."""
    usually: str = ""
    """Why it is off where nobody turned it off and no option has a reason."""
    in_baseline: bool = True
    """Whether the named baseline goes without it."""


def _device_twins(config: ResolvedConfig) -> dict[str, tuple[str, ...]]:
    return twins_on(torch.device(config.device))


SWITCHES = (
    Switch(name="kernels for this device", off={REFERENCE_KERNELS: "reference"}, is_on=lambda c: bool(_device_twins(c))),
    Switch(name="one step ahead", off={"async_scheduling": False}, is_on=lambda c: c.async_scheduling, option="async_scheduling"),
    Switch(
        name="CUDA graphs", off={"enforce_eager": True}, is_on=lambda c: c.has_graphs, in_baseline=False, usually="graphs are for a GPU"
    ),
    Switch(name="bounded replay", off={"replay": "exact"}, is_on=lambda c: c.replay == "bounded"),
    Switch(name="prefix cache", off={"enable_prefix_caching": False}, is_on=lambda c: c.prefix_caching, option="enable_prefix_caching"),
    Switch(
        name="drafts", off={"draft": "off"}, is_on=lambda c: c.drafts is not None, usually="the default; -e draft=adaptive turns them on"
    ),
    Switch(name="dense weights", off={"weights": "packed"}, is_on=lambda c: c.weights == "dense", option="weights", in_baseline=False),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Lengths are token ids. Every row gets the same prompts, from the seed."""

    requests: int = 16
    """Agents, and prompts, at once in the crowded phases."""
    low: int = 1
    """Agents at once in the quiet phase."""
    shape: AgentShape = field(default_factory=AgentShape)
    input_len: int = 256
    output_len: int = 32
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One workload, once."""

    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p90: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    failed: int
    rows_run: int
    """By the engine, prompts and outputs together."""
    rows_replayed: int


PHASES = ("agent_low", "agent_many", "plain_many")
"""Agent traces by few users, the same by many, and independent prompts handed in at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A row to run."""

    name: str
    off: tuple[Switch, ...]

    @property
    def choices(self) -> dict[str, Any]:
        return {k: v for switch in self.off for k, v in switch.off.items()}


@dataclass(kw_only=True, slots=True)
class Row:
    name: str
    off: tuple[str, ...]
    """Switches that were found off after loading."""
    config: dict[str, Any] = field(default_factory=dict)
    """As resolved, and which kernels the device had a choice of."""
    rounds: list[dict[str, Phase]] = field(default_factory=list)
    refused: str | None = None
    """Why it did not run."""

    def figure(self, phase: str, name: str) -> float | None:
        """The median over the rounds."""
        values = [getattr(made[phase], name) for made in self.rounds]
        return statistics.median(values) if values else None

    @property
    def failed(self) -> int:
        return sum(phase.failed for made in self.rounds for phase in made.values())


@dataclass(frozen=True, slots=True)
class Ablation:
    rows: list[Row]
    absent: list[tuple[str, str]]
    """(optimisation, why there is no row)."""


def ablate(
    base: EngineConfig,
    workload: Workload,
    *,
    rounds: int = 1,
    only: Sequence[str] = (),
    on_row: Callable[[str, int], None] | None = None,
) -> Ablation:
    """Everything on, each switch off by itself, and the baseline. Rows take turns, round by round, so that a slow minute hits all of them.

    Args:
        base: what everything on means; an option given here is on, or off, in every row that does not switch it.
        only: names of switches to run rows for; all when empty.
    Raises:
        ConfigError: not even everything on can be loaded.
    """
    unknown = [name for name in only if name not in {s.name for s in SWITCHES}]
    if unknown:
        raise ConfigError(not_among("only", unknown[0], [s.name for s in SWITCHES]))

    def run(variant: Variant, row: Row, number: int) -> ResolvedConfig | None:
        if on_row is not None:
            on_row(variant.name, number)
        return run_row(row, base, variant, workload, number)

    everything, full = Variant(name=FULL, off=()), Row(name=FULL, off=())
    resolved = run(everything, full, 0)
    if resolved is None:
        raise ConfigError(full.refused or "not even everything on can be loaded")
    variants, absent = choose(resolved, only)
    pairs = [(everything, full), *((v, Row(name=v.name, off=tuple(s.name for s in v.off))) for v in variants)]
    for number in range(rounds):
        for variant, row in pairs:
            if row.refused is None and len(row.rounds) == number:
                run(variant, row, number)
    return Ablation([row for _, row in pairs], absent)


def choose(full: ResolvedConfig, only: Sequence[str] = ()) -> tuple[list[Variant], list[tuple[str, str]]]:
    """Rows to run besides everything on, and switches that have none because they are off already."""
    here = [switch for switch in SWITCHES if switch.is_on(full)]
    absent = [(switch.name, _why_off(switch, full)) for switch in SWITCHES if switch not in here]
    wanted = [switch for switch in here if not only or switch.name in only]
    variants = [Variant(name=f"no {switch.name}", off=(switch,)) for switch in wanted]
    return [*variants, Variant(name=BASELINE, off=tuple(s for s in here if s.in_baseline))], absent


def _why_off(switch: Switch, full: ResolvedConfig) -> str:
    if switch.off.get(REFERENCE_KERNELS):
        return f"not on this device: no op has an implementation for {full.device} beside its reference"
    reason = switch.usually or full.chosen_by.get(switch.option, "user")
    return "off in every row: " + ("you chose so" if reason == "user" else reason)


def run_row(row: Row, base: EngineConfig, variant: Variant, workload: Workload, number: int) -> ResolvedConfig | None:
    """Load an engine, see that it is the one asked for, run the phases. None when it was refused."""
    options = {k: v for k, v in variant.choices.items() if k != REFERENCE_KERNELS}
    with reference_only() if REFERENCE_KERNELS in variant.choices else nullcontext():
        try:
            config, made = asyncio.run(_measure(replace(base, **options), variant, workload, number, row))
        except ConfigError as error:
            row.refused = str(error)
            return None
        finally:
            gc.collect()  # the engine is a web of references: its memory must be free before the next is loaded
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    row.rounds.append(made)
    return config


async def _measure(
    config: EngineConfig, variant: Variant, workload: Workload, number: int, row: Row
) -> tuple[ResolvedConfig, dict[str, Phase]]:
    engine = AsyncLLM.from_config(config)
    try:
        still_on = [switch.name for switch in variant.off if switch.is_on(engine.config)]
        if still_on:
            raise ConfigError(f"{', '.join(still_on)} should be off and is not")
        row.config = applied(engine.config)
        await _warm_up(engine, workload)
        runs = {
            "agent_low": lambda send: _agents(send, workload, engine.config.vocab_size, workload.low),
            "agent_many": lambda send: _agents(send, workload, engine.config.vocab_size, workload.requests),
            "plain_many": lambda send: _plain(send, workload, engine.config.vocab_size),
        }
        made = {}
        for name, run in runs.items():
            # A salt of its own keeps a phase from finding what an earlier one has left in the prefix cache.
            made[name] = await _phase(engine, run, salt=f"{name}-{number}")
        return engine.config, made
    finally:
        await engine.shutdown()


def applied(config: ResolvedConfig) -> dict[str, Any]:
    """What a row really ran with."""
    names = (
        "model_name",
        "device",
        "dtype",
        "weights",
        "kv_cache_dtype",
        "replay",
        "prefix_caching",
        "async_scheduling",
        "max_num_seqs",
        "num_blocks",
    )
    return {name: getattr(config, name) for name in names} | {REFERENCE_KERNELS: _device_twins(config) or "reference"}


async def _phase(engine: AsyncLLM, run: Callable[[Any], Awaitable[list[Record]]], salt: str) -> Phase:
    before = engine.stats().engine
    records = await run(lambda ask: submit(engine, ask, salt))
    after, made = engine.stats().engine, summarise(records, percents=(50, 90))
    ttft = made.ttft_ms
    return Phase(
        output_tokens_per_s=made.output_tokens_per_s,
        total_tokens_per_s=made.total_tokens_per_s,
        ttft_ms_mean=ttft.mean if ttft else 0.0,
        ttft_ms_p50=ttft.at(50) if ttft else 0.0,
        ttft_ms_p90=ttft.at(90) if ttft else 0.0,
        prompt_tokens=made.prompt_tokens,
        cached_tokens=made.cached_tokens,
        output_tokens=made.output_tokens,
        failed=made.failed,
        rows_run=after.batched_tokens - before.batched_tokens,
        rows_replayed=after.prefix_replayed_tokens - before.prefix_replayed_tokens,
    )


async def _agents(send: Any, workload: Workload, vocab_size: int, users: int) -> list[Record]:
    rng = random.Random(workload.seed)
    sessions = make_sessions(max(users, 2), workload.shape, prompt_maker(rng, vocab_size), rng)
    turns = await run_agents(sessions, send, users=users, shape=workload.shape, form="ids")
    return [turn.record for turn in turns]


async def _plain(send: Any, workload: Workload, vocab_size: int) -> list[Record]:
    maker = prompt_maker(random.Random(workload.seed + 1), vocab_size)
    asks = [Ask(prompt=maker.units(workload.input_len), max_tokens=workload.output_len) for _ in range(workload.requests)]
    return await run_load(asks, send, [0.0] * len(asks))


async def _warm_up(engine: AsyncLLM, workload: Workload) -> None:
    """Libraries initialise, kernels compile, memory is touched; not measured."""
    maker = prompt_maker(random.Random(workload.seed + 2), engine.config.vocab_size)
    asks = [Ask(prompt=maker.units(workload.input_len), max_tokens=4) for _ in range(min(2, workload.requests))]
    for _ in range(2):
        await asyncio.gather(*(submit(engine, ask, "warm-up") for ask in asks))


def prompt_maker(rng: random.Random, vocab_size: int) -> PromptMaker:
    if vocab_size <= FIRST_TOKEN_ID:
        raise ConfigError(f"the model has {vocab_size} token ids, random prompts need more than {FIRST_TOKEN_ID}")
    return PromptMaker(rng, "ids", vocab_size, "completions")


_NUMBERS: Iterator[int] = itertools.count()


async def submit(engine: AsyncLLM, ask: Ask, salt: str) -> Record:
    """One request, with the engine's own times."""
    prompt: list[int] = list(ask.prompt)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True, detokenize=False)
    ids: list[int] = []
    last: RequestOutput | None = None
    error: str | None = None
    try:
        async for last in engine.generate(prompt, params, f"ablate-{next(_NUMBERS)}", cache_salt=salt):
            ids += [token_id for choice in last.outputs for token_id in choice.token_ids]
        error = None if last is None else last.error
    except WhalefallError as refusal:
        error = str(refusal)
    metrics = None if last is None else last.metrics
    if metrics is None or metrics.finished_time is None:
        now_s = MonotonicClock().now_s()
        return Record(sent_s=now_s, ended_s=now_s, error=error or "no answer", label=ask.label)
    return Record(
        sent_s=metrics.arrival_time,
        ended_s=metrics.finished_time,
        arrivals=tuple(Arrival(at_s, 1) for at_s in metrics.token_times[0]),
        prompt_tokens=len(prompt),
        cached_tokens=last.num_cached_tokens if last is not None else 0,
        counted_by="token_ids",
        error=error,
        token_ids=tuple(ids),
        label=ask.label,
    )


def small_shape(*, system: int, turns: int, tool_result: int, answer: int, max_context: int) -> AgentShape:
    """Agents without pauses between turns, so that nothing but the engine is timed."""
    return AgentShape(
        system=system,
        kinds=1,
        task=Lengths(tool_result, 0.8, 1, max(1, max_context // 4)),
        turns=Lengths(turns, 0.3, 2, max(2, 2 * turns)),
        answer=Lengths(answer, 0.5, 1, 4 * answer),
        tool_result=Lengths(tool_result, 0.8, 1, max(1, max_context // 4)),
        tool_time_s=0.0,
        max_context=max_context,
        summary=max(1, tool_result),
    )
