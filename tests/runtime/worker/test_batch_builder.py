# SPDX-License-Identifier: Apache-2.0
"""The batch of a step holds what core/batch.py promises, also where prompts are trimmed for the decoder."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whalefall.core.batch import ForwardBatch, RowSet
from whalefall.core.plan import NewRequest, RequestStep
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.worker.batch_builder import BatchBuilder, LogitRows
from whalefall.runtime.worker.tables import SlotTables

NUM_SLOTS, MAX_MODEL_LEN, BLOCK_TOKENS, HISTORY = 6, 40, 4, 3


def id_at(slot: int, position: int) -> int:
    return 100 * slot + position


def build(steps: list[RequestStep], num_prompt: dict[int, int] | None = None) -> tuple[ForwardBatch, LogitRows]:
    """Slot s holds ids 100 s + position and blocks 10 s + 1, 10 s + 2, ..."""
    tables = SlotTables(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_TOKENS, torch.device("cpu"))
    num_prompt_by_slot = np.zeros(NUM_SLOTS, np.int64)
    blocks = []
    for step in steps:
        end = step.start + step.num_tokens
        ids = tuple(id_at(step.slot, position) for position in range(end + 1))
        num_prompt_by_slot[step.slot] = (num_prompt or {}).get(step.slot, end)
        tables.admit(
            NewRequest(
                request_id=step.request_id,
                slot=step.slot,
                token_ids=ids,
                num_prompt_tokens=end,
                sampling=SamplingParams(seed=0),
                eos_token_ids=(),
            )
        )
        blocks.append(step._replace(new_block_ids=tuple(10 * step.slot + 1 + i for i in range(-(-end // BLOCK_TOKENS)))))
    tables.append_blocks(blocks)
    return BatchBuilder(tables, num_prompt_by_slot, history_tokens=HISTORY, block_tokens=BLOCK_TOKENS).build(steps)


def make_step(slot: int, start: int, num_tokens: int, **changes: object) -> RequestStep:
    defaults = {"new_block_ids": (), "window_start": 0, "decoder_start": 0, "samples": True, "wants_prompt_logprobs": False}
    return RequestStep(request_id=str(slot), slot=slot, start=start, num_tokens=num_tokens, **(defaults | changes))


def test_a_mixed_step_row_by_row() -> None:
    """A decode, a chunk whose decoder tail starts inside it, a chunk before its tail, a whole prompt."""
    batch, wanted = build(
        [
            make_step(4, 9, 1),
            make_step(1, 2, 5, decoder_start=5, window_start=1),
            make_step(0, 0, 3, decoder_start=8, samples=False),
            make_step(3, 0, 2),
        ]
    )
    assert batch.input_ids_T.tolist() == [409, 102, 103, 104, 105, 106, 0, 1, 2, 300, 301]
    assert batch.history_BH.tolist() == [[408, 407, 406], [101, 100, -1], [-1, -1, -1], [-1, -1, -1]]
    assert batch.slot_B.tolist() == [4, 1, 0, 3]
    assert batch.context_B.tolist() == [10, 7, 3, 2]
    assert batch.max_context == 10
    assert batch.block_table_BP.tolist() == [[41, 42, 43], [11, 12, 0], [1, 0, 0], [31, 0, 0]]
    encoder, decoder = batch.encoder, batch.decoder
    assert encoder.positions_T.tolist() == [9, 2, 3, 4, 5, 6, 0, 1, 2, 0, 1]
    assert encoder.request_T.tolist() == [0, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3]
    assert encoder.first_row_B.tolist() == [0, 1, 6, 9]
    assert encoder.start_B.tolist() == [9, 2, 0, 0]
    assert encoder.window_start_B.tolist() == [0, 1, 0, 0]
    assert (encoder.num_rows, encoder.max_rows) == (11, 5)
    assert decoder.positions_T.tolist() == [9, 5, 6, 0, 1]
    assert decoder.request_T.tolist() == [0, 1, 1, 3, 3]
    assert decoder.first_row_B.tolist() == [0, 1, 3, 3]
    assert decoder.start_B.tolist() == [9, 5, 8, 0]
    assert decoder.window_start_B.tolist() == [0, 5, 8, 0]
    assert (decoder.num_rows, decoder.max_rows) == (5, 2)
    assert batch.decoder_rows_D is not None
    assert batch.decoder_rows_D.tolist() == [0, 4, 5, 9, 10]
    assert batch.logit_rows_L.tolist() == [0, 2, 4]
    assert wanted.sample_slot_S.tolist() == [4, 1, 3]
    assert wanted.sample_position_S.tolist() == [10, 7, 2]
    assert wanted.sample_request_S.tolist() == [0, 1, 3]


def test_one_row_set_when_every_row_is_a_decoder_row() -> None:
    batch, _ = build([make_step(0, 6, 2), make_step(1, 0, 3)])
    assert batch.decoder is batch.encoder
    assert batch.decoder_rows_D is None


def test_decoding_after_a_trimmed_prompt_keeps_the_floor_of_its_decoder_windows() -> None:
    batch, _ = build([make_step(0, 6, 2, decoder_start=5), make_step(1, 0, 3)])
    assert batch.decoder_rows_D is None
    assert batch.decoder.positions_T is batch.encoder.positions_T
    assert batch.decoder.window_start_B.tolist() == [5, 0]
    assert batch.encoder.window_start_B.tolist() == [0, 0]


def test_a_step_without_decoder_rows() -> None:
    batch, wanted = build([make_step(0, 0, 4, decoder_start=9, samples=False), make_step(1, 4, 2, decoder_start=7, samples=False)])
    assert (batch.decoder.num_rows, batch.decoder.max_rows) == (0, 0)
    assert batch.decoder.first_row_B.tolist() == [0, 0]
    assert batch.decoder_rows_D is not None
    assert [x.numel() for x in (batch.decoder_rows_D, batch.logit_rows_L, batch.decoder.positions_T)] == [0, 0, 0]
    assert wanted.num_sampled == 0


def test_prompt_rows_are_scored_up_to_the_last_prompt_token() -> None:
    """Rows to score follow the rows to sample. Slot 1 has a prompt of 6: rows 2..4 score positions 3..5, row 5 scores nothing."""
    batch, wanted = build(
        [make_step(0, 0, 2), make_step(1, 2, 4, wants_prompt_logprobs=True), make_step(2, 0, 3, wants_prompt_logprobs=True, samples=False)],
        num_prompt={1: 6, 2: 10},
    )
    assert batch.logit_rows_L.tolist() == [1, 5, 2, 3, 4, 6, 7, 8]
    assert wanted.prompt_slot_X.tolist() == [1, 1, 1, 2, 2, 2]
    assert wanted.prompt_position_X.tolist() == [3, 4, 5, 1, 2, 3]
    assert wanted.num_prompt_rows_B.tolist() == [0, 3, 3]


def test_index_tensors_are_int64() -> None:
    batch, _ = build([make_step(0, 0, 4, decoder_start=2), make_step(1, 4, 2)])
    tensors = [getattr(rows, name) for rows in (batch.encoder, batch.decoder) for name in RowSet.__annotations__ if name[-2] == "_"]
    tensors += [getattr(batch, name) for name in ForwardBatch.__annotations__ if name[-2] == "_" or name[-3] == "_"]
    assert len(tensors) == 2 * 5 + 8
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_blocks_are_appended_step_by_step_and_cleared_for_the_next_request() -> None:
    tables = SlotTables(2, MAX_MODEL_LEN, BLOCK_TOKENS, torch.device("cpu"))
    request = NewRequest(request_id="a", slot=1, token_ids=(5,), num_prompt_tokens=1, sampling=SamplingParams(seed=0), eos_token_ids=())
    tables.admit(request)
    tables.append_blocks([make_step(1, 0, 1, new_block_ids=(7, 8)), make_step(0, 0, 1)])
    tables.append_blocks([make_step(1, 1, 1, new_block_ids=(3,))])
    assert tables.block_ids[1].tolist() == [7, 8, 3, *[0] * 7]
    assert tables.blocks_of(1) == [7, 8, 3]
    assert tables.blocks_of(0) == []
    tables.admit(request)
    tables.append_blocks([make_step(1, 0, 1, new_block_ids=(9,))])
    assert tables.block_ids[1].tolist() == [9, *[0] * 9]


@st.composite
def some_steps(draw: st.DrawFn) -> list[RequestStep]:
    steps = []
    for slot in draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=NUM_SLOTS, unique=True)):
        start = draw(st.integers(0, 20))
        num_tokens = draw(st.integers(1, 15))
        decoder_start = draw(st.integers(0, 40))
        samples = decoder_start < start + num_tokens and draw(st.booleans())
        steps.append(
            make_step(slot, start, num_tokens, decoder_start=decoder_start, window_start=draw(st.integers(0, start)), samples=samples)
        )
    return steps


@settings(deadline=None)
@given(steps=some_steps())
def test_row_sets_equal_a_plain_loop(steps: list[RequestStep]) -> None:
    batch, _ = build(steps)
    encoder_rows, decoder_rows, logit_rows = [], [], []
    for request, step in enumerate(steps):
        for position in range(step.start, step.start + step.num_tokens):
            if position >= step.decoder_start:
                decoder_rows.append(len(encoder_rows))
            encoder_rows.append((request, position))
        if step.samples:
            logit_rows.append(len(decoder_rows) - 1)
    assert list(zip(batch.encoder.request_T.tolist(), batch.encoder.positions_T.tolist())) == encoder_rows
    assert batch.input_ids_T.tolist() == [id_at(steps[request].slot, position) for request, position in encoder_rows]
    chosen = list(range(len(encoder_rows))) if batch.decoder_rows_D is None else batch.decoder_rows_D.tolist()
    assert chosen == decoder_rows
    assert list(zip(batch.decoder.request_T.tolist(), batch.decoder.positions_T.tolist())) == [encoder_rows[row] for row in decoder_rows]
    assert batch.logit_rows_L.tolist() == logit_rows
    for rows in (batch.encoder, batch.decoder):
        first_T, start_T = rows.first_row_B[rows.request_T], rows.start_B[rows.request_T]
        assert torch.equal(rows.positions_T - start_T, torch.arange(rows.num_rows) - first_T)
        assert rows.max_rows == torch.bincount(rows.request_T, minlength=len(steps)).max()
