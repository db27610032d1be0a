# SPDX-License-Identifier: Apache-2.0
"""Rows of the ablation: each really runs with its option off, and what cannot run is named. Times are not judged."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from whalefall.bench import ablate as bench
from whalefall.bench.ablate import BASELINE, FULL, PHASES, Ablation, Row, Switch, Workload, ablate, choose, small_shape
from whalefall.bench.ablate_command import csv_rows, gain, to_table
from whalefall.bench.command import app
from whalefall.core.errors import ConfigError
from whalefall.engine.config import EngineConfig
from whalefall.engine.wiring import open_model
from whalefall.kernels.attention import sparse_mqa
from whalefall.testing.checkpoint import TINY_CONFIG, write_checkpoint

NO_KERNELS, NO_AHEAD, NO_REPLAY = "no kernels for this device", "no one step ahead", "no bounded replay"
NO_CACHE, NO_DENSE = "no prefix cache", "no dense weights"
SHAPE = small_shape(system=48, turns=2, tool_result=6, answer=3, max_context=160)
WORKLOAD = Workload(requests=3, low=1, shape=SHAPE, input_len=20, output_len=3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", TINY_CONFIG)


@pytest.fixture(scope="module")
def base(tiny: Path) -> EngineConfig:
    return EngineConfig(model=tiny, block_size=16, max_model_len=256, max_num_seqs=3, async_scheduling=True, stats_interval_s=0)


@pytest.fixture(scope="module")
def made(base: EngineConfig) -> tuple[Ablation, dict[str, int]]:
    """The ablation, and how often the attention's twin ran in each row."""
    twin, counts, current = sparse_mqa.impls[0], {}, [""]

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[current[0]] = counts.get(current[0], 0) + 1
        return twin.fn(*args, **kwargs)

    sparse_mqa.impls[0] = replace(twin, fn=counting)
    try:
        return ablate(base, WORKLOAD, on_row=lambda name, _: current.__setitem__(0, name)), counts
    finally:
        sparse_mqa.impls[0] = twin


def rows_of(made: Ablation) -> dict[str, Row]:
    return {row.name: row for row in made.rows}


def test_there_is_a_row_for_each_switch_between_everything_on_and_the_baseline(made: tuple[Ablation, dict[str, int]]) -> None:
    assert [row.name for row in made[0].rows] == [FULL, NO_KERNELS, NO_AHEAD, NO_REPLAY, NO_CACHE, NO_DENSE, BASELINE]
    assert all(row.refused is None and row.failed == 0 and len(row.rounds) == 1 for row in made[0].rows)
    assert all(tuple(row.rounds[0]) == PHASES for row in made[0].rows)


def test_each_row_ran_with_its_option_off_and_no_other(made: tuple[Ablation, dict[str, int]]) -> None:
    rows = rows_of(made[0])
    full = rows[FULL].config
    assert (full["replay"], full["prefix_caching"], full["async_scheduling"], full["weights"]) == ("bounded", True, True, "dense")
    changed = {
        name: {key for key in ("replay", "prefix_caching", "async_scheduling", "weights", "kernels") if row.config[key] != full[key]}
        for name, row in rows.items()
    }
    assert changed == {
        FULL: set(),
        NO_KERNELS: {"kernels"},
        NO_AHEAD: {"async_scheduling"},
        NO_REPLAY: {"replay"},
        NO_CACHE: {"prefix_caching"},
        NO_DENSE: {"weights"},
        BASELINE: {"kernels", "async_scheduling", "replay", "prefix_caching"},
    }


def test_engine_counters_confirm_what_was_off(made: tuple[Ablation, dict[str, int]]) -> None:
    ablation, twin_calls = made
    rows = rows_of(ablation)

    def total(name: str, figure: str) -> int:
        return sum(getattr(phase, figure) for phase in rows[name].rounds[0].values())

    cached = {name: total(name, "cached_tokens") > 0 for name in rows}
    assert cached == {name: name not in (NO_CACHE, BASELINE) for name in rows}
    replayed = {name: total(name, "rows_replayed") > 0 for name in rows}
    assert replayed == {name: name not in (NO_CACHE, NO_REPLAY, BASELINE) for name in rows}
    assert {name: twin_calls.get(name, 0) > 0 for name in rows} == {name: name not in (NO_KERNELS, BASELINE) for name in rows}
    assert len({total(name, "output_tokens") for name in rows}) == 1
    # A phase finds nothing that another has left: independent prompts never hit.
    assert all(row.rounds[0]["plain_many"].cached_tokens == 0 for row in rows.values())


