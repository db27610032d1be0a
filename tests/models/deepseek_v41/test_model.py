# SPDX-License-Identifier: Apache-2.0
"""The V4.1 forward: right by two independent accounts, and the same by every road.

The tests of design note deepseek-v41 §8 that need no drafts and no prefix hits. Window 16, exclusion of candidates from 65 entries on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.models.deepseek_v41.by_the_note import ByTheNote, Mistakes
from whalefall.core.batch import ForwardBatch
from whalefall.layers.engram import Engram
from whalefall.layers.mhc import HyperConnection
from whalefall.layers.norm import RMSNorm
from whalefall.testing.drive import Driver, LoadedModel, load_model

GOLDEN = Path(__file__).parents[2] / "goldens" / "v41-a-quant"
TOLERANCE = 1e-4
WINDOW = 16


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=count)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(GOLDEN)


@pytest.fixture
def driver(loaded: LoadedModel) -> Iterator[Driver]:
    """Pools full of NaN: whatever is read must have been written by this test, and no window may miss a row."""
    made = Driver(loaded)
    made.poison()
    made.model.tag_mismatches.zero_()
    yield made
    assert made.model.tag_mismatches == 0


@pytest.fixture(scope="module")
def whole(loaded: LoadedModel) -> Tensor:
    """Logits of `random_ids(216)` in one prefill."""
    return Driver(loaded).run(random_ids(216))


# the right numbers


@pytest.mark.parametrize("length", [1, 2, 3, 17, 70])
def test_logits_are_those_of_the_note(loaded: LoadedModel, driver: Driver, length: int) -> None:
    ids = random_ids(length)
    assert difference(driver.run(ids), ByTheNote(loaded).logits(ids)) < TOLERANCE


@pytest.mark.parametrize("length", [1, 7, 33, 130])
def test_logits_equal_the_golden_vectors(driver: Driver, length: int) -> None:
    expected = load_file(GOLDEN / "expected.safetensors")
    ids = expected[f"prompt.{length}.input_ids"].tolist()
    assert difference(driver.run(ids), expected[f"prompt.{length}.logits"]) < TOLERANCE
    if length > WINDOW:
        last = driver.run(ids, decoder_start=length - WINDOW)[-1]
        assert difference(last, expected[f"prompt.{length}.bounded_replay_last_logits"]) < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_rounded_caches_equal_the_golden_vectors(length: int) -> None:
    driver = Driver(load_model(GOLDEN, kv_cache_dtype="model"))
    expected = load_file(GOLDEN / "expected_cacheq.safetensors")
    ids = expected[f"prompt.{length}.input_ids"].tolist()
    assert difference(driver.run(ids), expected[f"prompt.{length}.logits"]) < TOLERANCE


def test_nothing_excluded_equals_dense_attention_over_all_visible_entries() -> None:
    loaded = load_model(GOLDEN, index_topk=66, candidate_topk_blocks=9)
    ids = random_ids(66)
    dense = ByTheNote(loaded, Mistakes(every_visible_entry=True)).logits(ids)
    assert difference(Driver(loaded).run(ids), dense) < TOLERANCE
    selective = Driver(load_model(GOLDEN)).run(ids)
    assert difference(selective, dense) > 0.1  # the indexer does leave something out at this length


@pytest.mark.parametrize("mistake", [Mistakes(comb_is_transposed=True), Mistakes(carry_is_unshifted=True)])
def test_a_plausible_mistake_in_the_streams_would_be_noticed(loaded: LoadedModel, driver: Driver, mistake: Mistakes) -> None:
    ids = random_ids(9)
    assert difference(driver.run(ids), ByTheNote(loaded, mistake).logits(ids)) > 0.1


def test_later_tokens_never_change_earlier_logits(driver: Driver) -> None:
    ids = random_ids(72)
    before = driver.run(ids)
    for t in (12, 37, 70, 71):  # even and odd: an entry of two tokens closes at odd positions
        changed = driver.run([*ids[:t], ids[t] + 1, *ids[t + 1 :]])
        assert difference(changed[:t], before[:t]) < TOLERANCE, t
        assert difference(changed[t], before[t]) > 1e-2, t


# the same by every road


# The sequence ends before its row 220, which lies on a tie between two entries: another order of rounding may choose the other one.
@pytest.mark.parametrize(("chunk", "length"), [(1, 20), (3, 70), (7, 100), (16, 200), (64, 216), ([1, 15, 2, 33, 70, 3], 130)])
def test_chunks_give_the_logits_of_the_whole(driver: Driver, whole: Tensor, chunk: int | list[int], length: int) -> None:
    assert difference(driver.run(random_ids(216)[:length], chunk), whole[:length]) < TOLERANCE


def test_decoding_equals_prefill_at_every_length_to_216(driver: Driver, whole: Tensor) -> None:
    """Eight sequences decode together, each over its own eighth of the lengths; one of them from the first token."""
    ids, share = random_ids(216), 27
    tracks = [driver.open() for _ in range(8)]
    for i, track in enumerate(tracks[1:], start=1):
        driver.forward((track, ids[: i * share]))
    for step in range(share):
        logits = driver.forward(*((track, [ids[i * share + step]]) for i, track in enumerate(tracks)))
        rows = torch.cat(logits)
        assert difference(rows, whole[step::share]) < TOLERANCE, [i * share + step + 1 for i in range(8)]


@pytest.mark.parametrize("length", [2, 3, 16, 17, 18, 31, 32, 33, 64, 65, 66, 128, 129, 192, 193])
def test_prefill_and_one_decode_equal_prefill(driver: Driver, whole: Tensor, length: int) -> None:
    assert difference(driver.run(random_ids(216)[:length], [length - 1, 1])[-1], whole[length - 1]) < TOLERANCE


def test_company_changes_nothing(driver: Driver) -> None:
    """Decodes, chunks and whole prompts of several requests in the same steps, in changing order."""
    prompts = [random_ids(count, seed) for seed, count in enumerate((1, 40, 23, 81, 5), start=1)]
    alone = [driver.run(prompt) for prompt in prompts]
    sizes = [(1,), (11, 1), (1, 1, 17), (30, 3, 48), (2, 1)]
    tracks = [driver.open(slot=slot) for slot in (5, 0, 3, 1, 7)]
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(30):
        chunks, who = [], []
        for i in range(len(prompts)) if step % 2 else reversed(range(len(prompts))):
            done = len(tracks[i].ids)
            if done < len(prompts[i]) and (step + i) % 3:  # now and then a request sits a step out
                chunks.append((tracks[i], prompts[i][done : done + sizes[i][step % len(sizes[i])]]))
                who.append(i)
        if chunks:
            for i, logits in zip(who, driver.forward(*chunks)):
                parts[i].append(logits)
    for expected, found in zip(alone, parts):
        assert difference(torch.cat(found), expected[: sum(map(len, found))]) < TOLERANCE
    assert sum(len(t.ids) == len(p) for t, p in zip(tracks, prompts)) >= 4


def test_requests_over_one_shared_text_keep_their_own_answers(driver: Driver) -> None:
    """The lookup case: same list, different questions, greedy, one at a time and all at once."""
    text = random_ids(60)
    prompts = [[*text, *random_ids(3, seed)] for seed in range(1, 6)]

    def answers(groups: list[list[list[int]]]) -> list[list[int]]:
        out = []
        for group in groups:
            tracks = [driver.open() for _ in group]
            logits = [rows[-1] for rows in driver.forward(*zip(tracks, group))]
            texts: list[list[int]] = [[] for _ in group]
            for _ in range(4):
                for reply, row in zip(texts, logits):
                    reply.append(int(row.argmax()))
                logits = [rows[-1] for rows in driver.forward(*((t, [reply[-1]]) for t, reply in zip(tracks, texts)))]
            out += texts
            for track in tracks:
                driver.close(track)
        return out

    alone = answers([[prompt] for prompt in prompts])
    assert answers([prompts]) == alone
    assert len({tuple(reply) for reply in alone}) == len(alone)


def test_what_a_former_request_left_is_never_read(loaded: LoadedModel) -> None:
    ids = random_ids(50)
    clean = Driver(loaded, num_slots=2, num_blocks=9).run(ids, 13)
    driver = Driver(loaded, num_slots=2, num_blocks=9)
    driver.poison()
    neighbour = driver.open()
    driver.forward((neighbour, random_ids(45, seed=8)))
    driver.run(random_ids(90, seed=9), 29)  # same slot and blocks as the next one
    # Not bit for bit: NaN beside a request's own rows makes the attention gather instead of sharing a range, and that rounds otherwise.
    assert difference(driver.run(ids, 13), clean) < TOLERANCE
    driver.close(neighbour)
    assert difference(driver.run(ids, 13), clean) < TOLERANCE  # and in the slot of the neighbour


# bounded replay


def growing(driver: Driver) -> list[Tensor]:
    """Every growing pool without the null block, NaN made comparable."""
    return [pool[driver.cache.block_tokens :].nan_to_num(nan=-777.0) for pool in driver.cache.growing.values()]


@pytest.mark.parametrize("chunk", [None, 33, [1, 60, 9]])
def test_bounded_replay_keeps_the_growing_caches_bit_for_bit(loaded: LoadedModel, chunk: int | list[int] | None) -> None:
    ids, caches = random_ids(100), []
    for decoder_start in (0, 84):
        driver = Driver(loaded)
        driver.poison()
        driver.run(ids, chunk, decoder_start=decoder_start)
        caches.append(growing(driver))
    assert all(torch.equal(exact, bounded) for exact, bounded in zip(*caches))


def test_bounded_replay_follows_the_note_in_any_chunks(loaded: LoadedModel, driver: Driver) -> None:
    ids, keep_from = random_ids(70), 54
    expected = ByTheNote(loaded, Mistakes(decoder_from=keep_from)).logits(ids)
    for chunk in (None, 20, [60, 1]):
        bounded = driver.run(ids, chunk, decoder_start=keep_from)
        assert bounded.shape[0] == 70 - keep_from
        assert difference(bounded, expected) < TOLERANCE
    assert difference(driver.run(ids)[keep_from:], expected) > 0.1  # it is an approximation


def test_bounded_replay_of_a_prompt_within_the_window_is_exact(driver: Driver) -> None:
    ids = random_ids(WINDOW)
    assert torch.equal(driver.run(ids, decoder_start=max(0, len(ids) - WINDOW)), driver.run(ids))


def test_bounded_and_exact_requests_share_a_step(driver: Driver) -> None:
    first, second = random_ids(60, 1), random_ids(30, 2)
    alone = driver.run(first, decoder_start=44), driver.run(second)
    a, b = driver.open(decoder_start=44), driver.open()
    parts: dict[int, list[Tensor]] = {0: [], 1: []}
    for step in range(3):  # in the first two the bounded request has no decoder row at all
        for i, logits in enumerate(driver.forward((a, first[step * 20 : step * 20 + 20]), (b, second[step * 10 : step * 10 + 10]))):
            parts[i].append(logits)
    assert difference(torch.cat(parts[0]), alone[0]) < TOLERANCE
    assert difference(torch.cat(parts[1]), alone[1]) < TOLERANCE


# a fault above the model is seen


@pytest.mark.parametrize("group", ["encoder", "decoder", "pending2"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_lost_row_is_counted(loaded: LoadedModel, group: str, rows: int) -> None:
    """The slot forgets its newest row: a window key, or the first half of an open group of two."""
    driver, ids = Driver(loaded), random_ids(41)
    track = driver.open()
    driver.forward((track, ids[:33]))
    tags_R = driver.cache.tags[group][track.slot]
    tags_R[32 % len(tags_R)] = -1
    loaded.model.tag_mismatches.zero_()  # type: ignore[attr-defined]
    driver.forward((track, ids[33 : 33 + rows]))
    assert loaded.model.tag_mismatches == (1 if group == "pending2" else rows)  # type: ignore[attr-defined]
    loaded.model.tag_mismatches.zero_()  # type: ignore[attr-defined]


# n-grams


def test_engram_looks_back_across_chunk_borders_and_pads_the_start(
    loaded: LoadedModel, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[Tensor]] = {layer: [] for layer in loaded.config.engram_layer_ids}
    hashing = driver.model.engram_hash

    def spy(batch: ForwardBatch) -> dict[int, Tensor]:
        rows = hashing(batch)
        for layer, rows_TJ in rows.items():
            seen[layer].append(rows_TJ)
        return rows

    blocking = hashing._map_V1.clone()
    blocking[509] = -1  # an id without a compressed id, as an image has: it blocks the look-back over it
    monkeypatch.setattr(hashing, "_map_V1", blocking)
    monkeypatch.setattr(driver.model, "engram_hash", spy)
    ids = random_ids(14)
    ids[5] = 509
    driver.run(ids, [1, 2, 1, 1, 4])
    for layer, parts in seen.items():
        assert torch.cat(parts).tolist() == ByTheNote(loaded).table_rows(layer, ids, unknown=(509,))


# weights and numerics


def test_packed_weights_give_the_same_logits_as_dense(driver: Driver) -> None:
    ids = random_ids(40)
    assert difference(Driver(load_model(GOLDEN, weights="packed")).run(ids), driver.run(ids)) < TOLERANCE


def test_bfloat16_runs_close_to_float32(driver: Driver) -> None:
    # Rounding flips some choices of experts, and the rows it meets differ for good: the claim is about the typical early row.
    ids = random_ids(12)
    narrow = Driver(load_model(GOLDEN, dtype=torch.bfloat16, kv_cache_dtype="unrounded"))
    narrow.poison()
    exact = driver.run(ids)
    error_T = (narrow.run(ids, 5) - exact).square().mean(-1).sqrt() / exact.std()
    assert error_T.isfinite().all()
    assert float(error_T.median()) < 0.1


@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_bfloat16_with_rounded_caches_gives_finite_logits(weights: str) -> None:
    driver = Driver(load_model(GOLDEN, dtype=torch.bfloat16, weights=weights, kv_cache_dtype="model"))  # type: ignore[arg-type]
    driver.poison()
    logits = driver.run(random_ids(30), [26, 1])
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_every_epsilon_is_the_configs() -> None:
    """Random-weight logits hardly see them, so the wiring is checked by name."""
    loaded = load_model(GOLDEN, rms_norm_eps=1.5e-20, hc_eps=2.5e-6, hc_sinkhorn_iters=19, swiglu_limit=9.5, routed_scaling_factor=1.25)
    modules = list(loaded.model.modules())  # type: ignore[attr-defined]
    assert {m.eps for m in modules if isinstance(m, RMSNorm | HyperConnection | Engram)} == {1.5e-20}
    assert {(m.hc_eps, m.iterations) for m in modules if isinstance(m, HyperConnection)} == {(2.5e-6, 19)}
    assert {m.limit for m in modules if hasattr(m, "limit")} == {9.5}
    assert {m.scale for m in modules if type(m).__name__ == "Gate"} == {1.25}


def test_the_bias_for_image_tokens_is_loaded(loaded: LoadedModel) -> None:
    """Text never uses it; it must be there for images."""
    stored = {}
    for file in GOLDEN.glob("model-*.safetensors"):
        with safe_open(file, "pt") as shard:
            stored |= {name: shard.get_tensor(name) for name in shard.keys() if name.endswith("gate.bias_vl")}  # noqa: SIM118
    for layer, block in enumerate(loaded.model.layers):  # type: ignore[attr-defined]
        assert torch.equal(block.ffn.gate.bias_vl, stored[f"layers.{layer}.ffn.gate.bias_vl"])
        assert not torch.equal(block.ffn.gate.bias_vl, block.ffn.gate.bias)
