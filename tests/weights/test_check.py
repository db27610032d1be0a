# SPDX-License-Identifier: Apache-2.0
"""Claims about faulty checkpoints: found from the headers, all at once, each with tensor, shard, expected and found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from whalefall.core.errors import ConfigError
from whalefall.models.deepseek_v41.config import DeepseekV41Config
from whalefall.models.deepseek_v41.weights import weight_map
from whalefall.testing.checkpoint import TINY_CONFIG, random_tensors, write_shards
from whalefall.weights.check import check_checkpoint
from whalefall.weights.safetensors import INDEX_FILE, ShardSet
from whalefall.weights.spec import TensorSpec, WeightMap

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NAME = "layers.2.attn.wkv.weight"
QUANTISED = DeepseekV41Config.from_hf({**TINY_CONFIG, "quantization_config": {"quant_method": "fp8"}})
PLAIN = DeepseekV41Config.from_hf(TINY_CONFIG)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return random_tensors(QUANTISED, seed=1)


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    write_shards(tmp_path, tensors, shards=2)
    return tmp_path


def problems_of(folder: Path, config: DeepseekV41Config = QUANTISED) -> list[str]:
    """Every problem of the folder, found without touching data."""
    try:
        check_checkpoint(ShardSet.open(folder), weight_map(config))
    except ConfigError as error:
        return list(error.problems)
    return []


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    held = load_file(path)
    change(held)
    save_file(held, path)


def change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_whole_checkpoint_has_no_problems(folder: Path) -> None:
    assert problems_of(folder) == []


def test_single_file_without_an_index_is_whole_too(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_shards(tmp_path, tensors, shards=1)
    assert problems_of(tmp_path) == []


def test_renamed_tensor_is_missing_and_extra(folder: Path) -> None:
    rewrite(folder / FIRST, lambda held: held.update({"layers.2.attn.wkvx.weight": held.pop(NAME)}))
    assert problems_of(folder) == [
        f"{NAME}: missing (the index places it in {FIRST}), expected F8_E4M3 [64, 256]",
        f"layers.2.attn.wkvx.weight: shard {FIRST}: found F8_E4M3 [64, 256], expected no tensor of this name",
    ]


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder / FIRST, lambda held: held.pop(NAME))
    change_index(folder, lambda index: index.pop(NAME))
    assert problems_of(folder) == [f"{NAME}: missing, expected F8_E4M3 [64, 256]"]


def test_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder / FIRST, lambda held: held.update({NAME: held[NAME][:32].clone()}))
    assert problems_of(folder) == [f"{NAME}: shard {FIRST}: found shape [32, 256], expected [64, 256]"]


def test_wrong_dtype_is_named(folder: Path) -> None:
    rewrite(folder / FIRST, lambda held: held.update({NAME: held[NAME].to(torch.bfloat16)}))
    assert problems_of(folder) == [f"{NAME}: shard {FIRST}: found dtype BF16, expected F8_E4M3"]


def test_tensor_of_an_older_family_is_refused(folder: Path) -> None:
    rewrite(folder / FIRST, lambda held: held.update({"hc_head_fn": torch.ones(4)}))
    assert problems_of(folder) == [f"hc_head_fn: shard {FIRST}: found F32 [4], expected no tensor of this name"]


def test_missing_shard_is_one_line(folder: Path) -> None:
    (folder / SECOND).unlink()
    assert problems_of(folder) == [f"{SECOND}: missing, although {INDEX_FILE} names it"]


def test_truncated_shard_is_named_with_both_sizes(folder: Path) -> None:
    size = (folder / FIRST).stat().st_size
    with (folder / FIRST).open("r+b") as file:
        file.truncate(size - 100)
    assert problems_of(folder) == [f"{FIRST}: truncated: found {size - 100:,} bytes, expected {size:,} by its header"]


@pytest.mark.parametrize("kept", [0, 5, 8, 4000])
def test_shard_cut_inside_its_header_is_named(folder: Path, kept: int) -> None:
    with (folder / FIRST).open("r+b") as file:
        file.truncate(kept)
    (line,) = problems_of(folder)
    assert line == f"{FIRST}: found {kept:,} bytes, too few for its header; expected a whole safetensors file"


def test_bytes_after_the_last_tensor_are_named(folder: Path) -> None:
    with (folder / FIRST).open("ab") as file:
        file.write(b"12345")
    (line,) = problems_of(folder)
    assert line.startswith(f"{FIRST}: found 5 bytes of no tensor at its end")


def test_git_lfs_pointer_is_recognised(folder: Path) -> None:
    (folder / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    (line,) = problems_of(folder)
    assert line.startswith(f"{FIRST}: found a Git LFS pointer of ") and "git lfs pull" in line


def test_index_naming_a_missing_shard_is_one_line(folder: Path) -> None:
    change_index(folder, lambda index: index.update({NAME: "model-00009-of-00002.safetensors"}))
    found = problems_of(folder)
    assert found[0] == f"model-00009-of-00002.safetensors: missing, although {INDEX_FILE} names it"
    assert found[1:] == [f"{NAME}: shard {FIRST}: found there, expected in model-00009-of-00002.safetensors by {INDEX_FILE}"]


def test_index_that_disagrees_with_the_headers_is_named(folder: Path) -> None:
    change_index(folder, lambda index: index.update({NAME: SECOND, "nowhere": FIRST, "head.weight": SECOND}))
    change_index(folder, lambda index: index.pop("embed.weight"))
    assert set(problems_of(folder)) == {
        f"{NAME}: shard {FIRST}: found there, expected in {SECOND} by {INDEX_FILE}",
        f"head.weight: shard {FIRST}: found there, expected in {SECOND} by {INDEX_FILE}",
        f"nowhere: shard {FIRST}: found no such tensor, expected by {INDEX_FILE}",
        f"embed.weight: shard {FIRST}: found there, but {INDEX_FILE} does not name it",
    }


@pytest.mark.parametrize("content", ["no json", "[]", '{"weight_map": 3}', "version https://git-lfs.github.com/spec/v1\n"])
def test_unusable_index_is_named(folder: Path, content: str) -> None:
    (folder / INDEX_FILE).write_text(content)
    (line,) = problems_of(folder)
    assert line.startswith(f"{INDEX_FILE}: found ") and "weight_map" in line


def test_index_may_not_point_outside_the_folder(folder: Path) -> None:
    change_index(folder, lambda index: index.update({NAME: "../elsewhere.safetensors"}))
    assert f"{INDEX_FILE}: names shard '../elsewhere.safetensors', expected a file name in the same folder" in problems_of(folder)


def test_tensor_in_two_shards_is_named_with_both(folder: Path) -> None:
    rewrite(folder / SECOND, lambda held: held.update({f"model.{NAME}": load_file(folder / FIRST)[NAME]}))
    (line,) = problems_of(folder)
    assert line.startswith(f"{NAME}: shard {FIRST} and {SECOND}: found twice")


def test_tensor_twice_in_one_header_is_named(tmp_path: Path) -> None:
    entry = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    raw = ("{" + entry + "," + entry + "}").encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"x")
    assert ShardSet.open(tmp_path).problems == ("a: shard model.safetensors: named twice in the header",)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("[]", "no JSON object"),
        ("{", "no JSON object"),
        ('{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}', "found dtype 'F4'"),
        ('{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}', "expected dtype, shape and data_offsets"),
        ('{"a":{"dtype":"U8","shape":[1]}}', "expected dtype, shape and data_offsets"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "found 4 bytes, expected 8 for F32 [2]"),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}', "overlaps"),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}', "4 bytes of no tensor before a"),
        ('{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}', "truncated"),
    ],
)
def test_malformed_header_is_named(tmp_path: Path, header: str, words: str) -> None:
    raw = header.encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"12345678")
    assert any(words in line for line in ShardSet.open(tmp_path).problems)


def test_folder_without_weights_says_what_is_expected(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == [f"{tmp_path}: found no weights, expected {INDEX_FILE} with its shards, or model.safetensors"]
    (line,) = problems_of(tmp_path / "nowhere")
    assert "found no such folder" in line


def test_all_problems_come_in_one_list_of_twenty_and_a_count(folder: Path) -> None:
    rewrite(folder / FIRST, lambda held: [held.pop(name) for name in list(held)[:30]])
    with pytest.raises(ConfigError) as caught:
        check_checkpoint(ShardSet.open(folder), weight_map(QUANTISED))
    assert len(caught.value.problems) == 30
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and lines[-1] == "... and 10 more problems"


def test_quantised_shards_under_a_plain_config_are_explained_first(folder: Path) -> None:
    first, *rest = problems_of(folder, PLAIN)
    assert first.startswith("config.json: quantization_config: missing, but the shards hold") and rest


def test_plain_shards_under_a_quantised_config_are_explained_first(tmp_path: Path) -> None:
    write_shards(tmp_path, random_tensors(PLAIN, seed=1), shards=2)
    assert problems_of(tmp_path, PLAIN) == []
    first, *rest = problems_of(tmp_path, QUANTISED)
    assert first.startswith("config.json: quantization_config: found, but the shards hold no scale tensor") and rest


def test_both_accepted_dtypes_pass(tmp_path: Path) -> None:
    accepted = WeightMap({"a": TensorSpec((2,), ("BF16", "F32"))})
    for dtype in (torch.bfloat16, torch.float32):
        save_file({"a": torch.ones(2, dtype=dtype)}, tmp_path / "model.safetensors")
        check_checkpoint(ShardSet.open(tmp_path), accepted)
