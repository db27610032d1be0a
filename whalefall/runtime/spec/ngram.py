# SPDX-License-Identifier: Apache-2.0
"""NgramDrafter: what followed the last time the same few tokens stood there. The simplest Drafter: no weights, no state, no rings.

It guesses well where an answer repeats its prompt (code edits, quotes, tables) or itself, and nothing where there is no repetition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.core.batch import CacheTensors, DraftRequests, Drafts


class NgramDrafter:
    def __init__(self, *, max_draft_tokens: int, longest: int = 4, shortest: int = 2) -> None:
        """
        Args:
            longest: tokens that are compared at most; of the places where as many agree the latest counts.
            shortest: fewer than that in common is chance, and gives no draft.
        """
        assert 1 <= shortest <= longest and max_draft_tokens >= 1
        self._max_draft_tokens = max_draft_tokens
        self._longest, self._shortest = longest, shortest

    @property
    def max_draft_tokens(self) -> int:
        return self._max_draft_tokens

    def draft(self, requests: DraftRequests, cache: CacheTensors, k: int) -> Drafts:
        position_R1 = requests.position_R[:, None]
        ids_RP = requests.token_ids_SP[requests.slot_R, : requests.max_position + 1]
        end_R1 = self._best_end(ids_RP, position_R1)
        # Behind the latest token the text goes on as it did behind the earlier one; a period shorter than k repeats.
        place_K = torch.arange(k, device=ids_RP.device)
        period_R1 = (position_R1 - end_R1).clamp_min(1)
        drafted_RK = ids_RP.gather(1, (end_R1 + 1 + place_K % period_R1).clamp(0, ids_RP.shape[1] - 1)).long()
        return Drafts(ids_RK=torch.where(end_R1 >= 0, drafted_RK, -1))

    def _best_end(self, ids_RP: Tensor, position_R1: Tensor) -> Tensor:
        """int64 [R, 1]: the latest earlier position where most of the last tokens stood before; -1 for fewer than `shortest`."""
        width = ids_RP.shape[1]
        position_P = torch.arange(width, device=ids_RP.device)
        agrees_RP = (position_P < position_R1).expand(-1, width).clone()
        length_RP = torch.zeros_like(ids_RP)
        for back in range(self._longest):
            wanted_R1 = ids_RP.gather(1, (position_R1 - back).clamp_min(0))
            shifted_RP = torch.nn.functional.pad(ids_RP[:, : max(width - back, 0)], (min(back, width), 0), value=-1)
            agrees_RP &= shifted_RP == wanted_R1
            length_RP += agrees_RP
        score_RP = torch.where(length_RP >= self._shortest, length_RP.long() * width + position_P, -1)
        best_R1 = score_RP.amax(1, keepdim=True)
        return torch.where(best_R1 >= 0, best_R1 % width, -1)
