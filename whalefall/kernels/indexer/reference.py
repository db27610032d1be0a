# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer: which compressed entries each token attends to. Source: design note deepseek-v41 §3.6.

Scores are s[t, j] = sum over heads of w[t, h] * relu(q[t, h] . k[j]), in float32. A selection is a set decision: equal scores go to the
lower entry, so twins must agree exactly on equal scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from whalefall.kernels.indexer import cases
from whalefall.kernels.registry import op

_TILE_SCORES = 1 << 24
"""Head scores (rows x heads x entries) held at once."""


@op("indexer.select", cases=cases.selections)
def select(
    q_TIJ: Tensor,
    w_TI: Tensor,
    key_pool_RJ: Tensor,
    block_table_BP: Tensor,
    entries_per_block: int,
    request_T: Tensor,
    num_visible_T: Tensor,
    max_visible: int,
    k: int,
) -> Tensor:
    """The k visible entries with the highest score, for each token.

    Args:
        key_pool_RJ: index keys of all blocks; entry j of request b is row block_table[b, j // L] * L + j % L, L = entries_per_block.
        request_T: int64, rising: rows of one request stand together.
        num_visible_T: int64, entries 0 .. num_visible - 1 may be chosen.
        max_visible: host integer, at least the largest num_visible.
    Returns:
        int64 [T, min(k, max_visible)], rising entry ids padded with -1 at the end.
    """
    if max_visible <= k:
        return all_visible(num_visible_T, max_visible)
    tiles = _score_tiles(q_TIJ, w_TI, key_pool_RJ, block_table_BP, entries_per_block, request_T, num_visible_T, max_visible)
    return select_from(tiles, num_visible_T, k)


