# SPDX-License-Identifier: Apache-2.0
"""EngineConfig: every choice a user has about an engine. Flags of the command line are generated from its fields and their docstrings.

None means "choose for me". resolve.py replaces each None by a value once, before anything is built; after that nothing changes a config.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self, get_args, get_type_hints

from whalefall.core.errors import ConfigError, not_among


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    model: str | Path
    """Directory of the checkpoint: config.json, *.safetensors, tokenizer.json."""
    tokenizer: str | Path | None = None
    """Directory of the tokenizer; default: the model's."""
    served_model_name: str | None = None
    """Name of the model in the API; default: name of the model's directory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of activations and dense weights; auto: bfloat16 on a GPU; on a CPU float32 where it fits comfortably, else bfloat16."""
    weights: Literal["auto", "packed", "dense"] = "auto"
    """packed keeps quantised weights as stored and dequantises when used; dense does so at load; auto: dense where it fits comfortably."""
    load_format: Literal["auto", "random"] = "auto"
    """auto reads the checkpoint's shards; random draws weights of the same shapes and formats, for measuring without a checkpoint: the
    directory then needs config.json and the tokenizer alone, and answers mean nothing."""
    kv_cache_dtype: Literal["auto", "model", "unrounded"] = "auto"
    """model rounds cache entries to the model's own formats; unrounded keeps them as computed; auto: unrounded in float32, else model."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together, at most; default: what the model and the KV cache allow."""
    max_num_seqs: int | None = None
    """Requests that may run at the same time; default: 256, or fewer where their fixed state would not fit."""
    max_num_batched_tokens: int | None = None
    """Tokens one step may process, prompts and decodes together; default: 8192 on a GPU, 2048 on a CPU."""
    block_size: int = 256
    """Tokens per cache block."""
    kv_cache_memory_bytes: int | None = None
    """Memory for cache blocks; default: a share of what is free, and no more than max_num_seqs full contexts need."""
    host_cache_bytes: int | None = None
    """Host memory that keeps blocks for which the device has no room; default: none, or 1 GiB on the way to disk_cache_dir."""
    disk_cache_dir: str | Path | None = None
    """Directory where blocks survive a restart; engines may share it. Or a URL, with the extra objectstore. Default: none."""
    disk_cache_bytes: int | None = None
    """Most that disk_cache_dir may hold, the oldest makes room; default: 32 GiB. Not for URLs."""
    disk_cache_write_bytes_per_s: int | None = None
    """Most that is written to disk_cache_dir in a second, to spare the device; default: no cap."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that the engine may use in all, in (0, 1]."""
    replay: Literal["exact", "bounded"] = "bounded"
    """bounded: decoder layers run only the last rows of a prompt, and windows are refilled by running some rows again after a prefix hit,
    as the model's own server does; exact: every row, and windows come from copies kept beside each block, which take memory."""
    enable_prefix_caching: bool | None = None
    """Remember what was computed for earlier prompts that begin alike; default: on, where the model's state can be restored."""
    kv_events_config: str | None = None
    """JSON with vLLM's keys (endpoint, replay_endpoint, topic, ...): tell routers over ZMQ which blocks are cached; default: no events."""
    enforce_eager: bool = False
    """Do not run decode steps as captured CUDA graphs; they are slower then, and start-up is shorter."""
    async_scheduling: bool | None = None
    """Plan and launch the next step before the last one has been read; default: on a GPU. The tokens are the same."""
    draft: str = "off"
    """Speculation: off, fixed:K to verify up to K drafted tokens per request and step, or adaptive to verify as many as pay by what steps
    cost and how sure the drafter is. Only the speed changes."""
    drafter: Literal["auto", "ngram", "dspark"] = "auto"
    """Who drafts: ngram looks for repetition in prompt and answer, dspark is the model's own; auto: the model's own if it brings one."""
    draft_acceptance: Literal["exact", "standard", "block"] = "exact"
    """exact: the tokens of a seed are those without drafts; standard, block: rejection sampling, which keeps more of a model's drafts at a
    temperature, with other tokens of the same distribution."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Of what log-probabilities of generated tokens are: the model's own logits, or those after masks, bias, penalties, temperature and
    filters, from which the token is chosen."""
    max_logprobs: int = 20
    """Alternatives per token a request may ask for; -1: any number, the whole vocabulary too."""
    deterministic: bool = False
    """Compute every row alone: the same bits whatever else runs, at a price (docs/sampling.md). Takes replay=exact."""
    seed: int | None = None
    """Makes the seeds of requests that bring none repeatable from run to run; default: fresh ones."""
    stats_interval_s: float = 10.0
    """Seconds between two throughput lines in the log while there is work; 0 for none."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """
        Raises:
            ConfigError: an option that does not exist; the message names the nearest one.
        """
        names = [f.name for f in fields(cls)]
        problems = []
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                problems.append(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; options: {', '.join(names)}"))
        if "model" not in options:
            problems.append("model is missing: the directory of a checkpoint")
        if problems:
            raise ConfigError(problems)
        return cls(**options)


@dataclass(frozen=True, slots=True)
class OptionDoc:
    """One field, as a command line needs it."""

    name: str
    kind: type
    """str, int, float or bool."""
    choices: tuple[str, ...] | None
    default: Any
    """The field's default; `dataclasses.MISSING` when it must be given."""
    is_optional: bool
    """Whether None is a value."""
    doc: str