def test_what_is_off_on_this_device_is_named_and_has_no_row(made: tuple[Ablation, dict[str, int]]) -> None:
    absent = dict(made[0].absent)
    assert absent == {
        "CUDA graphs": "off in every row: graphs are for a GPU",
        "drafts": "off in every row: the default; -e draft=adaptive turns them on",
    }
    table = to_table(made[0])
    assert "no row for drafts: off in every row" in table
    assert "The baseline goes without: kernels for this device, one step ahead, bounded replay, prefix cache." in table


def test_option_that_is_off_by_default_here_is_named_with_the_reason(base: EngineConfig) -> None:
    variants, absent = choose(open_model(replace(base, async_scheduling=None)).config, only=["prefix cache"])
    assert [variant.name for variant in variants] == [NO_CACHE, BASELINE]
    assert dict(absent)["one step ahead"] == "off in every row: on a CPU a launch has finished when it returns"
    assert "one step ahead" not in [switch.name for switch in variants[-1].off]


def test_row_that_the_engine_refuses_says_why_and_the_others_run(base: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Switch(name="wrong", off={"block_size": 15}, is_on=lambda c: True, in_baseline=False)
    unmoved = Switch(name="unmoved", off={}, is_on=lambda c: True, in_baseline=False)
    monkeypatch.setattr(bench, "SWITCHES", (wrong, unmoved))
    found = ablate(base, WORKLOAD)
    full, refused, still_on, baseline = found.rows
    assert "block_size is 15" in str(refused.refused)
    assert still_on.refused == "unmoved should be off and is not"
    assert full.refused is None
    assert baseline.refused is None
    assert "did not run" in to_table(found)
    assert csv_rows(found, {})[len(PHASES)]["output_tokens_per_s"] is None


def test_gain_says_how_many_times_better_everything_on_is(made: tuple[Ablation, dict[str, int]]) -> None:
    phase = made[0].rows[0].rounds[0]["agent_low"]
    fast, slow = Row(name="fast", off=()), Row(name="slow", off=())
    fast.rounds = [{"agent_low": replace(phase, output_tokens_per_s=tokens, ttft_ms_mean=10.0)} for tokens in (1.0, 30.0, 40.0)]
    slow.rounds = [{"agent_low": replace(phase, output_tokens_per_s=10.0, ttft_ms_mean=50.0)}]
    assert gain(fast, slow, "agent_low", "output_tokens_per_s", True) == pytest.approx(3)  # the median of three rounds
    assert gain(fast, slow, "agent_low", "ttft_ms_mean", False) == pytest.approx(5)


def test_command_writes_table_csv_json_and_picture(tiny: Path, tmp_path: Path) -> None:
    sizes = "--requests 2 --system 20 --turns 2 --tool-result 4 --answer 2 --max-context 64 --input-len 8 --output-len 2"
    args = ["ablate", str(tiny), *sizes.split(), "--only", "prefix cache", "--rounds", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*args, "-e", "block_size=16", "-e", "stats_interval_s=0"])
    assert done.exit_code == 0, done.output
    assert all(name in done.stdout for name in (FULL, NO_CACHE, BASELINE, "agents, few", "TTFT, many"))
    rows = list(csv.DictReader((tmp_path / "ablate.csv").read_text().splitlines()))
    assert [(row["row"], row["phase"]) for row in rows] == [(name, phase) for name in (FULL, NO_CACHE, BASELINE) for phase in PHASES]
    assert all(float(row["output_tokens_per_s"]) > 0 for row in rows)
    body = json.loads((tmp_path / "ablate.json").read_text())
    assert [len(row["rounds"]) for row in body["rows"]] == [2, 2, 2]
    assert body["settings"]["requests"] == 2
    assert ElementTree.fromstring((tmp_path / "ablate.svg").read_text()).tag.endswith("svg")


def test_unknown_switch_is_refused_with_the_names_there_are(base: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="only is 'graphs', must be one of kernels for this device"):
        ablate(base, WORKLOAD, only=["graphs"])
