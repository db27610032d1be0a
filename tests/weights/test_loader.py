# SPDX-License-Identifier: Apache-2.0
"""Claims about loading: values arrive exactly, once, in file order, with bounded memory, and what is left out is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from whalefall.core.errors import ConfigError
from whalefall.weights.loader import format_report, load_checkpoint
from whalefall.weights.mapped import MappedShard
from whalefall.weights.safetensors import ShardSet
from whalefall.weights.spec import IgnoreRule, TensorSpec, WeightMap


class RecordingSink:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.finished = 0

    def put(self, name: str, tensor: Tensor) -> None:
        assert name not in self.tensors and not self.finished
        self.tensors[name] = tensor

    def finish(self) -> None:
        self.finished += 1


class ForgettingSink:
    """Sums what it sees and notes the largest resident memory on the way."""

    def __init__(self) -> None:
        self.total = 0
        self.peak_rss = 0

    def put(self, name: str, tensor: Tensor) -> None:
        self.total += int(tensor.sum(dtype=torch.int64))
        self.peak_rss = max(self.peak_rss, resident_bytes())

    def finish(self) -> None:
        pass


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def samples() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "f32": torch.randn(3, 5),
        "bf16": torch.randn(7, 2).to(torch.bfloat16),
        "f16": torch.randn(4).to(torch.float16),
        "e4m3": torch.randn(5, 3).to(torch.float8_e4m3fn),
        "e8m0": torch.arange(9, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "i8": torch.arange(-3, 4, dtype=torch.int8),
        "u8": torch.arange(5, dtype=torch.uint8),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }


DTYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16", "e4m3": "F8_E4M3", "e8m0": "F8_E8M0", "i8": "I8", "u8": "U8"}


def map_of(tensors: dict[str, Tensor]) -> WeightMap:
    return WeightMap({name: TensorSpec(tuple(t.shape), (DTYPES.get(name, "F32"),)) for name, t in tensors.items()})


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def test_every_dtype_arrives_bit_for_bit(tmp_path: Path) -> None:
    save_file(samples(), tmp_path / "model.safetensors")
    sink = RecordingSink()
    report = load_checkpoint(tmp_path, map_of(samples()), sink)
    assert sink.finished == 1
    assert sink.tensors.keys() == samples().keys()
    assert all(same_bytes(sink.tensors[name], tensor) for name, tensor in samples().items())
    assert sink.tensors["e8m0"].dtype == torch.uint8
    assert sink.tensors["e4m3"].dtype == torch.float8_e4m3fn
    assert (report.num_tensors, report.num_bytes) == (9, sum(t.nbytes for t in samples().values()))


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6, dtype=torch.float32)}, tmp_path / "model.safetensors")
    (shard,) = ShardSet.open(tmp_path).shards
    mapped = MappedShard(shard.path)
    first, second = mapped.tensor(shard.tensors[0]), mapped.tensor(shard.tensors[0])
    assert first.data_ptr() == second.data_ptr()


def test_view_survives_the_release_of_its_pages_and_of_the_shard(tmp_path: Path) -> None:
    save_file({"a": torch.arange(5000, dtype=torch.float32)}, tmp_path / "model.safetensors")
    sink = RecordingSink()
    load_checkpoint(tmp_path, WeightMap({"a": TensorSpec((5000,), ("F32",))}), sink)
    assert torch.equal(sink.tensors["a"], torch.arange(5000, dtype=torch.float32))


def test_unaligned_tensor_is_read_right(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    data = b"\x07" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    sink = RecordingSink()
    load_checkpoint(tmp_path, WeightMap({"a": TensorSpec((1,), ("U8",)), "b": TensorSpec((2,), ("F32",))}), sink)
    assert sink.tensors["b"].tolist() == [1.5, -2.0]


def test_model_prefix_is_stripped(tmp_path: Path) -> None:
    save_file({"model.a": torch.ones(2), "b": torch.ones(1)}, tmp_path / "model.safetensors")
    sink = RecordingSink()
    load_checkpoint(tmp_path, WeightMap({"a": TensorSpec((2,), ("F32",)), "b": TensorSpec((1,), ("F32",))}), sink)
    assert sink.tensors.keys() == {"a", "b"}


def test_ignored_tensors_are_named_with_the_reason_and_never_handed_over(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "mtp.0.x": torch.ones(3), "mtp.1.x": torch.ones(4)}, tmp_path / "model.safetensors")
    sink = RecordingSink()
    wanted = WeightMap({"a": TensorSpec((2,), ("F32",))}, (IgnoreRule("mtp.", "speculation is off", 3), IgnoreRule("vision.", "text only")))
    report = load_checkpoint(tmp_path, wanted, sink)
    assert sink.tensors.keys() == {"a"}
    (left,) = report.ignored
    assert (left.rule.prefix, left.num_tensors, left.num_bytes) == ("mtp.", 2, 28)
    assert "left 2 of 3 tensors mtp.* (28 B): speculation is off" in format_report(report)


def test_progress_grows_from_tensor_to_tensor_up_to_the_total(tmp_path: Path) -> None:
    save_file(samples(), tmp_path / "model.safetensors")
    seen: list[tuple[int, int]] = []
    report = load_checkpoint(tmp_path, map_of(samples()), RecordingSink(), progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 9 and seen == sorted(seen) and seen[-1] == (report.num_bytes, report.num_bytes)


def test_sink_sees_nothing_of_a_faulty_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    sink = RecordingSink()
    with pytest.raises(ConfigError):
        load_checkpoint(tmp_path, WeightMap({"a": TensorSpec((2,), ("F32",)), "b": TensorSpec((1,), ("F32",))}), sink)
    assert not sink.tensors and not sink.finished


def test_memory_stays_bounded_while_a_large_file_passes(tmp_path: Path) -> None:
    tensors = {f"t{i:02d}": torch.full((8 << 20,), i, dtype=torch.uint8) for i in range(24)}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    sink = ForgettingSink()
    before = resident_bytes()
    load_checkpoint(tmp_path, WeightMap({f"t{i:02d}": TensorSpec((8 << 20,), ("U8",)) for i in range(24)}), sink)
    assert sink.total == (8 << 20) * sum(range(24))
    assert sink.peak_rss - before < 112 << 20, "a file of 192 MiB must not become resident as a whole"


def test_official_library_reads_the_same_values(tmp_path: Path) -> None:
    save_file(samples(), tmp_path / "model.safetensors")
    official = load_file(tmp_path / "model.safetensors")
    (shard,) = ShardSet.open(tmp_path).shards
    mapped = MappedShard(shard.path)
    assert all(same_bytes(mapped.tensor(stored), official[stored.name]) for stored in shard.tensors)
