# SPDX-License-Identifier: Apache-2.0
"""Drive a model by hand: direct forward calls without scheduler, worker or sampler.

A `Driver` owns pools and hands out slots and blocks (scattered on purpose, so that a model which mistakes logical for physical blocks
fails). A `Track` is one sequence on its way; `forward` takes any mix of chunks of several tracks in one step. For tests of a new model:
whatever the road (whole, in chunks, token by token, in company), the logits must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from whalefall.core.batch import ForwardBatch, RowSet
from whalefall.core.seams import Drafter, LocalComm
from whalefall.models.definition import BuildContext, Model, ModelConfig, ModelDefinition
from whalefall.models.registry import find_definition, read_config
from whalefall.runtime.kvcache.pools import allocate, reset_slot
from whalefall.weights.loader import load_checkpoint


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    definition: ModelDefinition
    config: Any
    """The family's own config."""
    context: BuildContext
    model: Model
    drafter: Drafter | None = None
    """The family's own, when it was asked for."""


def load_model(
    model_dir: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    weights: Literal["packed", "dense"] = "dense",
    kv_cache_dtype: Literal["model", "unrounded"] = "unrounded",
    max_draft_tokens: int = 0,
    **changes: Any,
) -> LoadedModel:
    """Build and fill a model on the CPU. `changes` replace fields of its config, for instance index_topk, after it has been checked.

    max_draft_tokens: build the family's own drafter too, with rings that have room for so many refused drafts.
    """
    folder = Path(model_dir)
    values = read_config(folder)
    definition = find_definition(values)
    config: Any = definition.parse_config(values, str(folder / "config.json"))
    config = replace(config, **changes)
    context = BuildContext(
        dtype=dtype,
        device=torch.device("cpu"),
        weights=weights,
        kv_cache_dtype=kv_cache_dtype,
        comm=LocalComm(),
        model_dir=folder,
        max_draft_tokens=max_draft_tokens,
        uses_own_drafter=max_draft_tokens > 0,
    )
    built = definition.build(config, context)
    tensors = definition.weight_map if not max_draft_tokens else definition.weight_map_with_drafter
    assert tensors is not None, f"{definition.name} has no drafter of its own"
    load_checkpoint(folder, tensors(config), built.sink)
    return LoadedModel(definition=definition, config=config, context=context, model=built.model, drafter=built.drafter)


@dataclass(eq=False, slots=True)
class Track:
    """One sequence in a slot."""

    slot: int
    window_start: int
    """Encoder windows see nothing below this position."""
    decoder_start: int
    """Rows below this position run through the encoder only, and decoder windows see nothing below it; 0 is exact mode."""
    write_start: int = 0
    """Growing caches are not written below this position."""
    ids: list[int] = field(default_factory=list)
    """Everything computed so far."""
    blocks: list[int] = field(default_factory=list)
    """Physical block of each logical one."""


Chunk = tuple[Track, Sequence[int]]
"""A track and the ids that come next on it; at least one."""


