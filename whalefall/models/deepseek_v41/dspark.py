# SPDX-License-Identifier: Apache-2.0
"""DSpark, the draft model that comes with V4.1: a few more blocks, fed by the backbone, that guess a whole block of tokens in one go.

Every decoder row of a step leaves its features in the draft's window rings (`DraftBlocks.feed`). A round then runs the blocks once for
the latest token and some noise tokens behind it, all slots of a block seeing one another and the window up to the row before it, and
draws the tokens one after the other, each shifted by what the one before makes likely (the Markov head).
Source: design note deepseek-v41 §4. Letters as everywhere, M slots of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from whalefall.core.batch import CacheTensors, DraftRequests, Drafts
from whalefall.kernels import mhc
from whalefall.kernels.quant import fakequant_mxfp8
from whalefall.kernels.rope import angles
from whalefall.layers.embedding import Embedding
from whalefall.layers.linear import Float32Linear, Linear, Storage
from whalefall.layers.norm import RMSNorm
from whalefall.models.deepseek_v41.block import Block
from whalefall.models.deepseek_v41.cache import DECODER_RING, draft_window_field, is_rounded
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.step import Angles, View
from whalefall.models.definition import BuildContext

if TYPE_CHECKING:
    from whalefall.models.deepseek_v41.model import DeepseekV41


class Taps:
    """Collects the residual streams at the attention input of some layers, averaged over the streams."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._seen: list[Tensor] = []

    def see(self, layer: int, streams_TSH: Tensor) -> None:
        if layer in self._layers:
            self._seen.append(streams_TSH.float().mean(1).to(streams_TSH.dtype))

    def keep(self, rows_D: Tensor) -> None:
        """From here on the step has only these rows."""
        self._seen = [seen_TH[rows_D] for seen_TH in self._seen]

    def features(self) -> Tensor:
        """[D, taps * H]."""
        return torch.cat(self._seen, -1)


class MarkovHead(nn.Module):
    """What the token before makes likely, through a narrow space."""

    def __init__(self, vocab_size: int, rank: int, storage: Storage) -> None:
        super().__init__()
        self.embed = Embedding(vocab_size, rank, storage)
        self.head = Float32Linear(rank, vocab_size, storage.device, stored=storage.dtype)


class ConfidenceHead(nn.Module):
    def __init__(self, width: int, storage: Storage) -> None:
        super().__init__()
        self.proj = Float32Linear(width, 1, storage.device, stored=storage.dtype)

    def forward(self, hidden_RH: Tensor, previous_RK: Tensor) -> Tensor:
        """float32 logits [R] that the draft is accepted if those before it were."""
        return self.proj(torch.cat((hidden_RH, previous_RK.to(hidden_RH.dtype)), -1)).squeeze(-1)


class DraftBlock(Block):
    """A block of ratio 0 with its own experts. The first also owns what turns features into rows, the last owns the heads."""

    def __init__(self, config: DeepseekV41Config, index: int, context: BuildContext, storage: Storage) -> None:
        super().__init__(
            config,
            config.num_hidden_layers + index,
            context,
            storage,
            num_experts=config.dspark_n_routed_experts,
            experts_per_token=config.dspark_num_experts_per_tok,
        )
        hidden, eps, rank = config.hidden_size, config.rms_norm_eps, config.dspark_markov_rank
        self._index, self._is_rounded = index, is_rounded(context)
        if index == 0:
            self.main_proj = Linear(hidden * len(config.dspark_target_layer_ids), hidden, storage)
            self.main_norm = RMSNorm(hidden, eps, storage.device)
        if index == config.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(hidden, eps, storage.device)
            self.markov_head = MarkovHead(config.vocab_size, rank, storage)
            self.confidence_head = ConfidenceHead(hidden + rank, storage)

    def keys(self, x_TH: Tensor, plain: Angles) -> Tensor:
        """Window rows [T, D] of rows x, rounded as the caches are."""
        kv_TD = self.attn.latent(x_TH, *plain)
        return fakequant_mxfp8(kv_TD) if self._is_rounded else kv_TD

    def draft(
        self, streams_TSH: Tensor, carry_TS: Tensor, plain: Angles, ring_SRD: Tensor, window_TW: Tensor, block_TM: Tensor
    ) -> tuple[Tensor, Tensor]:
        """T = requests * slots. window_TW: rows of the ring pool, -1 = absent; block_TM: the rows of a slot's own block."""
        x_TH = self.attn_norm(mhc.collapse(streams_TSH, carry_TS))
        own_TD, ring_MD = self.keys(x_TH, plain), ring_SRD.view(-1, ring_SRD.shape[-1])
        qr_TR = self.attn.low_rank_query(x_TH)
        return self.around(streams_TSH, lambda: self.attn.attend(qr_TR, *plain, ring_MD, window_TW, own_TD, block_TM))


