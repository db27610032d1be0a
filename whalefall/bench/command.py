# SPDX-License-Identifier: Apache-2.0
"""The `whalefall bench` command line."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from whalefall.bench.ablate_command import ablate_command
from whalefall.bench.agent import AgentShape, AgentSummary, TurnRecord, make_sessions, run_agents, summarise_agents
from whalefall.bench.http import Address, HttpError
from whalefall.bench.load import arrival_times, run_load
from whalefall.bench.metrics import Goal, Spread, summarise
from whalefall.bench.mixes import Lengths, PromptMaker, make_asks, parse_mix, read_asks
from whalefall.bench.offline_command import decode_command, latency_command, throughput_command
from whalefall.bench.openai import Ask, Endpoint, Target, list_models, send
from whalefall.bench.records import Record
from whalefall.bench.report import spread_table, to_csv, to_json, to_picture, to_table, write_files
from whalefall.core.errors import not_among

READY_TIMEOUT_S = 600
"""How long a server may go on loading before the first request is given up."""

app = typer.Typer(help="Measure a server, or the engine in this process.", no_args_is_help=True)
app.command("throughput")(throughput_command)
app.command("latency")(latency_command)
app.command("decode")(decode_command)
app.command("ablate")(ablate_command)

Url = Annotated[str, typer.Argument(help="Address of an OpenAI-compatible server.")]
Model = Annotated[str | None, typer.Option(help="Model name; the first of /v1/models when left out.")]
Key = Annotated[str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY")]
Out = Annotated[Path | None, typer.Option(help="Folder for summary.json, requests.csv and picture.svg.")]
Seed = Annotated[int, typer.Option(help="Prompts and arrival times come from it.")]
Extra = Annotated[str, typer.Option(help="Further fields of every request body, as JSON.")]


@app.command("serve")
def serve_command(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat")] = "completions",
    mix: Annotated[str, typer.Option(help='e.g. "chat=0.7,code=0.3"; "fixed" takes --input-len and --output-len')] = "fixed",
    dataset: Annotated[Path | None, typer.Option(help="JSON lines with prompt or messages, instead of a mix.")] = None,
    input_len: Annotated[int, typer.Option(min=1)] = 1_024,
    output_len: Annotated[int | None, typer.Option(min=1, help="For every mix; 128 for fixed.")] = None,
    form: Annotated[str, typer.Option(help="ids (exact lengths, completions only) or text")] = "text",
    vocab_size: Annotated[int, typer.Option(help="Random ids stay below this.")] = 1_000,
    num_requests: Annotated[int, typer.Option(min=1)] = 100,
    rate: Annotated[float, typer.Option(help="Requests a second; inf sends all at once.")] = math.inf,
    burstiness: Annotated[float, typer.Option(help="1 is Poisson; below 1 burstier.")] = 1.0,
    concurrency: Annotated[int | None, typer.Option(min=1, help="At most this many under way.")] = None,
    goodput: Annotated[list[str] | None, typer.Option(help="ttft:MS, tpot:MS or e2e:MS; may be repeated.")] = None,
    seed: Seed = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for all tokens, whatever the model says.")] = True,
    timeout_s: Annotated[float | None, typer.Option()] = None,
    api_key: Key = None,
    extra: Extra = "{}",
    out: Out = None,
) -> None:
    """Send requests at a rate and report TTFT, TPOT, ITL, end-to-end latency and goodput."""
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in locals().items() if k not in ("api_key", "out")}
    goals = _goals(goodput or [])
    rng = random.Random(seed)
    maker = _checked(
        lambda: PromptMaker(rng, _choice("form", form, ("ids", "text")), vocab_size, _choice("endpoint", endpoint, ("completions", "chat")))
    )
    if dataset is not None:
        asks = _checked(lambda: read_asks(dataset, num_requests, endpoint, output_len or 128))  # type: ignore[arg-type]
    else:
        asks = make_asks(_checked(lambda: parse_mix(mix, input_len, output_len)), num_requests, maker, rng)
    times = arrival_times(len(asks), rate, burstiness, seed)

    async def run() -> tuple[Target, list[Record]]:
        target = await _target(url, endpoint, model, api_key, asks[0], ignore_eos=ignore_eos, timeout_s=timeout_s, extra=json.loads(extra))
        progress = _Progress(len(asks))
        return target, await run_load(asks, lambda ask: send(target, ask), times, max_concurrency=concurrency, on_done=progress)

    target, records = _reached(url, run)
    summary = summarise(records, goals)
    typer.echo(to_table(summary))
    settings |= {"model": target.model, "rate": "inf" if math.isinf(rate) else rate}
    if out is not None:
        title = f"{target.model}, {mix}, {num_requests} requests, rate {settings['rate']}"
        files = {"summary.json": to_json(summary, settings), "requests.csv": to_csv(records), "picture.svg": to_picture(records, title)}
        typer.echo("wrote " + ", ".join(map(str, write_files(out, files))))
    raise typer.Exit(int(summary.failed > 0))


@app.command("agent")
def agent_command(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    form: Annotated[str, typer.Option(help="ids (completions, exact prefixes) or chat (messages with tool calls)")] = "ids",
    users: Annotated[int, typer.Option(min=1, help="Sessions under way at once.")] = 8,
    sessions: Annotated[int, typer.Option(min=1)] = 32,
    system: Annotated[int, typer.Option(min=0, help="Length of the shared system prompt.")] = 4_096,
    turns: Annotated[int, typer.Option(min=1, help="Median turns of a session.")] = 12,
    tool_result: Annotated[int, typer.Option(min=1, help="Median length of a tool's result.")] = 500,
    answer: Annotated[int, typer.Option(min=1, help="Median length of an answer.")] = 120,
    tool_time_s: Annotated[float, typer.Option(min=0)] = 1.0,
    max_context: Annotated[int, typer.Option(min=64, help="Compact the context before it grows past this.")] = 65_536,
    block: Annotated[int, typer.Option(min=1, help="Block size of the ideal cache.")] = 256,
    vocab_size: Annotated[int, typer.Option()] = 1_000,
    seed: Seed = 0,
    timeout_s: Annotated[float | None, typer.Option()] = None,
    api_key: Key = None,
    extra: Extra = "{}",
    out: Out = None,
) -> None:
    """Replay multi-turn agent sessions with tool calls and growing prefixes; report cache hits against the ideal."""
    settings = {k: v for k, v in locals().items() if k not in ("api_key", "out")}
    shape = AgentShape(
        system=system,
        turns=replace(AgentShape().turns, median=turns, high=max(60, turns)),
        answer=Lengths(answer, 0.8, 1, 2_048),
        tool_result=Lengths(tool_result, 1.1, 1, 8_192),
        tool_time_s=tool_time_s,
        max_context=max_context,
    )
    sent: Literal["ids", "chat"] = _choice("form", form, ("ids", "chat"))
    endpoint: Endpoint = "completions" if sent == "ids" else "chat"
    rng = random.Random(seed)
    maker = _checked(lambda: PromptMaker(rng, "ids" if sent == "ids" else "text", vocab_size, endpoint))
    planned = make_sessions(sessions, shape, maker, rng)
    first = Ask(prompt=maker.prompt(maker.units(8)), max_tokens=2)

    async def run() -> list[TurnRecord]:
        target = await _target(url, endpoint, model, api_key, first, token_ids=sent == "ids", timeout_s=timeout_s, extra=json.loads(extra))
        progress = _Progress(sum(len(s.turns) for s in planned))
        return await run_agents(
            planned,
            lambda ask: send(target, ask),
            users=users,
            shape=shape,
            form=sent,
            block=block,
            on_done=progress,
        )

    records = _reached(url, run)
    summary = summarise_agents(records)
    typer.echo(agent_table(summary))
    if out is not None:
        plain = [t.record for t in records]
        body = json.dumps({"settings": settings, "summary": asdict(summary)}, indent=1)
        files = {"summary.json": body, "requests.csv": to_csv(plain), "picture.svg": to_picture(plain, f"agent traces, {users} users")}
        typer.echo("wrote " + ", ".join(map(str, write_files(out, files))))
    raise typer.Exit(int(summary.failed > 0))


def agent_table(summary: AgentSummary) -> str:
    def share(value: float | None) -> str:
        return "not reported by the server" if value is None else f"{value:.1%}"

    fresh = "unknown" if summary.fresh_tokens is None else f"{summary.fresh_tokens:,}"
    rows = {
        "sessions": f"{summary.sessions}, {summary.turns} turns, {summary.failed} failed, in {summary.duration_s:.2f} s",
        "logical prompt tokens": f"{summary.logical_tokens:,} ({summary.logical_tokens_per_s:,.0f}/s)",
        "fresh prompt tokens": fresh,
        "cache hit rate": f"{share(summary.hit_rate)} (ideal {share(summary.ideal_hit_rate)})",
        "output tokens": f"{summary.output_tokens:,} ({summary.output_tokens_per_s:,.1f}/s)",
    }
    lines = [f"{name:<24}{value}" for name, value in rows.items()]
    times: list[tuple[str, Spread | None]] = [
        ("time to first token", summary.ttft_ms),
        ("  after the first turn", summary.later_ttft_ms),
        ("time per output token", summary.tpot_ms),
    ]
    speeds: list[tuple[str, Spread | None]] = [
        ("per user", summary.tokens_per_s_per_user),
        ("while streaming", summary.request_tokens_per_s),
    ]
    lines += spread_table([(title, s) for title, s in times if s], "ms")
    lines += spread_table([(title, s) for title, s in speeds if s], "tokens/s")
    return "\n".join(lines)


async def _target(url: str, endpoint: str, model: str | None, api_key: str | None, first: Ask, **options: Any) -> Target:
    """Find the model's name and what the server accepts, with one short request that is not measured.

    A server that refuses the options for exact token counts is asked again without them.
    """
    address = Address.parse(url)
    name = model or (await list_models(address, api_key))[0]
    target = Target(address=address, endpoint=endpoint, model=name, api_key=api_key, **options)  # type: ignore[arg-type]
    probe = replace(first, max_tokens=min(first.max_tokens, 2))
    record = await _send_when_ready(target, probe)
    for fewer in ({"continuous_usage": False}, {"token_ids": False}, {"ignore_eos": False}):
        if record.is_ok or not (record.error or "").startswith("4"):
            break
        target = replace(target, **fewer)  # type: ignore[arg-type]
        record = await send(target, probe)
    if not record.is_ok:
        raise HttpError(f"the first request failed: {record.error}")
    return target


async def _send_when_ready(target: Target, probe: Ask) -> Record:
    """503 means that the model is still loading: ask again, once a second and for `READY_TIMEOUT_S`."""
    for _ in range(READY_TIMEOUT_S):
        record = await send(target, probe)
        if not (record.error or "").startswith("503"):
            break
        await asyncio.sleep(1)
    return record


def _reached(url: str, run: Any) -> Any:
    try:
        return asyncio.run(run())
    except (HttpError, OSError, ValueError) as error:
        typer.echo(f"{url}: {error}", err=True)
        raise typer.Exit(2) from None


def _checked(make: Any) -> Any:
    try:
        return make()
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise typer.BadParameter(not_among(f"--{option}", value, allowed))
    return value


def _goals(items: list[str]) -> dict[Goal, float]:
    goals: dict[Goal, float] = {}
    for item in items:
        name, _, limit = item.partition(":")
        try:
            goals[_choice("goodput", name, ("ttft", "tpot", "e2e"))] = float(limit)
        except ValueError:
            raise typer.BadParameter(f"--goodput {item!r}: say e.g. ttft:500 (milliseconds)") from None
    return goals


class _Progress:
    """One line on a terminal that counts finished requests; silent elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._failed = total, 0, 0

    def __call__(self, record: Record) -> None:
        self._done += 1
        self._failed += not record.is_ok
        if sys.stderr.isatty():
            end = "\n" if self._done == self._total else ""
            print(f"\r{self._done}/{self._total} done, {self._failed} failed", end=end, file=sys.stderr, flush=True)