class Driver:
    def __init__(self, loaded: LoadedModel, *, num_blocks: int = 64, num_slots: int = 8, block_tokens: int = 32) -> None:
        self.model = loaded.model
        self.history_tokens = _facts(loaded).history_tokens
        self.cache = allocate(loaded.definition.cache_spec(loaded.config, loaded.context, block_tokens), num_blocks, num_slots, _CPU)
        # Every third block first, so that neighbours in a sequence are never neighbours in the pool.
        self._free_blocks = sorted(range(1, num_blocks), key=lambda block: (block % 3, -block))
        self._free_slots = list(range(num_slots))

    def open(self, *, window_start: int = 0, decoder_start: int = 0, slot: int | None = None) -> Track:
        """Start a sequence in a clean slot (the lowest free one, or this one)."""
        chosen = self._free_slots[0] if slot is None else slot
        self._free_slots.remove(chosen)
        reset_slot(self.cache, chosen)
        return Track(chosen, window_start, decoder_start)

    def close(self, track: Track) -> None:
        """Give back slot and blocks with whatever the sequence left in them."""
        self._free_slots.insert(0, track.slot)
        self._free_blocks = track.blocks + self._free_blocks
        track.blocks = []

    def poison(self) -> None:
        """Fill every pool with NaN, as the worst neighbour could have left it. Call it while no track is open."""
        for pool in (*self.cache.growing.values(), *self.cache.rings.values(), *self.cache.states.values()):
            pool.fill_(torch.nan if pool.is_floating_point() else torch.iinfo(pool.dtype).max)

    def forward(self, *chunks: Chunk) -> list[Tensor]:
        """One step. Gives, for each chunk, float32 logits [D, V] of its decoder rows, which in exact mode are all of its rows."""
        batch, num_decoder_rows = self._batch(chunks)
        logits_LV = self.model.forward(batch, self.cache)
        for track, ids in chunks:
            track.ids.extend(ids)
        return list(logits_LV.split(num_decoder_rows))

    def run(self, ids: Sequence[int], chunk: int | Sequence[int] | None = None, *, decoder_start: int = 0) -> Tensor:
        """Logits of all decoder rows of one sequence, alone, in chunks of so many tokens (a list gives the first sizes, its last entry goes
        on; None: all at once)."""
        track = self.open(decoder_start=decoder_start)
        sizes = [len(ids)] if chunk is None else [chunk] if isinstance(chunk, int) else list(chunk)
        parts: list[Tensor] = []
        start = 0
        while start < len(ids):
            size = sizes[min(len(parts), len(sizes) - 1)]
            parts += self.forward((track, ids[start : start + size]))
            start += size
        self.close(track)
        return torch.cat(parts)

    def _batch(self, chunks: Sequence[Chunk]) -> tuple[ForwardBatch, list[int]]:
        starts = [len(track.ids) for track, _ in chunks]
        ends = [start + len(ids) for start, (_, ids) in zip(starts, chunks)]
        decoder_starts = [max(start, min(end, track.decoder_start)) for start, end, (track, _) in zip(starts, ends, chunks)]
        window_starts = [track.window_start for track, _ in chunks]
        decoder_window_starts = [max(track.window_start, track.decoder_start) for track, _ in chunks]
        decoder = encoder = _row_set(starts, ends, window_starts)
        decoder_rows_D = None
        if (decoder_starts, decoder_window_starts) != (starts, window_starts):
            decoder = _row_set(decoder_starts, ends, decoder_window_starts)
        if decoder_starts != starts:
            is_decoder_T = encoder.positions_T >= torch.tensor(decoder_starts)[encoder.request_T]
            decoder_rows_D = is_decoder_T.nonzero().squeeze(1)
        batch = ForwardBatch(
            input_ids_T=torch.tensor([token for _, ids in chunks for token in ids]),
            history_BH=torch.tensor([self._history(track) for track, _ in chunks], dtype=torch.int64).view(len(chunks), -1),
            encoder=encoder,
            decoder=decoder,
            decoder_rows_D=decoder_rows_D,
            slot_B=torch.tensor([track.slot for track, _ in chunks]),
            block_table_BP=self._block_table(chunks, ends),
            context_B=torch.tensor(ends),
            write_start_B=torch.tensor([track.write_start for track, _ in chunks]),
            max_context=max(ends),
            logit_rows_L=torch.arange(decoder.num_rows),
        )
        return batch, [end - start for start, end in zip(decoder_starts, ends)]

    def _history(self, track: Track) -> list[int]:
        newest_first = track.ids[::-1][: self.history_tokens]
        return newest_first + [-1] * (self.history_tokens - len(newest_first))

    def _block_table(self, chunks: Sequence[Chunk], ends: Sequence[int]) -> Tensor:
        width = -(-max(ends) // self.cache.block_tokens)
        table_BP = torch.zeros(len(chunks), width, dtype=torch.int64)
        for row_P, (track, _), end in zip(table_BP, chunks, ends):
            while len(track.blocks) * self.cache.block_tokens < end:
                track.blocks.append(self._free_blocks.pop(0))
            row_P[: len(track.blocks)] = torch.tensor(track.blocks)
        return table_BP


_CPU = torch.device("cpu")


def _facts(loaded: LoadedModel) -> ModelConfig:
    facts: ModelConfig = loaded.config
    return facts


def _row_set(starts: Sequence[int], ends: Sequence[int], window_starts: Sequence[int]) -> RowSet:
    start_B, num_B = torch.tensor(starts), torch.tensor(ends) - torch.tensor(starts)
    first_row_B = num_B.cumsum(0) - num_B
    request_T = torch.repeat_interleave(torch.arange(len(starts)), num_B)
    num_rows = int(num_B.sum())
    return RowSet(
        positions_T=torch.arange(num_rows) - first_row_B[request_T] + start_B[request_T],
        request_T=request_T,
        first_row_B=first_row_B,
        start_B=start_B,
        window_start_B=torch.tensor(window_starts),
        num_rows=num_rows,
        max_rows=int(num_B.max()),
    )
