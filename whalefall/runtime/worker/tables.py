# SPDX-License-Identifier: Apache-2.0
"""The worker's tables, one row per state slot: token ids by position, physical blocks by logical block.

They live on the device. Sampled ids are written there by the step that drew them, so the next step can be launched before anyone has
read them. The host knows only how many blocks each slot holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from whalefall.core.plan import NewRequest, RequestStep


class SlotTables:
    def __init__(self, num_slots: int, max_model_len: int, block_tokens: int, device: torch.device) -> None:
        self.token_ids = torch.zeros((num_slots, max_model_len + 1), dtype=torch.int32, device=device)
        """[slot, position]; one column more than a context, for the token drawn after its last position."""
        num_columns = -(-max_model_len // block_tokens)
        self.block_ids = torch.zeros((num_slots, num_columns), dtype=torch.int32, device=device)
        """[slot, logical block]; 0, the null block, beyond what the request holds."""
        self._num_blocks = np.zeros(num_slots, np.int64)

    def admit(self, request: NewRequest) -> None:
        """Give the slot to a request: its known ids, and no blocks."""
        ids = torch.from_numpy(np.array(request.token_ids, np.int32))
        self.token_ids[request.slot, : len(ids)] = ids.to(self.token_ids.device, non_blocking=True)
        self.block_ids[request.slot] = 0
        self._num_blocks[request.slot] = 0

    def append_blocks(self, steps: Sequence[RequestStep]) -> None:
        """Add each step's new blocks at the end of its slot's row, in one write."""
        slots: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for step in steps:
            if step.new_block_ids:
                first, count = int(self._num_blocks[step.slot]), len(step.new_block_ids)
                slots += [step.slot] * count
                columns += range(first, first + count)
                blocks += step.new_block_ids
                self._num_blocks[step.slot] = first + count
        if blocks:
            device = self.block_ids.device
            slot_X, column_X, block_X = torch.from_numpy(np.array([slots, columns, blocks], np.int64)).to(device, non_blocking=True)
            self.block_ids[slot_X, column_X] = block_X.to(torch.int32)

    def blocks_of(self, slot: int) -> list[int]:
        """The slot's physical blocks; reads the device, for faults only."""
        return self.block_ids[slot, : int(self._num_blocks[slot])].tolist()