class DraftBlocks(nn.ModuleList):
    """mtp.0, mtp.1, ...: the weights of the draft, and the writing of its rings."""

    def __init__(self, config: DeepseekV41Config, context: BuildContext, storage: Storage) -> None:
        super().__init__()
        self.blocks = [DraftBlock(config, i, context, storage) for i in range(config.num_nextn_predict_layers)]
        self.extend(self.blocks)

    def feed(self, features_DF: Tensor, view: View, cache: CacheTensors) -> None:
        """Write the ring rows of this step's decoder rows; their tags are those of the decoder's window group."""
        first = self.blocks[0]
        main_DH = first.main_norm(first.main_proj(features_DF))
        for i, block in enumerate(self.blocks):
            view.ring.source(cache.rings[draft_window_field(i)], block.keys(main_DH, view.plain))


class DSparkDrafter:
    """The Drafter over a model that was built with its draft blocks. Has no state: rings and weights belong to others."""

    def __init__(self, model: DeepseekV41) -> None:
        assert model.mtp is not None
        self._model, self._blocks, self._config = model, model.mtp.blocks, model.config

    @property
    def max_draft_tokens(self) -> int:
        return self._config.dspark_block_size

    @torch.inference_mode()
    def draft(self, requests: DraftRequests, cache: CacheTensors, k: int) -> Drafts:
        """The whole block is run whatever k, as it was trained; k of its tokens are drawn."""
        hidden_RMH = self._hidden(requests, cache)
        last = self._blocks[-1]
        base_RMV = self._model.head(last.norm(hidden_RMH[:, :k].flatten(0, 1))).unflatten(0, (-1, k))
        previous_R, ids, probs, confidences = requests.latest_id_R, [], [], []
        for i in range(k):
            e_RK = last.markov_head.embed(previous_R)
            confidences.append(torch.sigmoid(last.confidence_head(hidden_RMH[:, i], e_RK)))
            previous_R, probs_RV = requests.choose(base_RMV[:, i] + last.markov_head.head(e_RK), i)
            ids.append(previous_R)
            probs.append(probs_RV)
        known = [p for p in probs if p is not None]
        return Drafts(
            ids_RK=torch.stack(ids, 1),
            probs_RKV=torch.stack(known, 1) if known else None,
            confidence_RK=torch.stack(confidences, 1),
        )

    def _hidden(self, requests: DraftRequests, cache: CacheTensors) -> Tensor:
        """[R, M, H] behind the last block, not normed."""
        config, device = self._config, requests.slot_R.device
        num_requests, size = requests.slot_R.shape[0], config.dspark_block_size
        slot_M = torch.arange(size, device=device)
        ids_RM = torch.full((num_requests, size), config.dspark_noise_token_id, device=device)
        ids_RM[:, 0] = requests.latest_id_R
        plain = angles((requests.position_R[:, None] + slot_M).flatten(), self._model.rope.plain_F)
        window_TW = _window_rows(requests, cache.tags[DECODER_RING], config.sliding_window).repeat_interleave(size, 0)
        block_TM = (torch.arange(num_requests, device=device)[:, None] * size + slot_M).repeat_interleave(size, 0)
        streams_TSH = self._model.embed(ids_RM.flatten())[:, None].expand(-1, config.hc_mult, -1)
        carry_TS = torch.zeros(streams_TSH.shape[:2], device=device)
        carry_TS[:, 0] = 1
        for i, block in enumerate(self._blocks):
            ring_SRD = cache.rings[draft_window_field(i)]
            streams_TSH, carry_TS = block.draft(streams_TSH, carry_TS, plain, ring_SRD, window_TW, block_TM)
        return mhc.collapse(streams_TSH, carry_TS).unflatten(0, (num_requests, size))


def _window_rows(requests: DraftRequests, tags_SR: Tensor, window: int) -> Tensor:
    """int64 [R, W]: pool rows of the window that ends before the latest token, the same for every slot of its block; -1 = absent.

    A row that bounded replay did not refill has another tag and is left out: the draft is then a little worse, and nothing else.
    """
    width = min(window, requests.max_position)
    ring_rows = tags_SR.shape[1]
    position_RW = requests.position_R[:, None] - torch.arange(width, 0, -1, device=tags_SR.device)
    place_RW, slot_R1 = position_RW % ring_rows, requests.slot_R[:, None]
    is_held_RW = (position_RW >= 0) & (tags_SR[slot_R1, place_RW] == position_RW)
    return torch.where(is_held_RW, slot_R1 * ring_rows + place_RW, -1)
