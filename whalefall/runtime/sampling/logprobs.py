# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen and given tokens, with rank and alternatives.

By default of the target model's logits as they come, before bias, penalties, temperature and filters, so that a value means the same for
every client and for prompts and outputs alike; `logprobs_mode` may ask for what tokens are chosen from instead (`processed_logits`). Never
of a drafter. Rows are taken in tiles, so the extra memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from whalefall.core.request import TokenLogprobs
from whalefall.kernels import sampling as ops
from whalefall.runtime.sampling.params import WHOLE_VOCABULARY

TILE_BYTES = 64 << 20
"""Log-probabilities computed at a time."""


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of L rows, on the device until `tokens` is called."""

    ids_L: Tensor
    """int64, the token chosen or given."""
    logprob_L: Tensor
    """float32; NaN where the logits were not finite."""
    rank_L: Tensor
    top_ids_LK: Tensor
    """int64, K = the most that any row asks for."""
    top_logprobs_LK: Tensor
    whole_XV: Tensor
    """float32 rows of the whole vocabulary, for the rows that want it, in order."""
    num_wanted_L: npt.NDArray[np.int64]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.ids_L, self.logprob_L, self.rank_L, self.top_ids_LK, self.top_logprobs_LK, self.whole_XV

    def on_host(self, tensors: Sequence[Tensor]) -> LogprobRows:
        """The same with copies of `tensors` in their place."""
        ids_L, logprob_L, rank_L, top_ids_LK, top_logprobs_LK, whole_XV = tensors
        return LogprobRows(ids_L, logprob_L, rank_L, top_ids_LK, top_logprobs_LK, whole_XV, self.num_wanted_L)

    def tokens(self) -> list[TokenLogprobs]:
        """One entry per row; waits for the tensors if they are on a device."""
        top_ids_LK = self.top_ids_LK.to("cpu", torch.int32).numpy()
        top_logprobs_LK = self.top_logprobs_LK.cpu().numpy()
        whole = iter(self.whole_XV.cpu().numpy())
        columns = zip(self.ids_L.tolist(), self.logprob_L.tolist(), self.rank_L.tolist(), self.num_wanted_L.tolist())
        return [
            TokenLogprobs(
                token_id=token_id,
                logprob=logprob,
                rank=rank,
                top_ids=None if k == WHOLE_VOCABULARY else top_ids_LK[row, :k],
                top_logprobs=next(whole) if k == WHOLE_VOCABULARY else top_logprobs_LK[row, :k],
            )
            for row, (token_id, logprob, rank, k) in enumerate(columns)
        ]


def logprobs_of(logits_LV: Tensor, ids_L: Tensor, num_wanted_L: npt.NDArray[np.int64]) -> LogprobRows:
    """Log-probability and rank of one id per row, and its alternatives.

    Args:
        logits_LV: float32, raw or processed.
        ids_L: int64 [L].
        num_wanted_L: per row, alternatives wanted, or WHOLE_VOCABULARY.
    """
    vocab_size = logits_LV.shape[-1]
    num_wanted_L = np.minimum(num_wanted_L, vocab_size)
    k = max(int(num_wanted_L.max(initial=0)), 0)
    tiles = [_tile(logits_LV[part], ids_L[part], num_wanted_L[part], k) for part in _parts(len(num_wanted_L), vocab_size)]
    logprob_L, rank_L, top_ids_LK, top_logprobs_LK, whole_XV = (torch.cat(column) for column in zip(*tiles))
    return LogprobRows(ids_L, logprob_L, rank_L, top_ids_LK, top_logprobs_LK, whole_XV, num_wanted_L)


def _tile(logits_LV: Tensor, ids_L: Tensor, num_wanted_L: npt.NDArray[np.int64], k: int) -> tuple[Tensor, ...]:
    """Columns of LogprobRows from `logprob_L` to `whole_XV`."""
    logprobs_LV = logits_LV.float().log_softmax(-1)
    chosen_L = logprobs_LV.gather(-1, ids_L[:, None])[:, 0]
    top_ids_LK = ops.top_ids(logprobs_LV, k)
    whole_X = torch.from_numpy(np.flatnonzero(num_wanted_L == WHOLE_VOCABULARY)).to(logits_LV.device)
    return chosen_L, ops.rank(logprobs_LV, ids_L), top_ids_LK, logprobs_LV.gather(-1, top_ids_LK), logprobs_LV[whole_X]


def _parts(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """At least one part, so that no rows at all still give columns of the right width."""
    step = max(1, TILE_BYTES // (4 * vocab_size))
    for first in range(0, max(num_rows, 1), step):
        yield slice(first, first + step)