def describe_options(config_class: type) -> tuple[OptionDoc, ...]:
    """Name, type, default and docstring of every field of a config dataclass, in order."""
    hints, docs = get_type_hints(config_class), _field_docs(config_class)
    return tuple(_describe(f.name, hints[f.name], f.default, docs.get(f.name, "")) for f in fields(config_class))


LOWEST = {
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
    "host_cache_bytes": 0,
    "disk_cache_bytes": 1,
    "disk_cache_write_bytes_per_s": 1,
    "max_logprobs": -1,
    "stats_interval_s": 0,
}


def check_options(config: EngineConfig) -> list[str]:
    """Problems with single values, whatever model and machine: type, choice, range. A command asks before anything is started."""
    problems = _wrong_types(config)
    for name, lowest in LOWEST.items():
        value = getattr(config, name)
        if isinstance(value, int | float) and value < lowest:
            problems.append(f"{name} is {value}, must be at least {lowest}")
    if num_drafts_of(config.draft) is None and isinstance(config.draft, str):
        problems.append(f"draft is {config.draft!r}, must be off, adaptive or fixed:K, with K from 1, such as fixed:3")
    if config.deterministic and config.replay != "exact":
        problems.append("deterministic needs replay=exact: bounded replay after a prefix hit is an approximation of a cold run")
    share = config.gpu_memory_utilization
    if isinstance(share, int | float) and not 0 < share <= 1:
        problems.append(f"gpu_memory_utilization is {share}, must be in (0, 1]")
    return problems


ADAPTIVE = -1
"""As many drafts as the drafter makes, of which the engine verifies those that pay."""


def num_drafts_of(draft: object) -> int | None:
    """0 for "off", K for "fixed:K", ADAPTIVE for "adaptive"; None for anything else."""
    if draft == "off":
        return 0
    if draft == "adaptive":
        return ADAPTIVE
    found = re.fullmatch(r"fixed:([1-9]\d{0,3})", draft) if isinstance(draft, str) else None
    return None if found is None else int(found[1])


def _wrong_types(config: EngineConfig) -> list[str]:
    problems = []
    for option in describe_options(type(config)):
        value = getattr(config, option.name)
        if value is None and option.is_optional:
            continue
        if option.choices is not None:
            if value not in option.choices:
                problems.append(not_among(option.name, value, option.choices))
        elif not _is_a(value, option.kind):
            problems.append(f"{option.name} is {value!r}, must be {_KIND_NAMES[option.kind]}")
    return problems


_KIND_NAMES = {str: "a text or path", int: "an integer", float: "a number", bool: "true or false"}


def _is_a(value: Any, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str | Path)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _describe(name: str, hint: Any, default: Any, doc: str) -> OptionDoc:
    parts = set(get_args(hint)) if get_args(hint) else {hint}
    if all(isinstance(p, str) for p in parts):  # Literal
        return OptionDoc(name, str, get_args(hint), default, False, doc)
    plain = parts - {NoneType, Path}
    assert len(plain) == 1, f"{name}: {hint} cannot become an option"
    return OptionDoc(name, plain.pop(), None, default, NoneType in parts, doc)


def _field_docs(config_class: type) -> dict[str, str]:
    """The string under each field. Python drops it, the source has it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
            docs[field.target.id] = inspect.cleandoc(ast.literal_eval(doc.value))
    return docs
