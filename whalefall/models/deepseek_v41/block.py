# SPDX-License-Identifier: Apache-2.0
"""One block of V4.1: Engram where it has one, attention and MoE, each inside its hyper-connection (design note deepseek-v41 §3).

Backbone and draft are made of the same blocks; what queries look at differs, so `around` takes the attention from its caller.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from whalefall.core.batch import CacheTensors
from whalefall.kernels import mhc
from whalefall.layers.engram import Engram
from whalefall.layers.linear import Storage
from whalefall.layers.mhc import HyperConnection
from whalefall.layers.moe import MoE
from whalefall.layers.norm import RMSNorm
from whalefall.layers.parametric import Parametric
from whalefall.models.deepseek_v41.cache import is_rounded
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.sparse import Lists, SparseAttention
from whalefall.models.deepseek_v41.step import StepIndex, View
from whalefall.models.definition import BuildContext


class Block(Parametric):
    """Its parameters carry the names that follow "layers.N." or "mtp.N." in the checkpoint."""

    def __init__(
        self,
        config: DeepseekV41Config,
        layer: int,
        context: BuildContext,
        storage: Storage,
        *,
        num_experts: int | None = None,
        experts_per_token: int | None = None,
    ) -> None:
        """
        Args:
            layer: its number in compress_ratios, where draft blocks follow the backbone's layers.
            num_experts, experts_per_token: the backbone's unless given.
        """
        super().__init__()
        eps, device = config.rms_norm_eps, storage.device
        self.attn_norm = RMSNorm(config.hidden_size, eps, device)
        self.ffn_norm = RMSNorm(config.hidden_size, eps, device)
        self.attn = SparseAttention(config, layer, is_rounded=is_rounded(context), storage=storage, comm=context.comm)
        self.ffn = MoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.n_routed_experts if num_experts is None else num_experts,
            config.num_experts_per_tok if experts_per_token is None else experts_per_token,
            scale=config.routed_scaling_factor,
            limit=config.swiglu_limit,
            storage=storage,
            comm=context.comm,
        )
        self.hc_attn, self.hc_ffn = (
            HyperConnection(
                config.hc_mult, config.hidden_size, eps=eps, hc_eps=config.hc_eps, iterations=config.hc_sinkhorn_iters, device=device
            )
            for _ in range(2)
        )
        self.engram: Engram | None = None
        if layer in config.engram_layer_ids:
            self.engram = Engram(
                config.hidden_size,
                config.hc_mult,
                num_rows=config.engram_num_embeddings[config.engram_layer_ids.index(layer)],
                slots=(config.engram_max_ngram_size - 1) * config.engram_n_heads,
                width=config.engram_head_dim,
                eps=eps,
                storage=storage,
            )

    def fill(self, part: str, tensor: Tensor) -> None:
        """The checkpoint spells the hyper-connections hc_attn_fn, hc_ffn_scale and so on."""
        _, sublayer, name = part.split("_")
        (self.hc_attn if sublayer == "attn" else self.hc_ffn).fill(name, tensor)

    def forward(
        self,
        streams_TSH: Tensor,
        carry_TS: Tensor,
        engram_rows_TJ: Tensor | None,
        view: View,
        step: StepIndex,
        cache: CacheTensors,
        lists: Lists,
    ) -> tuple[Tensor, Tensor]:
        if self.engram is not None and engram_rows_TJ is not None:
            streams_TSH = self.engram(streams_TSH, engram_rows_TJ)
        x_TH = self.attn_norm(mhc.collapse(streams_TSH, carry_TS))
        window_kv_MD = self.attn.write(x_TH, view, step, cache)
        return self.after_write(streams_TSH, x_TH, window_kv_MD, view, step, cache, lists)

    def after_write(
        self,
        streams_TSH: Tensor,
        x_TH: Tensor,
        window_kv_MD: Tensor,
        view: View,
        step: StepIndex,
        cache: CacheTensors,
        lists: Lists,
    ) -> tuple[Tensor, Tensor]:
        """The rest of the block once the attention sublayer's cache entries stand. Gives new streams and the next carry."""
        return self.around(streams_TSH, lambda: self.attn.look(x_TH, window_kv_MD, view, step, cache, lists))

    def around(self, streams_TSH: Tensor, attend: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Both sublayers inside their hyper-connections; `attend` gives the attention's output [T, H]. New streams and the next carry."""
        carry_TS, post_TS, comb_TSS = self.hc_attn.mixes(streams_TSH)
        streams_TSH = mhc.expand(streams_TSH, attend(), post_TS, comb_TSS)
        x_TH = self.ffn_norm(mhc.collapse(streams_TSH, carry_TS))
        carry_TS, post_TS, comb_TSS = self.hc_ffn.mixes(streams_TSH)
        return mhc.expand(streams_TSH, self.ffn(x_TH), post_TS, comb_TSS), carry_TS
