# SPDX-License-Identifier: Apache-2.0
"""Plans for the released model on cards that are not here, and a plan against an engine that really started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from tests.models.deepseek_v41.released_config import RELEASED
from whalefall.cli.main import build_app
from whalefall.core.errors import ConfigError
from whalefall.engine.config import EngineConfig
from whalefall.engine.facts import DeviceFacts
from whalefall.engine.resolve import resolve
from whalefall.engine.wiring import load_engine, open_model
from whalefall.models.registry import find_definition, read_config
from whalefall.plan.cards import CARDS, CONTEXT_BYTES, find_card
from whalefall.plan.planner import model_facts, plan_model
from whalefall.plan.report import card_rows, to_text
from whalefall.testing.checkpoint import TINY_CONFIG, write_checkpoint
from whalefall.testing.toy_checkpoint import write_toy_checkpoint

GOLDENS = Path(__file__).parents[3] / "shared" / "goldens"


@pytest.fixture
def released(tmp_path: Path) -> Path:
    folder = tmp_path / "V4.1-Flash"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RELEASED))
    return folder


@pytest.mark.parametrize(
    ("gpu", "count", "fits"),
    [("h100", 4, False), ("h100", 8, True), ("h200", 4, True), ("h200", 8, True), ("b200", 4, True), ("b200", 8, True), ("h200", 1, False)],
)
def test_released_model_fits_where_its_bytes_do(released: Path, gpu: str, count: int, fits: bool) -> None:
    made = plan_model(released, CARDS[gpu], count)
    assert (made.config is not None) is fits
    assert bool(made.problems) is not fits
    experts = 288_777_830_400
    copied = sum(kind.num_bytes for kind in made.kinds if kind.place == "device") - experts
    assert made.device_bytes_per_card == copied + experts // count
    assert made.mapped_bytes == 202_758_032_400


@pytest.mark.parametrize("gpu", ["h200", "b200"])
@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("replay", ["bounded", "exact"])
def test_rows_of_a_card_add_up_to_its_memory(released: Path, gpu: str, count: int, replay: Literal["bounded", "exact"]) -> None:
    made = plan_model(released, CARDS[gpu], count, EngineConfig(model="", replay=replay))
    *rows, card = card_rows(made, CARDS[gpu])
    assert sum(size for _, _, size in rows) == card[2] == CARDS[gpu].memory_bytes
    assert made.config is not None
    named = {name: size for name, _, size in rows}
    own = named["weights"] + named["workspace"] + named["CUDA context"] + named["left free"]
    assert sum(named.values()) - own == made.config.memory.total_bytes
    free = named["left free"]
    assert free >= 0.05 * card[2]


def test_cache_costs_are_the_notes(released: Path) -> None:
    made = plan_model(released, CARDS["h200"], 8)
    assert made.bytes_per_token == 3_200
    rings, tags, pending = 40 * 128 * 1_024, 2 * 128 * 4, 3 * 2 * 1_024 * 4 + 2 * 4
    assert made.spec.slot_bytes == rings + tags + pending


def test_requests_that_fit_never_pass_the_blocks_or_the_slots(released: Path) -> None:
    made = plan_model(released, CARDS["h200"], 8, EngineConfig(model="", max_num_seqs=40))
    assert made.config is not None
    for fit in made.fittings:
        blocks = -(-fit.context_tokens // made.config.block_size)
        assert fit.per_card <= 40
        spare_for_the_others = fit.per_card - 1
        assert fit.per_card * blocks + spare_for_the_others <= made.config.num_blocks - 1
        assert fit.in_all == 8 * fit.per_card
    assert [f.context_tokens for f in made.fittings] == [4_096, 32_768, 131_072, 1_048_576]


def test_printed_command_names_the_directory_as_it_was_given(tmp_path: Path) -> None:
    card, folder = CARDS["h200"], tmp_path / "a model"
    write_checkpoint(folder, TINY_CONFIG)
    text = to_text(plan_model(folder, card), card)
    assert f"  whalefall serve '{folder}' --device cuda" in text
    assert "give the host 0 MB" not in text and "give the host 0 GB" not in text


def test_missing_bytes_are_shown_where_it_does_not_fit(released: Path) -> None:
    card = CARDS["h100"]
    text = to_text(plan_model(released, card, 4), card)
    assert "DOES NOT FIT" in text
    assert "missing" in text


@pytest.mark.parametrize(("gpu", "count", "enough"), [("h100", 4, 8), ("h200", 1, 4), ("l40s", 8, 16)])
def test_plan_that_does_not_fit_says_how_many_cards_would_do(released: Path, gpu: str, count: int, enough: int) -> None:
    made = plan_model(released, CARDS[gpu], count)
    assert made.config is None
    assert made.notes[0] == f"it fits on {enough} x {CARDS[gpu].name}"
    assert plan_model(released, CARDS[gpu], enough).config is not None
    assert plan_model(released, CARDS[gpu], enough // 2).config is None


def test_plan_says_where_engram_goes_and_what_was_not_measured(released: Path) -> None:
    notes = " ".join(plan_model(released, CARDS["b200"], 8).notes)
    assert "203 GB" in notes
    assert "not measured" in notes
    assert "serves on one card only" in notes


@pytest.mark.parametrize(
    ("gpu", "count", "words"), [("h999", 1, "must be one of h100, h200"), ("h200", 0, "count is 0")], ids=["unknown card", "no cards"]
)
def test_wrong_cards_are_refused_by_name(released: Path, gpu: str, count: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_model(released, find_card(gpu), count)


def test_command_prints_json_and_says_by_its_exit_code_whether_it_fits(released: Path) -> None:
    app = build_app(["plan"])
    fits = CliRunner().invoke(app, ["plan", str(released), "--count", "8", "--json"])
    assert fits.exit_code == 0
    body = json.loads(fits.output)
    assert body["fits"] is True
    assert sum(row["bytes"] for row in body["one_card"][:-1]) == body["one_card"][-1]["bytes"]
    assert CliRunner().invoke(app, ["plan", str(released), "--gpu", "h100", "--count", "4"]).exit_code == 1


@pytest.mark.skipif(not GOLDENS.is_dir(), reason="no stored checkpoints beside the repository")
def test_flags_of_a_plan_are_accepted_and_give_the_same_caches(tmp_path: Path) -> None:

    folder, card = GOLDENS / "v41-a-quant", CARDS["h200"]
    made = plan_model(folder, card, 1)
    assert made.config is not None
    assert "the shards agree" in made.source
    pairs = [flag.removeprefix("--").split(" ") for flag in made.flags]
    options = {name.replace("-", "_"): int(value) if value.isdigit() else value for name, value in pairs}
    definition = find_definition(read_config(folder))
    facts, _ = model_facts(folder, definition, definition.parse_config(read_config(folder), "config.json"))
    device = DeviceFacts(kind="cuda", name=card.name, total_bytes=card.memory_bytes, free_bytes=card.memory_bytes - CONTEXT_BYTES)
    again = resolve(EngineConfig.from_options({"model": folder, **options}), facts, device)
    assert again.memory == made.config.memory


@pytest.mark.skipif(not GOLDENS.is_dir(), reason="no stored checkpoints beside the repository")
def test_plan_and_a_started_engine_agree() -> None:
    """The same arithmetic, once for a machine that is pretended and once for this one: weights, block and slot sizes must be equal."""

    folder = GOLDENS / "v41-a-quant"
    opened = open_model(EngineConfig(model=folder, device="cpu", dtype="bfloat16", weights="packed", max_num_seqs=2, max_model_len=512))
    load_engine(opened)
    planned = plan_model(folder, CARDS["h200"], 1, EngineConfig(model=folder, weights="packed"))
    assert planned.device_bytes_per_card == opened.config.weights_bytes
    assert planned.spec.block_bytes == opened.config.memory.block_bytes
    assert planned.spec.slot_bytes == opened.config.memory.slot_bytes


def test_other_families_are_planned_from_their_tensors(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy")
    made = plan_model(folder, CARDS["h200"], 1)
    assert made.kinds == ()
    assert made.config is not None
    assert made.device_bytes_per_card == made.config.weights_bytes > 0
