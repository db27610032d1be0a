# SPDX-License-Identifier: Apache-2.0
"""What can be set about scheduling. Composed into the engine's config; nothing changes it after start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from whalefall.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    max_model_len: int
    """Tokens of prompt and answer together, at most."""
    max_num_seqs: int = 256
    """Requests that may run at the same time."""
    max_num_batched_tokens: int = 8_192
    """Tokens one step may process, prompts and decodes together. May be less than max_num_seqs: the oldest requests then go first."""
    replay: Literal["exact", "bounded"] = "bounded"
    """bounded: decoder layers run only the last `decoder_window` rows of a prompt, and after a prefix hit `replay_rows` rows before it run
    again to refill windows; exact: every row runs, and windows come from snapshots kept at block borders."""
    decoder_window: int | None = None
    """Rows kept in bounded mode, at least the model's window; None when the model has no encoder/decoder split."""
    prefix_caching: bool = False
    """Remember complete blocks and adopt them for prompts that begin alike."""
    replay_rows: int = 0
    """CacheSpec.replay_rows: rows that refill every ring of the model."""
    has_fixed_state: bool = False
    """Whether the model keeps rings or states: something that blocks alone do not restore."""
    num_drafts: int = 0
    """Drafts to verify per decoding request and step, at most; 0: no speculation."""

    def __post_init__(self) -> None:
        problems = []
        if self.max_model_len < 2:
            problems.append(f"max_model_len is {self.max_model_len}, must be at least 2 (one token in, one out)")
        if self.max_num_seqs < 1:
            problems.append(f"max_num_seqs is {self.max_num_seqs}, must be at least 1")
        if self.max_num_batched_tokens < 1:
            problems.append(f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least 1")
        if self.replay not in ("exact", "bounded"):
            problems.append(f"replay is {self.replay!r}, must be 'exact' or 'bounded'")
        if self.num_drafts < 0:
            problems.append(f"num_drafts is {self.num_drafts}, must be at least 0")
        if self.replay_rows < 0:
            problems.append(f"replay_rows is {self.replay_rows}, must be at least 0")
        if self.decoder_window is not None and self.decoder_window < 1:
            problems.append(f"decoder_window is {self.decoder_window}, must be at least 1 (or None for a model without the split)")
        if problems:
            raise ConfigError(problems)

    def min_hit_tokens(self, block_tokens: int) -> int:
        """The smallest prefix that is ever adopted."""
        rows = self.replay_rows if self.replay == "bounded" else 0
        return (rows // block_tokens + 1) * block_tokens

    @property
    def takes_snapshots(self) -> bool:
        """Whether steps end at block borders, so that the fixed state can be kept there."""
        return self.prefix_caching and self.replay == "exact" and self.has_fixed_state
