# SPDX-License-Identifier: Apache-2.0
"""`whalefall doctor MODEL`: does this checkpoint fit here, with which values, and which implementation every op will use.

The only part of the doctor that imports torch, so it runs after the environment was found sound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whalefall.cli.doctor.report import Row, Status
from whalefall.core.errors import ConfigError
from whalefall.engine.config import EngineConfig
from whalefall.engine.resolve import ResolvedConfig
from whalefall.engine.wiring import open_model
from whalefall.kernels.registry import Op, load_all

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class OpChoice:
    op: str
    runs: tuple[str, ...]
    """Implementations that will run, in order of preference; the last is the reference unless an earlier one takes every shape."""
    passed_over: tuple[tuple[str, str], ...]
    """(implementation, why) for each that will never run here."""


@dataclass(frozen=True, slots=True)
class ModelVisit:
    rows: tuple[Row, ...]
    values: tuple[tuple[str, str, str], ...] = ()
    """(option, value, who chose it)."""
    memory: str = ""
    ops: tuple[OpChoice, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        values = [{"option": name, "value": value, "chosen_by": who} for name, value, who in self.values]
        ops = [{"op": o.op, "runs": list(o.runs), "passed_over": dict(o.passed_over)} for o in self.ops]
        return {"values": values, "memory": self.memory.splitlines(), "ops": ops}


def visit_model(model_dir: Path, options: Mapping[str, Any] | None = None) -> ModelVisit:
    """Headers, config and tokenizer are read and the config is resolved for this machine; no weights are."""
    try:
        opened = open_model(EngineConfig.from_options({"model": model_dir, **(options or {})}))
    except ConfigError as error:
        return ModelVisit(tuple(Row(Status.FAIL, "model", problem) for problem in error.problems))
    config = opened.config
    device = torch.device(config.device)
    ops = choose_ops(load_all(), device)
    rows = [
        Row(Status.OK, "model", f"{config.model_name}: {config.family}, checkpoint and tokenizer are sound"),
        Row(Status.OK, "fits", f"{_gib(_needed(config))} of weights and caches on the {config.device}"),
        _ops_row(ops, device),
    ]
    values = tuple((name, _value(config, name), who) for name, who in config.chosen_by.items())
    return ModelVisit(tuple(rows), values, config.memory_table(), ops)


def choose_ops(ops: Mapping[str, Op[Any, Any]], device: torch.device) -> tuple[OpChoice, ...]:
    return tuple(choose_op(op, device) for op in ops.values())


def choose_op(op: Op[Any, Any], device: torch.device) -> OpChoice:
    """Ask every implementation about every sample input of the op: one that takes no sample here is passed over."""
    samples = list(op.cases()) if op.cases is not None and op.impls else []
    left, runs, passed = list(range(len(samples))), [], []
    for impl in op.impls:
        reasons = {i: impl.why_not(device, *samples[i]) for i in left}
        taken = [i for i, reason in reasons.items() if reason is None]
        if taken:
            runs.append(impl.name)
            left = [i for i in left if i not in taken]
        else:
            passed.append((impl.name, _join(reason for reason in reasons.values() if reason) or "an earlier one takes every shape"))
    if left or not runs:
        runs.append(REFERENCE)
    return OpChoice(op.name, tuple(runs), tuple(passed))


def ops_text(visit: ModelVisit) -> str:
    width = max((len(o.op) for o in visit.ops), default=0)
    lines = []
    for choice in visit.ops:
        passed = "; ".join(f"not {name}: {why}" for name, why in choice.passed_over)
        lines.append(f"  {choice.op:<{width}}  {', else '.join(choice.runs)}" + (f"   ({passed})" if passed else ""))
    return "\n".join(lines)


def values_text(visit: ModelVisit) -> str:
    width = max((len(name) for name, _, _ in visit.values), default=0)
    return "\n".join(f"  {name:<{width}}  {value:<14}  {who}" for name, value, who in visit.values)


def _ops_row(ops: tuple[OpChoice, ...], device: torch.device) -> Row:
    plain = [o.op for o in ops if o.runs == (REFERENCE,)]
    if device.type == "cpu":
        return Row(Status.OK, "ops", f"{len(ops)} ops, {len(plain)} by their plain torch reference")
    if plain:
        shown = ", ".join(plain[:6]) + (f" and {len(plain) - 6} more" if len(plain) > 6 else "")
        return Row(Status.WARN, "ops", f"{len(plain)} of {len(ops)} ops have no kernel for this GPU: {shown}", "a kernel for each")
    return Row(Status.OK, "ops", f"{len(ops)} ops, each with a kernel for this GPU")


def _value(config: ResolvedConfig, option: str) -> str:
    """The resolved value; empty for an option that became part of something else, which the memory table then shows."""
    if option == "kv_cache_memory_bytes":  # a budget while resolving
        return f"{config.memory.pool_bytes:,} used"
    name = {"enable_prefix_caching": "prefix_caching"}.get(option, option)
    return str(getattr(config, name, ""))


def _needed(config: ResolvedConfig) -> int:
    return config.weights_bytes + config.memory.total_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _join(reasons: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(reasons))
