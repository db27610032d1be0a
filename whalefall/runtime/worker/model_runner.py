# SPDX-License-Identifier: Apache-2.0
"""Runs the model on a batch. The one place that calls `Model.forward`; other ways to run the same step (captured graphs) belong here."""

from __future__ import annotations

import torch
from torch import Tensor

from whalefall.core.batch import CacheTensors, ForwardBatch
from whalefall.models.definition import Model


class ModelRunner:
    def __init__(self, model: Model, cache: CacheTensors, vocab_size: int) -> None:
        self._model = model
        self._cache = cache
        self._vocab_size = vocab_size

    def run(self, batch: ForwardBatch) -> Tensor:
        """Write the caches and give float32 logits [L, V] of the batch's logit rows.

        Memory: all wanted rows come at once. A step has at most its token budget of them, and that many only when every row is a prompt
        row to score; `max_num_batched_tokens * vocab_size * 4` bytes is the bound to plan for.
        """
        logits_LV = self._model.forward(batch, self._cache)
        expected = (batch.logit_rows_L.shape[0], self._vocab_size)
        assert logits_LV.shape == expected, f"the model gave logits {tuple(logits_LV.shape)}, the step wants {expected}"
        assert logits_LV.dtype == torch.float32, f"the model gave {logits_LV.dtype} logits, not float32"
        return logits_LV