@op("indexer.select_with_candidates", cases=cases.with_candidates)
def select_with_candidates(
    q_TIJ: Tensor,
    w_TI: Tensor,
    key_pool_RJ: Tensor,
    block_table_BP: Tensor,
    entries_per_block: int,
    request_T: Tensor,
    num_visible_T: Tensor,
    max_visible: int,
    k: int,
    num_blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """As `select`, and the candidate blocks that later index layers may search.

    A candidate block is `block_size` aligned consecutive entries, scored by its best visible one; the last visible block always stays.
    Returns:
        The list of `select`, chosen from all visible entries, and int64 [T, min(num_blocks, blocks)] rising block ids padded with -1.
    """
    max_blocks = -(-max_visible // block_size)
    num_visible_blocks_T = -(-num_visible_T // block_size)
    if max_blocks <= num_blocks:
        # Every visible block is a candidate: no score can exclude one.
        chosen = select(q_TIJ, w_TI, key_pool_RJ, block_table_BP, entries_per_block, request_T, num_visible_T, max_visible, k)
        return chosen, all_visible(num_visible_blocks_T, max_blocks)
    tiles = _score_tiles(q_TIJ, w_TI, key_pool_RJ, block_table_BP, entries_per_block, request_T, num_visible_T, max_visible)
    return select_from_with_candidates(tiles, num_visible_T, max_visible, k, num_blocks, block_size)


@op("indexer.select_within", cases=cases.within)
def select_within(
    q_TIJ: Tensor,
    w_TI: Tensor,
    key_pool_RJ: Tensor,
    block_table_BP: Tensor,
    entries_per_block: int,
    request_T: Tensor,
    num_visible_T: Tensor,
    max_visible: int,
    k: int,
    candidates_TM: Tensor,
    block_size: int,
) -> Tensor:
    """As `select`, among the visible entries of the candidate blocks only."""
    if max_visible <= k:
        return all_visible(num_visible_T, max_visible)  # at least k entries are candidates, so nothing visible can be excluded
    if candidates_TM.shape[1] * block_size >= max_visible:
        # No block is excluded for any row of this step.
        return select(q_TIJ, w_TI, key_pool_RJ, block_table_BP, entries_per_block, request_T, num_visible_T, max_visible, k)
    tiles = _score_tiles(q_TIJ, w_TI, key_pool_RJ, block_table_BP, entries_per_block, request_T, num_visible_T, max_visible)
    return select_from_within(tiles, num_visible_T, max_visible, k, candidates_TM, block_size)


ScoreTiles = Iterable[tuple[Tensor | slice, Tensor]]
"""(rows, float32 scores [rows, max_visible]) tile by tile, each row once; columns beyond a row's visible count hold anything."""


def select_from(tiles: ScoreTiles, num_visible_T: Tensor, k: int) -> Tensor:
    """What `select` gives once the scores are there; k is below the number of columns."""
    out_TK = num_visible_T.new_empty(num_visible_T.shape[0], k)
    for rows, score_tC in tiles:
        out_TK[rows] = top_entries(score_tC, num_visible_T[rows], k)
    return out_TK


def select_from_with_candidates(
    tiles: ScoreTiles, num_visible_T: Tensor, max_visible: int, k: int, num_blocks: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """What `select_with_candidates` gives once the scores are there; num_blocks is below the number of blocks."""
    max_blocks = -(-max_visible // block_size)
    out_TK = num_visible_T.new_empty(num_visible_T.shape[0], min(k, max_visible))
    candidates_TM = num_visible_T.new_empty(num_visible_T.shape[0], num_blocks)
    for rows, score_tC in tiles:
        visible_t = num_visible_T[rows]
        out_TK[rows] = top_entries(score_tC, visible_t, k)
        padded = torch.nn.functional.pad(score_tC, (0, max_blocks * block_size - score_tC.shape[1]), value=-torch.inf)
        block_score = padded.unflatten(1, (max_blocks, block_size)).amax(-1)
        blocks_t = -(-visible_t // block_size)
        is_last = torch.arange(max_blocks, device=visible_t.device) == (blocks_t - 1)[:, None]
        candidates_TM[rows] = top_entries(block_score.masked_fill(is_last, torch.inf), blocks_t, num_blocks)
    return out_TK, candidates_TM


def select_from_within(
    tiles: ScoreTiles, num_visible_T: Tensor, max_visible: int, k: int, candidates_TM: Tensor, block_size: int
) -> Tensor:
    """What `select_within` gives once the scores are there."""
    blocks = -(-max_visible // block_size)
    out_TK = num_visible_T.new_empty(num_visible_T.shape[0], k)
    for rows, score_tC in tiles:
        allowed = torch.zeros(score_tC.shape[0], blocks + 1, dtype=torch.bool, device=score_tC.device)
        allowed.scatter_(1, torch.where(candidates_TM[rows] < 0, blocks, candidates_TM[rows]), True)
        entry_allowed = allowed[:, :blocks].repeat_interleave(block_size, dim=1)[:, :max_visible]
        out_TK[rows] = top_entries(score_tC.masked_fill(~entry_allowed, -torch.inf), num_visible_T[rows], k)
    return out_TK


def all_visible(num_visible_T: Tensor, max_visible: int) -> Tensor:
    """int64 [T, max_visible]: 0 .. num_visible - 1, then -1. What any selection gives when nothing has to be left out."""
    entry_C = torch.arange(max_visible, device=num_visible_T.device)
    return torch.where(entry_C < num_visible_T[:, None], entry_C, -1)


def top_entries(score_TC: Tensor, num_visible_T: Tensor, k: int) -> Tensor:
    """int64 [T, min(k, C)] rising ids of the k largest finite scores among the first num_visible; ties to the lower id; padded with -1.

    Entries with score -inf are never chosen. The k-th largest value splits each row: all above it are in, and of those equal to it the
    lowest ids fill the rest. This is exact, which a bare top-k is not: it leaves the order of equal scores open.
    """
    k = min(k, score_TC.shape[1])
    column_C = torch.arange(score_TC.shape[1], device=score_TC.device)
    score_TC = score_TC.masked_fill(column_C >= num_visible_T[:, None], -torch.inf)
    kth_T1 = score_TC.topk(k, dim=1).values[:, -1:]
    above_TC = score_TC > kth_T1
    equal_TC = score_TC == kth_T1
    room_T1 = k - above_TC.sum(1, keepdim=True)
    chosen_TC = (above_TC | (equal_TC & (equal_TC.cumsum(1) <= room_T1))) & (score_TC > -torch.inf)
    rank_TC = chosen_TC.cumsum(1) - 1
    out_TK = torch.full((score_TC.shape[0], k + 1), -1, dtype=torch.int64, device=score_TC.device)
    # Column k is a dump for everything that is not chosen.
    out_TK.scatter_(1, torch.where(chosen_TC, rank_TC, k), column_C.expand_as(rank_TC))
    return out_TK[:, :k]


def _score_tiles(
    q_TIJ: Tensor,
    w_TI: Tensor,
    key_pool_RJ: Tensor,
    block_table_BP: Tensor,
    entries_per_block: int,
    request_T: Tensor,
    num_visible_T: Tensor,
    max_visible: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(row ids, float32 scores [rows, max_visible]) tile by tile; columns beyond a row's visible count hold anything.

    Rows of one request share a matrix product with its keys; requests with a single row (decode) are batched together.
    """
    request, counts = torch.unique_consecutive(request_T, return_counts=True)
    first = counts.cumsum(0) - counts
    single = counts == 1
    heads, width = q_TIJ.shape[1:]

    def keys_of(requests: Tensor, num_entries: int) -> Tensor:
        entry = torch.arange(num_entries, device=request_T.device)
        rows = block_table_BP[requests][:, entry // entries_per_block] * entries_per_block + entry % entries_per_block
        return key_pool_RJ[rows].float()

    rows_b = first[single]
    if rows_b.numel():
        tile = max(1, _TILE_SCORES // (max_visible * max(heads, width)))
        for part, owner in zip(rows_b.split(tile), request[single].split(tile)):
            score = torch.bmm(q_TIJ[part].float(), keys_of(owner, max_visible).transpose(1, 2)).relu_()
            yield part, torch.bmm(w_TI[part].float()[:, None], score).squeeze(1)
    for owner, begin, count in zip(request[~single], first[~single].tolist(), counts[~single].tolist()):
        visible = int(num_visible_T[begin : begin + count].max())
        keys_CJ = keys_of(owner[None], max(1, visible))[0]
        tile = max(1, _TILE_SCORES // (keys_CJ.shape[0] * heads))
        for start in range(begin, begin + count, tile):
            part = torch.arange(start, min(start + tile, begin + count), device=request_T.device)
            score = torch.matmul(q_TIJ[part].float().flatten(0, 1), keys_CJ.T).relu_().unflatten(0, (-1, heads))
            summed = torch.bmm(w_TI[part].float()[:, None], score).squeeze(1)
            yield part, torch.nn.functional.pad(summed, (0, max_visible - summed.shape[1]), value=-torch.inf)
