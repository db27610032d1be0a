# SPDX-License-Identifier: Apache-2.0
"""SparseAttention: V4.1's attention sublayer in its four modes.

Window-only (ratio 0), Full (owns compressed KV and index), Reindex (own index query on a shared cache), Reuse (shared cache and list). A
layer works in two halves: `write` puts every row's cache entries in place, `look` lets queries attend. The border layer writes for all rows
and looks for decoder rows only; every other layer does both for the same rows. Source: design note deepseek-v41 §3.4-3.8, §6.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from whalefall.core.batch import CacheTensors
from whalefall.core.seams import Comm
from whalefall.kernels import indexer as index_ops
from whalefall.kernels.kv_store import store_rows
from whalefall.kernels.latent import Rounding, rotate_round
from whalefall.layers.attention import LatentAttention
from whalefall.layers.compressor import Compressor
from whalefall.layers.indexer import Indexer
from whalefall.layers.linear import Storage
from whalefall.models.deepseek_v41.cache import index_field, main_field, pending_field, window_field
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.step import Angles, StepIndex, View


@dataclass(slots=True)
class Lists:
    """What index sources publish to the layers above them, within one step and one row set."""

    pool_rows: dict[int, Tensor] = field(default_factory=dict)
    """Index source -> pool rows of its top-k entries [T, K], -1 = none."""
    candidates_TM: Tensor | None = None
    """Candidate blocks of the candidate source."""


class SparseAttention(LatentAttention):
    def __init__(self, config: DeepseekV41Config, layer: int, *, is_rounded: bool, storage: Storage, comm: Comm) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
            config.q_lora_rank,
            config.o_groups,
            config.o_lora_rank,
            eps=config.rms_norm_eps,
            storage=storage,
            comm=comm,
        )
        self._config, self._layer, self._is_rounded = config, layer, is_rounded
        self.ratio = config.ratio(layer)
        self.kv_source = config.kv_src(layer) if self.ratio else None
        self.index_source = config.idx_src(layer) if self.ratio else None
        owns_kv = self.kv_source == layer
        if owns_kv:
            self.compressor = Compressor(config.hidden_size, config.head_dim, self.ratio, config.rms_norm_eps, storage)
        if self.index_source == layer:
            self.indexer = Indexer(
                config.hidden_size,
                config.q_lora_rank,
                config.head_dim,
                config.index_n_heads,
                config.index_head_dim,
                owns_keys=owns_kv,
                eps=config.rms_norm_eps,
                storage=storage,
            )

    def write(self, x_TH: Tensor, view: View, step: StepIndex, cache: CacheTensors) -> Tensor:
        """Store window rows, and in a KV source compressed entries and index keys. Gives the window rows that queries look into."""
        kv_TD = self.latent(x_TH, *self._angles(view), self._rounding(Rounding.MXFP8))
        if self.kv_source == self._layer:
            self._write_entries(x_TH, step, cache)
        return view.ring.source(cache.rings[window_field(self._layer)], kv_TD)

    def look(self, x_TH: Tensor, window_kv_MD: Tensor, view: View, step: StepIndex, cache: CacheTensors, lists: Lists) -> Tensor:
        """The sublayer's output [T, H] for the rows of `view`."""
        qr_TR = self.low_rank_query(x_TH)
        if self.kv_source is None or self.index_source is None:
            return self.attend(qr_TR, *self._angles(view), window_kv_MD, view.window_index_TW)
        if self.index_source == self._layer:
            entry_TK = self._select(x_TH, qr_TR, view, step, cache, lists)
            lists.pool_rows[self._layer] = step.entry_rows(view.rows.request_T, entry_TK, self.ratio)
        main_kv_CD, main_index_TK = cache.growing[main_field(self.kv_source)], lists.pool_rows[self.index_source]
        return self.attend(qr_TR, *self._angles(view), window_kv_MD, view.window_index_TW, main_kv_CD, main_index_TK)

    def _rounding(self, released: Rounding) -> Rounding:
        return released if self._is_rounded else Rounding.NONE

    def _angles(self, view: View) -> Angles:
        return view.long if self.ratio else view.plain

    def _write_entries(self, x_TH: Tensor, step: StepIndex, cache: CacheTensors) -> None:
        group = step.groups[self.ratio]
        projected_TD = self.compressor.project(x_TH)
        if group.pending is not None:
            projected_TD = group.pending.source(cache.rings[pending_field(self._layer)], projected_TD)
        latent_TD = self.compressor.latent(group.members_Tr, projected_TD, x_TH.dtype)
        key_TJ = self.indexer.keys(latent_TD, *group.first_angles, self._rounding(Rounding.MXFP4))
        main_TD = rotate_round(latent_TD, *group.first_angles, self._rounding(Rounding.NVFP4))
        store_rows(cache.growing[index_field(self._layer)], group.target_T, key_TJ)
        store_rows(cache.growing[main_field(self._layer)], group.target_T, main_TD)

    def _select(self, x_TH: Tensor, qr_TR: Tensor, view: View, step: StepIndex, cache: CacheTensors, lists: Lists) -> Tensor:
        config = self._config
        assert self.kv_source is not None
        q_TIJ, w_TI = self.indexer.queries(x_TH, qr_TR, *view.long, self._rounding(Rounding.MXFP4))
        search = (
            q_TIJ,
            w_TI,
            cache.growing[index_field(self.kv_source)],
            step.batch.block_table_BP,
            step.groups[self.ratio].entries_per_block,
            view.rows.request_T,
            step.num_visible(view.rows, self.ratio),
            step.max_visible(self.ratio),
            config.index_topk,
        )
        if self._layer == config.candidate_source_layer_id:
            entry_TK, lists.candidates_TM = index_ops.select_with_candidates(
                *search, config.candidate_topk_blocks, config.candidate_block_size
            )
            return entry_TK
        if config.uses_candidates(self._layer):
            assert lists.candidates_TM is not None, "the candidate source runs before the layers that use its blocks"
            return index_ops.select_within(*search, lists.candidates_TM, config.candidate_block_size)
        return index_ops.select(*search)
