# SPDX-License-Identifier: Apache-2.0
"""RequestState: what the scheduler knows about one request. Changed in scheduler.py and nowhere else.

There is no prefill and no decode here, only counts of tokens: *known* (ids on the host), *expected* (known, plus a sampled one still on
its way back) and *scheduled* (rows that were planned). A request wants rows while scheduled is behind expected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from whalefall.core.request import EngineRequest, RequestTimings
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.kvcache.manager import Reservation
from whalefall.runtime.kvcache.prefix_index import KeyChain
from whalefall.runtime.kvcache.tiers.ledger import Prefetch


class Phase(Enum):
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True)
class RequestState:
    request: EngineRequest
    request_id: str
    sampling: SamplingParams
    num_prompt: int
    max_total: int
    """Tokens, prompt and answer, at which the request ends with LENGTH. Equal to num_prompt: score the prompt, sample nothing."""
    max_rows: int
    """Rows that are ever needed: the last token of an answer needs none."""
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    token_ids: list[int]
    """Known ids, prompt and answer."""
    num_expected: int
    """Known tokens plus those in flight, drafts among them as if all were accepted; the position that the next sampled token gets then."""
    phase: Phase = Phase.WAITING
    num_scheduled: int = 0
    """Position of the next row to plan, if all drafts in flight are accepted."""
    num_unsure: int = 0
    """Drafts in flight: the two counts above may be so much too high."""
    has_drafts: bool = False
    """A step has drawn a token since it entered, so the worker may hold drafts for the next one."""
    window_start: int = 0
    """Encoder windows see nothing below this; until the next admission, as are the two below."""
    decoder_start: int = 0
    write_start: int = 0
    """Tokens in adopted blocks."""
    chain: KeyChain | None = None
    """Keys of its full blocks; None without a prefix cache."""
    prefetch: Prefetch | None = None
    """What it waits for from lower tiers, since it waits to enter."""
    num_cached_tokens: int = 0
    """Prompt tokens adopted at the first admission."""
    reservation: Reservation | None = None
    last_step_id: int = -1
    """Newest plan that names this request: its blocks and slot must outlive that step."""
    next_prompt_logprob: int = 1
    """First prompt position whose log-probability has not been delivered. Survives a preemption, so nothing is delivered twice."""
    first_scheduled_s: float | None = None
    token_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, request: EngineRequest, max_total: int) -> RequestState:
        num_prompt = len(request.prompt_token_ids)
        sampling = request.sampling
        return cls(
            request=request,
            request_id=request.request_id,
            sampling=sampling,
            num_prompt=num_prompt,
            max_total=max_total,
            max_rows=max(max_total - 1, num_prompt),
            eos_ids=frozenset() if sampling.ignore_eos else frozenset(request.eos_token_ids),
            stop_ids=frozenset(sampling.stop_token_ids),
            token_ids=list(request.prompt_token_ids),
            num_expected=num_prompt,
        )

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def timings(self, *, with_tokens: bool) -> RequestTimings:
        times = self.token_s
        return RequestTimings(
            arrival_s=self.request.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            token_s=tuple(times) if with_tokens else (),
        )
