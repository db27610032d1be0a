# SPDX-License-Identifier: Apache-2.0
"""Claims about the tensor map: it reproduces the release byte for byte and the stored small checkpoints name by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from tests.models.deepseek_v41.released_config import RELEASED
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.weights import draft_parameters, parameters, stored_tensors, vision_parameters, weight_map
from whalefall.weights.spec import TensorSpec

CONFIG = DeepseekV41Config.from_hf(RELEASED)
TEXT = stored_tensors(parameters(CONFIG), is_quantised=True)
DRAFT = stored_tensors(draft_parameters(CONFIG), is_quantised=True)
VISION = stored_tensors(vision_parameters(CONFIG), is_quantised=True)


def totals(tensors: Mapping[str, TensorSpec], *parts: str) -> tuple[int, int]:
    """Count and bytes of the tensors whose name holds one of these parts."""
    chosen = [spec for name, spec in tensors.items() if not parts or any(part in name for part in parts)]
    return len(chosen), sum(spec.num_bytes for spec in chosen)


def test_release_is_reproduced_to_the_byte() -> None:
    everything = TEXT | DRAFT | VISION
    assert totals(everything) == (96_085, 510_286_023_000)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("experts", (92_160, 288_777_830_400)),
        ("compressors and indexers", (43, 81_835_008)),
        ("engram tables", (4, 202_758_032_400)),
        ("engram projections", (8, 315_043_840)),
        ("draft", (2_401, 7_932_874_632)),
        ("vision", (263, 970_506_240)),
        ("global", (6, 2_647_695_360)),
    ],
)
def test_each_group_of_the_inventory_is_reproduced(group: str, expected: tuple[int, int]) -> None:
    engram = {name: spec for name, spec in TEXT.items() if ".engram." in name}
    image_vectors = {name: spec for name, spec in VISION.items() if name.startswith("image_")}
    groups = {
        "experts": totals(TEXT, ".ffn.experts."),
        "compressors and indexers": totals(TEXT, ".compressor.", ".indexer."),
        "engram tables": totals(engram, ".engram.embed."),
        "engram projections": totals({name: spec for name, spec in engram.items() if ".embed." not in name}),
        "draft": totals(DRAFT),
        "vision": totals({name: spec for name, spec in VISION.items() if name not in image_vectors}),
        "global": totals({name: spec for name, spec in TEXT.items() if not name.startswith("layers.")} | image_vectors),
    }
    assert groups[group] == expected


def test_plain_form_has_no_scales_and_the_counts_of_the_note() -> None:
    plain = stored_tensors(parameters(CONFIG), is_quantised=False)
    draft = stored_tensors(draft_parameters(CONFIG), is_quantised=False)
    assert not [name for name in plain | draft if name.endswith(".scale")]
    assert len(plain) == 3 + 40 * (22 + 3 * 384) + 3 * 5 + 4 + 8 * 2 + 2 * 4
    assert len(draft) == 3 * (22 + 3 * 128) + 6
    assert plain["layers.0.ffn.experts.383.w2.weight"].shape == (5120, 2304)
    assert plain["layers.0.ffn.experts.383.w2.weight"].dtypes == ("BF16", "F32")


def test_unused_parts_are_ignored_by_name_with_their_count() -> None:
    made = weight_map(CONFIG)
    assert {rule.prefix: rule.num_expected for rule in made.ignored} == {"mtp.": 2401, "vision.": 259, "aligner.": 4, "image_": 3}
    assert all(made.rule_for(name) for name in DRAFT | VISION)
    assert not any(made.rule_for(name) for name in made.tensors)


def test_text_only_config_expects_no_image_tensors() -> None:
    config: dict[str, Any] = copy.deepcopy(RELEASED)
    del config["vision_config"]
    assert vision_parameters(DeepseekV41Config.from_hf(config)) == {}
