# SPDX-License-Identifier: Apache-2.0
"""StepPlan: who runs in a step, how many tokens, which blocks. Host integers only; made by the scheduler, read by the worker.

The worker owns a token table (slot x position). A plan names ranges of positions, never the ids inside them, except for the known ids of
a request that is new to the worker. So a plan may be made one step ahead: the id at the last position can still be on the device.

Drafts. A decode step with `num_drafts` k has up to 1 + k rows: the latest token and k guesses that the worker has from the step before. It
gives 1 to k + 1 tokens. A plan made ahead of such a step's result counts on all of them; by how many that was too many only the device
knows (`RequestStep.num_unsure`), and the worker moves the rows back by as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from whalefall.core.request import TokenLogprobs
from whalefall.core.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequest:
    """A request that the worker has not in its slots: first scheduled, or back after a preemption. Resets the slot."""

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    """All known ids: the prompt, and after a preemption the outputs too."""
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    start: int = 0
    """Position of its first row; above 0 after a prefix hit."""
    restore_block: int = 0
    """Block whose snapshot of the fixed state is put into the slot first: the state at `start`. 0: the slot begins empty."""


class RequestStep(NamedTuple):
    """One request's share of a step: rows for positions [start, start + num_tokens)."""

    request_id: str
    slot: int
    """State slot: rings, states, token table row and block table row."""
    start: int
    """Position of the first row; equals the tokens computed before this step."""
    num_tokens: int
    new_block_ids: tuple[int, ...]
    """Physical blocks appended to the request's block table before the step."""
    window_start: int
    """Encoder windows see no position below this (0, or the replay start after a bounded prefix hit)."""
    decoder_start: int
    """Decoder rows are the rows at positions >= this; decoder windows see no position below it. 0 runs every row."""
    samples: bool
    """Draw a token from the last row; it gets position start + num_tokens."""
    wants_prompt_logprobs: bool
    """Report log-probabilities of the prompt tokens at positions start + 1 ... (those inside the prompt)."""
    write_start: int = 0
    """Growing caches are not written below this: rows there are replayed over adopted blocks, which are complete and shared."""
    snapshot_block: int = 0
    """Block that keeps a snapshot of the fixed state as it is after this step, which ends where the block ends. 0: none."""
    num_drafts: int = 0
    """The last so many rows, at most, are drafts to verify. The worker runs fewer where it has fewer; the step samples then."""
    num_unsure: int = 0
    """Drafts of this request in the step that was not committed when this plan was made: `start` is that much too high at most."""


class StepPlan(NamedTuple):
    step_id: int
    new_requests: tuple[NewRequest, ...]
    steps: tuple[RequestStep, ...]
    """Never empty in a plan that is launched; one entry per request."""

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestResult:
    """What a step gave one request; aligned with StepPlan.steps."""

    token_ids: tuple[int, ...] = ()
    """Sampled ids: none for a chunk that does not end the known tokens, else the accepted drafts and one more: 1 ... num_drafts + 1."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token when asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    fault: str | None = None
    """Why this request cannot go on (for example NaN logits); the others are not affected."""
    num_drafts: int = 0
    """Drafts that were verified: len(token_ids) - 1 of them were accepted."""
    confidences: tuple[float, ...] | None = None
    """Of the drafts that now stand for the request's next step, from drafters that say so; for budgets of later steps only."""
    is_cache_sound: bool = False
    """With a fault: it lies in what was asked of the sampler, so that cached blocks of this request are not under suspicion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    step_id: int
    results: tuple[RequestResult, ...]
    health: Mapping[str, int] = field(default_factory=dict)
    """Counters of the model that rise only through a fault of the bookkeeping; see runtime/worker/health.py."""
