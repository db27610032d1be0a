# SPDX-License-Identifier: Apache-2.0
"""From a StepPlan's integers to the tensors of one forward: row sets, tables, and which rows' logits are wanted.

Everything the host knows is computed with numpy, packed into one array and sent to the device in one transfer; ids and blocks are then
gathered there from the slot tables. No Python per token. Its caller is the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from whalefall.core.batch import ForwardBatch, RowSet
from whalefall.core.plan import RequestStep
from whalefall.runtime.worker.tables import SlotTables

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogitRows:
    """What the rows of a step's logits are for: first those of requests that sample, one and its drafts each, then all prompt rows to
    score. Host arrays."""

    sample_slot_S: IntArray
    sample_position_S: IntArray
    """Position that the drawn token gets."""
    sample_request_S: IntArray
    """Index of the request in the plan."""
    num_rows_R: IntArray
    """Of the S rows, how many each request that samples has: 1 and its drafts."""
    prompt_slot_X: IntArray
    prompt_position_X: IntArray
    """Position of the scored token: one after its row."""
    num_prompt_rows_B: IntArray

    @property
    def num_sampled(self) -> int:
        return len(self.sample_slot_S)

    def of_blocks(self, num_rows_R: IntArray) -> LogitRows:
        """The same rows, R requests having several of them each: what `unrolled` took apart."""
        return replace(self, sample_request_S=np.repeat(np.arange(len(num_rows_R)), num_rows_R), num_rows_R=num_rows_R)

    @property
    def first_row_R(self) -> IntArray:
        """Index of each sampling request's first row among the S."""
        return np.cumsum(self.num_rows_R) - self.num_rows_R


@dataclass(frozen=True, slots=True)
class _Rows:
    """A row set on the host."""

    num_B: IntArray
    start_B: IntArray

    @property
    def first_row_B(self) -> IntArray:
        return np.cumsum(self.num_B) - self.num_B

    @property
    def request_T(self) -> IntArray:
        return np.repeat(np.arange(len(self.num_B)), self.num_B)

    @property
    def positions_T(self) -> IntArray:
        return np.arange(self.num_B.sum()) + np.repeat(self.start_B - self.first_row_B, self.num_B)


def unrolled(steps: Sequence[RequestStep]) -> list[RequestStep] | None:
    """A step of decode rows and drafts as if every row were a request of its own, of the same slot: None when that is not what it is.

    A layer writes the rows of all requests before any of them looks, and looks by position; so a draft's row finds what the row before it
    has written, as it does among rows of one request. What this gives is a step of one row per request, whatever the drafts: the shape
    that captured graphs have.
    """
    if not any(s.num_drafts for s in steps) or not all(s.samples and s.num_tokens == 1 + s.num_drafts for s in steps):
        return None
    if any(s.wants_prompt_logprobs for s in steps):
        return None
    return [s._replace(start=s.start + i, num_tokens=1, num_drafts=0, new_block_ids=()) for s in steps for i in range(s.num_tokens)]


