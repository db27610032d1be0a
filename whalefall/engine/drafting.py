# SPDX-License-Identifier: Apache-2.0
"""DraftPlan: whether the engine speculates, with which drafter and how far. Read from the options once the checkpoint is known."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whalefall.core.errors import ConfigError
from whalefall.engine.config import ADAPTIVE, EngineConfig, num_drafts_of
from whalefall.models.definition import ModelConfig, ModelDefinition

MAX_NGRAM_DRAFTS = 16
MAX_ADAPTIVE_DRAFTS = 8
"""Longer blocks are seldom accepted to the end, and every request reserves memory for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPlan:
    drafter: str
    """"ngram", or the name of the checkpoint's own."""
    num_drafts: int
    """Verified per request and step, at most."""
    acceptance: Literal["exact", "standard", "block"]
    is_adaptive: bool = False
    """The number is chosen step by step."""

    @property
    def is_own(self) -> bool:
        """Whether the drafter comes with the checkpoint."""
        return self.drafter != "ngram"

    @property
    def text(self) -> str:
        """For the log."""
        how = ", as many as pay" if self.is_adaptive else ""
        return f"{self.drafter}, up to {self.num_drafts} drafts per request and step{how}, {self.acceptance} acceptance"


def plan_drafts(config: EngineConfig, definition: ModelDefinition, model_config: ModelConfig) -> DraftPlan | None:
    """
    Raises:
        ConfigError: the options do not fit the checkpoint; the message says what it can do.
    """
    num_drafts = num_drafts_of(config.draft)
    if not num_drafts:
        return None  # off; or wrong, which `check_options` says together with what else is
    own = definition.own_drafter(model_config) if definition.own_drafter is not None else None
    name: str = config.drafter
    if name == "auto":
        name = "ngram" if own is None else own[0]
    if name == "ngram":
        most, whose = MAX_NGRAM_DRAFTS, "the n-gram drafter"
    elif own is None or own[0] != name:
        raise ConfigError(f"drafter is {name!r}, but this checkpoint brings {'none' if own is None else own[0]}: use --drafter ngram")
    else:
        most, whose = own[1], f"this checkpoint's {name}"
    if num_drafts == ADAPTIVE:
        return DraftPlan(drafter=name, num_drafts=min(most, MAX_ADAPTIVE_DRAFTS), acceptance=config.draft_acceptance, is_adaptive=True)
    if num_drafts > most:
        raise ConfigError(f"draft is {config.draft!r}, but {whose} drafts 1 to {most} tokens: use fixed:{most} or less")
    return DraftPlan(drafter=name, num_drafts=num_drafts, acceptance=config.draft_acceptance)


def costs_path(*about: str) -> Path:
    """The file that keeps what steps cost on this machine: in $XDG_CACHE_HOME or ~/.cache, named by all that the costs depend on."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "whalefall" / "draft-costs" / f"{hashlib.sha256(chr(10).join(about).encode()).hexdigest()[:16]}.json"