class BatchBuilder:
    def __init__(self, tables: SlotTables, num_prompt_by_slot: IntArray, *, history_tokens: int, block_tokens: int) -> None:
        self._tables = tables
        self._num_prompt_by_slot = num_prompt_by_slot
        self._history_tokens = history_tokens
        self._block_tokens = block_tokens

    def build(self, steps: Sequence[RequestStep]) -> tuple[ForwardBatch, LogitRows]:
        """The batch of one step. The tables must already hold the step's new requests and blocks."""
        columns = np.array([(s.slot, s.start, s.num_tokens, s.window_start, s.decoder_start, s.write_start) for s in steps], np.int64)
        slot_B, start_B, num_B, window_start_B, decoder_start_B, write_start_B = np.ascontiguousarray(columns.T)
        encoder = _Rows(num_B, start_B)
        end_B = start_B + num_B
        decoder_first_B = np.maximum(start_B, decoder_start_B)
        decoder = _Rows(np.maximum(end_B - decoder_first_B, 0), decoder_first_B)
        is_split = bool((decoder.num_B != num_B).any())
        wanted, logit_rows_L = self._logit_rows(steps, slot_B, end_B, decoder)

        host = {f"encoder.{k}": v for k, v in _row_arrays(encoder, window_start_B).items()}
        if is_split:
            host |= {f"decoder.{k}": v for k, v in _row_arrays(decoder, decoder_start_B).items()}
            host["decoder_rows"] = np.arange(decoder.num_B.sum()) + np.repeat(
                encoder.first_row_B + decoder_first_B - start_B - decoder.first_row_B, decoder.num_B
            )
        host["decoder_window_start"] = decoder_start_B
        host |= {"slot": slot_B, "context": end_B, "write_start": write_start_B, "logit_rows": logit_rows_L}
        on_device = _send(host, self._tables.token_ids.device)
        encoder_rows = _row_set(on_device, "encoder", num_B)
        max_context = int(end_B.max())
        if is_split:
            decoder_rows = _row_set(on_device, "decoder", decoder.num_B)
        elif (decoder_start_B == window_start_B).all():
            decoder_rows = encoder_rows
        else:
            # The same rows, but their decoder windows begin where the tail of the prompt began.
            decoder_rows = replace(encoder_rows, window_start_B=on_device["decoder_window_start"])
        return self._gather(on_device, encoder_rows, decoder_rows, max_context), wanted

    def _gather(self, on_device: dict[str, Tensor], encoder: RowSet, decoder: RowSet, max_context: int) -> ForwardBatch:
        slot_B = on_device["slot"]
        num_blocks = -(-max_context // self._block_tokens)
        return ForwardBatch(
            input_ids_T=self._tables.token_ids[slot_B[encoder.request_T], encoder.positions_T].long(),
            history_BH=self._history(slot_B, encoder.start_B),
            encoder=encoder,
            decoder=decoder,
            decoder_rows_D=on_device.get("decoder_rows"),
            slot_B=slot_B,
            block_table_BP=self._tables.block_ids[slot_B, :num_blocks].long(),
            context_B=on_device["context"],
            write_start_B=on_device["write_start"],
            max_context=max_context,
            logit_rows_L=on_device["logit_rows"],
        )

    def _history(self, slot_B: Tensor, start_B: Tensor) -> Tensor:
        distance_H = torch.arange(1, self._history_tokens + 1, device=slot_B.device)
        position_BH = start_B[:, None] - distance_H
        ids_BH = self._tables.token_ids[slot_B[:, None], position_BH.clamp(min=0)].long()
        return torch.where(position_BH >= 0, ids_BH, -1)

    def _logit_rows(self, steps: Sequence[RequestStep], slot_B: IntArray, end_B: IntArray, decoder: _Rows) -> tuple[LogitRows, IntArray]:
        """Which decoder rows give logits, and what for."""
        sampling = np.flatnonzero([s.samples for s in steps])
        assert (decoder.num_B[sampling] > 0).all(), "a request that samples has no decoder row"
        scoring_B = np.array([s.wants_prompt_logprobs for s in steps])
        prompt = _Rows(
            np.where(scoring_B, np.clip(self._num_prompt_by_slot[slot_B] - 1 - decoder.start_B, 0, decoder.num_B), 0), decoder.start_B
        )
        assert all(s.decoder_start <= s.start for s in steps if s.wants_prompt_logprobs), "prompt logprobs need every row in the decoder"
        num_drafts_R = np.array([steps[i].num_drafts for i in sampling.tolist()], np.int64)
        judged = _Rows(num_drafts_R + 1, end_B[sampling] - num_drafts_R)
        assert (decoder.num_B[sampling] > num_drafts_R).all(), "a draft whose row is no decoder row"
        sample_row_S = judged.positions_T - 1 + np.repeat((decoder.first_row_B - decoder.start_B)[sampling], judged.num_B)
        prompt_row_X = prompt.positions_T + np.repeat(decoder.first_row_B - decoder.start_B, prompt.num_B)
        wanted = LogitRows(
            sample_slot_S=slot_B[sampling][judged.request_T],
            sample_position_S=judged.positions_T,
            sample_request_S=sampling[judged.request_T],
            num_rows_R=judged.num_B,
            prompt_slot_X=slot_B[prompt.request_T],
            prompt_position_X=prompt.positions_T + 1,
            num_prompt_rows_B=prompt.num_B,
        )
        return wanted, np.concatenate([sample_row_S, prompt_row_X])


def _row_arrays(rows: _Rows, window_start_B: IntArray) -> dict[str, IntArray]:
    return {
        "positions": rows.positions_T,
        "request": rows.request_T,
        "first_row": rows.first_row_B,
        "start": rows.start_B,
        "window_start": window_start_B,
    }


def _row_set(on_device: dict[str, Tensor], name: str, num_B: IntArray) -> RowSet:
    return RowSet(
        positions_T=on_device[f"{name}.positions"],
        request_T=on_device[f"{name}.request"],
        first_row_B=on_device[f"{name}.first_row"],
        start_B=on_device[f"{name}.start"],
        window_start_B=on_device[f"{name}.window_start"],
        num_rows=int(num_B.sum()),
        max_rows=int(num_B.max()),
    )


def _send(host: dict[str, IntArray], device: torch.device) -> dict[str, Tensor]:
    """One transfer for all arrays. The staging array is this step's own: the next step is built while the copy may still run."""
    packed = torch.from_numpy(np.concatenate(list(host.values())))
    if device.type != "cpu":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return dict(zip(host, packed.split([len(array) for array in host.values()])))
